"""One read that a load has planned, and the ways in which its bytes get into the tensor.

`ReadRequest` is the value that planning, sharing and reading have in common. If the memory of the tensor has the layout
of the file, bytes are read straight into it. If it has gaps, or only a part of the stored array is wanted, a `Pick`
copies rows out of each block that is read, so the whole array never needs a buffer.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from holdfast.storage.base import FileReader

from ..tree.arrays import move, move_small

__all__ = ["BATCH", "CheckingReader", "Pick", "ReadRequest", "can_pick", "extent", "is_direct", "read_block"]

BATCH = 32 << 20  # tensors that need a detour (other device, dtype, order) are read in batches of this size

_SMALL = 16 << 10  # fewer bytes are copied without giving up the interpreter lock
_LONGEST = 1 << 30  # bytes of the longest element that NumPy takes
_ANYWHERE: Any = ctypes.c_char * (1 << 46)  # memory from an address on; its end is never used

_Span = tuple[int, int]
_Dim = tuple[int, _Span, int]
"""A dimension of a stored array, the part of it that is wanted, and its stride in the target, in bytes."""


@dataclass(slots=True)
class ReadRequest:
    """One stored byte range and the tensor it goes to.

    Attributes:
        name: name of the tensor, for messages.
        file: path inside the checkpoint.
        offset: first byte within the file.
        nbytes: number of bytes.
        dtype: stored dtype.
        target: the tensor to fill: same number of elements; any device, strides or floating dtype.
        within: (shape, slices) if only a part of these bytes is wanted: they are an array of this shape.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    target: torch.Tensor
    within: tuple[tuple[int, ...], tuple[slice, ...]] | None = None


def _is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a tensor is memory of this process with elements as they are stored."""
    if not target.is_cpu or target.dtype is not dtype or target.is_conj() or target.is_neg():
        return False
    try:
        # A subclass that wraps other tensors has a shape and strides, but no memory. Freed memory is another case.
        return target.data_ptr() != 0 or not target.untyped_storage().nbytes()
    except RuntimeError:  # it has no address
        return False


def is_direct(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether stored bytes can be read straight into a tensor."""
    return _is_plain(target, dtype) and target.is_contiguous()


def can_pick(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether stored bytes can be copied into a tensor row by row.

    Its elements lie in the order of the file, perhaps with gaps: no two share memory, and the last dimension has none.
    """
    if not _is_plain(target, dtype) or not target.dim() or not target.numel():
        return False
    inner = 1
    for size, stride in zip(reversed(target.shape), reversed(target.stride()), strict=True):
        if size > 1:
            if stride < inner:
                return False
            inner = size * stride
    return target.shape[-1] == 1 or target.stride(-1) == 1


def extent(target: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return (1 + steps) * target.itemsize if target.numel() else 0


class Pick:
    """A part of a stored array on its way into a tensor.

    Nearly every part is the same range of bytes in each of several successive rows, because a dimension that is wanted
    whole is merged with the dimension before it. One call copies the rows of a block of the file.

    Args:
        target: memory of the part, for which `can_pick` is true. Its memory has to outlive this.
        shape: shape of the stored array, with as many dimensions as ``target``.
        wanted: the part, a slice for each dimension.
    """

    __slots__ = ("_address", "_deep", "_first", "_high", "_kind", "_last", "_low", "_row", "_rows", "_stride")

    def __init__(self, target: torch.Tensor, shape: tuple[int, ...], wanted: tuple[slice, ...]) -> None:
        dims = _dims(target, shape, wanted)
        self._address = target.data_ptr()
        self._deep: _Deep | None = None
        if len(dims) > 2 or dims[-1][0] > _LONGEST:
            self._deep = _Deep(dims, self._address)
            return
        _, (self._first, self._last), self._stride = dims[0] if len(dims) == 2 else (1, (0, 1), 0)
        self._row, (self._low, self._high), _ = dims[-1]
        # Runs of bytes as elements: NumPy does not know every dtype of torch, and copies without the interpreter lock.
        self._kind = np.dtype((np.void, self._high - self._low))
        rows = self._last - self._first
        self._rows = np.ndarray((rows,), self._kind, _ANYWHERE.from_address(self._address), 0, (self._stride,))

    def take(self, offset: int, address: int, size: int) -> None:
        """Copy the part's share of ``size`` bytes of the stored array.

        Args:
            offset: position of the bytes in the stored array.
            address: where the bytes are in memory.
            size: number of bytes.
        """
        if self._deep is not None:
            self._deep.take(offset, address, size)
            return
        end, row, low, high, first = offset + size, self._row, self._low, self._high, self._first
        begin = max(first, -((low - offset) // row))  # the first row whose part begins in these bytes
        stop = min(self._last, (end - high) // row + 1)  # behind the last row whose part ends in them
        if begin < stop:
            start = address + begin * row + low - offset
            source = np.ndarray((stop - begin,), self._kind, _ANYWHERE.from_address(start), 0, (row,))
            self._rows[begin - first : stop - first] = source
        for number in {begin - 1, stop}:  # rows that these bytes begin or end within
            if first <= number < self._last:
                at = number * row + low
                head, tail = max(offset, at), min(end, number * row + high)
                if head < tail:
                    into = self._address + (number - first) * self._stride + head - at
                    (move_small if tail - head <= _SMALL else move)(into, address + head - offset, tail - head)


class _Deep:
    """A part that is cut along three dimensions or more, or has very long rows.

    Args:
        dims: as `_dims` returns them.
        address: address of the target.
    """

    __slots__ = ("_shape", "_target", "_wanted")

    def __init__(self, dims: list[_Dim], address: int) -> None:
        sizes = [stop - start for _, (start, stop), _ in dims]
        strides = [stride for _, _, stride in dims]
        self._target = np.ndarray(sizes, np.uint8, _ANYWHERE.from_address(address), 0, strides)
        self._shape = tuple(size for size, _, _ in dims)
        self._wanted = tuple(span for _, span, _ in dims)

    def take(self, offset: int, address: int, size: int) -> None:
        """See `Pick.take`."""
        data = np.ndarray((size,), np.uint8, _ANYWHERE.from_address(address))
        _pour(data, offset, self._shape, self._wanted, self._target)


def _dims(target: torch.Tensor, shape: tuple[int, ...], wanted: tuple[slice, ...]) -> list[_Dim]:
    """Return the dimensions of a part, the last in bytes, with neighbours merged where possible."""
    width = target.itemsize
    dims: list[_Dim] = [(width, (0, width), 1)]
    for size, part, step in zip(reversed(shape), reversed(wanted), reversed(target.stride()), strict=True):
        start, stop, _ = part.indices(size)
        inner, (low, high), stride = dims[-1]
        if low == 0 and high == inner and (step * width == inner * stride or stop - start == 1):
            dims[-1] = size * inner, (start * inner, stop * inner), stride
        elif stop - start == 1:
            dims[-1] = size * inner, (start * inner + low, start * inner + high), stride
        else:
            dims.append((size, (start, stop), step * width))
    return dims[::-1]


def _pour(data: np.ndarray, offset: int, shape: tuple[int, ...], wanted: tuple[_Span, ...], target: np.ndarray) -> None:
    """Copy whole rows at once; for a row that the data begin or end within, recurse into its own rows."""
    end = offset + len(data)
    first, last = wanted[0]
    row = prod(shape[1:])
    low, high = max(first, -(-offset // row)), min(last, end // row)
    if low < high:
        rows = data[low * row - offset : high * row - offset].reshape(high - low, *shape[1:])
        inner = slice(None), *[slice(*span) for span in wanted[1:]]
        part, into = rows[inner], target[low - first : high - first]
        if (
            part.ndim > 1 and part.size and part.shape[-1] > 1
        ):  # runs of bytes as elements: faster, above all for short runs
            run = np.dtype((np.void, part.shape[-1]))
            part, into = part.view(run), into.view(run)
        into[...] = part
    for number in sorted({offset // row, end // row}):
        start, stop = max(offset, number * row), min(end, (number + 1) * row)
        if first <= number < last and 0 < stop - start < row:
            part = data[start - offset : stop - offset]
            _pour(part, start - number * row, shape[1:], wanted[1:], target[number - first])


class CheckingReader(FileReader):
    """A reader that compares blocks with their digests itself, where it has to know whether they are the right ones."""

    @abstractmethod
    def read_checked(self, offset: int, view: memoryview) -> bool:
        """Fill ``view`` as `read_into` does; tell whether its bytes were compared."""


def read_block(reader: FileReader, offset: int, view: memoryview) -> bool:
    """Fill ``view``; tell whether its bytes were compared with their digests: nothing is hashed twice."""
    if isinstance(reader, CheckingReader):
        return reader.read_checked(offset, view)
    reader.read_into(offset, view)
    return False
