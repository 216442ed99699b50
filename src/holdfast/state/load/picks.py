"""Pick a part out of a stored array while its bytes go by, piece by piece, with no room for the whole in between."""

from __future__ import annotations

import ctypes
from math import prod

import numpy as np
import torch

__all__ = ["Pick", "can_pick", "extent", "is_plain"]

Span = tuple[int, int]


def is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a tensor is memory of this process with elements as they are stored."""
    if not target.is_cpu or target.dtype is not dtype or target.is_conj() or target.is_neg():
        return False
    try:
        # A subclass that wraps other tensors has a shape and strides, but no memory. Freed memory is another case.
        return target.data_ptr() != 0 or not target.untyped_storage().nbytes()
    except RuntimeError:  # it has no address to tell
        return False


def can_pick(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether stored bytes can be copied into a tensor row by row.

    Its elements lie in the order of the file, perhaps with gaps: no two share memory, and the last dimension has none.
    """
    if not is_plain(target, dtype) or not target.dim():
        return False
    inner = 1
    for size, stride in zip(reversed(target.shape), reversed(target.stride()), strict=True):
        if size > 1:
            if stride < inner:
                return False
            inner = size * stride
    return target.shape[-1] == 1 or target.stride(-1) == 1


def extent(target: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last one."""
    steps = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return (1 + steps) * target.itemsize if target.numel() else 0


class Pick:
    """A part of a stored array on its way into a tensor.

    Args:
        target: memory of the part, for which `can_pick` is true. Its memory has to outlive this.
        shape: of the stored array, as many dimensions.
        wanted: the part.
    """

    __slots__ = ("_shape", "_target", "_wanted")

    def __init__(self, target: torch.Tensor, shape: tuple[int, ...], wanted: tuple[slice, ...]) -> None:
        width = target.itemsize
        # As bytes: NumPy does not know every dtype of torch, and copies runs of bytes without the interpreter lock.
        memory = _memory(target.data_ptr(), extent(target))
        strides = (*[width * stride for stride in target.stride()[:-1]], 1)
        self._target = np.ndarray((*target.shape[:-1], width * target.shape[-1]), np.uint8, memory, 0, strides)
        self._shape = (*shape[:-1], width * shape[-1])
        spans = [one.indices(size)[:2] for one, size in zip(wanted, shape, strict=True)]
        self._wanted = (*spans[:-1], (width * spans[-1][0], width * spans[-1][1]))

    def take(self, offset: int, address: int, size: int) -> None:
        """Copy what there is of the part in ``size`` bytes of the stored array, from byte ``offset`` of it on."""
        data = np.frombuffer(_memory(address, size), np.uint8)
        _pour(data, offset, self._shape, self._wanted, self._target)


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address))


def _pour(data: np.ndarray, offset: int, shape: tuple[int, ...], wanted: tuple[Span, ...], target: np.ndarray) -> None:
    """Copy whole rows at once; of a row that the data begin or end within, go on with the rows that it consists of."""
    end = offset + len(data)
    first, last = wanted[0]
    row = prod(shape[1:])
    low, high = max(first, -(-offset // row)), min(last, end // row)
    if low < high:
        rows = data[low * row - offset : high * row - offset].reshape(high - low, *shape[1:])
        inner = slice(None), *[slice(*span) for span in wanted[1:]]
        part, into = rows[inner], target[low - first : high - first]
        if part.ndim > 1 and part.size and part.shape[-1] > 1:  # runs of bytes as elements: faster, most where short
            run = np.dtype((np.void, part.shape[-1]))
            part, into = part.view(run), into.view(run)
        into[...] = part
    for number in sorted({offset // row, end // row}):
        start, stop = max(offset, number * row), min(end, (number + 1) * row)
        if first <= number < last and 0 < stop - start < row:
            part = data[start - offset : stop - offset]
            _pour(part, start - number * row, shape[1:], wanted[1:], target[number - first])
