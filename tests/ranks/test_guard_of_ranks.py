"""The guard with several ranks: rank 0 finds a bad step, all end at the same boundary, all leave out the same batch."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = str(Path(__file__).parent / "guard_cases.py")


def test_all_ranks_go_back_at_the_same_step(ranks, tmp_path) -> None:
    """A bad batch of rank 1 alone, in the mean of the losses: both ranks end with 86, and nothing is saved."""
    ended = ranks.ranks(f"{CASES}:train", str(tmp_path / "run"), 9)
    assert [one.status for one in ended] == [86, 86], [one.error or one.output for one in ended]
    assert "rolled back at step 10: loss is nan (batch 9 of epoch 0)" in ended[0].output
    assert ended[1].output == ""


@pytest.mark.slow
@pytest.mark.parametrize("where", [9, 23, 0])
def test_all_ranks_leave_out_the_same_batch(ranks, tmp_path, where) -> None:
    """The end is that of ranks that never had it. After the last step there is none to agree on: rank 0 ends alone."""
    for number in range(2):
        ended = ranks.ranks(f"{CASES}:train", str(tmp_path / "run"), where)
        assert [one.status for one in ended] == ([86, 0] if where == 23 else [86, 86]), ended[0].output
        assert ("left out from now on" in ended[0].output) == (number == 1)
    end = ranks.checked(f"{CASES}:train", str(tmp_path / "run"), where)
    assert end == ranks.checked(f"{CASES}:train", str(tmp_path / "twin"), -1, where)


@pytest.mark.slow
def test_stop_ends_all_ranks(ranks, tmp_path) -> None:
    """Rank 0 raises the reason, the others leave at the same step."""
    ended = ranks.ranks(f"{CASES}:train", str(tmp_path / "run"), 9, action="stop")
    assert [one.status for one in ended] == [1, 86]
    assert "action='stop'" in ended[0].error
