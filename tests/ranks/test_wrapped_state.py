"""One object that holds model and optimizer, and loads them by torch's own functions, in any layout."""

from __future__ import annotations

import itertools
from pathlib import Path

CASES = str(Path(__file__).with_name("wrapped_cases.py"))


def test_an_object_with_sharded_state_goes_on_in_any_layout(ranks, tmp_path):
    """DDP, FSDP2 and FSDP1 (twice) after each other: each begins with what the one before has left."""
    chain = [("ddp", 2), ("fsdp2", 3), ("fsdp1", 2), ("fsdp1", 3)]
    lives = [ranks.checked(f"{CASES}:train", str(tmp_path), layout, world_size=size)[0] for layout, size in chain]
    for before, after in itertools.pairwise(lives):
        assert after["begun"] == before["ended"]


def test_what_an_object_gives_on_rank_0_alone_comes_back_on_all(ranks, tmp_path):
    """A ZeroRedundancyOptimizer behind an object, stopped and started again; by itself it is refused, with the way."""
    whole = ranks.checked(f"{CASES}:zero", str(tmp_path / "whole"), 4)
    ranks.checked(f"{CASES}:zero", str(tmp_path / "parts"), 2)
    assert ranks.checked(f"{CASES}:zero", str(tmp_path / "parts"), 4) == whole


def test_an_8_bit_optimizer_under_fsdp2_goes_on_exactly(ranks, tmp_path):
    """Its state is a sharded tensor that wraps others: each rank stores what it holds."""
    whole = ranks.checked(f"{CASES}:eight_bit", str(tmp_path / "whole"), 5)
    ranks.checked(f"{CASES}:eight_bit", str(tmp_path / "parts"), 2)
    assert ranks.checked(f"{CASES}:eight_bit", str(tmp_path / "parts"), 5) == whole


def test_optimizers_and_objects_that_begin_empty_get_sharded_state_back(ranks, tmp_path):
    """Lists of LBFGS, methods and hooks of an optimizer, an object around one: exactly as without a stop."""
    case = f"{CASES}:odd_optimizers"
    whole = ranks.checked(case, str(tmp_path / "whole"), 4)
    ranks.checked(case, str(tmp_path / "parts"), 2)
    assert ranks.checked(case, str(tmp_path / "parts"), 4) == whole
    ranks.checked(case, str(tmp_path / "parts"), 5, "plain", world_size=1)  # nothing is sharded: whole tensors
