"""Read tensors out of a checkpoint straight into memory, checking digests on the way.

Where a digest chunk lies within one tensor it is read to its destination and checked there; where it holds several
(or parts of several, such as columns) it goes through a small buffer and is scattered. A range of a file is read once,
however many tensors it holds. Two threads take its blocks in turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from holdfast.errors import CorruptCheckpointError, StateMismatchError, StorageNotFoundError
from holdfast.format.contents import check_there
from holdfast.format.digest import CHUNK, Digests
from holdfast.storage.base import FileReader, Storage
from holdfast.storage.together import SerialExecutor, asked_again, together, wait_out

from ..tree.arrays import move, move_small
from .shared_reads import Block, FileBlocks, SharedReads
from .targets import BATCH, SMALL, Pick, ReadRequest, can_pick, extent, is_direct, read_block

__all__ = ["BlockFeed", "read_tensors", "split"]

Place = int | list[Pick]
"""Where the bytes of a range go: an address, or copies of parts of them."""

_DIRECT = 4 * CHUNK  # a tensor with fewer whole chunks than this is not worth blocks of its own
BLOCK = 2 << 20  # bytes read and checked at a time: they fit the cache, and take the interpreter lock seldom
_MIXED = 512 << 10  # the same of small tensors of a disk, which are scattered while they are in the nearest cache
_HINT = 8 << 20  # bytes of one hint to the storage of what will be read next
_FEW_BYTES = 8 << 20  # up to so many wanted bytes, files of an object store are read side by side


def read_tensors(
    storage: Storage,
    requests: Iterable[ReadRequest],
    digests: Digests | None,
    *,
    progress: Callable[[int], None] | None = None,
    shared: SharedReads | None = None,
) -> int:
    """Read every request; blocks until done. Returns the number of bytes read from the storage.

    Args:
        storage: rooted at the checkpoint.
        requests: what to read, in any order.
        digests: tables to check against; None reads unchecked.
        progress: called with the bytes of each finished block, from worker threads.
        shared: blocks that other ranks of this machine need as well.

    Raises:
        CorruptCheckpointError: a chunk differs from its digest. Targets may be partly written by then.
        StorageError: the storage failed.
    """
    by_file: dict[str, list[ReadRequest]] = defaultdict(list)
    for request in requests:
        if request.nbytes:
            by_file[request.file].append(request)

    def read(file: str) -> int:
        total, rows = 0, sorted(by_file[file], key=attrgetter("offset"))
        with _open(storage, file, rows) as reader, torch.no_grad():  # no_grad holds for one thread only
            job = _FileJob(reader, file, digests, side, progress)
            job.mixed = _MIXED if storage.traits.num_parallel == 1 else BLOCK  # each block is a request to some stores
            for number, batch in enumerate(_apart(rows)):
                # Shared blocks come in the order of the file, so only one pass can take from them.
                job.shared = shared.file(file) if shared is not None and number == 0 else None
                total += job.read_all(batch)
        if shared is not None:
            shared.done_with(file)
        return total

    beside: list[str] = []
    if storage.traits.num_parallel > 1 and shared is None:
        beside = sorted(file for file, rows in by_file.items() if sum(row.nbytes for row in rows) <= _FEW_BYTES)
    with contextlib.closing(SerialExecutor("holdfast-read")) as side:
        total = sum(together(storage, [partial(read, file) for file in beside]))
        return total + sum(read(file) for file in sorted(by_file.keys() - {*beside}))


def _open(storage: Storage, file: str, rows: list[ReadRequest]) -> FileReader:
    try:
        return asked_again(storage, partial(storage.open, file))
    except StorageNotFoundError as error:
        check_there(storage)
        raise CorruptCheckpointError(
            f"{file} is gone; it holds tensor {rows[0].name!r} and {len(rows) - 1} more: this checkpoint is damaged; "
            "use another one, or a copy of this file",
            file=file,
            tensor=rows[0].name,
        ) from error


def _apart(rows: list[ReadRequest]) -> list[list[ReadRequest]]:
    """Split rows (sorted by offset) so that no two of a batch want the same bytes: each read fills one target.

    More than one batch is needed only where tensors tied in the checkpoint are apart in the live state. Rows that want
    parts of the very same range stay together: it is read once for all of them.
    """
    end = 0
    for row in rows:
        if row.offset < end:
            break
        end = row.offset + row.nbytes
    else:
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


class _Group(NamedTuple):
    """Ranges of a file that are read together, in order.

    Attributes:
        heads: the first row of each.
        places: where the bytes of each go; for one that needs a detour 0 until it has temporary memory.
        detours: number of each of these -> all its rows.
    """

    heads: list[ReadRequest]
    places: list[Place]
    detours: dict[int, list[ReadRequest]]


def _groups(rows: list[ReadRequest]) -> Iterator[_Group]:
    """Cut rows (sorted by offset) into groups whose detours need little memory."""
    group = _Group([], [], {})
    size = at = 0
    while at < len(rows):
        first = rows[at]
        at += 1
        if first.address is not None:
            group.heads.append(first)
            group.places.append(first.address)
            continue
        members = [first]
        while at < len(rows) and rows[at].offset == first.offset and _span(rows[at]) == _span(first):
            members.append(rows[at])
            at += 1
        place = _place(members)
        if place is None:
            if size and size + first.nbytes > BATCH:
                yield group
                group, size = _Group([], [], {}), 0
            size += first.nbytes
            group.detours[len(group.heads)] = members
        group.heads.append(first)
        group.places.append(0 if place is None else place)
    if group.heads:
        yield group


def _place(rows: list[ReadRequest]) -> Place | None:
    """Return where the bytes of a range go, None if torch has to copy them there from temporary memory."""
    if rows[0].within is None and is_direct(rows[0].target, rows[0].dtype):
        return _address(rows[0], rows[0].nbytes)
    if not all(can_pick(row.target, row.dtype) for row in rows):
        return None
    picks = []
    for row in rows:
        _address(row, extent(row.target))
        shape, wanted = row.within or (row.target.shape, (slice(None),) * row.target.dim())
        picks.append(Pick(row.target, shape, wanted))
    return picks


def _address(row: ReadRequest, size: int) -> int:
    """Return the address of a target of which ``size`` bytes are written.

    Raises:
        StateMismatchError: the memory of the target ends before.
    """
    target = row.target
    room = target.untyped_storage().nbytes() - target.storage_offset() * target.itemsize
    if size > room or (row.within is None and target.nbytes != row.nbytes):
        raise StateMismatchError(
            f"{row.name}: {row.nbytes} bytes are to be read into a tensor of {target.nbytes}, which needs {size} bytes "
            f"from its beginning, but its memory ends after {room}: it was freed or resized (fully sharded parameters "
            "while they are gathered, say); load between two steps",
            problems=(f"wrong: {row.name}",),
        )
    return target.data_ptr()


def _copy_into(target: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Copy ``value``; where an expanded target has a single element, the elements of ``value`` must be equal."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            first = value.narrow(dim, 0, 1)
            if not torch.equal(
                first.expand_as(value).contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)
            ):
                raise StateMismatchError(
                    f"{name}: the live tensor is expanded along dimension {dim}, so its entries there share memory, "
                    "but the stored entries differ: make the live tensor contiguous() first",
                    problems=(f"wrong: {name}",),
                )
            target, value = target.narrow(dim, 0, 1), first
    target.copy_(value)


class _FileJob:
    """The reads of a file."""

    def __init__(
        self,
        reader: FileReader,
        file: str,
        digests: Digests | None,
        side: SerialExecutor,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.reader, self.file, self.digests, self.side, self.progress = reader, file, digests, side, progress
        self.shared: FileBlocks | None = None
        self.mixed = BLOCK  # bytes of a block that is scattered
        self.rows: Sequence[ReadRequest] = ()
        self.later = 0  # offset of the first row of the next group; sys.maxsize if there is none
        self.starts: list[int] = []
        self.places: list[Place] = []
        self.failed = threading.Event()
        self.alone = 0  # bytes of shared blocks that this rank had to read itself

    def read_all(self, rows: list[ReadRequest]) -> int:
        """Read rows (sorted by offset) in order; returns the number of bytes read from the storage.

        Rows whose targets are no plain memory go into a temporary batch, from where torch copies them.
        """
        total, groups = 0, list(_groups(rows))
        for number, group in enumerate(groups, 1):
            self.later = groups[number].heads[0].offset if number < len(groups) else sys.maxsize
            memories = {
                at: torch.empty(group.heads[at].nbytes, dtype=torch.uint8, device="cpu") for at in group.detours
            }
            for at, memory in memories.items():
                group.places[at] = memory.data_ptr()
            total += self.read(group.heads, group.places)
            for at, memory in memories.items():
                for row in group.detours[at]:
                    shape, wanted = row.within or (row.target.shape, ...)
                    _copy_into(row.target, memory.view(row.dtype).view(shape)[wanted], row.name)
        return total

    def read(self, rows: Sequence[ReadRequest], places: list[Place]) -> int:
        """Read rows (sorted by offset) to their places; returns the number of bytes read from the storage."""
        if not rows:
            return 0
        self.rows, self.places, self.starts, self.alone = rows, places, [row.offset for row in rows], 0
        blocks, parts = self._blocks()
        feed = BlockFeed(blocks, self.reader)
        # No more than is scattered at a time: to take and clear pages costs more than to copy out of them.
        room = max([size for _, size, owner in blocks if owner < 0] + [size for _, size, _ in parts], default=0)

        def work(parts: Sequence[tuple[int, int, Block]] = ()) -> None:
            # Not closed explicitly: the frames of an error hold views of it, so close() would raise and hide the error.
            buffer = mmap.mmap(-1, max(room, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
            view = memoryview(buffer)
            base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            try:
                for offset, size, block in parts:
                    if not self.failed.is_set():
                        self._shared_block(offset, size, block, view, base)
                if parts and self.shared is not None and parts[-1][2].offset + BLOCK <= self.later:
                    self.shared.passed(parts[-1][2])  # its owner must not wait while we read the rest
                while not self.failed.is_set() and (next_block := feed.take()) is not None:
                    self._block(*next_block, view, base)
            except BaseException:
                self.failed.set()
                raise

        other = self.side.run(work) if len(blocks) > 4 else None
        try:
            work(parts)
        finally:
            error = None if other is None else self._outcome(other)
        if error is not None:
            raise error
        return sum(size for _, size, _ in blocks) + self.alone

    def _outcome(self, other: Future[None]) -> BaseException | None:
        """Wait for the other thread, even after a Ctrl-C: only then may the caller use the memory it writes to."""
        try:
            return other.exception()
        except BaseException:  # a Ctrl-C
            self.failed.set()
            wait_out(other.exception)
            raise

    def _blocks(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, Block]]]:
        """Cover the wanted ranges with (offset, size, row) blocks of whole chunks; gaps between ranges are left out.

        ``row`` is the number of the row that contains the whole block, -1 for a block to be scattered. The second list
        has (offset, size, block) of ranges of blocks that are shared with other ranks.
        """
        end_of_file = self.reader.size
        blocks: list[tuple[int, int, int]] = []
        parts: list[tuple[int, int, Block]] = []

        def add(start: int, stop: int, owner: int) -> None:
            if self.shared is None:
                split(start, stop, owner, blocks, self.mixed)
                return
            for low, high, block in self.shared.cut(start, stop):
                if block is None:
                    split(low, high, owner, blocks, self.mixed)
                elif parts and parts[-1][2] is block and sum(parts[-1][:2]) == low:
                    parts[-1] = (parts[-1][0], high - parts[-1][0], block)
                else:
                    parts.append((low, high - low, block))

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
            if inner[1] - inner[0] >= _DIRECT and start <= inner[0] and isinstance(self.places[number], int):
                add(start, inner[0], -1)
                add(inner[0], inner[1], number)
                start = inner[1]
            add(start, last, -1)
            done = max(done, last)
        return blocks, parts

    def _block(self, offset: int, size: int, owner: int, buffer: memoryview, base: int) -> None:
        place = self.places[owner] if owner >= 0 else None
        if isinstance(place, int):
            address = place + offset - self.rows[owner].offset
            view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        else:
            view = buffer[:size]
        if not read_block(self.reader, offset, view) and self.digests is not None:
            self.digests.check(self.file, offset // CHUNK, view, self._name_between)
        if owner < 0:
            self._scatter(offset, offset + size, base)
        if self.progress is not None:
            self.progress(size)

    def _shared_block(self, offset: int, size: int, block: Block, buffer: memoryview, base: int) -> None:
        """Take a range from the rank that reads and checks it; read it here if that rank does not."""
        assert self.shared is not None
        taken = self.shared.take(block, offset, size)
        if taken is None:
            self._block(offset, size, -1, buffer, base)
            self.alone += size
            return
        view, address = taken
        self._scatter(offset, offset + size, address)
        del view  # kept the memory alive until here
        if self.progress is not None:
            self.progress(size)

    def _scatter(self, offset: int, end: int, base: int) -> None:
        starts, rows, places = self.starts, self.rows, self.places
        for number in range(max(0, bisect_right(starts, offset) - 1), bisect_left(starts, end)):
            first, place = starts[number], places[number]
            high = first + rows[number].nbytes
            low, high = first if first > offset else offset, high if high < end else end  # `max` takes longer
            if low >= high:
                continue
            if isinstance(place, int):
                (move_small if high - low <= SMALL else move)(place + low - first, base + low - offset, high - low)
            else:
                for pick in place:
                    pick.take(low - first, base + low - offset, high - low)

    def _name_between(self, start: int, stop: int) -> str | None:
        for row in self.rows:
            if row.offset < stop and row.offset + row.nbytes > start:
                return row.name
        return None


class BlockFeed:
    """Hands blocks to the threads in file order and hints to the storage what comes next."""

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


def split(start: int, stop: int, owner: int, blocks: list[tuple[int, int, int]], mixed: int = BLOCK) -> None:
    """Append blocks for a range; one to be scattered, of ``mixed`` bytes, is joined to the one before if it fits."""
    while start < stop:
        if owner < 0 and blocks:
            offset, size, before = blocks[-1]
            room = mixed - size
            if before < 0 and offset + size == start and room > 0:
                take = min(room, stop - start)
                blocks[-1] = (offset, size + take, -1)
                start += take
                continue
        size = min(mixed if owner < 0 else BLOCK, stop - start)
        blocks.append((start, size, owner))
        start += size
