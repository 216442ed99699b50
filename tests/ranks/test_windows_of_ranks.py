"""Saves of several ranks through windows, with the writer of one of them killed: whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import holdfast as hf

CASES = str(Path(__file__).parent / "window_cases.py")


def whole(root: Path) -> list[int]:
    """Return the steps that are there, each of them whole and of one moment: tensors of all ranks, and model files."""
    steps = []
    for path in sorted(root.glob("step_*")):
        checkpoint = hf.Checkpoint(path)
        assert checkpoint.verify(deep=True).ok, path
        steps.append(checkpoint.step)
        state = hf.load(checkpoint, only=["model", "step"])
        assert state["model"]["weight"].unique().tolist() == state["step"].tolist() == [checkpoint.step]
        assert json.loads((path / "config.json").read_text()) == {"step": checkpoint.step}
        assert not list(path.glob("plan-*")) + list(path.glob("part-*"))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("what", "at"), [("window", 1), ("window", 3), ("window", 6), ("seal", 2)])
def test_a_writer_killed_during_a_save_through_windows(ranks, tmp_path, what, at, rank) -> None:
    """Every save that is there is whole; the run goes on, and so does the next life, from the newest of them."""
    first = ranks.ranks(f"{CASES}:train", str(tmp_path), 4, what, rank, at)
    assert first[rank].status or first[rank].value["killed"]
    found = whole(tmp_path)
    assert len(found) >= 3
    if all(one.status == 0 for one in first):
        assert found[-1] == 4
    else:
        assert any("writer" in (one.error or "") for one in first), [one.error for one in first]
    again = ranks.checked(f"{CASES}:train", str(tmp_path), 6, "", 0, 0)
    assert [one["start"] for one in again] == [found[-1]] * 2
    assert whole(tmp_path)[-1] == 6
