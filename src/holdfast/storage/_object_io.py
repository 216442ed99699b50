"""Bytes to and from one object: multipart uploads and parallel ranged reads with bounded memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

from ..errors import StorageError
from ._object_errors import status_of
from .base import FileReader, FileWriter, check_view

__all__ = [
    "AGAIN_S",
    "NUM_PARALLEL",
    "PART_BYTES",
    "TRIES",
    "ObjectReader",
    "ObjectWriter",
    "again_if_broken",
    "is_broken",
    "part_bytes",
]

PART_BYTES = 8 << 20
NUM_PARALLEL = 12
"""Parts under way at once. A file being closed and the next one being written use 2 * 13 * 8 MiB at most."""

_MAX_PARTS = 9_000  # the stores allow 10,000
_CHUNK = 4 << 20
TRIES = 3
AGAIN_S = 120.0
"""No new try after this time, so that the client's own deadline is the bound of the whole."""

_T = TypeVar("_T")
_Errors = Callable[[str], AbstractContextManager[None]]

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def part_bytes(size: int) -> int:
    """Return how large the parts of an object of ``size`` bytes are."""
    return max(PART_BYTES, -(-size // _MAX_PARTS))


def _readers() -> ThreadPoolExecutor:
    """Return the threads that read ranges, shared by the process so that their memory is bounded too."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(NUM_PARALLEL, thread_name_prefix="holdfast-ranges")
        return _pool


def _after_fork_in_child() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def again_if_broken(action: Callable[[], _T]) -> _T:
    """Repeat a request for reading whose answer broke off; what fails before an answer the client repeats itself."""
    begin = time.monotonic()
    for attempt in range(TRIES):
        try:
            return action()
        except Exception as error:
            # One that took the client its whole deadline is not begun anew.
            if not is_broken(error) or attempt == TRIES - 1 or time.monotonic() - begin > AGAIN_S:
                raise
    raise AssertionError("not reached")


def is_broken(error: Exception) -> bool:
    """Tell whether a connection broke before the whole answer was there."""
    return type(error).__name__ == "GenericError" and status_of(error) is None


class ObjectWriter(FileWriter):
    """Uploads an object in parts while it is written; one request if it is small. Nothing is visible before `close`."""

    def __init__(
        self, start: Callable[[], Any], arrived: Callable[[Exception], bool], errors: _Errors, path: str, size: int
    ) -> None:
        self._start, self._arrived, self._errors, self._path, self._size = start, arrived, errors, path, size
        self._upload: Any = None
        self._offset = 0  # padding included
        self._ended = False

    def write(self, view: memoryview) -> None:
        """Hand the bytes to the client, which copies them; blocks while all its parts are under way."""
        if self._ended:
            raise StorageError(f"cannot write {self._path}: the writer is closed")
        view = view.cast("B")
        check_view(self._path, size=self._size, offset=self._offset, nbytes=len(view))
        content = view[: max(0, self._size - self._offset)]
        self._offset += len(view)
        with self._errors("write"):
            if self._upload is None:
                self._upload = self._start()
            for begin in range(0, len(content), _CHUNK):
                self._upload.write(content[begin : begin + _CHUNK])

    def close(self) -> None:
        """Finish the upload: the object appears, whole."""
        if self._ended:
            return
        if min(self._offset, self._size) != self._size:
            self.abort()
            raise StorageError(f"cannot finish {self._path}: {self._offset} of {self._size} bytes were written")
        self._ended = True
        with self._errors("write"):
            if self._upload is None:
                self._upload = self._start()
            try:
                self._upload.close()
            except Exception as error:
                # The answer may have been lost, and the request repeated in vain, when all the bytes are there.
                if not self._arrived(error):
                    raise
            finally:
                self._upload = None

    def abort(self) -> None:
        """Give the upload up and let the store forget its parts."""
        if self._ended:
            return
        self._ended = True
        upload, self._upload = self._upload, None
        if upload is not None:
            # Leaving its block by an exception is how the client is told to abort. A store that has gone away keeps the
            # parts: docs/storage.md has the rule of life cycle that removes them.
            with suppress(Exception):
                upload.__exit__(StorageError, StorageError("aborted"), None)


class ObjectReader(FileReader):
    """Reads ranges of the version of an object that was opened, several at once."""

    def __init__(self, fetch: Callable[[int, int], Any], errors: _Errors, path: str, *, size: int) -> None:
        self._fetch, self._errors, self._path, self.size = fetch, errors, path, size

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` by parallel requests of at most 8 MiB."""
        target = view.cast("B")
        end = offset + len(target)
        if offset < 0 or end > self.size:
            raise StorageError(
                f"short read of {self._path}: {len(target)} bytes at {offset} asked for, the object has {self.size}"
            )
        if not len(target):
            return
        if len(target) <= PART_BYTES:
            self._read_range(offset, target)
            return
        pool = _readers()
        pieces = [
            pool.submit(self._read_range, begin, target[begin - offset : min(begin + PART_BYTES, end) - offset])
            for begin in range(offset, end, PART_BYTES)
        ]
        wait(pieces)  # each ends: every request has its deadline
        for piece in pieces:
            piece.result()

    def _read_range(self, offset: int, target: memoryview) -> None:
        at = 0

        def go_on() -> None:
            nonlocal at
            # Chunk by chunk as they arrive: an answer is never held twice. After a break it goes on from there.
            for chunk in self._fetch(offset + at, offset + len(target)) if at < len(target) else ():
                data = memoryview(chunk)
                if at + len(data) > len(target):
                    raise StorageError(f"cannot read {self._path}: the storage sent more than was asked for")
                target[at : at + len(data)] = data
                at += len(data)

        with self._errors("read"):
            again_if_broken(go_on)
        if at < len(target):
            raise StorageError(f"cannot read {self._path}: the storage sent {at} of {len(target)} bytes at {offset}")

    def close(self) -> None:
        """Nothing is held."""
