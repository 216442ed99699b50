"""Read tensors out of a checkpoint straight into memory, checking digests on the way.

Where a digest chunk lies within one tensor it is read to its destination and checked there; where it holds several
(or parts of several) it goes through a small buffer and is scattered. A range of a file is read once, whatever number
of tensors it holds, by two threads that take turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter

import torch

from ..errors import CorruptCheckpointError, StateMismatchError, StorageNotFoundError
from ..format.digest import CHUNK, chunk_digests
from ..storage.base import FileReader, Storage
from ..writer.side import Side
from .memory import move

__all__ = ["BATCH", "Digests", "ReadRequest", "is_direct", "read_tensors"]

_BLOCK = 2 << 20  # read and checked at a time: near enough for the cache, and few turns at the interpreter lock
_AHEAD = 32 << 20  # the storage is told what will be read this far ahead
_DIRECT = 4 * CHUNK  # a tensor with fewer whole chunks than this is not worth blocks of its own
_HINT = 8 << 20  # in steps of this size
BATCH = 32 << 20  # tensors that need a detour (other device, dtype, strides) are read in batches of this size


@dataclass(slots=True)
class ReadRequest:
    """One stored byte range and the tensor it goes to.

    Attributes:
        name: name of the tensor, for messages.
        file: path inside the checkpoint.
        offset: first byte within the file.
        nbytes: number of bytes.
        dtype: stored dtype.
        target: where it goes: same number of elements; any device, strides or floating dtype.
        within: (shape, slices) if only a part of these bytes is wanted: they are an array of this shape.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    target: torch.Tensor
    within: tuple[tuple[int, ...], tuple[slice, ...]] | None = None


@dataclass(slots=True)
class Digests:
    """The digest tables of a checkpoint's files: path -> eight bytes for each 64 KiB chunk."""

    tables: Mapping[str, bytes]

    def check(self, file: str, first_chunk: int, view: memoryview, names: Callable[[int, int], str | None]) -> None:
        """Compare a block of whole chunks with the table.

        Raises:
            CorruptCheckpointError: naming the file, the chunk and the tensor it belongs to.
        """
        table = self.tables.get(file, b"")  # a file without a table matches nothing
        found = chunk_digests(view)
        if found == table[8 * first_chunk : 8 * first_chunk + len(found)]:
            return
        for number in range(len(found) // 8):
            at = 8 * (first_chunk + number)
            if found[8 * number : 8 * number + 8] != table[at : at + 8]:
                chunk = first_chunk + number
                tensor = names(chunk * CHUNK, (chunk + 1) * CHUNK)
                where = f"tensor {tensor!r}, " if tensor else ""
                raise CorruptCheckpointError(
                    f"{file}: {where}bytes {chunk * CHUNK}..{(chunk + 1) * CHUNK} are not what was written "
                    "(digest differs): this checkpoint is damaged; use another one, or a copy of this file",
                    file=file,
                    tensor=tensor,
                    chunk=chunk,
                )


def read_tensors(
    storage: Storage,
    requests: Iterable[ReadRequest],
    digests: Digests | None,
    *,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Read every request; blocks until done. Returns the number of bytes read from the storage.

    Args:
        storage: rooted at the checkpoint.
        requests: what to read, in any order.
        digests: tables to check against; None reads unchecked.
        progress: told the bytes of each finished block, from worker threads.

    Raises:
        CorruptCheckpointError: a chunk differs from its digest. Targets may be partly written by then.
        StorageError: the storage failed.
    """
    by_file: dict[str, list[ReadRequest]] = {}
    for request in requests:
        if request.nbytes:
            by_file.setdefault(request.file, []).append(request)
    total = 0
    with contextlib.closing(Side("holdfast-read")) as side:
        for file in sorted(by_file):
            rows = sorted(by_file[file], key=attrgetter("offset"))
            with _open(storage, file, rows) as reader:
                job = _FileJob(reader, file, digests, side, progress)
                for batch in _apart(rows):
                    direct: list[ReadRequest] = []
                    detours: list[ReadRequest] = []
                    for row in batch:
                        (direct if row.within is None and is_direct(row.target, row.dtype) else detours).append(row)
                    total += job.read(direct, [row.target.data_ptr() for row in direct])
                    total += job.read_detours(detours)
    return total


def _open(storage: Storage, file: str, rows: list[ReadRequest]) -> FileReader:
    try:
        return storage.open(file)
    except StorageNotFoundError as error:
        raise CorruptCheckpointError(
            f"{file} is gone; it holds tensor {rows[0].name!r} and {len(rows) - 1} more: this checkpoint is damaged; "
            "use another one, or a copy of this file",
            file=file,
            tensor=rows[0].name,
        ) from error


def _apart(rows: list[ReadRequest]) -> list[list[ReadRequest]]:
    """Split rows (sorted by offset) so that no two of a batch want the same bytes: one read fills one target.

    More than one batch is needed only where tensors tied in the checkpoint are apart in the live state. Rows that want
    parts of the very same range stay together: it is read once for all of them.
    """
    if all(one.offset + one.nbytes <= other.offset for one, other in pairwise(rows)):
        return [rows]
    batches: list[list[ReadRequest]] = [[]]
    for row in rows:
        for batch in batches:
            last = batch[-1] if batch else None
            if last is None or last.offset + last.nbytes <= row.offset or (last.within and _span(last) == _span(row)):
                batch.append(row)
                break
        else:
            batches.append([row])
    return batches


def _span(row: ReadRequest) -> tuple[int, int, bool]:
    return row.offset, row.nbytes, row.within is not None


def is_direct(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether stored bytes can be read straight into a tensor."""
    return (
        target.is_cpu
        and target.dtype is dtype
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def _copy_into(target: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Copy; an expanded target has one element where ``value`` has many, which must be equal then."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            first = value.narrow(dim, 0, 1)
            if not torch.equal(
                first.expand_as(value).contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)
            ):
                raise StateMismatchError(
                    f"{name}: the live tensor is expanded along dimension {dim}, so its entries there are one and the "
                    "same, but the stored entries differ: make the live one contiguous() first",
                    problems=(f"wrong: {name}",),
                )
            target, value = target.narrow(dim, 0, 1), first
    target.copy_(value)


class _FileJob:
    """Reads of one file."""

    def __init__(
        self,
        reader: FileReader,
        file: str,
        digests: Digests | None,
        side: Side,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.reader, self.file, self.digests, self.side, self.progress = reader, file, digests, side, progress
        self.rows: Sequence[ReadRequest] = ()
        self.starts: list[int] = []
        self.addresses: list[int] = []
        self.failed = threading.Event()

    def read(self, rows: Sequence[ReadRequest], addresses: list[int]) -> int:
        """Read rows (sorted by offset) to plain memory addresses."""
        if not rows:
            return 0
        self.rows, self.addresses, self.starts = rows, addresses, [row.offset for row in rows]
        blocks = self._blocks()
        feed = _Feed(blocks, self.reader)

        def work() -> None:
            # Not closed by hand: the frames of an error hold parts of it, and closing would hide that error.
            buffer = mmap.mmap(-1, _BLOCK)
            view = memoryview(buffer)
            base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            try:
                while not self.failed.is_set() and (block := feed.take()) is not None:
                    self._block(*block, view, base)
            except BaseException:
                self.failed.set()
                raise

        other = self.side.run(work) if len(blocks) > 4 else None
        try:
            work()
        finally:
            error = None if other is None else other.exception()
        if error is not None:
            raise error
        return sum(size for _, size, _ in blocks)

    def read_detours(self, rows: list[ReadRequest]) -> int:
        """Read rows whose targets are no plain memory: into a temporary batch, then copied by torch."""
        total = 0
        start = 0
        groups = [list(group) for _, group in groupby(rows, _span)]
        while start < len(groups):
            stop, size = start, 0
            while stop < len(groups) and (stop == start or size + groups[stop][0].nbytes <= BATCH):
                size += groups[stop][0].nbytes
                stop += 1
            batch = [group[0] for group in groups[start:stop]]
            temporary = [torch.empty(row.nbytes, dtype=torch.uint8) for row in batch]
            total += self.read(batch, [one.data_ptr() for one in temporary])
            for group, one in zip(groups[start:stop], temporary, strict=True):
                for row in group:
                    shape, wanted = row.within or (row.target.shape, ...)
                    _copy_into(row.target, one.view(row.dtype).view(shape)[wanted], row.name)
            start = stop
        return total

    def _blocks(self) -> list[tuple[int, int, int]]:
        """Cover the wanted ranges with (offset, size, row) blocks of whole chunks; gaps between ranges are left out.

        ``row`` is the number of the row a block lies in as a whole, -1 for a block to be scattered.
        """
        end_of_file = self.reader.size
        blocks: list[tuple[int, int, int]] = []
        done = 0  # everything before this is covered
        for number, row in enumerate(self.rows):
            stop = row.offset + row.nbytes
            if stop <= done:
                continue
            if stop > end_of_file:
                raise CorruptCheckpointError(
                    f"{self.file} ends at byte {end_of_file}, but tensor {row.name!r} reaches to {stop}: "
                    "the file was cut short",
                    file=self.file,
                    tensor=row.name,
                )
            inner = -(-row.offset // CHUNK) * CHUNK, stop // CHUNK * CHUNK  # whole chunks of this row alone
            start = max(done, row.offset // CHUNK * CHUNK)
            last = min(-(-stop // CHUNK) * CHUNK, end_of_file)
            if inner[1] - inner[0] >= _DIRECT and start <= inner[0]:
                _split(start, inner[0], -1, blocks)
                _split(inner[0], inner[1], number, blocks)
                start = inner[1]
            _split(start, last, -1, blocks)
            done = max(done, last)
        return blocks

    def _block(self, offset: int, size: int, owner: int, buffer: memoryview, base: int) -> None:
        if owner >= 0:
            address = self.addresses[owner] + offset - self.rows[owner].offset
            view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        else:
            view = buffer[:size]
        self.reader.read_into(offset, view)
        if self.digests is not None:
            self.digests.check(self.file, offset // CHUNK, view, self._name_between)
        if owner < 0:
            self._scatter(offset, offset + size, base)
        if self.progress is not None:
            self.progress(size)

    def _scatter(self, offset: int, end: int, base: int) -> None:
        starts, rows, addresses = self.starts, self.rows, self.addresses
        for number in range(max(0, bisect_right(starts, offset) - 1), bisect_left(starts, end)):
            first, size = starts[number], rows[number].nbytes
            if first >= offset and first + size <= end:
                move(addresses[number], base + first - offset, size)
            elif (low := max(first, offset)) < (high := min(first + size, end)):
                move(addresses[number] + low - first, base + low - offset, high - low)

    def _name_between(self, start: int, stop: int) -> str | None:
        for row in self.rows:
            if row.offset < stop and row.offset + row.nbytes > start:
                return row.name
        return None


class _Feed:
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
            while self._hinted < len(self._blocks) and self._blocks[self._hinted][0] < block[0] + _AHEAD:
                self._hint()
            return block

    def _hint(self) -> None:
        start, stop = self._blocks[self._hinted][0], self._blocks[self._hinted][0]
        while self._hinted < len(self._blocks) and stop - start < _HINT:
            offset, size, _ = self._blocks[self._hinted]
            if offset != stop:
                break
            stop += size
            self._hinted += 1
        self._reader.will_read(start, stop - start)


def _split(start: int, stop: int, owner: int, blocks: list[tuple[int, int, int]]) -> None:
    """Append blocks for a range; one to be scattered goes on with the block before it while there is room."""
    while start < stop:
        if owner < 0 and blocks:
            offset, size, before = blocks[-1]
            room = _BLOCK - size
            if before < 0 and offset + size == start and room > 0:
                take = min(room, stop - start)
                blocks[-1] = (offset, size + take, -1)
                start += take
                continue
        size = min(_BLOCK, stop - start)
        blocks.append((start, size, owner))
        start += size
