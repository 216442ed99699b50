"""Saves whose bytes are still on their way from the trainer: behind a watermark in the arena, or window by window."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.errors import HoldfastError

from .frames import Message
from .messages import FilePlan, SaveJob, error_from_json

__all__ = ["Arriving", "Watermark", "Window", "WindowSource", "watermark"]


class Watermark:
    """A mark in the arena that only rises; whoever needs bytes waits until it has passed them.

    Args:
        filled: bytes of the arena that are complete already.
        size: bytes at which the job is complete: sealed.
    """

    def __init__(self, filled: int, size: int) -> None:
        self._filled, self._size = filled, size
        self._changed = threading.Condition()
        self._why: HoldfastError | None = None

    @property
    def sealed(self) -> bool:
        """True once everything is there: from then on the job is finished whatever happens to the trainer."""
        return self._filled >= self._size

    def rise(self, filled: int) -> None:
        """Move the mark."""
        with self._changed:
            self._filled = max(self._filled, filled)
            self._changed.notify_all()

    def abandon(self, why: HoldfastError) -> None:
        """Drop the job, unless it is sealed."""
        with self._changed:
            if not self.sealed:
                self._why = why
                self._changed.notify_all()

    def wait(self, end: int) -> None:
        """Wait until the bytes before ``end`` are there.

        Raises:
            HoldfastError: the job was abandoned.
        """
        with self._changed:
            # Unbounded on purpose: the end of the trainer, or of its connection, abandons the job.
            self._changed.wait_for(lambda: self._why is not None or self._filled >= min(end, self._size))
            if self._why is not None:
                raise self._why


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One range of the arena that holds the next bytes of a file; ``call`` is answered when it may be reused."""

    call: int
    file_no: int
    file_offset: int
    arena_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seal:
    blobs: tuple[bytes, ...]
    manifest: dict[str, Any] | None


class WindowSource:
    """Queue between the thread that reads messages and the thread that writes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Window | _Seal | HoldfastError] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[int, Window] = {}
        self._ended = False
        self.sealed = False
        self.blobs: tuple[bytes, ...] = ()
        self.manifest: dict[str, Any] | None = None

    def put(self, window: Window) -> None:
        """Add the next window.

        Raises:
            HoldfastError: the save has ended, nobody would answer.
        """
        with self._lock:
            if self._ended:
                raise HoldfastError("this save has ended already; its future says why")
            self._open[window.call] = window
        self._queue.put(window)

    def answered(self, window: Window) -> None:
        """Note that a window may be reused."""
        with self._lock:
            self._open.pop(window.call, None)

    def end(self) -> list[Window]:
        """Take no more windows; give those that nobody has answered."""
        with self._lock:
            self._ended = True
            return list(self._open.values())

    def seal(self, blobs: tuple[bytes, ...], manifest: dict[str, Any] | None) -> None:
        """Declare the job complete."""
        self.sealed = True
        self._queue.put(_Seal(blobs=blobs, manifest=manifest))

    def abandon(self, why: HoldfastError) -> None:
        """Drop the job, unless it is sealed."""
        if not self.sealed:
            self._queue.put(why)

    def windows(self) -> Iterator[Window]:
        """Yield windows until the seal; `blobs` and `manifest` are those of the seal afterwards.

        Raises:
            HoldfastError: the job was abandoned.
        """
        while True:
            item = self._queue.get()
            if isinstance(item, Window):
                yield item
            elif isinstance(item, _Seal):
                self.blobs, self.manifest = item.blobs, item.manifest
                return
            else:
                raise item


class Arriving:
    """By the number of the call that brought the save."""

    def __init__(self) -> None:
        self._windowed: dict[int, WindowSource] = {}
        self._followed: dict[int, Watermark] = {}

    def expect(self, call: int, source: WindowSource | None, filled: Watermark | None) -> None:
        """Wait for the bytes of a save from now on; a save that comes whole has neither source nor watermark."""
        if source is not None:
            self._windowed[call] = source
        if filled is not None:
            self._followed[call] = filled

    def window(self, message: Message) -> None:
        """Take in that a window is filled.

        Raises:
            HoldfastError: its save has ended.
        """
        header = message.header
        source = self._windowed.get(header["job_no"])
        if source is None:
            raise HoldfastError("this save has ended already; its future says why")
        fields = ("call", "file_no", "file_offset", "arena_offset", "nbytes")
        source.put(Window(**{name: header[name] for name in fields}))

    def fill(self, message: Message) -> None:
        """Take in how much of the arena is filled."""
        filled = self._followed.get(message.header["job_no"])
        if filled is not None:
            filled.rise(message.header["filled"])

    def seal(self, message: Message) -> None:
        """Take in that all windows of a save have been sent."""
        source = self._windowed.get(message.header["job_no"])
        if source is not None:
            source.seal(message.attachments, message.header["manifest"])

    def abandon(self, message: Message) -> None:
        """Take in that the trainer gives a save up."""
        number = message.header["job_no"]
        waiting = self._windowed.get(number) or self._followed.get(number)
        if waiting is not None:
            error = message.header["error"]
            why = HoldfastError("the trainer abandoned this save") if error is None else error_from_json(error)
            waiting.abandon(why)

    def abandon_all(self, why: str) -> None:
        """Give up every save that is not complete: nobody will send the rest."""
        waiting: list[WindowSource | Watermark] = [*self._windowed.values(), *self._followed.values()]
        for source in waiting:
            source.abandon(HoldfastError(why))

    def end(self, call: int) -> list[Window]:
        """Forget a save that has ended; return the windows that nobody has answered.

        Windows that come from now on are refused by `window`.
        """
        self._followed.pop(call, None)
        source = self._windowed.pop(call, None)
        return [] if source is None else list(source.end())


def watermark(job: SaveJob, filled: int) -> Watermark:
    """Return the mark below which the arena of a job is filled."""
    return Watermark(filled, max((_end(plan) for plan in job.files), default=0))


def _end(plan: FilePlan) -> int:
    return plan.arena_offset + plan.size
