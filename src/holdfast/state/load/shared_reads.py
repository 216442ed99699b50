"""Ranks of one machine that load the same checkpoint read each byte once and copy the rest from each other.

Every rank shows which 64 KiB chunks it needs (`shared_read_buffer`). From that each rank computes, with the same result
and without a message, which blocks several ranks need and which rank reads each of them (`ChunkNumbers.divide`). The
owner of a block reads it into a slot of its own memory and checks the digests; then the others take what they need. All
ranks go through the blocks in one order, so there is no circle of ranks that wait. Nobody depends on it: where a
neighbour is slow or dead, has left, or has found damage, a rank reads for itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from holdfast._log import get_logger
from holdfast.errors import CorruptCheckpointError, HoldfastError
from holdfast.format.digest import CHUNK, Digests, bytes_digest, num_chunks
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.run.process import memory_name
from holdfast.storage.base import FileReader, Storage
from holdfast.storage.local.local_io import address_of
from holdfast.writer.serial_executor import SerialExecutor

from .read_request import ReadRequest
from .shared_read_buffer import PeerReadBuffer, SharedReadBuffer, can_share, pauses

__all__ = ["BLOCK", "Block", "ChunkNumbers", "FileBlocks", "SharedReads", "Swap", "no_part", "reading_together"]

Swap = Callable[[str, Any], Sequence[Any]]
"""Gives a value of ours to all ranks, and returns those of the ones that have named the same group."""

_LOG = get_logger("state")
_CHUNKS = 32  # in a block
BLOCK = _CHUNKS * CHUNK
_WORTH = 4 << 20  # fewer bytes saved on a machine are not worth the waiting
_SLOTS = 2  # blocks that a rank has ready for others: few, so that they are in the cache when the others come
_AHEAD = 8  # blocks that a storage is asked to fetch before their turn
_PATIENCE_S = 30.0  # without a sign of life of whom we wait for


@dataclass(frozen=True, slots=True)
class Block:
    """A block that several ranks need.

    Attributes:
        number: position among all shared blocks.
        file: path inside the checkpoint.
        offset: of the block within the file.
        owner: who reads it, as a position among the ranks of this machine.
        turn: position among the blocks of its owner.
        takers: who needs it.
        chunks: which of its chunks anybody needs.
    """

    number: int
    file: str
    offset: int
    owner: int
    turn: int
    takers: tuple[int, ...]
    chunks: tuple[int, ...]


class ChunkNumbers:
    """Numbers the chunks of all files with tensors of a checkpoint; each file begins with a new block."""

    def __init__(self, files: Iterable[FileEntry]) -> None:
        tensors = sorted((one.path, one.size, one.digest) for one in files if one.role == "tensors")
        self.content = bytes_digest(repr(tensors).encode())
        self.sizes = {path: size for path, size, _ in tensors}
        self.first: dict[str, int] = {}
        self.total = 0
        for path, size in self.sizes.items():
            self.first[path] = self.total
            self.total += -(-num_chunks(size) // _CHUNKS) * _CHUNKS

    def wanted(self, requests: Iterable[ReadRequest]) -> torch.Tensor:
        """Return one byte for each chunk, 1 where a request needs it."""
        starts, stops = [], []
        for row in requests:
            first = self.first.get(row.file)
            if row.nbytes and first is not None:
                starts.append(first + row.offset // CHUNK)
                stops.append(first + num_chunks(min(row.offset + row.nbytes, self.sizes[row.file])))
        edges = torch.zeros(self.total + 1, dtype=torch.int32)
        edges.index_add_(0, torch.tensor(starts, dtype=torch.long), torch.ones(len(starts), dtype=torch.int32))
        edges.index_add_(0, torch.tensor(stops, dtype=torch.long), -torch.ones(len(stops), dtype=torch.int32))
        return (edges.cumsum(0)[:-1] > 0).to(torch.uint8)

    def divide(self, wants: Sequence[torch.Tensor]) -> list[Block]:
        """Find the blocks that are worth sharing and say who reads each; the same result on every rank."""
        rows = torch.stack(list(wants)).bool().view(len(wants), -1, _CHUNKS)
        any_of = rows.any(0)
        once, in_all = any_of.sum(1), rows.sum((0, 2))
        shared = 4 * in_all > 5 * once
        if int((in_all - once)[shared].sum()) * CHUNK < _WORTH:
            return []
        chosen = shared.nonzero().flatten()
        takers, chunks = rows.any(2)[:, chosen].T.tolist(), any_of[chosen].tolist()
        found: list[Block] = []
        turns = [0] * len(wants)
        files = iter(self.first.items())
        path, first, following = "", 0, next(files, None)
        for number, block in enumerate(chosen.tolist()):
            while following is not None and following[1] <= block * _CHUNKS:
                (path, first), following = following, next(files, None)
            ranks = tuple(rank for rank, takes in enumerate(takers[number]) if takes)
            owner = ranks[number % len(ranks)]
            spots = tuple(at for at, needed in enumerate(chunks[number]) if needed)
            found.append(Block(number, path, (block * _CHUNKS - first) * CHUNK, owner, turns[owner], ranks, spots))
            turns[owner] += 1
        return found


class FileBlocks:
    """The shared blocks of one file, for the reader of that file."""

    def __init__(self, reads: SharedReads, blocks: dict[int, Block]) -> None:
        self._reads, self._blocks = reads, blocks

    def cut(self, start: int, stop: int) -> Iterator[tuple[int, int, Block | None]]:
        """Cut a range into what we read and what is in shared blocks."""
        begun = start
        while start < stop:
            block = self._blocks.get(start // BLOCK)
            end = min(stop, (start // BLOCK + 1) * BLOCK)
            if block is not None:
                if begun < start:
                    yield begun, start, None
                yield start, end, block
                begun = end
            start = end
        if begun < stop:
            yield begun, stop, None

    def take(self, block: Block, offset: int, size: int) -> tuple[memoryview, int] | None:
        """Return the bytes of a range of a block, and their address; None if we have to read it ourselves."""
        return self._reads.take(block, offset, size)

    def passed(self, block: Block) -> None:
        """Give back what was taken up to the end of a block: nothing more of it is wanted."""
        self._reads.passed(block.number)


class SharedReads:
    """One load of one rank, together with the others of its machine.

    Args:
        storage: rooted at the checkpoint.
        numbers: of the chunks.
        buffer: ours.
        peers: the buffers of all ranks of this machine; None in our own place.
        blocks: what is shared.
        digests: what is checked before others may take it; all of them check, or none.

    Attributes:
        bytes_read: what we have read for us and others.
    """

    def __init__(
        self,
        storage: Storage,
        numbers: ChunkNumbers,
        buffer: SharedReadBuffer,
        peers: list[PeerReadBuffer | None],
        blocks: list[Block],
        digests: Digests | None,
    ) -> None:
        self._storage, self._numbers, self._buffer, self._peers = storage, numbers, buffer, peers
        self._digests = digests
        self._me = peers.index(None)
        self._address = address_of(buffer.slots)
        self._num_blocks = len(blocks)
        self._own = [block for block in blocks if block.owner == self._me]
        self._by_file: dict[str, dict[int, Block]] = {}
        for block in blocks:
            if self._me in block.takers:
                self._by_file.setdefault(block.file, {})[block.offset // BLOCK] = block
        self._lost: set[int] = set()  # whom we do not wait for any more
        self._stopped = False
        self.bytes_read = 0
        self._side = SerialExecutor("holdfast-share")
        self._reading = self._side.run(self._read_own)

    def file(self, path: str) -> FileBlocks | None:
        """Return what is shared of a file; None if it is nothing that we need."""
        blocks = self._by_file.get(path)
        return FileBlocks(self, blocks) if blocks else None

    def done_with(self, path: str) -> None:
        """Give back what was taken of a file."""
        blocks = self._by_file.get(path)
        if blocks:
            self.passed(max(block.number for block in blocks.values()))

    def passed(self, number: int) -> None:
        """Give back what was taken up to the end of a block."""
        self._buffer.consume(max(self._buffer.consumed, number + 1))

    def take(self, block: Block, offset: int, size: int) -> tuple[memoryview, int] | None:
        """See `FileBlocks.take`. Blocks are taken in ascending order."""
        if block.number < self._buffer.consumed:
            return None  # given back already
        self._buffer.consume(block.number)
        peer = self._peers[block.owner]
        shelf = self._buffer if peer is None else peer
        if not self._arrives(block, shelf):
            return None
        at = block.turn % _SLOTS * BLOCK + offset - block.offset
        return shelf.slots[at : at + size], (self._address if peer is None else peer.address) + at

    def _arrives(self, block: Block, shelf: SharedReadBuffer | PeerReadBuffer) -> bool:
        def over() -> bool:
            return self._reading.done() if isinstance(shelf, SharedReadBuffer) else shelf.ended

        if shelf.published > block.turn:
            return True
        if block.owner not in self._lost and not _wait(
            lambda: shelf.published > block.turn or over(), sign=lambda: shelf.published
        ):
            _LOG.warning("a rank of this machine reads nothing for %g s: this one reads for itself", _PATIENCE_S)
        if shelf.published > block.turn:  # what was published before the end is good
            return True
        self._lost.add(block.owner)
        return False

    # -- reading for others, on a thread

    def _read_own(self) -> None:
        reader: FileReader | None = None
        try:
            with contextlib.ExitStack() as stack:
                path = ""
                for block in self._own:
                    if not self._is_free(block):
                        return
                    if reader is None or block.file != path:
                        stack.close()
                        path, reader = block.file, stack.enter_context(self._storage.open(block.file))
                        self._announce(reader, path, block.turn, _AHEAD)
                    else:
                        self._announce(reader, path, block.turn + _AHEAD - 1, 1)
                    self._read_block(reader, block)
                    self._buffer.publish(block.turn + 1)
        except Exception as error:  # noqa: BLE001 - a thread edge: whoever needs the block reads it and gets the error
            _LOG.debug("reading for other ranks has ended: %s", error)
        finally:
            if self._buffer.published < len(self._own):
                self._buffer.end()  # we ourselves may still copy from the slots of others

    def _announce(self, reader: FileReader, file: str, turn: int, count: int) -> None:
        """Let a reader of ``file`` fetch the blocks of these turns ahead, those of other files apart."""
        for block in self._own[turn : turn + count]:
            if block.file == file:
                for low, high in self._runs(block):
                    reader.will_read(low, high - low)

    def _runs(self, block: Block) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a block that anybody needs."""
        end = self._numbers.sizes[block.file]
        for _, run in groupby(enumerate(block.chunks), lambda pair: pair[1] - pair[0]):
            spots = [at for _, at in run]
            yield block.offset + spots[0] * CHUNK, min(block.offset + (spots[-1] + 1) * CHUNK, end)

    def _read_block(self, reader: FileReader, block: Block) -> None:
        slot = block.turn % _SLOTS * BLOCK - block.offset
        for low, high in self._runs(block):
            view = self._buffer.slots[slot + low : slot + high]
            reader.read_into(low, view)
            self.bytes_read += high - low
            if self._digests is not None and not self._digests.fit(block.file, low // CHUNK, view):
                raise CorruptCheckpointError(f"{block.file}: bytes {low}..{high} are not what was written")

    def _is_free(self, block: Block) -> bool:
        """Wait until the slot of a block may be filled; False if this rank had better read for nobody any more."""
        if self._stopped:
            return False
        if block.turn < _SLOTS:
            return True
        before = self._own[block.turn - _SLOTS]
        waiting: set[int] = set(before.takers)

        def taken() -> bool:
            for rank in tuple(waiting):
                peer = self._peers[rank]
                if (self._buffer if peer is None else peer).consumed > before.number or (peer and peer.gone):
                    waiting.discard(rank)
            return not waiting or self._stopped

        buffers = [peer for peer in self._peers if peer is not None]
        return _wait(taken, sign=lambda: tuple(peer.consumed for peer in buffers)) and not self._stopped

    # -- the end

    def finish(self) -> None:
        """Read what others still need of us, and see that they have it before their eyes."""
        self._buffer.consume(self._num_blocks)
        self._reading.exception()
        self._side.close()
        peers = [peer for peer in self._peers if peer is not None]
        _wait(lambda: all(peer.has_opened or peer.gone for peer in peers), sign=lambda: None)

    def stop(self) -> None:
        """End at once: others read for themselves."""
        self._stopped = True
        self._buffer.leave()
        self._side.close()


def _wait(ready: Callable[[], bool], sign: Callable[[], object]) -> bool:
    """Wait until something is ready; False after a while without a sign of life."""
    seen, until = sign(), time.monotonic() + _PATIENCE_S
    for _ in pauses():
        if ready():
            return True
        if time.monotonic() > until:
            if (now := sign()) == seen:
                return False
            seen, until = now, time.monotonic() + _PATIENCE_S
    return False


@contextlib.contextmanager
def reading_together(
    storage: Storage, manifest: Manifest, requests: Iterable[ReadRequest], digests: Digests | None, swap: Swap
) -> Iterator[SharedReads | None]:
    """Share the reading of some requests with the other ranks of this machine; gives None if there is nothing to share.

    All ranks call this, or call `no_part`.

    Args:
        storage: rooted at the checkpoint.
        manifest: of that checkpoint. Ranks share what they read only where they load the same one.
        requests: what this rank needs.
        digests: tables to check against; None reads unchecked, and shares with ranks that do so too.
        swap: used once.
    """
    numbers = ChunkNumbers(manifest.files)
    buffer, shown = _lay_out(numbers, requests, digests is not None)
    reads = None
    peers: list[PeerReadBuffer | None] = []
    try:
        others = swap(memory_name(), shown)
        if buffer is not None:
            if blocks := _join(numbers, buffer, shown, others, peers):
                reads = SharedReads(storage, numbers, buffer, peers, blocks, digests)
            else:
                buffer.leave()  # at once: the others must not wait for us while we read for ourselves
        yield reads
        if reads is not None:
            reads.finish()
    finally:
        if buffer is not None:
            buffer.leave()
            if reads is not None:
                reads.stop()
            for peer in peers:
                if peer is not None:
                    peer.close()
            buffer.close()


def no_part(swap: Swap) -> None:
    """Tell the others that this rank does not read: they must not wait for it."""
    with contextlib.suppress(HoldfastError, RuntimeError):  # it must not hide why this rank does not read
        swap(memory_name(), None)


def _lay_out(
    numbers: ChunkNumbers, requests: Iterable[ReadRequest], checks: bool
) -> tuple[SharedReadBuffer | None, dict[str, Any] | None]:
    if not numbers.total or not can_share():
        return None, None
    try:
        buffer = SharedReadBuffer(numbers.wanted(requests).numpy().data, _SLOTS * BLOCK)
        return buffer, {"of": [numbers.content, checks], **buffer.describe()}
    except (OSError, RuntimeError) as error:  # no memory, no /proc, a sandbox, torch without NumPy
        _LOG.debug("this rank reads for itself: %s", error)
        return None, None


def _join(
    numbers: ChunkNumbers,
    buffer: SharedReadBuffer,
    shown: dict[str, Any] | None,
    others: Sequence[Any],
    peers: list[PeerReadBuffer | None],
) -> list[Block]:
    """Map the buffers of the ranks of this machine into ``peers`` and divide the work; empty if there is none."""
    assert shown is not None
    alike = [one for one in others if one and one["of"] == shown["of"]]
    if len(alike) < 2:
        return []
    try:
        for one in alike:
            peers.append(None if one["token"] == shown["token"] else PeerReadBuffer(one))
    except (OSError, ValueError, HoldfastError) as error:
        _LOG.debug("this rank reads for itself: %s", error)
        return []
    buffer.open_others()
    wants = [buffer.wanted if peer is None else peer.wanted for peer in peers]
    blocks = numbers.divide([torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in wants])
    if not blocks:
        _wait(lambda: all(peer is None or peer.has_opened or peer.gone for peer in peers), sign=lambda: None)
    return blocks
