"""Where the bytes of a windowed job come from: ranges of a small arena, one after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.errors import HoldfastError

__all__ = ["Window", "WindowSource"]


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
    """Queue between the thread that reads messages and the one that writes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Window | _Seal | str] = queue.SimpleQueue()
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

    def abandon(self, why: str) -> None:
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
                raise HoldfastError(item)
