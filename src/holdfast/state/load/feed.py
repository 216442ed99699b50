"""Blocks of a file that two threads read in turns."""

from __future__ import annotations

import threading

from holdfast.storage.base import FileReader

__all__ = ["BLOCK", "BlockFeed", "split"]

BLOCK = 2 << 20  # read and checked at a time: near enough for the cache, and few turns at the interpreter lock
_HINT = 8 << 20  # the storage is told what will be read in steps of this size


class BlockFeed:
    """Hands blocks to the threads in file order and tells the storage what comes next."""

    def __init__(self, blocks: list[tuple[int, int, int]], reader: FileReader) -> None:
        self._blocks, self._reader = blocks, reader
        self._next = self._hinted = 0
        self._lock = threading.Lock()

    def take(self) -> tuple[int, int, int] | None:
        """Return the next block, None at the end."""
        with self._lock:
            if self._next == len(self._blocks):
                return None
            block = self._blocks[self._next]
            self._next += 1
            end = block[0] + self._reader.ahead_bytes
            while self._hinted < len(self._blocks) and self._blocks[self._hinted][0] < end:
                self._hint()
            return block

    def _hint(self) -> None:
        start, stop = self._blocks[self._hinted][0], self._blocks[self._hinted][0]
        while self._hinted < len(self._blocks):
            offset, size, _ = self._blocks[self._hinted]
            if offset != stop or stop + size - start > _HINT:
                break
            stop += size
            self._hinted += 1
        self._reader.will_read(start, stop - start)


def split(start: int, stop: int, owner: int, blocks: list[tuple[int, int, int]]) -> None:
    """Append blocks for a range; one to be scattered goes on with the block before it while there is room."""
    while start < stop:
        if owner < 0 and blocks:
            offset, size, before = blocks[-1]
            room = BLOCK - size
            if before < 0 and offset + size == start and room > 0:
                take = min(room, stop - start)
                blocks[-1] = (offset, size + take, -1)
                start += take
                continue
        size = min(BLOCK, stop - start)
        blocks.append((start, size, owner))
        start += size
