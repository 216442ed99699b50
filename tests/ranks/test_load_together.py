"""`load(ranks="all")` and the start of a run: the ranks of one machine read each byte once."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = str(Path(__file__).with_name("load_cases.py"))


def test_each_byte_is_read_once(ranks, tmp_path):
    """Four ranks read replicated state, columns of it, and that of a run, once between them; the work is divided."""
    found = ranks.checked(f"{CASES}:together", str(tmp_path), world_size=4)
    for kind in ("everything", "fresh", "columns", "resumed"):
        read = [one[kind] for one in found]
        assert found[0]["bytes"] * 0.99 <= sum(read) <= 1.05 * found[0]["bytes"], (kind, read)
        assert max(read) <= 0.4 * found[0]["bytes"], (kind, read)


def test_a_default_device_of_the_script_changes_nothing(ranks, tmp_path):
    """Which bytes a rank wants is worked out on the CPU, whatever ``torch.set_default_device`` says."""
    assert ranks.checked(f"{CASES}:elsewhere", str(tmp_path)) == [True, True]


def test_an_error_of_one_rank_is_raised_by_all(ranks, tmp_path):
    """A state that does not fit on one rank, or a source that it cannot name: the same error on all ranks, at once.

    Ranks may load alone afterwards.
    """
    found = ranks.checked(f"{CASES}:wrong_on_one", str(tmp_path), world_size=3)
    assert len({one["told"] for one in found}) == 1
    assert found[0]["told"].startswith("StateMismatchError: rank 1: ")
    assert {one["named"] for one in found} == {found[0]["named"]}
    assert "rank 1: " in found[0]["named"]
    assert all(one["quick"] == "True" for one in found)


def test_a_rank_that_dies_in_a_load(ranks, tmp_path):
    """The others read what it would have read for them, and hear that it did not come."""
    first, dead, last = ranks.ranks(f"{CASES}:one_dies", str(tmp_path), world_size=3)
    assert dead.status == -9
    for one in (first, last):
        assert "rank 1 did not come" in one.checked()


@pytest.mark.slow
def test_a_flip_in_each_block_is_raised_by_all(ranks, tmp_path):
    """A block that one rank reads for both is damaged, each in turn: both raise; mended, both load it."""
    found = ranks.checked(f"{CASES}:damaged", str(tmp_path), world_size=2)
    for one in found:
        assert one["blocks"] >= 4
        assert one["missed"] == list(range(one["blocks"])), "the second load of each, and no other"
