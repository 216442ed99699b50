"""Ranges of a checkpoint's files, checked against their digests, through a small cache of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import CorruptCheckpointError, StorageNotFoundError
from holdfast.format.digest import CHUNK, Digests
from holdfast.storage.base import FileReader, Storage

__all__ = ["CheckedFiles"]

_BLOCK = 64 * CHUNK  # 4 MiB: small tensors next to each other are read together
_BLOCKS = 6  # blocks in the cache
_OPEN = 64  # open files
_MANY = 4  # with more checkpoints open than this, blocks are smaller


class _Block(NamedTuple):
    data: memoryview
    checked: bytearray  # one byte for each chunk


class CheckedFiles:
    """Reads ranges of files; used by one thread.

    Args:
        storage: rooted at the checkpoint.
        digests: the tables of its files; None reads unchecked.
        tensor_at: called with a damaged range (file, first, last); returns the name of a tensor in it.
        share: how many of these readers there are; they divide memory and open files.
    """

    def __init__(
        self, storage: Storage, digests: Digests | None, tensor_at: Callable[..., str | None], *, share: int = 1
    ) -> None:
        self._block_bytes = max(CHUNK, _BLOCK // share // CHUNK * CHUNK) if share > _MANY else _BLOCK
        self._max_open = max(1, _OPEN // share)
        self._storage, self._digests, self._tensor_at = storage, digests, tensor_at
        self._readers: OrderedDict[str, FileReader] = OrderedDict()
        self._blocks: OrderedDict[tuple[str, int], _Block] = OrderedDict()
        self.bytes_read = 0

    def read(self, file: str, offset: int, view: memoryview, tensor: str) -> None:
        """Fill ``view`` with the bytes of ``file`` from ``offset`` on.

        Raises:
            CorruptCheckpointError: the bytes differ from their digest; names file and tensor.
        """
        done = 0
        while done < len(view):
            at = offset + done
            block = self._block(file, at // self._block_bytes, tensor)
            start = at % self._block_bytes
            size = min(len(block.data) - start, len(view) - done)
            if size <= 0:
                raise CorruptCheckpointError(f"{file} ends before tensor {tensor!r} does", file=file, tensor=tensor)
            self._check(file, at - start, block, start, start + size)
            view[done : done + size] = block.data[start : start + size]
            done += size

    def close(self) -> None:
        """Close all files; idempotent."""
        while self._readers:
            self._readers.popitem()[1].close()
        self._blocks.clear()

    def _check(self, file: str, base: int, block: _Block, start: int, stop: int) -> None:
        """Check the chunks of a range that are not checked yet; damage elsewhere in the block does not matter here."""
        if self._digests is None:
            return
        chunks = [chunk for chunk in range(start // CHUNK, -(-stop // CHUNK)) if not block.checked[chunk]]
        if not chunks:
            return
        # Checked chunks in between are checked again: that is rare.
        first, last = chunks[0], chunks[-1] + 1
        view = block.data[first * CHUNK : last * CHUNK]
        self._digests.check(file, base // CHUNK + first, view, lambda low, high: self._tensor_at(file, low, high))
        block.checked[first:last] = b"\1" * (last - first)

    def _block(self, file: str, number: int, tensor: str) -> _Block:
        key = (file, number)
        cached = self._blocks.get(key)
        if cached is not None:
            self._blocks.move_to_end(key)
            return cached
        reader = self._reader(file, tensor)
        start = number * self._block_bytes
        while len(self._blocks) >= _BLOCKS:
            self._blocks.popitem(last=False)
        data = memoryview(bytearray(max(0, min(self._block_bytes, reader.size - start))))
        if data:
            reader.read_into(start, data)
            self.bytes_read += len(data)
        block = _Block(data, bytearray(-(-len(data) // CHUNK)))
        self._blocks[key] = block
        return block

    def _reader(self, file: str, tensor: str) -> FileReader:
        reader = self._readers.get(file)
        if reader is None:
            if len(self._readers) >= self._max_open:
                self._readers.popitem(last=False)[1].close()
            try:
                reader = self._readers[file] = self._storage.open(file)
            except StorageNotFoundError as error:
                raise CorruptCheckpointError(
                    f"{file} is gone; it holds tensor {tensor!r}: this checkpoint is damaged; use another one",
                    file=file,
                    tensor=tensor,
                ) from error
        self._readers.move_to_end(file)
        return reader
