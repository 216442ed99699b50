"""The boxes that a tensor is stored in. Layers are cut alike, so one `Cuts` serves many tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from operator import sub
from typing import TYPE_CHECKING

import numpy as np

from holdfast.format.boxes import Box, flaw
from holdfast.format.pieces import Boxes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Cuts"]

_FEW = 64  # boxes, and fewer: arrays are slower
_MANY = 1 << 24  # corners that are looked at by arrays
_LIMIT = 1 << 62


class Cuts:
    """A way to cut a tensor into stored boxes.

    Args:
        shape: of the tensor.
        boxes: stored boxes, perhaps not all of the tensor.
    """

    def __init__(self, shape: tuple[int, ...], boxes: Boxes) -> None:
        self.shape, self.boxes = shape, boxes
        self._overlaps: dict[Box, tuple[tuple[int, Box], ...]] = {}

    @classmethod
    def of(cls, shape: tuple[int, ...], boxes: Sequence[Box]) -> Cuts:
        """Return the cuts of a tensor of ``shape`` into single boxes."""
        size = len(boxes), len(shape)
        starts = np.array([box.start for box in boxes], dtype=np.int64).reshape(size)
        return cls(shape, Boxes(starts, np.array([box.shape for box in boxes], dtype=np.int64).reshape(size)))

    def box(self, number: int) -> Box:
        """Return a stored box."""
        return Box(tuple(self.boxes.starts[number].tolist()), tuple(self.boxes.sizes[number].tolist()))

    @cached_property
    def problem(self) -> str | None:
        """Why the boxes do not make up the tensor with each element once; None if they do."""
        if len(self.boxes.starts) > _FEW:
            text = _flaw(self.shape, self.boxes)
            if text is not None:
                return text or None
        return flaw(self.shape, [self.box(number) for number in range(len(self.boxes.starts))])

    @cached_property
    def counts(self) -> list[int]:
        """How many elements each box has."""
        return [prod(size) for size in self.boxes.sizes.tolist()]

    @cached_property
    def counts_array(self) -> NDArray[np.int64]:
        """`counts` as an array; a count beyond 2**62 is cut to that."""
        return np.array([min(count, _LIMIT) for count in self.counts], np.int64)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The first indices behind all boxes."""
        return self.boxes.starts + self.boxes.sizes

    def overlaps(self, wanted: Box) -> tuple[tuple[int, Box], ...]:
        """Return the numbers of the boxes that overlap ``wanted``, each with what they have in common."""
        common = self._overlaps.get(wanted)
        if common is None:
            first = np.array(wanted.start, dtype=np.int64)
            low = np.maximum(self.boxes.starts, first)
            sizes = np.minimum(self._ends, first + np.array(wanted.shape, dtype=np.int64)) - low
            numbers = (sizes > 0).all(axis=1).nonzero()[0]
            rows = zip(numbers.tolist(), low[numbers].tolist(), sizes[numbers].tolist(), strict=True)
            common = tuple([(number, Box(tuple(start), tuple(size))) for number, start, size in rows])
            self._overlaps[wanted] = common
        return common

    def make_up(self, wanted: Box) -> bool:
        """Tell whether the boxes make up ``wanted``, each element once, whatever is missing elsewhere."""
        common = [box for _, box in self.overlaps(wanted)]
        moved = [Box(tuple(map(sub, box.start, wanted.start)), box.shape) for box in common]
        return flaw(wanted.shape, moved) is None


def _flaw(shape: tuple[int, ...], boxes: Boxes) -> str | None:
    """Look for a flaw with arrays: "" if there is none, None if `flaw` has to look."""
    full = (boxes.sizes > 0).all(axis=1)
    starts, sizes = boxes.starts[full], boxes.sizes[full]
    cut = [dim for dim, size in enumerate(shape) if (sizes[:, dim] != size).any()]
    if prod(size + 1 for size in shape) >= _LIMIT or len(starts) << len(cut) > _MANY:
        return None
    if sum(np.multiply.reduce(sizes, axis=1).tolist()) != prod(shape):
        return None  # the message of `flaw` says how many elements
    steps = [prod(shape[dim] + 1 for dim in cut[place + 1 :]) for place in range(len(cut))]
    corners, expected = np.zeros((1, len(starts)), np.int64), np.zeros(1, np.int64)
    signs = np.ones(1, np.int64)
    for dim, step in zip(cut, steps, strict=True):
        low, high = starts[:, dim] * step, (starts[:, dim] + sizes[:, dim]) * step
        corners = np.concatenate([corners + low, corners + high])
        expected = np.concatenate([expected, expected + shape[dim] * step])
        signs = np.concatenate([signs, -signs])
    places, inverse = np.unique(corners, return_inverse=True)
    sums = np.bincount(inverse.reshape(-1), np.repeat(signs, len(starts)), len(places)).astype(np.int64)
    left = np.stack([places, sums], axis=1)[sums != 0]
    order = np.argsort(expected)
    whole = np.stack([expected, signs], axis=1)[order] if prod(shape) else left[:0]
    return "" if np.array_equal(left, whole) else None
