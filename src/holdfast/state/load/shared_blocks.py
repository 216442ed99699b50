"""Which blocks several ranks of one machine need, and which of these ranks reads each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from holdfast.format.digest import CHUNK, bytes_digest, num_chunks
from holdfast.format.manifest import FileEntry

from .read_request import ReadRequest

__all__ = ["BLOCK", "Block", "ChunkNumbers"]

_CHUNKS = 32  # in a block
BLOCK = _CHUNKS * CHUNK
_WORTH = 4 << 20  # fewer bytes saved on a machine are not worth the waiting


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
