"""Bytes of a tensor in row-major order, window by window, from the boxes it is stored in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from holdfast.errors import CorruptCheckpointError
from holdfast.format.boxes import Box, flaw, overlap

__all__ = ["WINDOW", "BoxReader", "assemble", "check_parts", "fill", "windows"]

WINDOW = 8 << 20
"""Bytes of a tensor in memory at a time."""

Shape = tuple[int, ...]


class BoxReader(NamedTuple):
    """A box of a tensor whose elements lie in row-major order: ``read(offset, view)`` fills ``view`` from there on."""

    box: Box
    read: Callable[[int, memoryview], None]


def assemble(name: str, shape: Shape, itemsize: int, parts: Sequence[BoxReader]) -> Iterator[memoryview]:
    """Yield the bytes of a whole tensor; each view is valid until the next is asked for.

    Raises:
        CorruptCheckpointError: the boxes do not make up the tensor.
    """
    check_parts(name, shape, parts)
    if not prod(shape):
        return
    buffer = memoryview(bytearray(min(max(WINDOW, itemsize), prod(shape) * itemsize)))
    for window in windows(shape, max(1, WINDOW // itemsize)):
        view = buffer[: prod(window.shape) * itemsize]
        for part in parts:
            fill(view, window, part, itemsize)
        yield view


def check_parts(name: str, shape: Shape, parts: Sequence[BoxReader]) -> None:
    """Raise CorruptCheckpointError if the boxes do not make up the tensor."""
    if problem := flaw(shape, (part.box for part in parts)):
        raise CorruptCheckpointError(
            f"tensor {name!r}: {problem}: this checkpoint is damaged; use another one", tensor=name
        )


def windows(shape: Shape, limit: int) -> Iterator[Box]:
    """Cut a shape into boxes of at most ``limit`` elements, each one run of the row-major order; in that order."""
    if not shape:
        yield Box((), ())
        return
    dim = next(at for at in range(len(shape)) if prod(shape[at + 1 :]) <= limit)
    rest = shape[dim + 1 :]
    rows = limit // prod(rest)
    for outer in np.ndindex(*shape[:dim]):
        for at in range(0, shape[dim], rows):
            size = min(rows, shape[dim] - at)
            yield Box((*outer, at, *(0 for _ in rest)), (*(1 for _ in outer), size, *rest))


def fill(view: memoryview, window: Box, part: BoxReader, itemsize: int) -> None:
    """Put what a part has of a window into it."""
    common = overlap(window, part.box)
    if common is None:
        return
    # A window is one run of the tensor, so what it shares with a box is one run of the box.
    offset = 0
    for index, start, size in zip(common.start, part.box.start, part.box.shape, strict=True):
        offset = offset * size + index - start
    if common == window:
        part.read(offset * itemsize, view)
        return
    data = bytearray(prod(common.shape) * itemsize)
    part.read(offset * itemsize, memoryview(data))
    spot = tuple(slice(a - b, a - b + n) for a, b, n in zip(common.start, window.start, common.shape, strict=True))
    whole = np.frombuffer(view, np.uint8).reshape(*window.shape, itemsize)
    whole[spot] = np.frombuffer(data, np.uint8).reshape(*common.shape, itemsize)
