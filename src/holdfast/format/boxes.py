"""Boxes of a tensor: where two of them overlap, and whether many of them make up the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

__all__ = ["Box", "flaw", "overlap"]

_MAX_CUT = 8  # dimensions along which one tensor may be cut; every box has 2 ** n corners along them


class Box(NamedTuple):
    """A part of a tensor: its first index and its size, dimension by dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


def overlap(box: Box, other: Box) -> Box | None:
    """Return the box that two boxes share, None if they share no element."""
    start, shape = [], []
    for low, size, first, count in zip(box.start, box.shape, other.start, other.shape, strict=True):
        begin, end = max(low, first), min(low + size, first + count)
        if end <= begin:
            return None
        start.append(begin)
        shape.append(end - begin)
    return Box(tuple(start), tuple(shape))


def flaw(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Return why boxes do not cover a tensor of this shape, each element once; None if they do.

    Linear in the number of boxes: instead of comparing each with each, their corners are added up, with alternating
    signs. Wherever boxes meet these cancel out; what is left are the corners of the whole, and of nothing else. (The
    mixed difference of a sum of indicator functions determines that sum.)
    """
    filled = [box for box in boxes if all(box.shape)]
    count, whole = sum(prod(box.shape) for box in filled), prod(shape)
    if count != whole:
        state = "are missing" if count < whole else "are stored twice"
        return f"{abs(whole - count)} of its {whole} elements {state}"
    cut = [dim for dim, size in enumerate(shape) if any(box.shape[dim] != size for box in filled)]
    if len(cut) > _MAX_CUT:
        return f"it is cut along {len(cut)} dimensions, more than the {_MAX_CUT} that this version reads"
    left: dict[tuple[int, ...], int] = {}
    signs = [(-1) ** sum(bits) for bits in product((0, 1), repeat=len(cut))]
    for box in filled:
        edges = [(box.start[dim], box.start[dim] + box.shape[dim]) for dim in cut]
        for corner, sign in zip(product(*edges), signs, strict=True):
            left[corner] = left.get(corner, 0) + sign
    corners = product(*[(0, shape[dim]) for dim in cut])
    expected = dict(zip(corners, signs, strict=True)) if whole else {}
    if {corner: sign for corner, sign in left.items() if sign} != expected:
        return "some of its elements are missing and as many are stored twice"
    return None
