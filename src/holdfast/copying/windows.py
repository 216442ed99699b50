"""Files read window by window through reused memory: the next windows are read and digested while one is written."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from typing import NamedTuple

from holdfast.format.digest import chunk_digests
from holdfast.storage.base import BLOCK, FileReader

__all__ = ["WINDOW", "ReadWindow", "Windows"]

WINDOW = 8 << 20
"""A multiple of the chunks of `holdfast.format.digest`, so that the digests of windows join to those of the file."""


class ReadWindow(NamedTuple):
    """A part of a file.

    Attributes:
        view: page-aligned, padded to whole blocks; valid until the next window is asked for.
        nbytes: how many of its bytes are the file's.
        digests: the chunk digests of those bytes.
    """

    view: memoryview
    nbytes: int
    digests: bytes


class Windows:
    """Page-aligned buffers, filled ahead by other threads; the files under way have equal shares of them.

    A file that is alone has all of them, so that the end of the last big file is as fast as the middle.

    Args:
        submit: runs a call on another thread and returns its future; several at once, or one after another.
        number: how many buffers there are at most. A buffer is made when it is first needed, and stays.
    """

    def __init__(self, submit: Callable[[Callable[[], bytes]], Future[bytes]], number: int) -> None:
        self._submit, self._number = submit, number
        self._free: list[mmap.mmap] = []
        self._num_made = self._num_files = 0
        self._changed = threading.Condition()

    def read(self, reader: FileReader) -> Generator[ReadWindow]:
        """Yield a file window by window. To be closed: others may wait for the buffers.

        Raises:
            StorageError: the file could not be read.
        """
        ahead: deque[tuple[Future[bytes], mmap.mmap, int]] = deque()
        starts = deque(range(0, reader.size, WINDOW))
        self._count(1)
        try:
            while starts or ahead:
                while starts and (buffer := self._take(len(ahead))) is not None:
                    start = starts.popleft()
                    nbytes = min(WINDOW, reader.size - start)
                    ahead.append((self._load(reader, start, memoryview(buffer)[:nbytes]), buffer, nbytes))
                future, buffer, nbytes = ahead[0]
                digests = future.result()
                yield ReadWindow(memoryview(buffer)[: -(-nbytes // BLOCK) * BLOCK], nbytes, digests)
                self._give(ahead.popleft()[1])
        finally:
            wait([future for future, _, _ in ahead])  # nothing may touch buffers or reader after this
            for _, buffer, _ in ahead:
                self._give(buffer)
            self._count(-1)

    @contextlib.contextmanager
    def buffer(self) -> Iterator[memoryview]:
        """Lend a buffer of `WINDOW` bytes to a caller that reads by itself."""
        self._count(1)
        buffer = self._take(0)
        assert buffer is not None  # who holds none waits for one
        try:
            yield memoryview(buffer)
        finally:
            self._give(buffer)
            self._count(-1)

    def _load(self, reader: FileReader, start: int, view: memoryview) -> Future[bytes]:
        def load() -> bytes:
            reader.read_into(start, view)
            return chunk_digests(view)

        return self._submit(load)

    def _take(self, held: int) -> mmap.mmap | None:
        """Return another buffer for a file, None if the file has its share; a file without buffers waits for one."""
        with self._changed:
            while True:
                may_have = held < max(1, self._number // self._num_files)
                if may_have and self._free:
                    return self._free.pop()
                if may_have and self._num_made < self._number:
                    self._num_made += 1
                    return mmap.mmap(-1, WINDOW)
                if held:
                    return None
                self._changed.wait()  # files with more than their share give a buffer back with each window

    def _give(self, buffer: mmap.mmap) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def _count(self, change: int) -> None:
        with self._changed:
            self._num_files += change
