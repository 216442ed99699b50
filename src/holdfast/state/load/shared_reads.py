"""Ranks of one machine that load the same checkpoint read each byte once and copy the rest from each other.

Every rank shows which 64 KiB chunks it needs (`SharedReadBuffer`). From that each rank computes, with the same result
and without a message, which blocks several ranks need and which rank reads each of them (`ChunkNumbers.divide`). The
owner of a block reads it into a slot of its own memory and checks the digests; then the others take what they need. All
ranks go through the blocks in one order, so ranks never wait for each other in a circle. No rank depends on
another: if a neighbour is slow or dead, has left, or has found damage, a rank reads the block itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import secrets
import select
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
from holdfast.storage.together import SerialExecutor
from holdfast.writer.arena import can_share_memory

from .targets import ReadRequest, read_block

__all__ = [
    "BLOCK", "Block", "ChunkNumbers", "FileBlocks", "PeerReadBuffer", "SharedReadBuffer", "SharedReads", "Swap",
    "reading_together",
]  # fmt: skip

Swap = Callable[[str, Any], Sequence[Any]]
"""Sends a group name and a value to all ranks; returns the values of the ranks that sent the same name."""

_LOG = get_logger("state")
_CHUNKS = 32  # in a block
BLOCK = _CHUNKS * CHUNK
_WORTH = 4 << 20  # if a machine saves fewer bytes than this, its ranks do not share
_SLOTS = 2  # blocks that a rank keeps ready for others: few, so that they are still in the cache
_AHEAD = 8  # blocks that a storage is asked to fetch before their turn
_PATIENCE_S = 30.0  # longest wait for another rank without a sign of life from it


@dataclass(frozen=True, slots=True)
class Block:
    """A block that several ranks need.

    Attributes:
        number: position among all shared blocks.
        file: path inside the checkpoint.
        offset: first byte of the block within the file.
        owner: the rank that reads it, as a position among the ranks of this machine.
        turn: position among the blocks of its owner.
        takers: the ranks that need it, as such positions.
        chunks: numbers within the block of the chunks that some rank needs.
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
        tensors = sorted((file.path, file.size, file.digest) for file in files if file.role == "tensors")
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
        edges = torch.zeros(self.total + 1, dtype=torch.int32, device="cpu")
        for places, change in ((starts, 1), (stops, -1)):
            changes = torch.full((len(places),), change, dtype=torch.int32, device="cpu")
            edges.index_add_(0, torch.tensor(places, dtype=torch.long, device="cpu"), changes)
        return (edges.cumsum(0)[:-1] > 0).to(torch.uint8)

    def divide(self, wants: Sequence[torch.Tensor]) -> list[Block]:
        """Return the blocks that are worth sharing, each with the rank that reads it; the same on every rank."""
        rows = torch.stack(list(wants)).bool().view(len(wants), -1, _CHUNKS)
        any_of = rows.any(0)
        once, in_all = any_of.sum(1), rows.sum((0, 2))
        shared = 4 * in_all > 5 * once
        if int((in_all - once)[shared].sum()) * CHUNK < _WORTH:
            return []
        chosen = shared.nonzero().flatten()
        takers, chunks = rows.any(2)[:, chosen].T.tolist(), any_of[chosen].tolist()
        divided: list[Block] = []
        turns = [0] * len(wants)
        files = iter(self.first.items())
        path, first, following = "", 0, next(files, None)
        for number, block in enumerate(chosen.tolist()):
            while following is not None and following[1] <= block * _CHUNKS:
                (path, first), following = following, next(files, None)
            ranks = tuple(rank for rank, takes in enumerate(takers[number]) if takes)
            owner = ranks[number % len(ranks)]
            spots = tuple(at for at, needed in enumerate(chunks[number]) if needed)
            divided.append(Block(number, path, (block * _CHUNKS - first) * CHUNK, owner, turns[owner], ranks, spots))
            turns[owner] += 1
        return divided


class FileBlocks:
    """The shared blocks of one file, for the reader of that file."""

    def __init__(self, reads: SharedReads, blocks: dict[int, Block]) -> None:
        self._reads, self._blocks = reads, blocks

    def cut(self, start: int, stop: int) -> Iterator[tuple[int, int, Block | None]]:
        """Cut a range into (start, stop, block); the block is None where this rank reads alone."""
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
        """Return the bytes of a range of a block, and their address; None if this rank has to read it."""
        return self._reads.take(block, offset, size)

    def passed(self, block: Block) -> None:
        """Release everything up to the end of a block: this rank needs no more of it."""
        self._reads.passed(block.number)


class SharedReads:
    """One load of one rank, together with the other ranks of its machine.

    Args:
        storage: rooted at the checkpoint.
        numbers: numbers of the chunks.
        buffer: the buffer of this rank.
        peers: the buffers of all ranks of this machine; None in the place of this rank.
        blocks: the shared blocks.
        digests: tables that a block is checked against before others may take it; all ranks check, or none.

    Attributes:
        bytes_read: bytes that this rank has read, for itself and others.
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
        self._lost: set[int] = set()  # ranks that this rank no longer waits for
        self._stopped = False
        self.bytes_read = 0
        self._side = SerialExecutor("holdfast-share")
        self._reading = self._side.run(self._read_own)

    def file(self, path: str) -> FileBlocks | None:
        """Return the shared blocks of a file; None if this rank needs none of them."""
        blocks = self._by_file.get(path)
        return FileBlocks(self, blocks) if blocks else None

    def done_with(self, path: str) -> None:
        """Release all shared blocks of a file."""
        blocks = self._by_file.get(path)
        if blocks:
            self.passed(max(block.number for block in blocks.values()))

    def passed(self, number: int) -> None:
        """Release everything up to the end of a block."""
        self._buffer.consume(max(self._buffer.consumed, number + 1))

    def take(self, block: Block, offset: int, size: int) -> tuple[memoryview, int] | None:
        """See `FileBlocks.take`. Blocks are taken in ascending order."""
        if block.number < self._buffer.consumed:
            return None  # released already
        self._buffer.consume(block.number)
        peer = self._peers[block.owner]
        buffer = self._buffer if peer is None else peer
        if not self._arrives(block, buffer):
            return None
        at = block.turn % _SLOTS * BLOCK + offset - block.offset
        return buffer.slots[at : at + size], (self._address if peer is None else peer.address) + at

    def _arrives(self, block: Block, buffer: SharedReadBuffer | PeerReadBuffer) -> bool:
        def over() -> bool:
            return self._reading.done() if isinstance(buffer, SharedReadBuffer) else buffer.ended

        if buffer.published > block.turn:
            return True
        if block.owner not in self._lost and not _wait(
            lambda: buffer.published > block.turn or over(), sign=lambda: buffer.published
        ):
            _LOG.warning("a rank of this machine reads nothing for %g s: this rank reads for itself", _PATIENCE_S)
        if buffer.published > block.turn:  # blocks published before the end are valid
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
                self._buffer.end()  # this rank may still copy from the slots of others

    def _announce(self, reader: FileReader, file: str, turn: int, count: int) -> None:
        """Let a reader fetch ahead the blocks of these turns that are in ``file``."""
        for block in self._own[turn : turn + count]:
            if block.file == file:
                for low, high in self._runs(block):
                    reader.will_read(low, high - low)

    def _runs(self, block: Block) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a block that some rank needs."""
        end = self._numbers.sizes[block.file]
        for _, run in groupby(enumerate(block.chunks), lambda pair: pair[1] - pair[0]):
            spots = [at for _, at in run]
            yield block.offset + spots[0] * CHUNK, min(block.offset + (spots[-1] + 1) * CHUNK, end)

    def _read_block(self, reader: FileReader, block: Block) -> None:
        slot = block.turn % _SLOTS * BLOCK - block.offset
        for low, high in self._runs(block):
            view = self._buffer.slots[slot + low : slot + high]
            is_known, digests = read_block(reader, low, view), self._digests
            self.bytes_read += high - low
            if not is_known and digests is not None and not digests.fit(block.file, low // CHUNK, view):
                raise CorruptCheckpointError(f"{block.file}: bytes {low}..{high} are not what was written")

    def _is_free(self, block: Block) -> bool:
        """Wait until the slot of a block may be filled; False if this rank shall stop reading for others."""
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
        """Read the blocks that others still need, and wait until they have mapped this rank's buffer."""
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
    """Wait until ``ready()``; False if ``sign()`` does not change for `_PATIENCE_S`."""
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
    """Share reads with the other ranks of this machine; yields None if there is nothing to share.

    All ranks call this.

    Args:
        storage: rooted at the checkpoint.
        manifest: manifest of that checkpoint. Only ranks that load the same checkpoint share.
        requests: the reads of this rank.
        digests: tables to check against; None reads unchecked, and shares with other ranks that do so.
        swap: called once.
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
                buffer.leave()  # at once: the others must not wait for a rank that reads for itself
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
    """Map the buffers of the ranks of this machine into ``peers`` and divide the work between them."""
    assert shown is not None
    alike = [described for described in others if described and described["of"] == shown["of"]]
    if len(alike) < 2:
        return []
    try:
        for described in alike:
            peers.append(None if described["token"] == shown["token"] else PeerReadBuffer(described))
    except (OSError, ValueError, HoldfastError) as error:
        _LOG.debug("this rank reads for itself: %s", error)
        return []
    buffer.open_others()
    wants = [buffer.wanted if peer is None else peer.wanted for peer in peers]
    blocks = numbers.divide([torch.frombuffer(bytearray(wanted), dtype=torch.uint8) for wanted in wants])
    if not blocks:
        _wait(lambda: all(peer is None or peer.has_opened or peer.gone for peer in peers), sign=lambda: None)
    return blocks


_PAGE = 4096
_NAME = "holdfast-reads"
_TOKEN_BYTES = 16
_CONSUMED, _PUBLISHED, _GONE, _OPENED, _ENDED = range(_TOKEN_BYTES // 8, _TOKEN_BYTES // 8 + 5)
_PAUSE_S = (50e-6, 2e-3)


def can_share() -> bool:
    """Tell whether this platform has memfd, pidfd and /proc, which these buffers need."""
    return can_share_memory() and _can_watch() and os.path.isdir("/proc/self/fd")


@functools.cache
def _can_watch() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except AttributeError:
        return False
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES)
    return True


class SharedReadBuffer:
    """The buffer of this rank: its progress, the chunks it needs, and the blocks it has read for others.

    The others map it for reading only, so that no rank can overwrite what another one uses. It is a memfd: no file
    system, no limit of /dev/shm, and a crash leaves nothing behind.

    Args:
        wanted: one byte for each chunk of the checkpoint, not zero where this rank needs it.
        slots_bytes: bytes of memory for blocks that this rank reads for others.

    Attributes:
        wanted: the argument, in shared memory.
        slots: memory for blocks that this rank reads for others.
    """

    def __init__(self, wanted: memoryview, slots_bytes: int) -> None:
        start = _PAGE + -(-len(wanted) // _PAGE) * _PAGE
        size = start + slots_bytes
        self._token = secrets.token_hex(_TOKEN_BYTES)[:_TOKEN_BYTES]
        self._shape = (len(wanted), start, size)
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            # The size is fixed: a file that shrinks kills every process that has it mapped (SIGBUS).
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        view = memoryview(self._memory)
        view[:_TOKEN_BYTES] = self._token.encode()
        view[_PAGE : _PAGE + len(wanted)] = wanted
        self._words = view[:_PAGE].cast("q")
        self.wanted = view[_PAGE : _PAGE + len(wanted)]
        self.slots = view[start:]

    def describe(self) -> dict[str, Any]:
        """Return what `PeerReadBuffer` needs to find this buffer from another process."""
        return {"pid": os.getpid(), "fd": self._fd, "token": self._token, "shape": self._shape}

    @property
    def published(self) -> int:
        """How many blocks this rank has read for others."""
        return self._words[_PUBLISHED]

    def publish(self, count: int) -> None:
        """Show that ``count`` blocks have been read for others."""
        self._words[_PUBLISHED] = count

    @property
    def consumed(self) -> int:
        """The shared block that this rank has reached: it needs none of those before it any more."""
        return self._words[_CONSUMED]

    def consume(self, number: int) -> None:
        """Show that this rank has reached a shared block."""
        self._words[_CONSUMED] = number

    def open_others(self) -> None:
        """Show that this rank has mapped the buffers of the others."""
        self._words[_OPENED] = 1

    def end(self) -> None:
        """Show that this rank reads no more for others; it may still copy what they read."""
        self._words[_ENDED] = 1

    def leave(self) -> None:
        """Show that this rank reads no more for others, and needs nothing from them."""
        self._words[_GONE] = 1

    def close(self) -> None:
        """Close the descriptor; others keep what they have mapped. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            for view in (self._words, self.wanted, self.slots):
                view.release()
            os.close(fd)
            with contextlib.suppress(BufferError):  # unmapped when the last view of it goes
                self._memory.close()


class PeerReadBuffer:
    """The buffer of another rank, for reading.

    Raises:
        OSError, ValueError: the buffer does not exist (any more), or is not the described buffer.
    """

    def __init__(self, described: dict[str, Any]) -> None:
        wanted, start, size = described["shape"]
        self._process = os.pidfd_open(described["pid"])
        try:
            fd = os.open(f"/proc/{described['pid']}/fd/{described['fd']}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_size != size:
                    raise ValueError("the buffer of another rank has another size than it says")
                self._memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
        except BaseException:
            os.close(self._process)
            raise
        view = memoryview(self._memory)
        if bytes(view[:_TOKEN_BYTES]) != described["token"].encode():
            self.close()
            raise ValueError("this is not the buffer that another rank has described")
        self._words = view[:_PAGE].cast("q")
        self.wanted = view[_PAGE : _PAGE + wanted]
        self.slots = view[start:]
        self.address = address_of(self.slots) if len(self.slots) else 0

    @property
    def published(self) -> int:
        """How many blocks that rank has read for others; they stay readable after it ends."""
        return self._words[_PUBLISHED]

    @property
    def consumed(self) -> int:
        """The shared block that the other rank has reached."""
        return self._words[_CONSUMED]

    @property
    def has_opened(self) -> bool:
        """Whether that rank has mapped the buffers of the others."""
        return bool(self._words[_OPENED])

    @property
    def ended(self) -> bool:
        """Whether that rank reads no more for others; it may still copy what others read."""
        return bool(self._words[_ENDED]) or self.gone

    @property
    def gone(self) -> bool:
        """Whether that rank reads and copies no more: it has left, or its process has ended."""
        if self._words[_GONE] or self._process < 0:
            return True
        poll = select.poll()  # a new object for each call: two threads must not use the same at once
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the descriptor of its process; idempotent."""
        if self._process >= 0:
            os.close(self._process)
            self._process = -1


def pauses() -> Iterator[None]:
    """Yield at once, then after pauses that grow up to 2 ms."""
    pause_s = _PAUSE_S[0]
    yield
    while True:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S[1])
        yield
