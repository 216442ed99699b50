"""Which byte ranges of a stored box are read for a part of it.

A part is contiguous in the file from its last cut dimension on. Where the gaps between such runs are large, each run
is read by itself, straight to its place if memory is contiguous there too; where they are small, the gaps are read as
well and a copy picks out what is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import torch

from holdfast.format.boxes import Box
from holdfast.format.index import Piece

from .read_request import ReadRequest
from .reader import BATCH, is_direct

__all__ = ["spans"]

_GAP = 256 << 10  # rows at least this wide are read one by one: digests are checked by 64 KiB, at both ends of a range


def spans(
    name: str, piece: Piece, box: Box, wanted: Box, target: torch.Tensor, dtype: torch.dtype
) -> Iterator[ReadRequest]:
    """Yield the reads that bring ``wanted`` of a stored piece to ``target``.

    Args:
        name: of the tensor, for messages.
        piece: where the stored box lies.
        box: the stored box.
        wanted: a box within it, not empty.
        target: memory for ``wanted``, of its shape.
        dtype: stored dtype.
    """
    if not box.shape:
        yield ReadRequest(name, piece.file, piece.offset, piece.nbytes, dtype, target)
        return
    if box.shape[1:] == wanted.shape[1:] and is_direct(target, dtype):  # nearly always: rows that follow each other
        stride = dtype.itemsize * prod(box.shape[1:])
        begin = piece.offset + (wanted.start[0] - box.start[0]) * stride
        yield ReadRequest(name, piece.file, begin, wanted.shape[0] * stride, dtype, target)
        return
    dims = range(len(box.shape))
    strides = [dtype.itemsize * prod(box.shape[dim + 1 :]) for dim in dims]
    first = [at - start for at, start in zip(wanted.start, box.start, strict=True)]
    cut = max((dim for dim in dims if wanted.shape[dim] != box.shape[dim]), default=0)
    along = next((dim for dim in range(cut) if strides[dim] < _GAP), cut)
    slices = tuple(slice(first[dim], first[dim] + wanted.shape[dim]) for dim in dims[along + 1 :])
    rows, stride = wanted.shape[along], strides[along]
    start = piece.offset + sum(at * step for at, step in zip(first[: along + 1], strides, strict=False))
    for outer in product(*map(range, wanted.shape[:along])):
        offset = start + sum(at * step for at, step in zip(outer, strides, strict=False))
        part = target[outer] if outer else target
        whole = along == cut and is_direct(part, dtype)
        step = rows if whole else max(1, BATCH // stride)
        for low in range(0, rows, step):
            count = min(step, rows - low)
            within = None if along == cut else ((count, *box.shape[along + 1 :]), (slice(None), *slices))
            yield ReadRequest(
                name, piece.file, offset + low * stride, count * stride, dtype, part.narrow(0, low, count), within
            )
