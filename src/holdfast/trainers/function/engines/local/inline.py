"""An engine without processes of its own: a worker is a call in this process, for a debugger to step through."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from holdfast.errors import HoldfastError
from holdfast.trainers.function.engine import Event, Exited, GroupSpec, Received, Started, TaskEnded, Woken
from holdfast.writer.frames import Channel

__all__ = ["InlineEngine"]


class InlineEngine:
    """Implements `holdfast.trainers.function.engine.Engine` for a group of one worker, or of those of a launcher.

    The controller runs in a thread of its own and calls `start`; the owner of this engine waits for that in
    `next_call`, runs the function, and reports its end with `ended`. A call cannot be killed: its connection is
    closed, so that its next report raises.

    Args:
        others: our ends of the conversations with workers that are calls in other processes, rank 1 first. A group with
            them is started once.
    """

    def __init__(self, others: Sequence[Channel] = ()) -> None:
        self._others = tuple(others)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()
        self._channels: dict[int, Channel] = {}
        self._status = 0
        self._tasks = 0

    # ---- for the thread that calls the function

    def next_call(self) -> Channel | None:
        """Wait for the next start; return the worker's end of the channel, None when the run is over."""
        return self._calls.get()

    def ended(self, status: int) -> None:
        """Note how the call ended, before its end of the channel is closed."""
        self._status = status

    # ---- for the controller

    def start(self, spec: GroupSpec) -> None:
        """Start the worker."""
        ours, theirs = socket.socketpair()
        self._channels = dict(enumerate((Channel(ours), *self._others)))
        for rank, channel in self._channels.items():
            self._events.put(Started(rank=rank, pid=os.getpid()))
            threading.Thread(target=self._read, args=(rank, channel), name="holdfast-inline", daemon=True).start()
        self._calls.put(Channel(theirs))

    def send(self, rank: int, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message to the worker; dropped when it has ended."""
        with contextlib.suppress(OSError, KeyError):
            self._channels[rank].send(header, attachments)

    def events(self, timeout_s: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout_s``. None waits until there is one."""
        try:
            found = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def kill(self, ranks: Iterable[int] | None = None, grace_s: float = 0.0) -> None:
        """Close the connection: the function ends with an error at its next report."""
        for channel in self._channels.values():
            channel.close()

    def wake(self) -> None:
        """Make `events` return; callable from any thread and from signal handlers."""
        self._events.put(Woken())

    def close(self) -> None:
        """Let `next_call` return None; idempotent."""
        self._calls.put(None)

    # ---- tasks

    def run_task(
        self,
        blob: bytes,
        *,
        name: str = "task",
        environment: Mapping[str, str] | None = None,
        log_file: Path | None = None,
    ) -> int:
        """Run a pickled function without arguments in a thread; its end is a `TaskEnded`."""
        self._tasks += 1
        threading.Thread(target=self._run_task, args=(self._tasks, blob), name=f"holdfast-{name}", daemon=True).start()
        return self._tasks

    def kill_task(self, task: int, grace_s: float = 0.0) -> None:
        """End the waiting for a task; the thread itself cannot be ended."""
        self._events.put(TaskEnded(task=task, result=None, error=HoldfastError("it was stopped")))

    def _run_task(self, task: int, blob: bytes) -> None:
        try:
            result = cloudpickle.dumps(cloudpickle.loads(blob)())
        except Exception as error:  # noqa: BLE001 - a thread edge: the controller decides what it means
            self._events.put(TaskEnded(task=task, result=None, error=error))
        else:
            self._events.put(TaskEnded(task=task, result=result, error=None))

    def _read(self, rank: int, channel: Channel) -> None:
        finished = False
        try:
            while (message := channel.receive()) is not None:
                finished = finished or message.header.get("on") == "finished"
                self._events.put(Received(rank=rank, message=message))
        finally:  # whatever ends the reading: the controller waits for this event
            channel.close()
            # Of a process of the launcher only that is known.
            status = self._status if rank == 0 else 0 if finished else None
            self._events.put(Exited(rank=rank, exit_code=status, signal=None))
