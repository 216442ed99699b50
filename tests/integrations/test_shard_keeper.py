"""What all ranks of a plain loop write together is kept: all of it or nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))
from ranks_kit import RankServer

CASES = f"{Path(__file__).with_name('shard_cases.py')}:"


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankServer]:
    with RankServer(preload=[CASES[:-1]]) as server:
        yield server


def test_killed(ranks: RankServer, tmp_path: Path) -> None:
    """Both ranks are killed after a save; it is committed all the same, all go on from it, and the best stays."""
    run = tmp_path / "run"
    assert [one.status for one in ranks.ranks(f"{CASES}keep", str(run), 9, kill=3)] == [-signal.SIGKILL] * 2
    first, second = ranks.checked(f"{CASES}keep", str(run), 4)
    assert first["begun"] == second["begun"] == ["3 0", "3 1"]
    assert first["newest"] == second["newest"]
    assert first["there"] == [4, 3, 2]  # newest, resumed from, best
    assert sorted(os.listdir(run / "step_00000004")) == ["manifest.json", "shard-0", "shard-1"]
    assert not list(run.glob(".incoming-*"))


def test_a_rank_fails(ranks: RankServer, tmp_path: Path) -> None:
    """What one rank could not write is kept by nobody, all ranks hear of it, and the next is kept; elsewhere, too."""
    folder = tmp_path / "work"
    found = ranks.checked(f"{CASES}keep", str(tmp_path / "run"), 2, fails=True, folder=str(folder))
    assert [len(one["heard"]) for one in found] == [1, 1]
    assert all("no space on rank 1" in one["heard"][0] for one in found)
    assert found[0]["there"] == [2]
    assert os.listdir(folder) == []


def test_machines_that_share_nothing(ranks: RankServer, tmp_path: Path) -> None:
    """A rank that does not see the directory is named, on all ranks, with what to do."""
    found = ranks.checked(f"{CASES}not_seen", str(tmp_path / "run"), str(tmp_path / "work"))
    assert all("rank 1" in one and "folder=" in one for one in found)
