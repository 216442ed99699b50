"""The leases of single files: who holds a name, what becomes of it when something fails, and who sees its files."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_kit import plain

import holdfast as hf
from holdfast.cli.targets import find
from holdfast.copying.transfer import copy_checkpoint
from holdfast.errors import HoldfastError, RunBusyError, StorageUnavailableError
from holdfast.run.heartbeat import Heartbeat
from holdfast.run.lease import Lease, is_claim, make_owner
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.trainers.loop.saving.file_leases import FileLeases
from holdfast.trainers.loop.saving.files import FileImage
from holdfast.trainers.loop.saving.finder import FolderEntry
from holdfast.trainers.loop.saving.folder import SaveFolder
from holdfast.trainers.loop.training.ranks import Ranks


def claims(folder: Path, ranks: Ranks | None = None) -> FileLeases:
    return FileLeases(LocalStorage(folder), ranks or Ranks())


def is_free(folder: Path, shape: str) -> bool:
    other = claims(folder)
    try:
        other.take(shape)
    except RunBusyError:
        return False
    other.release(patient=True)
    return True


def test_a_name_is_held_until_it_is_released(tmp_path: Path) -> None:
    """Each name by itself; nothing is left behind; who holds it in the same process is told to close it."""
    mine = claims(tmp_path)
    mine.take("a*.pt")
    with pytest.raises(RunBusyError, match=r"by this very process: close\(\)"):
        claims(tmp_path).take("a*.pt")
    assert is_free(tmp_path, "b*.pt")
    mine.release(patient=True)
    assert is_free(tmp_path, "a*.pt")
    assert list(tmp_path.iterdir()) == []


def test_one_that_cannot_be_released_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves are durable by then, and the error under way matters more: it is logged."""
    mine = claims(tmp_path)
    for shape in ("a*.pt", "b*.pt"):
        mine.take(shape)
    first = mine._held["a*.pt"]
    assert first is not None

    def fail() -> None:
        raise StorageUnavailableError("down")

    monkeypatch.setattr(first.lease, "release", fail)
    mine.release(patient=True)
    assert is_free(tmp_path, "b*.pt")
    monkeypatch.undo()
    first.lease.release()


def test_a_rank_that_fails_while_a_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which has the lease by then, gives it back."""
    ranks = Ranks()

    def lead(_: str, act: Any, *, work_s: float) -> None:
        act()
        raise RuntimeError(f"another rank has failed within {work_s:g} s")

    monkeypatch.setattr(ranks, "lead", lead)
    with pytest.raises(RuntimeError, match="another rank"):
        claims(tmp_path, ranks).take("a*.pt")
    assert is_free(tmp_path, "a*.pt")


def test_an_end_that_does_not_wait(tmp_path: Path) -> None:
    """What is being written is finished under the lease; nothing begins after it."""
    mine = claims(tmp_path)
    mine.take("a*.pt")
    mine.begin("a*.pt")
    mine.release(patient=False)
    with pytest.raises(HoldfastError, match="was closed"):
        mine.begin("a*.pt")
    left = mine._left["a*.pt"]
    left.confirm()  # the beat that says that the trainer has left
    other = claims(tmp_path)
    waiting = threading.Thread(target=other.take, args=("a*.pt",))
    waiting.start()  # for a trainer that has left: it waits, and is not refused
    mine.end()
    waiting.join(30)
    other.release(patient=True)
    assert list(tmp_path.iterdir()) == []


def test_taken_up_again_while_a_file_is_written(tmp_path: Path) -> None:
    """The same trainer goes on under the lease it still has."""
    mine = claims(tmp_path)
    mine.take("a*.pt")
    mine.begin("a*.pt")
    mine.release(patient=False)
    mine.take("a*.pt")
    mine.end()
    assert not is_free(tmp_path, "a*.pt")
    mine.release(patient=True)
    assert is_free(tmp_path, "a*.pt")


def test_a_lease_that_was_lost_is_not_taken_up_again(tmp_path: Path) -> None:
    """Said at the start, not at the first save."""
    mine = claims(tmp_path)
    mine.take("a*.pt")
    mine.begin("a*.pt")
    mine.release(patient=False)
    mine._left["a*.pt"].lost = RunBusyError("taken over")
    with pytest.raises(RunBusyError, match="taken over"):
        mine.take("a*.pt")
    mine.end()
    mine.take("a*.pt")
    mine.release(patient=True)


def test_whoever_waits_for_a_save_finds_its_name_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim ends before the save is called ended, so that a close that has waited for it leaves nothing behind."""
    end, ended = FileLeases.end, []

    def watched(self: FileLeases) -> None:
        pending = trainer._savers[0]._track._pending
        ended.append(pending is not None and pending.done())
        end(self)

    monkeypatch.setattr(FileLeases, "end", watched)
    trainer = plain(tmp_path, save_filename="ba{batch}.pt", save_interval="1ep", max_duration="2ep")
    trainer.fit()
    trainer.close()
    assert ended == [False, False]


def test_an_end_within_a_slow_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the beat; the lease is given back after it."""
    lease = Lease.acquire(LocalStorage(tmp_path), make_owner("ab12"))
    begun, go_on = threading.Event(), threading.Event()

    def slow(**_: Any) -> None:
        begun.set()
        go_on.wait(30)

    monkeypatch.setattr(lease, "heartbeat", slow)
    beats = Heartbeat(lease)
    beats.trainer_gone()  # wakes it
    assert begun.wait(30)
    beats.close(wait=False)
    assert (tmp_path / "lease.json").exists()
    go_on.set()
    beats._thread.join(30)
    assert list(tmp_path.iterdir()) == []


def test_a_lease_deleted_by_hand(tmp_path: Path) -> None:
    """It is written again while the lock proves that nobody else came; without the lock this process stops."""
    lease = Lease.acquire(LocalStorage(tmp_path / "run"), make_owner("ab12"))
    (tmp_path / "run/lease.json").unlink()
    lease.heartbeat()
    assert (tmp_path / "run/lease.json").exists()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunBusyError, match="was deleted"):
        lease.heartbeat()
    lease.release()


def test_its_files_are_nobodys_data(tmp_path: Path) -> None:
    """A copy of the folder leaves them where they are, and alone they are no checkpoint."""
    mine = claims(tmp_path / "run")
    mine.take("a*.pt")
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert len(found) == 2
    assert all(map(is_claim, found))
    assert find(str(tmp_path / "run"))[1] is None
    (tmp_path / "run/a1.pt").write_bytes(b"1")
    (tmp_path / "run/lease-terms.json").write_bytes(b"{}")
    copy_checkpoint(LocalStorage(tmp_path), "run", LocalStorage(tmp_path), "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"a1.pt", "lease-terms.json"}
    mine.release(patient=True)


@pytest.mark.parametrize("before", [None, b"ours"])
def test_a_sleeper_replaces_no_file_of_whoever_took_its_name(tmp_path: Path, before: bytes | None) -> None:
    """Stopped right before it stores a file: what the next one has stored meanwhile stays."""
    image, asked = FileImage(), []

    def confirm() -> None:
        if asked:
            raise RunBusyError("taken over")
        asked.append(True)
        (tmp_path / "a.safetensors").write_bytes(b"theirs!")

    if before is not None:
        (tmp_path / "a.safetensors").write_bytes(before)
    image.take_weights({"w": torch.ones(3)}, {"step": 1})
    with pytest.raises(RunBusyError, match="taken over"):
        image.store(LocalStorage(tmp_path), "a.safetensors", confirm=confirm)
    image.close()
    assert (tmp_path / "a.safetensors").read_bytes() == b"theirs!"


def test_a_sleeper_deletes_no_file(tmp_path: Path) -> None:
    """Its lease is read before each deletion; a heartbeat may be far from finding out."""
    folder = SaveFolder(str(tmp_path))
    folder.open(claim="a*.pt")
    (tmp_path / "a1.pt").write_bytes(b"needed")
    (name,) = tmp_path.glob("lease-*.json")
    name.write_text(json.dumps({**json.loads(name.read_text()), "start_id": "ffff", "host": "elsewhere"}))
    with pytest.raises(RunBusyError, match="lost to"):
        folder.delete(FolderEntry(name="a1.pt", container="torch"), claim="a*.pt")
    assert (tmp_path / "a1.pt").read_bytes() == b"needed"
    folder.close("test")


def test_a_sleeper_deletes_no_directory(tmp_path: Path) -> None:
    """Also of one whose name has a slash, which the index of the run does not know."""
    folder = SaveFolder(str(tmp_path))
    folder.open(claim=None)
    saved = hf.save(tmp_path / "ep1/ba3", {"w": torch.ones(3)})
    told = tmp_path / "lease.json"
    one = FolderEntry(name="ep1/ba3", container="directory")
    folder.confirm(one.name)
    assert json.loads(told.read_text())["doomed"] == [one.name]
    told.write_text(json.dumps({**json.loads(told.read_text()), "start_id": "ffff", "host": "elsewhere"}))
    with pytest.raises(RunBusyError, match="lost to"):
        folder.delete(one)
    assert saved.verify().ok
    folder.close("test")
