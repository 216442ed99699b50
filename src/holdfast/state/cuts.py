"""The boxes that a tensor is stored in. Layers are cut alike, so what is found out about one serves many tensors."""

from __future__ import annotations

from functools import cached_property
from operator import sub

from ..format.boxes import Box, flaw, overlap

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

    def overlaps(self, wanted: Box) -> tuple[tuple[int, Box], ...]:
        """Return the numbers of the boxes that overlap ``wanted``, each with what they have in common."""
        found = self._overlaps.get(wanted)
        if found is None:
            pairs = ((number, overlap(box, wanted)) for number, box in enumerate(self.boxes))
            found = self._overlaps[wanted] = tuple((number, common) for number, common in pairs if common is not None)
        return found

    def make_up(self, wanted: Box) -> bool:
        """Tell whether the boxes make up ``wanted``, each element once, whatever is missing elsewhere."""
        common = [box for _, box in self.overlaps(wanted)]
        moved = [Box(tuple(map(sub, one.start, wanted.start)), one.shape) for one in common]
        return flaw(wanted.shape, moved) is None
