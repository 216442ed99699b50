"""What a dead worker has left on its node: finished, answered for, or discarded; never what is somebody else's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Driver
from nodes_kit import FakeNodes
from process_kit import wait_until

from holdfast.errors import HoldfastError
from holdfast.format.commit import PartSummary
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry
from holdfast.format.parts import put_part
from holdfast.storage import LocalStorage
from holdfast.trainers.function import handoff
from holdfast.trainers.function.engine import Exited
from holdfast.trainers.function.engines.process_engine import ClusterEngine, LocalEngine
from holdfast.trainers.function.handoff import Unfinished, left_directory
from holdfast.trainers.function.transit import error_from_wire
from holdfast.writer.ingest.sources import read_incoming

HOME = ".incoming-abcd1234/1-0"


def left_share(folder: Path, directory: str, save_id: str) -> dict[str, Any]:
    """What rank 0 says of its share on a disk of its node."""
    return {"kind": "share", "folder": str(folder), "directory": directory, "save_id": save_id, "rank": 0}


class Node:
    """Collects what `Unfinished` says."""

    def __init__(self, storage: LocalStorage | None) -> None:
        self.told: list[tuple[int, dict[str, Any], tuple[bytes, ...]]] = []
        self.lines: list[str] = []
        self._changed = threading.Event()
        self.unfinished = Unfinished(lambda *message: self.told.append(message), self.lines.append, storage=storage)

    def report(self, path: Path, *, child: int = 3, index: int = 1, owned: bool = True) -> None:
        left = left_directory(home=HOME, path=str(path), rank=0, owned=owned)
        self.unfinished.note(child, {"on": "report", "index": index, "unfinished": left})

    def answer(self) -> tuple[int, dict[str, Any], tuple[bytes, ...]]:
        assert wait_until(lambda: self.told)
        return self.told[-1]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "scratch" / "mine"
    path.mkdir(parents=True)
    (path / "model.pt").write_bytes(b"weights")
    return path


@pytest.mark.parametrize("owned", [True, False])
def test_a_directory_is_stored(tmp_path: Path, directory: Path, owned: bool) -> None:
    """The driver gets the message that the worker would have sent; what was taken over goes, the caller's own stays."""
    storage = LocalStorage(tmp_path / "run")
    node = Node(storage)
    node.report(directory, owned=owned)
    node.unfinished.end(3, finish=True)
    assert node.answer() == (3, {"on": "part", "index": 1}, ())
    assert [one.name for one in read_incoming(storage, HOME, 0).contents.files] == ["model.pt"]
    assert wait_until(lambda: directory.exists() is not owned)
    assert node.lines == ["rank 0 ended before report 1 was stored: brought by its node"]


def test_what_has_ended_is_no_business_of_the_node(tmp_path: Path, directory: Path) -> None:
    """A report that its worker has brought, or that has failed there; another worker's end."""
    node = Node(LocalStorage(tmp_path / "run"))
    node.report(directory)
    node.unfinished.end(4, finish=True)
    node.unfinished.note(3, {"on": "part", "index": 1})
    node.unfinished.note(3, {"on": "finished", "left": True})
    node.unfinished.end(3, finish=True)
    node.unfinished.end(3, finish=False)
    node.unfinished.close()
    assert (node.told, node.lines) == ([], [])
    assert directory.exists()


def test_it_cannot_be_finished(tmp_path: Path, directory: Path) -> None:
    """The driver hears why, so that it waits no longer: the files are back in their place, the storage is not known."""
    node = Node(LocalStorage(tmp_path / "run"))
    node.report(tmp_path / "put-back")
    node.unfinished.end(3, finish=True)
    _, header, (blob,) = node.answer()
    assert isinstance(error_from_wire(header["error"], blob), HoldfastError)
    assert node.lines == []
    node = Node(None)
    node.report(directory)
    node.unfinished.end(3, finish=True)
    assert "could not be tried on this node" in node.answer()[1]["error"]["message"]
    assert wait_until(lambda: node.lines)
    assert "that is lost" in node.lines[0]


def test_a_share_that_was_never_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer of a dead worker gets some time for it, and no more."""
    monkeypatch.setattr("holdfast.trainers.function.handoff._WRITER_S", 0.1)
    node = Node(LocalStorage(tmp_path / "run"))
    left = left_share(tmp_path / "disk", "checkpoint_000001", "abcd1234-1")
    node.unfinished.note(3, {"on": "staged", "index": 1, "unfinished": left})
    node.unfinished.end(3, finish=True)
    assert "this save is lost" in node.answer()[1]["error"]["message"]


def test_the_driver_wants_none_of_it(directory: Path) -> None:
    """A worker that was ended on purpose: what it had taken over is removed, which is said."""
    node = Node(None)
    node.report(directory)
    node.report(directory.parent, child=4, owned=False)
    node.unfinished.end(4, finish=False)
    node.unfinished.close()
    assert not directory.exists()
    assert directory.parent.exists()
    assert node.told == []
    assert node.lines == [f"rank 0 ended before report 1 was stored: {directory} is removed"]


def files(storage: LocalStorage) -> list[str]:
    return sorted(info.path for info in storage.list(""))


class Gate:
    """Holds what brings something to the run, after or before it has done so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, *, after: bool) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.calls = 0
        bring = getattr(handoff, name)

        def held(*args: Any, **more: Any) -> None:
            self.calls += 1
            if after:
                bring(*args, **more)
            self.reached.set()
            assert self.open.wait(30)
            if not after:
                bring(*args, **more)

        monkeypatch.setattr(handoff, name, held)


@pytest.mark.parametrize("after", [True, False])
def test_another_group_begins_meanwhile(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Nobody takes what is brought now: no more is sent, nothing of it stays in the run, and this is said."""
    storage = LocalStorage(tmp_path / "run")
    node, gate = Node(storage), Gate(monkeypatch, "put_incoming", after=after)
    node.report(directory)
    node.report(tmp_path / "scratch", index=2, owned=False)
    node.unfinished.end(3, finish=True)
    assert gate.reached.wait(10), node.told
    node.unfinished.give_up()
    gate.open.set()
    assert wait_until(lambda: len(node.lines) == 2)
    assert files(storage) == []
    assert (node.told, gate.calls) == ([], 1)
    why = "given up, for the driver goes on without it"
    assert node.lines == [f"rank 0 ended before report {index} was stored: {why}" for index in (1, 2)]
    other = tmp_path / "other"
    other.mkdir()
    node.report(other, child=4)  # of the group that has begun
    node.unfinished.end(4, finish=True)
    assert node.answer() == (4, {"on": "part", "index": 1}, ())


def test_what_was_brought_too_late(tmp_path: Path, directory: Path) -> None:
    """The driver had given it up before, and swept the run by then: the next group finds nothing of it."""
    storage = LocalStorage(tmp_path / "run")
    node = Node(storage)
    node.report(directory)
    node.unfinished.end(3, finish=True)
    node.answer()
    assert wait_until(lambda: node.lines)
    assert files(storage) != []
    node.unfinished.give_up()
    assert wait_until(lambda: files(storage) == [])


@pytest.mark.parametrize("committed", [True, False])
def test_a_share_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool) -> None:
    """Its files leave the run again, unless that save has been committed with them."""
    storage, local = LocalStorage(tmp_path / "run"), LocalStorage(tmp_path / "disk")
    name, save_id = "checkpoint_000001", "abcd1234-1"
    local.put(f"{name}/tensors", b"")
    entry = FileEntry(path="tensors", size=0, digest=bytes_digest(b""), role="state")
    put_part(local, name, save_id, PartSummary(writer=0, files=(entry,)))
    monkeypatch.setattr(
        handoff,
        "send_entries",
        lambda source, target, *_: target.put(f"{name}/tensors", source.read(f"{name}/tensors")),
    )
    node, gate = Node(storage), Gate(monkeypatch, "bring_share", after=True)
    left = left_share(tmp_path / "disk", name, save_id)
    node.unfinished.note(3, {"on": "staged", "index": 1, "unfinished": left})
    node.unfinished.end(3, finish=True)
    assert gate.reached.wait(10), node.told
    if committed:
        storage.put(f"{name}/manifest.json", b"{}")
    assert len(files(storage)) == 2 + committed
    node.unfinished.give_up()
    gate.open.set()
    assert wait_until(lambda: node.lines)
    assert len(files(storage)) == 3 * committed
    assert node.told == []


def on_this_machine(storage: LocalStorage) -> LocalEngine:
    return LocalEngine(entry="engine_peer:serve", storage=storage)


def on_a_node(storage: LocalStorage) -> ClusterEngine:
    return ClusterEngine(FakeNodes(a=1), entry="engine_peer:serve", storage=storage)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("make", [on_this_machine, on_a_node])
def test_a_group_that_begins_ends_the_work_for_the_one_before(
    tmp_path: Path, directory: Path, make: Callable[[LocalStorage], Any]
) -> None:
    """What the node of a killed worker has brought is gone once another group is started."""
    storage = LocalStorage(tmp_path / "run")
    left = left_directory(home=HOME, path=str(directory), rank=0, owned=True)

    def die(channel: Any, _: Any) -> None:
        import os
        import signal

        channel.send({"on": "report", "index": 1, "unfinished": left})
        os.kill(os.getpid(), signal.SIGKILL)

    engine = make(storage)
    try:
        driver = Driver(engine)
        driver.start(1)
        driver.ask(0, die)
        driver.next(Exited)
        assert wait_until(lambda: storage.exists(f"{HOME}/listing.json"))
        assert wait_until(lambda: not directory.exists())
        driver.start(1)
        assert wait_until(lambda: not [path for path in files(storage) if path.startswith(HOME)])
    finally:
        driver.clear()
        engine.close()
