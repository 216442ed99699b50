"""Mirrored runs with several ranks on one machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from catalog_kit import steps_of

CASES = str(Path(__file__).parents[1] / "ranks" / "joint_cases.py")


def test_ranks_share_a_local_disk_in_front_of_a_remote(ranks, tmp_path):
    """Two ranks commit on the disk and upload; killed, and with the disk lost, both go on from the same place."""
    remote, local = str(tmp_path / "share"), tmp_path / "scratch"
    plain = ranks.checked(f"{CASES}:train", str(tmp_path / "plain"), 7)
    died = ranks.ranks(f"{CASES}:train", remote, 7, crash_at=5, local_dir=str(local))
    assert [one.status for one in died] == [9, 9], died
    again = ranks.checked(f"{CASES}:train", remote, 5, local_dir=str(local), every=1)
    assert [one["start"] for one in again] == [4, 4]
    assert steps_of(Path(remote)) == [2, 4, 5]
    shutil.rmtree(local)
    last = ranks.checked(f"{CASES}:train", remote, 7, local_dir=str(local))
    assert [one["start"] for one in last] == [5, 5]
    for rank in range(2):
        assert last[rank]["tensors"] == plain[rank]["tensors"]
    assert steps_of(local) == [7]
    assert steps_of(Path(remote))[-1] == 7
