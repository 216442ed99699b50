"""Reader and writer over the open handles of an fsspec file system."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable
from typing import Any

from holdfast.errors import StorageError

from ..base import FileReader, check_range
from .common import FoundObject, SentWriter
from .errors import client_errors

__all__ = ["HandleReader", "HandleWriter"]


class HandleWriter(SentWriter):
    """Writes through an open handle, one thread of the client at a time."""

    def __init__(
        self,
        handle: Any,
        guard: threading.RLock,
        *,
        where: str,
        size: int,
        drop: Callable[[], None],
        check: Callable[[], FoundObject | None],
    ) -> None:
        super().__init__(where, size, drop=drop, check=check)
        self._handle, self._guard = handle, guard
        if hasattr(handle, "set_pipelined"):
            handle.set_pipelined(True)  # SFTP: does not wait for the answer to each 32 KiB; close sees the errors

    def _send(self, data: bytes) -> None:
        with self._guard:
            self._handle.write(data)

    def _finish(self) -> None:
        with self._guard:
            self._handle.close()

    def _give_up(self) -> None:
        handle = self._handle
        with self._guard:
            if hasattr(handle, "discard"):
                handle.discard()
            if hasattr(handle, "autocommit") and not handle.closed:
                handle.closed = True  # a buffered upload would be finished when it is collected
            else:
                handle.close()


class HandleReader(FileReader):
    """Reads ranges through one open handle, which keeps its version of the file."""

    def __init__(self, handle: Any, guard: threading.RLock, *, where: str, size: int) -> None:
        self._handle: Any = handle
        self._guard, self._where, self.size = guard, where, size

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on."""
        target = view.cast("B")
        check_range(self._where, size=self.size, offset=offset, nbytes=len(target))
        with client_errors("read", self._where), self._guard:
            if self._handle is None:
                raise StorageError(f"cannot read {self._where}: the reader is closed")
            done = self._read(offset, target)
        check_range(self._where, size=offset + done, offset=offset, nbytes=len(target))

    def _read(self, offset: int, target: memoryview) -> int:
        handle = self._handle
        if isinstance(handle, io.BytesIO):
            # fsspec's memory file: its position is shared by all who opened it, and its bytes are at hand.
            with handle.getbuffer() as content:
                part = content[offset : offset + len(target)]
                target[: len(part)] = part
                return len(part)
        if hasattr(handle, "readv"):
            data = b"".join(handle.readv([(offset, len(target))])) if len(target) else b""
            target[: len(data)] = data
            return len(data)
        handle.seek(offset)
        done = 0
        while done < len(target):
            data = handle.read(len(target) - done)
            if not data:
                break
            target[done : done + len(data)] = data
            done += len(data)
        return done

    def close(self) -> None:
        """Close the handle."""
        with self._guard:
            handle, self._handle = self._handle, None
            if handle is not None and not isinstance(handle, io.BytesIO):
                with contextlib.suppress(Exception):
                    handle.close()
