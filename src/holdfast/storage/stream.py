"""Objects of a storage as binary file objects of Python, for packages that read and write those."""

from __future__ import annotations

import io
import tempfile
from typing import Any

from .base import FileReader, Storage

__all__ = ["InputStream", "OutputStream"]

_IN_MEMORY = 16 << 20  # more of an object of unknown size goes to a temporary file
_PIECE = 8 << 20


class InputStream(io.RawIOBase):
    """A `FileReader` as a seekable binary stream."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._reader.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes; at the end of the object with fewer, whose number is returned."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._reader.size - self._at))]
        if view:
            self._reader.read_into(self._at, view)
            self._at += len(view)
        return len(view)

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()


class OutputStream(io.RawIOBase):
    """Gathers an object of unknown size, and stores it when it is closed."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage, self._path = storage, path
        self._gathered = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - closed with this
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._gathered.write(view)
        self._size += len(view)
        return len(view)

    def close(self) -> None:
        """Store the object; durable on return; idempotent."""
        if self.closed:
            return
        try:
            self._gathered.seek(0)
            if self._size <= _PIECE:
                self._storage.put(self._path, self._gathered.read())
                return
            with self._storage.create(self._path, self._size) as writer:
                while piece := self._gathered.read(_PIECE):
                    writer.write(memoryview(piece))
        finally:
            self._drop()

    def _drop(self) -> None:
        self._gathered.close()
        super().close()

    def __del__(self) -> None:
        # Python would call `close`, and so store an object that was given up half way.
        self._drop()
