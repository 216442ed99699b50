"""Readers and writers over libcloud's ranges and uploads."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from holdfast.errors import StorageError

from ..base import FileReader, FileWriter, check_view
from .common import FoundObject, short_read
from .errors import client_errors

if TYPE_CHECKING:
    from .libcloud import LibcloudObjectStore

__all__ = ["Reader", "Writer"]

# Views under way to libcloud, 8 MiB each as a rule; then `write` waits.
_QUEUE_VIEWS = 2
# No byte taken by libcloud for so long, and the upload is given up; its own socket time-out is 60 s.
_STALL_S = 600.0
_ABORT_S = 60.0
_POLL_S = 0.5


class Reader(FileReader):
    """Reads ranges by requests of their own; the object is looked at again after each."""

    def __init__(self, storage: LibcloudObjectStore, full: str, where: str, found: FoundObject) -> None:
        self._storage, self._full, self._where, self._found = storage, full, where, found
        self.size = found.size or 0

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on."""
        target = view.cast("B")
        if offset < 0 or offset + len(target) > self.size:
            raise short_read(self._where, len(target), offset, self.size)
        if not len(target):
            return
        with client_errors("read", self._where):
            found = self._storage._object(self._full)
            chunks = self._storage._driver.download_object_range_as_stream(found, offset, offset + len(target))
            data = b"".join(chunks)
            now = self._storage._look(self._full)
        if len(data) != len(target):
            raise short_read(self._where, len(target), offset, offset + len(data))
        if now != self._found:
            raise StorageError(f"cannot read {self._where}: it was replaced while it was read; open it again")
        target[:] = data

    def close(self) -> None:
        """Do nothing: requests end by themselves."""


class _Abandoned(Exception):  # noqa: N818  # never leaves this module
    """The upload is not wanted any more."""


class Writer(FileWriter):
    """Feeds an upload that runs in a thread of its own."""

    def __init__(
        self,
        upload: Callable[[Iterator[bytes]], None],
        where: str,
        size: int,
        *,
        drop: Callable[[], None],
        check: Callable[[], FoundObject | None],
    ) -> None:
        self._where, self._size, self._drop, self._check = where, size, drop, check
        self._offset = 0  # bytes written, padding included
        self._ended = False
        self._error: Exception | None = None
        self._chunks: queue.Queue[bytes | None] = queue.Queue(_QUEUE_VIEWS)  # None: that was all
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(upload,), name="holdfast-libcloud", daemon=True)
        self._thread.start()

    def _run(self, upload: Callable[[Iterator[bytes]], None]) -> None:
        try:
            upload(self._feed())
        except Exception as error:  # noqa: BLE001  # the edge of the thread: `write` and `close` raise it
            self._error = error

    def _feed(self) -> Iterator[bytes]:
        waited_from = time.monotonic()
        while True:
            if self._abandoned.is_set():
                raise _Abandoned
            try:
                chunk = self._chunks.get(timeout=_POLL_S)
            except queue.Empty:
                # A writer that was dropped without `close` would keep this thread and its connection.
                if time.monotonic() - waited_from > _STALL_S:
                    raise _Abandoned from None
                continue
            if chunk is None:
                return
            yield chunk
            waited_from = time.monotonic()

    def _give(self, chunk: bytes | None) -> None:
        until = time.monotonic() + _STALL_S
        while True:
            if not self._thread.is_alive():
                self._raise()
                raise StorageError(f"cannot write {self._where}: the upload ended before its bytes")
            with contextlib.suppress(queue.Full):
                self._chunks.put(chunk, timeout=_POLL_S)
                return
            if time.monotonic() > until:
                raise StorageError(f"cannot write {self._where}: the provider took no bytes for {_STALL_S:.0f} s")

    def _raise(self) -> None:
        if self._error is not None:
            with client_errors("write", self._where):
                raise self._error

    def write(self, view: memoryview) -> None:
        """Append ``view``; waits while libcloud is behind."""
        if self._ended:
            raise StorageError(f"cannot write {self._where}: the writer is closed")
        view = view.cast("B")
        check_view(self._where, size=self._size, offset=self._offset, nbytes=len(view))
        self._give(bytes(view[: max(0, self._size - self._offset)]))
        self._offset += len(view)

    def close(self) -> None:
        """Wait for the upload and ask whether all of it is there."""
        if self._ended:
            return
        try:
            if self._offset < self._size:
                raise StorageError(
                    f"cannot finish {self._where}: {self._offset} of {self._size} bytes were written; write the rest"
                )
            self._give(None)
            self._thread.join(_STALL_S)
            self._raise()
            if self._thread.is_alive():
                raise StorageError(f"cannot finish {self._where}: the provider did not answer for {_STALL_S:.0f} s")
            with client_errors("write", self._where):
                found = self._check()
            if found is None or found.size != self._size:
                raise StorageError(f"cannot finish {self._where}: the provider has {found and found.size} bytes of it")
            self._ended = True
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Stop the upload and remove what it made."""
        if self._ended:
            return
        self._ended = True
        self._abandoned.set()
        self._thread.join(_ABORT_S)
        # What cannot be dropped now is no part of any manifest; nobody reads it, and a sweep takes it.
        with contextlib.suppress(Exception):
            self._drop()
