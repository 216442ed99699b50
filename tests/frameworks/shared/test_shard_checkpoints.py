"""What all ranks of a plain loop write together is kept: all of it or nothing."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from ranks_kit import RankServer

from holdfast.errors import HoldfastError, StorageFullError
from holdfast.frameworks.keepers import ShardCheckpoints
from holdfast.testing import FaultyStorage

CASES = f"{Path(__file__).with_name('shard_cases.py')}:"


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
    """A rank that does not see the place is named before anything is trained, on all ranks, with what to do."""
    for first in ("enter", "latest", "newest"):
        found = ranks.checked(f"{CASES}not_seen", str(tmp_path / first), str(tmp_path / "work"), first)
        assert all("rank 1" in one and "folder=" in one for one in found)
        assert os.listdir(tmp_path / "work") == []


def test_nothing_grows(ranks: RankServer, tmp_path: Path) -> None:
    """What the ranks told each other in a save is taken back from their store after the next one."""
    found = ranks.checked(f"{CASES}keys", str(tmp_path / "run"), 5)
    assert all(len({*counts[1:]}) == 1 for counts in found), found


def test_a_lost_one_costs_itself(tmp_path: Path) -> None:
    """The error of an earlier save does not cost the one just written, nor the lost one its files."""
    keeper = ShardCheckpoints(tmp_path / "run", on_full="raise")
    keeper.storage = FaultyStorage(tmp_path / "run", disk_bytes=40_000)
    with write(keeper, 1, metrics={"what does not fit": "x" * 100_000}):
        pass
    assert isinstance(keeper._session.saves._pending[0].future.exception(), StorageFullError)
    with pytest.raises(StorageFullError), write(keeper, 2):
        pass
    keeper.wait()
    assert [one.step for one in keeper.checkpoints()] == [2]
    with write(keeper, 3, metrics={"what does not fit": "x" * 100_000}):
        pass
    with pytest.raises(StorageFullError):
        keeper.close()
    left = tmp_path / "run" / "_holdfast-lost-step_00000003"
    assert os.listdir(left) == ["shard"]
    assert not list((tmp_path / "run").glob(".incoming-*"))


@contextlib.contextmanager
def write(keeper: ShardCheckpoints, step: int, **options: Any) -> Iterator[None]:
    with keeper.writing(step=step, **options) as directory:
        Path(directory, "shard").write_text(f"{step}")
        yield


def test_an_end_while_it_is_read(tmp_path: Path) -> None:
    """What the writer still reads when the time is up, or at Ctrl-C, stays; a process that comes later removes it."""
    keeper = ShardCheckpoints(tmp_path / "run", folder=tmp_path / "work")
    keeper.latest()
    keeper._session.client.ingest = lambda storage, job: Future()  # type: ignore[union-attr,method-assign]
    with write(keeper, 1):
        pass
    keeper._session.timeout_s = keeper._session.saves.timeout_s = 0.2  # type: ignore[union-attr]
    with pytest.raises(HoldfastError, match="not durable"):
        keeper.close()
    assert [path.read_text() for path in (tmp_path / "work").rglob("shard")] == ["1"]
    keeper.close()
    with write(keeper, 2):
        pass
    keeper.close()
    assert [path.read_text() for path in (tmp_path / "work").rglob("shard")] == ["1"]
    assert [one.step for one in keeper.checkpoints()] == [2]


def test_a_download_is_removed_after_the_block() -> None:
    """A checkpoint that was only loaded takes no room on the machine while the training goes on."""
    with ShardCheckpoints("memory://shards/run") as keeper:
        with write(keeper, 1):
            pass
        with keeper.newest() as directory:
            assert (Path(directory or "") / "shard").read_text() == "1"
        assert not os.path.exists(directory or "")
