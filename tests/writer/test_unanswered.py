"""Whoever asks the writer gets an answer or an error, however the threads are interleaved and whatever goes wrong."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import writer_kit as kit

from holdfast.errors import HoldfastError, StorageUnavailableError
from holdfast.storage import MemoryStorage, ObjectInfo
from holdfast.writer import frames, server
from holdfast.writer.arena import Arena
from holdfast.writer.client import WriterClient
from holdfast.writer.frames import Channel
from holdfast.writer.open_run import Run
from holdfast.writer.server import HandedOver, WriterLoop

OPEN = {
    "do": "open_run",
    "call": 1,
    "storage": 1,
    "owner": {"start_id": "aaaaaaaa", "trainer_pid": os.getpid()},
    "keep": None,
    "wait_s": 1.0,
}


def serve(kind: type[WriterLoop], *messages: dict[str, Any]) -> tuple[WriterLoop, Channel, threading.Thread]:
    """A writer loop in a thread that finds these messages and a storage of key 1."""
    ours, theirs = (Channel(end) for end in socket.socketpair())
    shared = HandedOver()
    shared.share_storage(1, MemoryStorage(f"unanswered-{id(shared)}"))
    writer = kind(theirs, shared)
    thread = threading.Thread(target=writer.serve, daemon=True)
    for message in ({"do": "storage", "key": 1}, *messages):
        ours.send(message)
    ours.set_timeout(20)
    thread.start()
    return writer, ours, thread


def answers(channel: Channel) -> list[dict[str, Any]]:
    """Everything the writer says up to its end; without "bye" it never came to one."""
    found = []
    while (message := channel.receive()) is not None:
        found.append(message.header)
    return found


def test_a_run_that_is_closed_while_the_end_comes() -> None:
    """close_run takes the run away between two looks of the reading thread: the writer ends in order all the same."""

    class Leaving(WriterLoop):
        looks = 0

        def __init__(self, *arguments: Any) -> None:
            self.told: list[str] = []
            super().__init__(*arguments)

        def trainer_gone(self) -> None:
            self.told.append("gone")

        @property
        def _run(self) -> Any:
            self.looks += 1
            return self if self.looks == 1 else None

        @_run.setter
        def _run(self, value: Any) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)  # what is missing is the end
        writer, ours, thread = serve(Leaving, {"do": "close"})
        assert [answer["on"] for answer in answers(ours)] == ["bye"]
        thread.join(20)
    assert writer.told == ["gone"]
    ours.close()


def test_a_run_that_opens_after_the_end_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is gone before its run is open: the lease says so while the rest of the work is done."""
    opening, go_on = threading.Event(), threading.Event()
    gone: list[Run] = []

    def trainer_gone(run: Run) -> None:
        gone.append(run)

    monkeypatch.setattr(Run, "trainer_gone", trainer_gone)
    real = Run.open.__func__

    def slow(*arguments: Any, **options: Any) -> Any:
        opening.set()
        assert go_on.wait(20)
        return real(Run, *arguments, **options)

    monkeypatch.setattr(server.Run, "open", slow)
    writer, ours, thread = serve(WriterLoop, OPEN, {"do": "close"})
    assert opening.wait(20)
    assert writer._ending.wait(20)
    thread.join(0.05)  # it has looked for a run by now, or will and find the one that opens
    go_on.set()
    assert [answer["on"] for answer in answers(ours)] == ["done", "bye"]
    assert gone
    ours.close()


class Nowhere(MemoryStorage):
    """A storage that says it can be described, in words the writer does not know."""

    def describe(self) -> dict[str, Any]:
        return {"kind": "nowhere"}


def test_windows_of_a_save_that_could_not_be_queued() -> None:
    """The writer cannot make the storage: the save and each of its windows are answered."""
    with WriterClient.start() as client, Arena.create(4 * kit.MIB) as arena:
        job = kit.make_job([kit.noise(1, 3 * kit.MIB)], windowed=True)
        future = client.submit(Nowhere("nowhere"), job, [b"{}"], arena)
        assert isinstance(future.exception(20), HoldfastError)
        window = client.window(future, file_no=0, file_offset=0, arena_offset=0, nbytes=kit.MIB)
        assert "ended already" in str(window.exception(20))


@pytest.mark.parametrize("thread", [True, False])
def test_calls_after_an_unexpected_end_are_refused(thread: bool) -> None:
    """A writer that could not read a message has ended: nobody would answer what is sent to it now."""
    client = WriterClient.start(thread=thread)
    client._conversation.send({"without": "do"})
    client._conversation._reader.join(20)
    assert client.closed
    with pytest.raises(HoldfastError, match="ended"):
        client.run_op("records")
    client.close()


def test_an_answer_that_cannot_be_read_is_an_error_of_its_call() -> None:
    """The call is answered although its answer makes no sense (a writer restarted from a newer Holdfast)."""

    def decode(_: Any) -> Any:
        raise KeyError("value")

    with WriterClient.start(thread=True) as client:
        storage = client._conversation.tell_storage(MemoryStorage("unreadable"))
        args = {"storage": storage, "directory": ".probe-aaaaaaaa"}
        future = client._conversation.call({"do": "op", "op": "probe", "args": args}, decode=decode)
        assert "could not be read" in str(future.exception(20))


def test_a_message_that_the_kernel_refuses_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for a message although the writer lives: it is said again to the same writer, and answered."""
    send, fail = frames._send_some, [errno.ENOBUFS]

    def refuse(sock: Any, data: memoryview, fds: Any, flags: int) -> int:
        if fail and b'"records"' in bytes(data[:200]):
            raise OSError(fail.pop(), "no buffers")
        return send(sock, data, fds, flags)

    monkeypatch.setattr(frames, "_send_some", refuse)
    with WriterClient.start(thread=False) as client:
        first = client.process_id
        assert "open_run" in str(client.run_op("records").exception(20))
        assert fail == []
        assert client.process_id == first


class Foreign(MemoryStorage):
    """A plug-in whose errors are its own and carry what they like."""

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        error = ValueError("foreign")
        error.file = object()  # type: ignore[attr-defined]
        raise error


def test_errors_of_a_plug_in_are_answered() -> None:
    """An error with attributes that JSON does not know reaches the caller, and the writer goes on."""
    storage = Foreign("foreign")
    with WriterClient.start(storage) as client:
        assert "foreign" in str(client.open_run(storage).exception(20))
        good = MemoryStorage("foreign-good")
        assert client.probe(good, directory=".probe-aaaaaaaa").result(20)["seconds"] > 0


def test_a_descriptor_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel is closed while its sender sends a descriptor: nobody else's file of that number is closed."""
    one, other = (Channel(end) for end in socket.socketpair())
    send, taken = frames._send_some, []

    def interrupted(sock: socket.socket, data: memoryview, fds: Any, flags: int) -> int:
        if flags:
            raise BlockingIOError
        sent = send(sock, data, fds, flags)
        one.close()
        taken.extend([*fds, *(open("/dev/null") for _ in range(4))])  # noqa: SIM115 - they take the numbers that are free
        return sent

    with open("/dev/null") as mine:
        monkeypatch.setattr(frames, "_send_some", interrupted)
        one.send({"n": 1}, fds=[mine.fileno()])
        assert one._sender is not None
        one._sender.join(20)
    message = other.receive()
    assert message is not None
    for file in taken[1:]:
        assert file.read() == ""  # EBADF if somebody closed it
        file.close()
    for fd in message.fds:
        os.close(fd)
    other.close()


class Away(MemoryStorage):
    """A store that refuses everything from some moment on; to renew the lease then takes long."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.is_away = False
        self.asked, self.back = threading.Event(), threading.Event()

    def put(self, path: str, data: bytes | memoryview, **conditions: Any) -> str | None:
        if self.is_away and path == "lease.json":
            self.asked.set()
            self.back.wait(60)
        if self.is_away:
            raise StorageUnavailableError(f"cannot write {path}: nobody answers")
        return super().put(path, data, **conditions)


def test_the_end_waits_for_no_beat_that_asks_a_dead_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the end could not be recorded, a lease that is being renewed goes stale: the process ends."""
    monkeypatch.setattr("holdfast.run.lease.HEARTBEAT_S", 0.02)
    storage = Away("dead-store")
    with WriterClient.start(thread=True) as client:
        client.open_run(storage, owner={"start_id": "aaaaaaaa"}).result(20)
        storage.is_away = True
        assert storage.asked.wait(20)
        try:
            with pytest.raises(StorageUnavailableError, match="nobody answers"):
                client.run_op("close_run", reason="finished").result(10)
        finally:
            storage.back.set()
