"""What a trainer hands to its writer: storages, memory, and the bytes of saves that are still on their way.

`Handed` keeps storages and memory, by the numbers that later messages name them with. `Arriving` keeps the saves that
are not whole yet: behind a watermark in the arena (`Watermark`), or window by window (`WindowSource`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage
from holdfast.storage.resolve import extend_path, from_description

from .arena import Arena
from .frames import Message
from .messages import FilePlan, SaveJob, error_from_json


class Handed:
    """Storages and arenas of one conversation, which come out of the socket.

    Taken in on the reading thread, dropped on the working one.
    """

    def __init__(self) -> None:
        self._storages: dict[int, Storage | HoldfastError] = {}
        self._views: dict[int, memoryview] = {}
        self._unmapped: dict[int, Message] = {}
        self._arenas: dict[int, Arena] = {}

    def take_storage(self, message: Message) -> None:
        """Take a storage in, or the reason why it cannot be made here: what is asked of it fails with that.

        A plug-in is imported along the trainer's ``sys.path``.
        """
        try:
            extend_path(message.header.get("imports", []))
            made = from_description(message.header["description"], message.header.get("secrets"))
            self._storages[message.header["key"]] = made
        except HoldfastError as error:
            self._storages[message.header["key"]] = error

    def storage(self, key: int) -> Storage:
        """Return a storage by its number.

        Raises:
            HoldfastError: it could not be made in this process.
        """
        found = self._storages[key]
        if isinstance(found, HoldfastError):
            raise found
        return found

    def take_arena(self, message: Message) -> None:
        """Take an arena in, and map it if that is possible now: else the first job that needs it tries again."""
        self._unmapped[message.header["number"]] = message
        with contextlib.suppress(HoldfastError):
            self.view(message.header["number"])

    def view(self, number: int) -> memoryview:
        """Return the memory of an arena, mapped now if it is not yet.

        Raises:
            HoldfastError: there is no room to map it.
        """
        view = self._views.get(number)
        if view is None:
            message = self._unmapped[number]
            try:
                view = self._views[number] = self._map(message)
            except OSError as error:
                raise HoldfastError(
                    f"the writer cannot map {message.header['size']} bytes of memory that it shares with the trainer "
                    f"({error.strerror}): this save is lost, the next one tries again; give the machine more memory"
                ) from error
            del self._unmapped[number]
        return view

    def _map(self, message: Message) -> memoryview:
        arena = Arena.attach(message.fds[0], message.header["size"])
        arena.prefault(allocate=False)  # in the background: direct IO needs mapped pages
        self._arenas[message.header["number"]] = arena
        return arena.view

    def drop_arena(self, number: int) -> None:
        """Give an arena back, when no job uses it any more."""
        self._views.pop(number, None)
        message = self._unmapped.pop(number, None)
        for fd in () if message is None else message.fds:
            os.close(fd)
        arena = self._arenas.pop(number, None)
        if arena is not None:
            arena.close()


class HandedOver(Handed):
    """What a writer that is a thread takes from its trainer directly: there the same objects serve both."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[int, memoryview] = {}

    def share_storage(self, key: int, storage: Storage) -> None:
        """Hand a storage over, before the message that tells of it."""
        self._storages[key] = storage

    def share(self, arena: Arena) -> None:
        """Hand memory over: a view of our own, so that it outlives `Arena.close` in the middle of a save."""
        self._shared[arena.number] = arena.view[:]

    def take_storage(self, message: Message) -> None:
        """Do nothing: it is here."""

    def _map(self, message: Message) -> memoryview:
        return self._shared[message.header["number"]]

    def drop_arena(self, number: int) -> None:
        """Let go of an arena, which is the trainer's to close."""
        super().drop_arena(number)
        view = self._shared.pop(number, None)
        if view is not None:
            view.release()


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
    """Queue between the thread that reads messages and the thread that writes.

    Args:
        answer: gets the calls of windows whose memory may be reused, or of those that failed with an error.
    """

    def __init__(self, answer: Callable[[list[int], BaseException | None], None]) -> None:
        self._answer = answer
        self._queue: queue.SimpleQueue[Window | _Seal | HoldfastError] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[int] = set()
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
            self._open.add(window.call)
        self._queue.put(window)

    def end(self, why: BaseException) -> None:
        """Take no more windows; those that nobody has answered fail."""
        with self._lock:
            self._ended = True
            left = list(self._open)
        if left:
            self._answer(left, why)

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

        Whoever asks for the next window has done with the one before.

        Raises:
            HoldfastError: the job was abandoned.
        """
        while True:
            item = self._queue.get()
            if isinstance(item, Window):
                yield item
                with self._lock:
                    self._open.discard(item.call)
                self._answer([item.call], None)
            elif isinstance(item, _Seal):
                self.blobs, self.manifest = item.blobs, item.manifest
                return
            else:
                raise item


class Arriving:
    """By the number of the call that brought the save."""

    def __init__(self) -> None:
        self._saves: dict[int, WindowSource | Watermark] = {}

    def expect(self, call: int, save: WindowSource | Watermark) -> None:
        """Wait for the bytes of a save from now on."""
        self._saves[call] = save

    def window(self, message: Message) -> None:
        """Take in that a window is filled.

        Raises:
            HoldfastError: its save has ended.
        """
        header = message.header
        source = self._saves.get(header["job_no"])
        if not isinstance(source, WindowSource):
            raise HoldfastError("this save has ended already; its future says why")
        fields = ("call", "file_no", "file_offset", "arena_offset", "nbytes")
        source.put(Window(**{name: header[name] for name in fields}))

    def fill(self, message: Message) -> None:
        """Take in how much of the arena is filled."""
        mark = self._saves.get(message.header["job_no"])
        if isinstance(mark, Watermark):
            mark.rise(message.header["filled"])

    def seal(self, message: Message) -> None:
        """Take in that all windows of a save have been sent."""
        source = self._saves.get(message.header["job_no"])
        if isinstance(source, WindowSource):
            source.seal(message.attachments, message.header["manifest"])

    def abandon(self, message: Message) -> None:
        """Take in that the trainer gives a save up."""
        save = self._saves.get(message.header["job_no"])
        if save is not None:
            error = message.header["error"]
            why = HoldfastError("the trainer abandoned this save") if error is None else error_from_json(error)
            save.abandon(why)

    def abandon_all(self, why: str) -> None:
        """Give up every save that is not complete: nobody will send the rest."""
        for save in list(self._saves.values()):
            save.abandon(HoldfastError(why))

    def end(self, call: int, error: BaseException | None = None) -> None:
        """Forget a save that has ended, by an error or not: windows that are left, or come from now on, fail."""
        ended = self._saves.pop(call, None)
        if isinstance(ended, WindowSource):
            ended.end(error or HoldfastError("this save has ended already"))


def watermark(job: SaveJob, filled: int) -> Watermark:
    """Return the mark below which the arena of a job is filled."""
    return Watermark(filled, max((_end(plan) for plan in job.files), default=0))


def _end(plan: FilePlan) -> int:
    return plan.arena_offset + plan.size
