"""Which part of a tensor a rank holds, from shape and cuts alone: pure arithmetic, no torch.

A dimension is cut as ``torch.chunk`` cuts it: pieces of ``ceil(size / parts)``, the last ones shorter or empty. A
*strided* cut (fully sharded data parallel over tensor parallel) first makes ``factor`` pieces as if by the cut that
comes after it, and takes its share of each of them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

from holdfast.format.boxes import Box

__all__ = ["Cut", "Held", "held"]

_Runs = list[tuple[int, int]]  # (first index, length), in the order in which they lie in memory


class Cut(NamedTuple):
    """One cut: ``dim`` into ``parts``, of which ``number`` is held; ``factor`` above one makes it a strided cut."""

    dim: int
    parts: int
    number: int
    factor: int = 1


class Held(NamedTuple):
    """A box of the whole tensor, and where it begins in the local one."""

    box: Box
    local: tuple[int, ...]


@lru_cache(maxsize=4096)
def held(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[tuple[int, ...], tuple[Held, ...]]:
    """Return the local shape, and the boxes that make up the local tensor; no box if it is empty.

    Args:
        shape: of the whole tensor.
        cuts: from first to last; each cuts what the ones before have left.
    """
    runs: list[_Runs] = [[(0, size)] for size in shape]
    for dim, parts, number, factor in cuts:
        old, new = runs[dim], []
        total = sum(length for _, length in old)
        for piece in range(factor):
            start, size = _chunk(total, factor, piece)
            first, length = _chunk(size, parts, number)
            new.extend(_take(old, start + first, length))
        runs[dim] = _merged(new)
    local_shape = tuple(sum(length for _, length in row) for row in runs)
    if not all(local_shape):
        return local_shape, ()
    found = []
    for rows in product(*[list(zip(row, _starts(row), strict=True)) for row in runs]):
        box = Box(tuple(start for (start, _), _ in rows), tuple(length for (_, length), _ in rows))
        found.append(Held(box, tuple(at for _, at in rows)))
    return local_shape, tuple(found)


def _chunk(size: int, parts: int, number: int) -> tuple[int, int]:
    full = -(-size // parts)
    start = min(size, full * number)
    return start, min(size, start + full) - start


def _take(runs: _Runs, start: int, length: int) -> _Runs:
    taken = []
    for first, size in runs:
        low, high = max(0, start), min(size, start + length)
        if low < high:
            taken.append((first + low, high - low))
        start -= size
    return taken


def _merged(runs: _Runs) -> _Runs:
    merged: _Runs = []
    for first, size in runs:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((first, size))
    return merged


def _starts(runs: _Runs) -> list[int]:
    starts, at = [], 0
    for _, size in runs:
        starts.append(at)
        at += size
    return starts
