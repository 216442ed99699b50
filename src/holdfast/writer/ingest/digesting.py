"""Bytes of files that are no arena: digested where they are, or copied and digested in the same pass."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from holdfast.errors import StorageError
from holdfast.format.digest import chunk_digests
from holdfast.storage.base import BLOCK, FileBatch, Storage
from holdfast.storage.local.beneath import Inside
from holdfast.storage.local.ops import errors_of

from ..serial_executor import SerialExecutor

__all__ = ["SMALL_BYTES", "Copier", "changed", "opened"]

_BUFFER = 8 << 20
SMALL_BYTES = 1 << 20
"""Up to here a file goes through the page cache, together with others, and is digested where it was read."""


class Copier:
    """Reads through two reused buffers; one thread at a time.

    Args:
        side: reads and digests into one buffer while the other is written.
    """

    def __init__(self, side: SerialExecutor) -> None:
        self._side = side
        self._buffers: tuple[mmap.mmap, ...] = ()

    def digest_file(self, path: str, size: int) -> bytes:
        """Give the chunk digests of a local file."""
        with opened(path, size) as fd:
            return self.digest_open(fd, path, size)

    def digest_open(self, fd: int, path: str, size: int) -> bytes:
        """Give the chunk digests of an open file."""
        return self._digest(lambda view, start: _fill(fd, view, start, path), size)

    def digest_object(self, storage: Storage, path: str) -> bytes:
        """Give the chunk digests of an object."""
        with storage.open(path) as reader:
            return self._digest(lambda view, start: reader.read_into(start, view), reader.size)

    def copy(self, path: str, size: int, storage: Storage, target: str) -> bytes:
        """Copy a local file, durably; give its chunk digests.

        Raises:
            StorageError: it could not be read or written, or changed meanwhile.
        """
        table = bytearray()
        with opened(path, size) as fd, storage.create(target, size) as writer:
            before = os.fstat(fd)
            starts = range(0, size, _BUFFER)
            loading = self._load(fd, path, starts[0], size, 0) if size else None
            for number, start in enumerate(starts):
                assert loading is not None
                table += loading.result()
                if start != starts[-1]:
                    loading = self._load(fd, path, starts[number + 1], size, (number + 1) % 2)
                try:
                    # Whole pages, so that the tail goes past the page cache as well; the storage cuts it to size.
                    pages = -(-min(_BUFFER, size - start) // BLOCK) * BLOCK
                    writer.write(memoryview(self._buffer(number % 2))[:pages])
                finally:
                    loading.exception()  # nothing may touch buffer or file after this
            after = os.fstat(fd)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise changed(path)
        return bytes(table)

    def copy_small(self, path: str, size: int, batch: FileBatch, target: str) -> bytes:
        """Copy a local file of at most `SMALL_BYTES` into a batch; give its chunk digests.

        Raises:
            StorageError: as `copy`.
        """
        view = memoryview(self._buffer(0))[:size]
        with opened(path, size) as fd:
            before = os.fstat(fd)
            _fill(fd, view, 0, path)
            after = os.fstat(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise changed(path)
        batch.add(target, view)
        return chunk_digests(view)

    def _load(self, fd: int, path: str, start: int, size: int, number: int) -> Future[bytes]:
        """Fill one buffer on the helper thread, while the other is being written; give its chunk digests."""
        view = memoryview(self._buffer(number))[: min(_BUFFER, size - start)]

        def load() -> bytes:
            _fill(fd, view, start, path)
            return chunk_digests(view)

        return self._side.run(load)

    def _digest(self, read: Callable[[memoryview, int], None], size: int) -> bytes:
        table = bytearray()
        for start in range(0, size, _BUFFER):
            view = memoryview(self._buffer(0))[: min(_BUFFER, size - start)]
            read(view, start)
            table += chunk_digests(view)
        return bytes(table)

    def _buffer(self, number: int) -> mmap.mmap:
        if not self._buffers:
            self._buffers = (mmap.mmap(-1, _BUFFER), mmap.mmap(-1, _BUFFER))  # page-aligned, for direct writes
        return self._buffers[number]


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


def _fill(fd: int, view: memoryview, offset: int, path: str) -> None:
    with errors_of("read", path):
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                raise changed(path)
            done += count
