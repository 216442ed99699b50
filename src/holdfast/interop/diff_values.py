"""Values of two tensors, compared window by window: counts, norms, places."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from holdfast.state.tree import arrays

from .blobs import Blob
from .diff import CheckpointContents, CheckpointDifference, Leaf, TensorChange, Tolerance
from .source import OpenedCheckpoint

__all__ = ["compare_values"]

_AT_ONCE = 1 << 18  # elements: their differences fit into the cache of a core
_Array = Any  # np.ndarray of one dimension
_NUMBERS = "biufc"


def compare_values(
    difference: CheckpointDifference,
    contents_a: CheckpointContents,
    contents_b: CheckpointContents,
    pairs: Sequence[tuple[str, Leaf, Leaf]],
    tolerance: Tolerance,
    progress: Callable[[int], object],
) -> None:
    """Read tensors of equal shape from both checkpoints, and add the differences to ``difference``.

    Args:
        difference: receives the changes, and the number of bytes read.
        contents_a: first checkpoint.
        contents_b: second checkpoint.
        pairs: path, and the leaf in each checkpoint.
        tolerance: how far numbers may lie apart.
        progress: called with the bytes of ``contents_a`` just compared.

    Raises:
        CorruptCheckpointError: bytes differ from their digests.
    """
    places = (side.checkpoint.storage.child(side.checkpoint.directory) for side in (contents_a, contents_b))
    left_storage, right_storage = places
    with OpenedCheckpoint(left_storage) as left, OpenedCheckpoint(right_storage) as right:
        for path, before, after in pairs:
            sides = left.named(before.value), right.named(after.value)
            kinds = (before.dtype, after.dtype)
            tally = _Tally(tolerance)
            for values_a, values_b, nbytes in _windows(*sides, kinds):
                tally.add(values_a, values_b)
                progress(nbytes)
            difference.bytes_read += sides[0].nbytes + sides[1].nbytes
            dtypes = (before.dtype or sides[0].dtype, after.dtype or sides[1].dtype)
            if tally.differing or dtypes[0] != dtypes[1]:
                difference.tensors.append(tally.change(path, dtypes, sides[0].shape))
            elif tally.close:
                difference.within.append(path)


class _Tally:
    """Sums up the differences of one tensor."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.seen = self.differing = self.not_finite = self.close = 0
        self.squares = self.before = 0.0
        self.largest = -1.0
        self.place: int | None = None
        self.values: tuple[Any, Any] | None = None

    def add(self, a: _Array, b: _Array) -> None:
        """Count the next elements of both sides."""
        start, self.seen = self.seen, self.seen + len(a)
        with np.errstate(all="ignore"):
            self.before += _squares(_magnitude(a))
            unequal = a != b
            if a.dtype.kind in "fc" or b.dtype.kind in "fc":
                unequal &= ~(np.isnan(a) & np.isnan(b))
            if not unequal.any():
                return
            apart = np.where(unequal, _distance(a, b), 0.0)
            finite = np.isfinite(apart)
            allowed = self.tolerance.absolute + self.tolerance.relative * _magnitude(a)
            differs = unequal & ~(finite & (apart <= allowed)) if self.tolerance != Tolerance() else unequal
        self.close += int(np.count_nonzero(unequal))
        self.differing += int(np.count_nonzero(differs))
        if not finite.all():
            self.not_finite += int(np.count_nonzero(~finite))
            if self.values is None:
                self._at(int(np.argmin(finite)), start, a, b)
            apart = np.where(finite, apart, 0.0)
        self.squares += _squares(apart)
        most = int(np.argmax(apart))
        if apart[most] > max(self.largest, 0.0) or (self.values is None and apart[most] == 0.0):
            # Integers beyond 2 ** 53 may differ where their difference as floats is 0.
            most = most if apart[most] else int(np.argmax(unequal))
            self.largest = float(apart[most])
            self._at(most, start, a, b)

    def _at(self, number: int, start: int, a: _Array, b: _Array) -> None:
        self.place, self.values = start + number, (a[number].item(), b[number].item())

    def change(self, path: str, dtypes: tuple[str, str], shape: tuple[int, ...]) -> TensorChange:
        """Return the sums as a `TensorChange`."""
        elements = math.prod(shape)
        norm, before = math.sqrt(self.squares), math.sqrt(self.before)
        place = self.place
        if place is not None and elements and self.seen != elements:
            place = place * elements // self.seen  # counted in bytes
        return TensorChange(
            name=path,
            dtype=dtypes,
            shape=(shape, shape),
            elements=elements,
            differing=min(self.differing, elements),
            norm=norm,
            relative=norm / before if before and math.isfinite(before) else None,
            largest=max(self.largest, 0.0),
            at=None if place is None else tuple(map(int, np.unravel_index(place, shape))) if shape else (),
            values=self.values,
            not_finite=self.not_finite,
        )


def _squares(values: _Array) -> float:
    finite = values if np.isfinite(values).all() else np.where(np.isfinite(values), values, 0.0)
    return float(finite @ finite)


def _magnitude(values: _Array) -> _Array:
    return np.abs(values if values.dtype.kind == "c" else values.astype(np.float64))


def _distance(a: _Array, b: _Array) -> _Array:
    """Return |a - b| as float64; of integers without overflow."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        above = np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)
        return above.astype(np.float64)
    wide = np.complex128 if "c" in a.dtype.kind + b.dtype.kind else np.float64
    return np.abs(a.astype(wide) - b.astype(wide))


def _windows(blob_a: Blob, blob_b: Blob, kinds: tuple[str | None, str | None]) -> Iterator[tuple[_Array, _Array, int]]:
    """Yield equally many elements of both sides as NumPy arrays, and how many bytes of the first these are."""
    sides = [_Elements(blob, kind) for blob, kind in zip((blob_a, blob_b), kinds, strict=True)]
    if sides[0].is_bytes != sides[1].is_bytes:  # NumPy can compute with only one of the dtypes
        sides = [_Elements(blob, None, as_bytes=True) for blob in (blob_a, blob_b)]
    while not (sides[0].is_over() or sides[1].is_over()):
        count = min(side.left for side in sides)
        first, second = (side.take(count) for side in sides)
        yield first, second, count * sides[0].width


class _Elements:
    """Elements of a tensor in the order of rows, a few at a time, in a dtype that NumPy computes with."""

    def __init__(self, blob: Blob, array_dtype: str | None, *, as_bytes: bool = False) -> None:
        self._parts = blob.parts()
        self._view = memoryview(b"")
        self._at = 0
        self._torch: torch.dtype | None = None
        self.is_bytes = as_bytes
        dtype = None if array_dtype is None else np.dtype(array_dtype)
        if as_bytes:
            dtype = np.dtype(np.uint8)
        elif dtype is not None:
            if dtype.kind in "mM":
                dtype = np.dtype(f"{dtype.byteorder.replace('|', '=')}i8")
            self.is_bytes = dtype.kind not in _NUMBERS
        else:
            dtype, self._torch = _numpy_of(blob.dtype)
            self.is_bytes = dtype is None
        self._dtype = np.dtype(np.uint8) if dtype is None or self.is_bytes else dtype
        self.width = self._torch.itemsize if self._torch is not None else self._dtype.itemsize

    @property
    def left(self) -> int:
        """The most elements that `take` can return at once."""
        return min(_AT_ONCE, (len(self._view) - self._at) // self.width)

    def is_over(self) -> bool:
        """Tell whether there are no more."""
        while self._at >= len(self._view):
            view = next(self._parts, None)
            if view is None:
                return True
            self._view, self._at = view, 0
        return False

    def take(self, count: int) -> _Array:
        """Return the next elements; valid until the next call."""
        view = self._view[self._at : self._at + count * self.width]
        self._at += len(view)
        if self._torch is not None:
            wide = torch.complex64 if self._torch.is_complex else torch.float32
            return torch.frombuffer(view, dtype=torch.uint8).view(self._torch).to(wide).numpy()
        values = np.frombuffer(view, self._dtype)
        return values if self._dtype.isnative else values.astype(self._dtype.newbyteorder("="))


def _numpy_of(name: str) -> tuple[Any, torch.dtype | None]:
    """Return the dtype NumPy computes with, and torch's dtype if torch has to convert; (None, None) if neither can."""
    if name in ("float16", "float32", "float64", "complex64", "complex128", "bool") or "int" in name[:4]:
        try:
            return np.dtype(name), None
        except TypeError:
            return None, None
    dtype = arrays.dtype_of(name)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).to(wide)
    except (RuntimeError, TypeError):
        return None, None
    return np.dtype(np.complex64 if dtype.is_complex else np.float32), dtype
