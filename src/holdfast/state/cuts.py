"""The boxes that a tensor is stored in. Layers are cut alike, so what is found out about one serves many tensors."""

from __future__ import annotations

from functools import cached_property
from math import prod
from operator import sub

import numpy as np

from ..format.boxes import Box, flaw

__all__ = ["Cuts"]


class Cuts:
    """What is known of one way to cut a tensor.

    Args:
        shape: of the tensor.
        boxes: stored ones, perhaps not all there are.
    """

    def __init__(self, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> None:
        self.shape, self.boxes = shape, boxes
        self._overlaps: dict[Box, tuple[tuple[int, Box], ...]] = {}

    @cached_property
    def problem(self) -> str | None:
        """Why the boxes do not make up the tensor, each element once; None if they do."""
        return flaw(self.shape, self.boxes)

    @cached_property
    def counts(self) -> list[int]:
        """How many elements each box has."""
        return [prod(box.shape) for box in self.boxes]

    @cached_property
    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """First indices of all boxes, and those behind their last ones: rows of as many numbers as dimensions."""
        size = len(self.boxes), len(self.shape)
        starts = np.array([box.start for box in self.boxes], dtype=np.int64).reshape(size)
        return starts, starts + np.array([box.shape for box in self.boxes], dtype=np.int64).reshape(size)

    def overlaps(self, wanted: Box) -> tuple[tuple[int, Box], ...]:
        """Return the numbers of the boxes that overlap ``wanted``, each with what they have in common."""
        found = self._overlaps.get(wanted)
        if found is None:
            starts, ends = self._edges
            first = np.array(wanted.start, dtype=np.int64)
            low = np.maximum(starts, first)
            sizes = np.minimum(ends, first + np.array(wanted.shape, dtype=np.int64)) - low
            numbers = (sizes > 0).all(axis=1).nonzero()[0]
            rows = zip(numbers.tolist(), low[numbers].tolist(), sizes[numbers].tolist(), strict=True)
            found = tuple([(number, Box(tuple(start), tuple(size))) for number, start, size in rows])
            self._overlaps[wanted] = found
        return found

    def make_up(self, wanted: Box) -> bool:
        """Tell whether the boxes make up ``wanted``, each element once, whatever is missing elsewhere."""
        common = [box for _, box in self.overlaps(wanted)]
        moved = [Box(tuple(map(sub, one.start, wanted.start)), one.shape) for one in common]
        return flaw(wanted.shape, moved) is None
