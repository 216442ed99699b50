"""What the tests of a worker's session share: a session, and a controller at the other end that follows a script."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast.errors import StorageFullError
from holdfast.storage import LocalStorage
from holdfast.trainers.function.transit import error_to_wire
from holdfast.trainers.function.worker.session import Session
from holdfast.writer.frames import Channel, Message

START_ID = "abcd1234"
WAIT_S = 20.0

Script = Callable[["Controller", dict[str, Any]], None]


def channels() -> tuple[Channel, Channel]:
    """Both ends of a connection between worker and controller."""
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def begin(root: Path | None, rank: int = 0, world_size: int = 1, **fields: Any) -> dict[str, Any]:
    """The controller's first message; without ``root`` the run is in the memory of the driver."""
    where = {"storage": None, "uri": "memory://elsewhere", "name": "run"}
    if root is not None:
        where = {"storage": LocalStorage(root).describe(), "uri": str(root), "name": ""}
    told = {
        "do": "begin",
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "local_world_size": world_size,
        "node_rank": 0,
        "first_index": 1,
        "run_name": "exp",
        "attempt": 1,
        "start_id": START_ID,
        "strategy": None,
        "score": None,
        "report_timeout_s": WAIT_S,
        "checkpoint": None,
        "run_root": where,
    }
    return told | fields


def begin_on(end: socket.socket, told: dict[str, Any]) -> Session:
    """The session of a worker whose driver is at the other end of a socket."""
    return Session(Channel(end), told)


class Controller:
    """Plays the controller of one rank: keeps what it hears and lets a script react.

    Args:
        channel: to the session.
        script: called with each message's header, on the thread of this controller.
    """

    def __init__(self, channel: Channel, script: Script) -> None:
        self.channel, self.script = channel, script
        self.heard: list[Message] = []
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while (message := self.channel.receive()) is not None:
            with self._changed:
                self.heard.append(message)
                self._changed.notify_all()
            try:
                self.script(self, message.header)
            except BaseException:
                self.channel.close()  # a failed assertion must not leave the session waiting
                raise
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, test: Callable[[list[dict[str, Any]]], Any]) -> Any:
        """Wait until what was heard passes a test."""
        with self._changed:
            found = self._changed.wait_for(lambda: test(self.headers()) or self._ended, WAIT_S)
            assert found, f"not heard: {self.headers()}"
            return test(self.headers())

    def headers(self, on: str | None = None) -> list[dict[str, Any]]:
        return [one.header for one in list(self.heard) if on is None or one.header["on"] == on]

    def rows(self) -> list[tuple[int, dict[str, Any]]]:
        """(number, metrics) of all reports of rank 0 heard so far, in order."""
        found = []
        for header in self.headers():
            if header["on"] == "rows":
                found += [(header["first"] + place, row["metrics"]) for place, row in enumerate(header["rows"])]
            elif header["on"] == "report":
                found.append((header["index"], header["metrics"]))
        return found

    def answer(self, call: int, **value: Any) -> None:
        self.send({"do": "answer", "call": call, "value": value})

    def refuse(self, call: int, error: BaseException) -> None:
        told, blob = error_to_wire(error)
        self.send({"do": "answer", "call": call, "error": told}, blob)

    def trouble(self, error: BaseException, index: int, root: int | None = None) -> None:
        told, blob = error_to_wire(error)
        self.send({"do": "trouble", "error": told, "index": index, "root": index if root is None else root}, blob)

    def committed(self, index: int) -> None:
        self.send({"do": "committed", "index": index, "checkpoint": None})

    def send(self, header: dict[str, Any], *attachments: bytes) -> None:
        with contextlib.suppress(OSError):  # the session may have closed by now
            self.channel.send(header, attachments)

    def close(self) -> None:
        self.channel.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def agreeable(controller: Controller, header: dict[str, Any]) -> None:
    """Commit every directory as soon as it is there, and answer that there is no checkpoint."""
    if header["on"] == "part":
        controller.committed(header["index"])
    elif header["on"] == "report" and not header.get("coming"):
        if header["call"] is not None:
            controller.answer(header["call"], checkpoint=None)
        controller.committed(header["index"])
    elif header["on"] == "ask":
        controller.answer(header["call"], checkpoint=None, checkpoints=[])


def trouble_at_a_question(index: int) -> Script:
    """Report ``index`` fails in the background: it has failed when the first question is answered. Else `agreeable`."""
    told: list[bool] = []

    def script(controller: Controller, header: dict[str, Any]) -> None:
        if header["on"] == "ask" and not told:
            told.append(True)
            controller.trouble(StorageFullError("no space left"), index=index)
        if header.get("index") != index:
            agreeable(controller, header)

    return script


def silent(_: Controller, __: dict[str, Any]) -> None:
    """Answer nothing."""


def make(path: Path, content: bytes = b"weights") -> hf.Checkpoint:
    """A directory with one file, as a checkpoint."""
    path.mkdir(exist_ok=True)
    (path / "model.pt").write_bytes(content)
    return hf.Checkpoint.from_directory(path)


class Pair:
    """A session and its controller; a context manager.

    Attributes:
        gone: set when the session noticed the end of its driver.
    """

    def __init__(self, told: dict[str, Any], script: Script = agreeable, memory: bytes | None = None) -> None:
        ours, theirs = channels()
        self.gone = threading.Event()
        self.controller = Controller(theirs, script)
        self.session = Session(ours, told, memory, on_gone=self.gone.set)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self.controller.close()
