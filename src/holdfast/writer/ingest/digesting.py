"""Bytes of files that are no arena: digested where they are, or copied and digested in the same pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

from holdfast.copying.sending import Windows
from holdfast.errors import StorageError
from holdfast.format.digest import chunk_digests, digested
from holdfast.storage.base import FileBatch, FileReader, Storage
from holdfast.storage.local.beneath import Inside
from holdfast.storage.local.ops import errors_of

from ..serial_executor import SerialExecutor

__all__ = ["SMALL_BYTES", "Copier", "changed", "opened"]

SMALL_BYTES = 1 << 20
"""Up to here a file goes through the page cache, together with others, and is digested where it was read."""


class Copier:
    """Reads through two reused buffers; one thread at a time.

    Args:
        side: reads and digests into one buffer while the other is written.
    """

    def __init__(self, side: SerialExecutor) -> None:
        self._windows = Windows(side.run, 2)

    def digest_file(self, path: str, size: int) -> bytes:
        """Give the chunk digests of a local file."""
        with opened(path, size) as fd:
            return self.digest_open(fd, path, size)

    def digest_open(self, fd: int, path: str, size: int) -> bytes:
        """Give the chunk digests of an open file, without the help of the side thread."""
        return self._digest(_OpenFile(fd, path, size))

    def digest_object(self, storage: Storage, path: str) -> bytes:
        """Give the chunk digests of an object."""
        with storage.open(path) as reader:
            return self._digest(reader)

    def copy(self, path: str, size: int, storage: Storage, target: str) -> bytes:
        """Copy a local file, durably; give its chunk digests.

        Raises:
            StorageError: it could not be read or written, or changed meanwhile.
        """
        table = bytearray()
        with (
            opened(path, size) as fd,
            storage.create(target, size) as writer,
            _unchanged(fd, path),
            closing(self._windows.read(_OpenFile(fd, path, size))) as windows,
        ):
            for window in windows:
                table += window.digests
                # Whole pages, so that the tail goes past the page cache as well; the storage cuts it to size.
                writer.write(window.view)
        return bytes(table)

    def copy_small(self, path: str, size: int, batch: FileBatch, target: str) -> bytes:
        """Copy a local file of at most `SMALL_BYTES` into a batch; give its chunk digests.

        Raises:
            StorageError: as `copy`.
        """
        with self._windows.buffer() as buffer:
            view = buffer[:size]
            with opened(path, size) as fd, _unchanged(fd, path):
                _OpenFile(fd, path, size).read_into(0, view)
            batch.add(target, view)
            return chunk_digests(view)

    def _digest(self, reader: FileReader) -> bytes:
        with self._windows.buffer() as buffer:
            return b"".join(digests for _, _, digests in digested(reader, buffer))


class _OpenFile(FileReader):
    """A local file that its owner may change while it is read; whoever opened ``fd`` closes it."""

    def __init__(self, fd: int, path: str, size: int) -> None:
        self._fd, self._path, self.size = fd, path, size

    def read_into(self, offset: int, view: memoryview) -> None:
        with errors_of("read", self._path):
            done = 0
            while done < len(view):
                count = os.preadv(self._fd, [view[done:]], offset + done)
                if count == 0:
                    raise changed(self._path)
                done += count

    def close(self) -> None:
        pass


@contextmanager
def _unchanged(fd: int, path: str) -> Iterator[None]:
    """Refuse a file that is written to in the block."""
    before = os.fstat(fd)
    yield
    after = os.fstat(fd)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise changed(path)


@contextmanager
def opened(path: str, size: int) -> Iterator[int]:
    """Open a local file for reading, an `Inside` by its directory; it must have ``size`` bytes."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    with errors_of("read", path):
        if isinstance(path, Inside):
            fd = os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=path.dir_fd)
        else:
            fd = os.open(path, flags)
    try:
        if os.fstat(fd).st_size != size:
            raise changed(path)
        yield fd
    finally:
        os.close(fd)


def changed(path: str) -> StorageError:
    """Say that a file is not what it was when it was looked at."""
    return StorageError(
        f"cannot take {path}: it changed while it was read; leave a reported directory alone until report() returns "
        "(SYNC), or has taken it over (ASYNC)"
    )
