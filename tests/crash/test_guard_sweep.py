"""Random poisonings of a training that looks after itself: its end is bitwise that of a training without them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ranks_kit import RankServer

KIT = str(Path(__file__).resolve().parents[1] / "kits" / "guard_training.py")
CASES, BOUND_S = 16, 50.0  # for each test: about two poisonings a case


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow, pytest.mark.long][part > 1]) for part in range(7)]
)
def test_random_poisonings_and_kills_end_as_if_they_had_not_been(ranks: RankServer, tmp_path: Path, part: int) -> None:
    """Nan or a jump in a batch, a bit flipped in a weight, lives killed at any moment: no human, the state of the twin.

    For poisoned batches the twin never had them; for flipped bits it is the clean one.
    """
    until = time.monotonic() + BOUND_S
    for seed in range(part * CASES, (part + 1) * CASES):
        root = tmp_path / str(seed)
        root.mkdir()
        case = ranks.run(f"{KIT}:random_case", str(root), seed, timeout_s=120.0).checked()
        assert case["same"], (seed, case)
        if time.monotonic() > until:
            break
