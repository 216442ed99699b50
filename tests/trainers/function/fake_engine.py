"""An engine without processes: what its workers do is a script that runs in the driver's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from holdfast.trainers.function.engine import Event, Exited, GroupSpec, Received, Started, TaskEnded, Woken
from holdfast.writer.frames import Message

Script = Callable[["FakeEngine", int, dict[str, Any], tuple[bytes, ...]], None]


class FakeEngine:
    """Calls ``script(engine, rank, header, attachments)`` for each message to a worker; it answers with `say`, `exit`.

    Attributes:
        specs: what was started.
        closed: whether it was closed.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._alive: set[int] = set()
        self._task = 0
        self.specs: list[GroupSpec] = []
        self.closed = False

    def say(self, rank: int, *attachments: bytes, **header: Any) -> None:
        """Let a worker send a message."""
        self._add(Received(rank=rank, message=Message(header=header, attachments=attachments)))

    def report_directory(self, rank: int, index: int, source: Path, *, owned: bool) -> None:
        """Let a worker report a directory and wait for its commit."""
        self.say(
            rank,
            on="report",
            index=index,
            kind="directory",
            call=index,
            metrics={"loss": index},
            time=1.0,
            name=None,
            validation=False,
            source={"path": str(source), "owned": owned},
        )

    def exit(self, rank: int, code: int | None = 0, signal: int | None = None) -> None:
        """Let a worker end."""
        if rank in self._alive:
            self._alive.discard(rank)
            self._add(Exited(rank=rank, exit_code=code if signal is None else None, signal=signal))

    def _add(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    # -- what engines can do

    def start(self, spec: GroupSpec) -> None:
        self.specs.append(spec)
        for rank in range(spec.num_workers):
            self._alive.add(rank)
            self._add(Started(rank=rank, pid=1000 + rank))

    def send(self, rank: int, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        if rank in self._alive:
            self._script(self, rank, header, tuple(attachments))

    def events(self, timeout_s: float | None) -> list[Event]:
        with self._changed:
            self._changed.wait_for(lambda: self._events, timeout_s)
            events = list(self._events)
            self._events.clear()
            return events

    def kill(self, ranks: Iterable[int] | None = None, grace_s: float = 0.0) -> None:
        for rank in list(self._alive if ranks is None else ranks):
            self.exit(rank, signal=9)

    def wake(self) -> None:
        self._add(Woken())

    def close(self) -> None:
        self.closed = True

    def run_task(
        self,
        blob: bytes,
        *,
        name: str = "task",
        log_file: Path | None = None,
    ) -> int:
        self._task += 1
        try:
            result = cloudpickle.dumps(cloudpickle.loads(blob)())
        except Exception as error:
            self._add(TaskEnded(task=self._task, result=None, error=error))
        else:
            self._add(TaskEnded(task=self._task, result=result, error=None))
        return self._task

    def kill_task(self, task: int, grace_s: float = 0.0) -> None:
        self._add(TaskEnded(task=task, result=None, error=RuntimeError("killed")))
