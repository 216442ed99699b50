"""The leases of single files: who holds a name, what becomes of it when something fails, and who sees its files."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from process_kit import wait_until

from holdfast.cli.targets import find
from holdfast.copying.transfer import copy_checkpoint
from holdfast.errors import HoldfastError, RunBusyError, StorageUnavailableError
from holdfast.run.lease import is_claim, make_owner
from holdfast.storage import LocalStorage
from holdfast.storage.base import ReplacingWriter
from holdfast.storage.together import SerialExecutor
from holdfast.trainers.loop.parallel import Ranks
from holdfast.trainers.loop.saving.files import FileImage
from holdfast.trainers.loop.saving.finder import FolderEntry
from holdfast.trainers.loop.saving.folder import FileLeases, SaveFolder, _of
from holdfast.writer.messages import SaveJob, SaveResult
from holdfast.writer.save import Task
from holdfast.writer.single_file import NameLeases, write_file


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


def test_one_that_cannot_be_released_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves are durable by then, and the writer has to end: it is logged."""
    mine = NameLeases()
    for shape in ("a*.pt", "b*.pt"):
        mine.take(LocalStorage(tmp_path), _of(shape), make_owner("ab12"), wait_s=1.0, pause=time.sleep)
    first = mine.held(LocalStorage(tmp_path), _of("a*.pt"))
    assert first is not None

    def fail() -> None:
        raise StorageUnavailableError("down")

    monkeypatch.setattr(first.lease, "release", fail)
    mine.close()
    assert "a lease could not be given back, it goes stale by itself: down" in caplog.text
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


class SlowDisk(LocalStorage):
    """A disk on which no file gets its name before `go_on`; its writer is a thread of this process."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def describe(self) -> None:
        return None

    def replace(self, path: str, size: int) -> ReplacingWriter:
        self.begun.set()
        assert self.go_on.wait(60)
        return super().replace(path, size)


class UnderWay(NamedTuple):
    """A file that is being written."""

    disk: SlowDisk
    claims: FileLeases
    image: FileImage
    future: Future[SaveResult]
    writer: threading.Thread


@pytest.fixture
def under_way(tmp_path: Path) -> Iterator[UnderWay]:
    """A file ``a1.pt``, stored before, whose next content is on its way."""
    disk, image = SlowDisk(tmp_path), FileImage()
    mine = FileLeases(disk, Ranks())
    mine.take("a*.pt")
    (tmp_path / "a1.pt").write_bytes(b"before")
    image.take_torch({"w": torch.ones(3)}, {"step": 1})
    future = mine.submit("a*.pt", "a1.pt", image)
    assert disk.begun.wait(60)
    assert mine._client is not None
    writer = mine._client._conversation._thread
    assert writer is not None
    yield UnderWay(disk, mine, image, future, writer)
    disk.go_on.set()
    writer.join(60)
    mine.release(patient=True)
    image.close()


def told(folder: Path) -> dict[str, Any]:
    """What the lease of the only name in a folder says."""
    (name,) = folder.glob("lease-*.json")
    found: dict[str, Any] = json.loads(name.read_text())
    return found


def test_an_end_that_does_not_wait(tmp_path: Path, under_way: UnderWay) -> None:
    """What is being written is finished under the lease; nothing begins after it."""
    mine = under_way.claims
    mine.release(patient=False)
    for act in (lambda: mine.submit("a*.pt", "a2.pt", under_way.image), lambda: mine.confirm("a*.pt")):
        with pytest.raises(HoldfastError, match="was closed"):
            act()
    with pytest.raises(HoldfastError, match="what was sealed is still committed"):
        under_way.future.result(60)
    assert wait_until(lambda: told(tmp_path)["trainer_alive"] is False)  # the beat that says that the trainer has left
    other = claims(tmp_path)
    waiting = threading.Thread(target=other.take, args=("a*.pt",))
    waiting.start()  # for a trainer that has left: it waits, and is not refused
    under_way.disk.go_on.set()
    waiting.join(30)
    assert not waiting.is_alive()
    assert torch.load(tmp_path / "a1.pt", weights_only=True)["w"].sum() == 3
    other.release(patient=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a1.pt"]


def test_taken_up_again_while_a_file_is_written(tmp_path: Path, under_way: UnderWay) -> None:
    """The same trainer has the name again when that file is there."""
    mine = under_way.claims
    mine.release(patient=False)
    assert wait_until(lambda: told(tmp_path)["trainer_alive"] is False)
    again = threading.Thread(target=mine.take, args=("a*.pt",))
    again.start()
    under_way.disk.go_on.set()
    again.join(30)
    assert not again.is_alive()
    assert not is_free(tmp_path, "a*.pt")
    mine.release(patient=True)
    assert is_free(tmp_path, "a*.pt")


def test_a_lease_that_was_lost_is_not_taken_up_again(
    tmp_path: Path, under_way: UnderWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said at the start, not at the first save; the file that was under way gets no name."""
    monkeypatch.setattr("holdfast.trainers.loop.saving.folder.LEASE_S", 0.3)
    mine = under_way.claims
    mine.release(patient=False)
    assert wait_until(lambda: told(tmp_path)["trainer_alive"] is False)
    (name,) = tmp_path.glob("lease-*.json")
    name.write_text(json.dumps({**told(tmp_path), "start_id": "ffff", "host": "elsewhere", "boot": "other"}))
    with pytest.raises(RunBusyError, match="on elsewhere"):
        mine.take("a*.pt")
    under_way.disk.go_on.set()
    under_way.writer.join(60)
    assert (tmp_path / "a1.pt").read_bytes() == b"before"
    name.unlink()
    mine.take("a*.pt")
    mine.release(patient=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a1.pt"]


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


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize("before", [None, b"ours"])
def test_a_sleeper_replaces_no_file_of_whoever_took_its_name(tmp_path: Path, before: bytes | None, kind: str) -> None:
    """Stopped right before it stores a file: what the next one has stored meanwhile stays."""
    image, side, asked = FileImage(), SerialExecutor(), []

    class Sleeper:
        def verify(self) -> None:
            if asked:
                raise RunBusyError("taken over")
            asked.append(True)
            (tmp_path / "a").write_bytes(b"theirs!")

    if before is not None:
        (tmp_path / "a").write_bytes(before)
    if kind == "pt":
        image.take_torch({"w": torch.ones(3)}, {"step": 1})
    else:
        image.take_weights({"w": torch.ones(3)}, {"step": 1})
    assert image.arena is not None
    file = image.container(lease=None)
    job = SaveJob(directory="a", save_id="", container=file)
    task = Task(job=job, storage=LocalStorage(tmp_path), storage_key=1, view=image.arena.view)
    with pytest.raises(RunBusyError, match="taken over"):
        write_file(task, file, side, Sleeper())  # type: ignore[arg-type]
    side.close()
    image.close()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"theirs!")]


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
