"""`save` and `save_async` by all ranks together."""

from __future__ import annotations

from pathlib import Path

import holdfast as hf

CASES = str(Path(__file__).with_name("joint_cases.py"))


def test_all_ranks_save_one_checkpoint(ranks, tmp_path):
    """Two ranks make one checkpoint, each value of a rank is its own, and both futures end with it."""
    found = ranks.checked(f"{CASES}:save_twice", str(tmp_path))
    assert [one["rank"] for one in found] == [0, 1]
    for name in ("first", "second"):
        checkpoint = hf.Checkpoint(tmp_path / name)
        assert checkpoint.verify(deep=True).ok
        assert checkpoint.manifest.world_size == 2
        assert checkpoint.manifest.writers == (0, 1)
        assert not list((tmp_path / name).glob("part-*"))
