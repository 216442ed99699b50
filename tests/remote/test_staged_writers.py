"""Two writers on machines that share no disk: what they stage is committed at the remote, by this life or the next."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from catalog_kit import catalog_of

from holdfast.config import Mirror
from holdfast.errors import CheckpointError, StorageError
from holdfast.format.commit import PartSummary, read_manifest
from holdfast.format.parts import put_part, staged_name
from holdfast.run.catalog import Catalog
from holdfast.storage import LocalStorage, MemoryStorage, StorageTraits
from holdfast.testing import FaultyStorage
from holdfast.writer import distributed
from holdfast.writer.arena import MAILBOX_BYTES, Arena, StepMailbox
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import BlobPlan, SaveJob
from holdfast.writer.uploads import staged_run

LIMIT_S = 20.0


class Life:
    """Two ranks; the writers are threads of this process."""

    def __init__(self, home: Path, start_id: str, second: Any = None, remote: Any = None) -> None:
        self.start_id, self.remote = start_id, remote or LocalStorage(home / "remote")
        self.disks = [LocalStorage(home / f"node{rank}") for rank in (0, 1)]
        self.clients = [WriterClient.start(disk, thread=True) for disk in self.disks]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._mailboxes = [Arena.create(MAILBOX_BYTES) for _ in self.clients]
        for rank, client in enumerate(self.clients):
            StepMailbox(self._mailboxes[rank].view).clear(step=0)
            client.join(
                self._mailboxes[rank], rank=rank, world_size=2, addresses=[self._listener.getsockname()[:2]], token="t",
                timeout_s=LIMIT_S, listener=None if rank else self._listener.fileno(), beat_s=0.1, stale_s=10.0,
            )  # fmt: skip
        self.opened = self.clients[0].open_run(self.remote, owner={"start_id": start_id}).result(LIMIT_S)
        self.staging = [
            client.stage(disk, far, Mirror(disk.uri), start_id=start_id)
            for client, disk, far in zip(self.clients, self.disks, (self.remote, second or self.remote), strict=True)
        ]

    def save(self, step: int, *more: bytes) -> None:
        """One save of both ranks, until it is staged; ``more``: files of every rank beside its own."""
        futures = []
        for rank, client in enumerate(self.clients):
            save_id = f"{self.start_id}-{step:x}"
            manifest = {"run_id": self.opened.run_id, "checkpoint_id": save_id, "step": step}
            job = SaveJob(
                directory=f"step_{step:08d}", save_id=save_id, writer=rank, part=True, joint=True, run=rank == 0,
                blobs=(
                    BlobPlan(path=f"rank-{rank:05d}-{save_id}.json", role="rank"),
                    *(BlobPlan(path=f"more{n}-{rank:05d}-{save_id}.json", role="rank") for n in range(len(more))),
                ),
                manifest={**manifest, "attempt": self.opened.attempt},
            )  # fmt: skip
            futures.append(client.submit(self.disks[rank], job, [b"{}", *more]))
        for future in futures:
            future.result(LIMIT_S)

    def arrive(self) -> None:
        """Wait until all that is staged is at the remote."""
        state: dict[str, Any] = {"version": None, "waiting": ["not asked yet"]}
        while state["waiting"]:
            state = self.clients[0].run_op("follow", since=state["version"]).result(LIMIT_S)

    def close(self) -> None:
        ends = [threading.Thread(target=client.close, args=(LIMIT_S,)) for client in self.clients]
        for one in ends:
            one.start()
        for one in ends:
            one.join()
        self._listener.close()


@contextlib.contextmanager
def life(home: Path, start_id: str, second: Any = None, remote: Any = None) -> Iterator[Life]:
    one = Life(home, start_id, second, remote)
    try:
        yield one
    finally:
        one.close()


def files(home: Path) -> list[str]:
    return sorted(path.name for node in home.glob("node*") for path in node.rglob("*") if path.is_file())


def test_what_both_have_staged_is_committed_at_the_remote(tmp_path: Path) -> None:
    """And nothing of it stays on their disks."""
    with life(tmp_path, "aaaaaaa1") as one:
        one.save(1)
        one.save(2)
    for step in (1, 2):
        manifest = read_manifest(LocalStorage(tmp_path / "remote"), f"step_{step:08d}", check_sizes=True)
        assert manifest.writers == (0, 1)
    assert files(tmp_path) == []


def test_what_did_not_get_there_is_brought_by_the_next_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 could not reach the remote: nothing is committed, everything stays where it is until somebody asks."""
    monkeypatch.setattr(staged_run, "END_S", 0.2)
    monkeypatch.setattr(distributed, "_LAST_S", 0.2)
    with life(tmp_path, "aaaaaaa1", FaultyStorage(tmp_path / "remote", fail_on={"pwrite": errno.EIO})) as one:
        one.save(1)
    assert not (tmp_path / "remote" / "step_00000001" / "manifest.json").exists()
    assert [name.split("-")[0] for name in files(tmp_path)] == ["part", "part", "rank", "rank", "staged"]
    with life(tmp_path, "aaaaaaa2") as two:
        two.clients[0].run_op("bring", name="step_00000001", save="aaaaaaa1-1").result(LIMIT_S)
        assert [row[0] for row in two.clients[0].run_op("records").result(LIMIT_S)] == ["step_00000001"]
    assert files(tmp_path) == []


class Store(MemoryStorage):
    """Tells what was sent to it, and what it has repeated by itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent: list[str] = []
        self.repeated: list[str] = []

    def create(self, path: str, size: int) -> Any:
        self.sent.append(path)
        return super().create(path, size)

    def copy(self, source: str, target: str) -> None:
        super().copy(source, target)
        self.repeated.append(target)


def test_a_store_repeats_what_did_not_change(tmp_path: Path) -> None:
    """Nobody sends it again: but small files, what has changed, every tenth time, and where it is gone at the store."""
    store, large = Store("staged-repeats"), b"7" * (1 << 20)
    with life(tmp_path, "aaaaaaa1", remote=store) as one:
        for step in range(1, 14):
            if step == 13:
                for found in list(store.list("step_00000012")):
                    store.delete(found.path)
            one.save(step, large, bytes([step]) * (1 << 20), large[:-1])
            one.arrive()

    def steps(paths: list[str], kind: str) -> list[int]:
        return sorted(int(path[5:13]) for path in paths if f"/{kind}-" in path)

    both = sorted([*range(1, 14)] * 2)
    assert steps(store.sent, "more0") == [1, 1, 11, 11, 13, 13]
    assert steps(store.repeated, "more0") == [step for step in both if step not in (1, 11, 13)]
    assert all("/more0-" in path for path in store.repeated)
    assert steps(store.sent, "more1") == steps(store.sent, "more2") == steps(store.sent, "rank") == both
    found = read_manifest(store, "step_00000013", check_sizes=True)
    assert store.read(f"step_00000013/{found.files[1].path}") == large


def test_a_store_that_cannot_copy_by_itself_is_sent_all(tmp_path: Path) -> None:
    """Its copy would bring the bytes here and send them back."""

    class Poor(Store):
        traits = StorageTraits(copies_itself=False)

    store, large = Poor("staged-poor"), b"7" * (1 << 20)
    with life(tmp_path, "aaaaaaa1", remote=store) as one:
        for step in (1, 2):
            one.save(step, large)
            one.arrive()
    assert store.repeated == []
    assert len([path for path in store.sent if "/more0-" in path]) == 4  # two ranks, two saves


def test_bringing_a_save_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is broken off while the remote takes everything but the manifest: nobody waits for ever."""
    monkeypatch.setattr(staged_run, "END_S", 0.2)
    monkeypatch.setattr(distributed, "_LAST_S", 0.2)
    tried = threading.Event()

    def fail(*_: object, **__: object) -> None:
        tried.set()
        raise StorageError("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(staged_run, "commit_manifest", fail)
        with life(tmp_path, "aaaaaaa1") as one:
            one.save(1)
            assert tried.wait(LIMIT_S)
        tried.clear()
        with life(tmp_path, "aaaaaaa2") as two:
            brought = two.clients[0].run_op("bring", name="step_00000001", save="aaaaaaa1-1")
            assert tried.wait(LIMIT_S)
        with pytest.raises(StorageError, match="before the end"):
            brought.result(LIMIT_S)
    with life(tmp_path, "aaaaaaa3") as three:
        three.clients[0].run_op("bring", name="step_00000001", save="aaaaaaa1-1").result(LIMIT_S)
        three.clients[0].run_op("bring", name="step_00000001", save="aaaaaaa1-1").result(LIMIT_S)  # asked again
        with pytest.raises(CheckpointError, match="could not be brought"):
            three.clients[0].run_op("bring", name="step_00000002", save="aaaaaaa1-2").result(LIMIT_S)


def test_what_is_said_before_a_save_arrives_is_kept_until_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remote fails just when the metrics are to be bound: they are bound with the next try."""
    may_go, failures = threading.Event(), iter([StorageError("no answer")])
    send, bind = staged_run.send_entries, Catalog.set_metrics

    def send_later(*args: Any, **more: Any) -> Any:
        assert may_go.wait(LIMIT_S)
        return send(*args, **more)

    def fail_once(*args: Any) -> Any:
        for failure in failures:
            raise failure
        return bind(*args)

    monkeypatch.setattr(staged_run, "send_entries", send_later)
    monkeypatch.setattr(Catalog, "set_metrics", fail_once)
    with life(tmp_path, "aaaaaaa1") as one:
        one.save(1)
        for loss in (0.5, 0.25):
            one.clients[0].run_op("metrics", name="step_00000001", metrics={f"loss{loss}": loss}).result(LIMIT_S)
        may_go.set()
    assert catalog_of(one.remote).record("step_00000001").metrics == {"loss0.5": 0.5, "loss0.25": 0.25}


def test_staging_that_cannot_begin_is_an_error_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no end of the thread that works: other calls are answered."""

    def fail(local: object) -> object:
        raise StorageError("the disk does not answer")

    monkeypatch.setattr(staged_run, "staged_saves", fail)
    with life(tmp_path, "aaaaaaa1") as one:
        one.staging[1].result(LIMIT_S)
        with pytest.raises(StorageError, match="does not answer"):
            one.staging[0].result(LIMIT_S)
        assert one.clients[0].run_op("records").result(LIMIT_S) == []


def test_only_directories_of_checkpoints_are_looked_at(tmp_path: Path) -> None:
    """What else lies on the disk is the user's; a staged save of another version of the format is left alone."""
    local = LocalStorage(tmp_path)
    name = staged_name("aaaaaaa1-1")
    for directory in ("step_00000001", "elsewhere"):
        local.put(f"{directory}/{name}", b'{"format": "holdfast", "format_version": [99, 0]}')
    assert list(staged_run.files_in_front(local)) == [("step_00000001", name)]
    assert staged_run.staged_saves(local) == []


def test_what_rank_0_has_asked_for_is_done_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its farewell is heard at once, while the last removal may still be under way."""
    may_go, removed = threading.Event(), []

    def remove(*args: object) -> None:
        assert may_go.wait(LIMIT_S)
        removed.append(args)

    monkeypatch.setattr(staged_run, "remove_part", remove)
    parts = staged_run.StagedParts(LocalStorage(tmp_path), LocalStorage(tmp_path), 1, "aaaaaaa1", lambda _: None)
    parts.take({"do": "clear", "save": "aaaaaaa1-1", "directory": "step_00000001"})
    threading.Timer(0.05, may_go.set).start()
    parts.await_end(time.monotonic() + LIMIT_S, lambda: True)
    assert len(removed) == 1


def test_an_order_that_comes_with_the_first_words_is_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is started again in the middle of an upload hears of it while it joins; its answer is not lost."""
    local, remote = LocalStorage(tmp_path / "node1"), LocalStorage(tmp_path / "remote")
    put_part(local, "step_00000001", "aaaaaaa1-1", PartSummary(writer=1, files=()))
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    class Eager:
        def __init__(self, *, hear: Any, **_: Any) -> None:
            order = {"do": "upload", "save": "aaaaaaa1-1", "directory": "step_00000001"}
            first = threading.Thread(target=hear, args=(order,))
            first.start()
            first.join(LIMIT_S)

        def say(self, message: Any) -> None:
            said.put(message)

    monkeypatch.setattr(distributed, "ControlMember", Eager)
    stages = {"local": 1, "remote": 2, "limits": {}, "start_id": "aaaaaaa1"}
    answers: Any = SimpleNamespace(storage_of={1: local, 2: remote}.get, later=lambda work: None, hold=bool)
    header = {"rank": 1, "world_size": 2, "timeout_s": LIMIT_S, "pid": os.getpid(), "beat_s": 0.1, "stale_s": 10.0}
    told = {**header, "addresses": [], "token": "t", "stage": stages}
    distributed.Joint(answers).join(told, (), memoryview(bytearray(MAILBOX_BYTES)))
    assert said.get(timeout=LIMIT_S) == {"do": "uploaded", "save": "aaaaaaa1-1", "error": None}
