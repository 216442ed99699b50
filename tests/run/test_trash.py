"""The trash of a run: what was deleted by hand comes back whole, is never taken for a checkpoint, and goes at last."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_kit import invoke

import holdfast as hf
from holdfast.checkpointer import start
from holdfast.run import trash as module
from holdfast.run.catalog import Catalog
from holdfast.run.trash import TRASH, WEEK_S, Trash
from holdfast.storage import MemoryStorage, resolve

ONE, TWO = "step_00000001", "step_00000002"


def names(root: Path) -> list[str]:
    return sorted(record.name for record in Catalog(resolve(str(root))).records())


def holdfast(*arguments: object, code: int = 0) -> str:
    return invoke(*arguments, code=code).output


def train(root: Path, until: int) -> None:
    state = {"w": torch.zeros(4)}
    with hf.Checkpointer(root, state, every=1, keep=hf.Keep(last=100)) as ck:
        while ck.global_step < until:
            state["w"] += 1
            ck.step()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    train(tmp_path / "run", 4)
    return tmp_path / "run"


def test_both_directories_are_durable(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut the checkpoint is in one of them: the run and the trash are synced when it has moved."""
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd)))
    trash = Trash(resolve(str(run)))
    for act in (trash.take, trash.restore):
        synced.clear()
        act(ONE)
        assert {run.stat().st_ino, (run / TRASH).stat().st_ino} <= {*synced}


def test_there_and_back(run: Path) -> None:
    """Rm moves, --undo brings back bit by bit; meanwhile neither ls, verify nor a resume sees it."""
    said = holdfast("rm", run / ONE, "--yes")
    assert "in the trash" in said
    assert "--undo" in said
    assert ONE not in names(run)
    assert ONE not in holdfast("ls", run)
    holdfast("verify", run)
    (entry,) = Trash(resolve(str(run))).entries()
    assert entry.name == ONE
    assert not (run / entry.directory / "manifest.json").exists(), "in the trash it is no checkpoint"
    assert "is back" in holdfast("rm", "--undo", run / ONE)
    assert hf.load(run / ONE)["w"].tolist() == [1.0] * 4
    assert hf.Checkpoint(run / ONE).verify().ok
    assert ONE in names(run)
    assert not Trash(resolve(str(run))).entries()


def test_after_further_starts(run: Path) -> None:
    """A checkpoint comes back though the run was started meanwhile; no sweep of that start takes it."""
    holdfast("rm", run / ONE, "--yes")
    train(run, 6)
    holdfast("rm", "--undo", run / ONE)
    train(run, 7)
    assert ONE in names(run)
    assert hf.Checkpoint(run / ONE).verify().ok


def age(run: Path, name: str, seconds: float) -> None:
    """Let a checkpoint have been in the trash for so long."""
    entry = next(entry for entry in Trash(resolve(str(run))).entries() if entry.name == name)
    (run / entry.directory).rename(run / TRASH / f"{int((time.time() - seconds) * 1000)}-{name}")


def test_a_loop_of_rm_loses_nothing(run: Path) -> None:
    """What an earlier rm took stays for its week, also beside --now, and all of it comes back."""
    for name in (ONE, TWO):
        assert "for good" not in holdfast("rm", run / name)
        holdfast("rm", run / name, "--yes")
    assert "deleted" in holdfast("rm", run / "step_00000003", "--yes", "--now")
    holdfast("prune", run, "--keep", "last=1", "--yes")
    holdfast("rm", "--undo", run / ONE, run / TWO)
    assert names(run) == [ONE, TWO, "step_00000004"]
    assert "there is: nothing" in holdfast("rm", "--undo", run / "step_00000003", code=2)


@pytest.mark.parametrize("command", [("rm", TWO), ("prune", "", "--keep", "last=2")], ids=lambda command: command[0])
def test_what_goes_for_good_is_named(run: Path, command: tuple[str, ...]) -> None:
    """After its week the next rm or prune empties it, and says so without --yes, and as it does; never silently."""
    holdfast("rm", run / ONE, "--yes")
    age(run, ONE, WEEK_S + 60)
    name, place, *rules = command
    said = holdfast(name, run / place, *rules)
    assert f"for good: {ONE}, in the trash for over a week" in said
    document = json.loads(invoke(name, run / place, *rules, "--json").stdout)
    assert document["emptied"] == [f"{run}/{ONE}"]
    assert [entry.name for entry in Trash(resolve(str(run))).entries()] == [ONE]
    assert f"for good: {ONE}, in the trash for over a week" in holdfast(name, run / place, *rules, "--yes")
    assert [entry.name for entry in Trash(resolve(str(run))).entries()] == [TWO]


def test_one_rm_does_not_empty_what_it_took_itself(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkpoints in one command are both in the trash, as it says, though the clock is set back meanwhile."""
    holdfast("rm", run / "step_00000003", "--yes")
    age(run, "step_00000003", WEEK_S + 7200)
    back = SimpleNamespace(time=lambda: time.time() - 3600)
    monkeypatch.setattr(module, "time", back)
    holdfast("rm", run / ONE, run / TWO, "--yes")
    assert {entry.name for entry in Trash(resolve(str(run))).entries()} == {ONE, TWO}


def test_a_week(run: Path) -> None:
    """A start of the run leaves what is younger than a week, and deletes what is older."""
    holdfast("rm", run / ONE, "--yes")
    train(run, 5)
    age(run, ONE, WEEK_S + 60)
    train(run, 6)
    assert not Trash(resolve(str(run))).entries()


@pytest.mark.parametrize("nth", range(1, 5))
def test_killed_between_two_renames(run: Path, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever rm or --undo dies, the checkpoint is in one of the two places, whole, and comes back."""
    real, done = os.rename, []

    def rename(*arguments: object, **options: object) -> None:
        done.append(arguments)
        if len(done) == nth:
            raise KeyboardInterrupt
        real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module.os, "rename", rename)
    trash = Trash(resolve(str(run)))
    with pytest.raises(KeyboardInterrupt):
        trash.take(ONE)
        trash.restore(ONE)
    monkeypatch.setattr(module.os, "rename", real)
    is_there = (run / ONE / "manifest.json").exists()
    assert is_there is (not trash.entries())
    train(run, 5)  # a start sweeps what it takes for remains
    if not is_there:
        holdfast("rm", "--undo", run / ONE)
    assert ONE in names(run)
    assert hf.Checkpoint(run / ONE).verify().ok


def test_half_emptied(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while the trash is emptied leaves something that is refused, not a checkpoint with holes."""
    holdfast("rm", run / ONE, "--yes")
    storage = resolve(str(run))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "delete_tree", die)
        with pytest.raises(KeyboardInterrupt):
            Trash(storage).empty(older_s=-1)
    assert "deletion had begun" in holdfast("rm", "--undo", run / ONE, code=2)
    assert Trash(storage).empty(older_s=-1) == [ONE]


def test_a_name_that_is_taken(run: Path) -> None:
    """--undo replaces nothing."""
    holdfast("rm", run / ONE, "--yes")
    (run / ONE).mkdir()
    (run / ONE / "mine.txt").write_text("x")
    assert "is there by now" in holdfast("rm", "--undo", run / ONE, code=1)
    assert (run / ONE / "mine.txt").exists()


def test_a_store_has_none() -> None:
    """There rm says before and after that it is for good."""
    storage = MemoryStorage("trash-test")
    hf.save(f"{storage.uri}/{ONE}", {"w": 1})
    assert not Trash(storage).exists
    assert "would be gone for good" in holdfast("rm", f"{storage.uri}/{ONE}")
    assert "no trash" in holdfast("rm", "--undo", f"{storage.uri}/{ONE}", code=2)


def test_prune_goes_to_the_trash(run: Path) -> None:
    """What prune takes comes back as what rm takes; with --now it is in no trash."""
    holdfast("rm", run / ONE, "--yes")
    said = holdfast("prune", run, "--keep", "last=2", "--yes")
    assert "in the trash" in said
    assert "--undo" in said
    assert {entry.name for entry in Trash(resolve(str(run))).entries()} == {ONE, TWO}
    holdfast("rm", "--undo", run / TWO)
    assert hf.Checkpoint(run / TWO).verify().ok
    holdfast("prune", run, "--keep", "last=2", "--yes", "--now")
    assert [entry.name for entry in Trash(resolve(str(run))).entries()] == [ONE]
    assert TWO not in names(run)


@pytest.mark.parametrize("kind", ["damaged", "copied"])
def test_whatever_it_is_comes_back(run: Path, kind: str) -> None:
    """A damaged checkpoint and a copy that somebody made go to the trash as well, and come back as they were."""
    name = ONE
    if kind == "damaged":
        (run / ONE / "manifest.json").write_text("{")
    else:
        name = "copy"
        shutil.copytree(run / ONE, run / name)
    before = sorted(path.name for path in (run / name).iterdir())
    assert "in the trash" in holdfast("rm", run / name, "--yes", "--force")
    assert not (run / name).exists()
    holdfast("rm", "--undo", run / name)
    assert sorted(path.name for path in (run / name).iterdir()) == before


@pytest.mark.parametrize("days", [-30, 30])
def test_a_clock_that_is_set(run: Path, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """A clock set back or forward empties nothing early, in this boot of the machine or after another one."""
    holdfast("rm", run / ONE, "--yes")
    trash = Trash(resolve(str(run)))
    wrong = SimpleNamespace(
        time=lambda: time.time() + days * 86400, clock_gettime=time.clock_gettime, CLOCK_BOOTTIME=time.CLOCK_BOOTTIME
    )
    monkeypatch.setattr(module, "time", wrong)
    assert trash.empty(older_s=WEEK_S) == []
    monkeypatch.setattr(module, "_boot", lambda: ("0" * 8, 3600))
    assert trash.empty(older_s=WEEK_S) == []
    (entry,) = trash.entries()
    monkeypatch.setattr(module, "_boot", lambda: (entry.boot, entry.up_s + int(WEEK_S) + 60))
    assert trash.empty(older_s=WEEK_S) == [ONE]


def test_a_full_disk_names_the_trash(run: Path) -> None:
    """Where there is no room for a checkpoint the start says what the trash keeps, and how to get that back."""
    holdfast("rm", run / ONE, "--yes")
    said = r"trash of the run, .*\.trash, keeps 1 checkpoint .*delete that folder"
    with pytest.raises(hf.StorageFullError, match=said):
        start.check_room(resolve(str(run)), 1000, [["", 1 << 20, None]], {})
