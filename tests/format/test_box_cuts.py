"""Boxes of tensors, against arrays that count how often each element is covered."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.division import Box, flaw, overlap

SHAPE = (4, 3)
BOX = st.tuples(*(st.integers(0, size) for size in SHAPE)).flatmap(
    lambda start: st.tuples(*(st.integers(0, size - at) for at, size in zip(start, SHAPE, strict=True))).map(
        lambda shape: Box(start, shape)
    )
)


def counted(*boxes: Box) -> np.ndarray:
    """Count how many boxes hold each element."""
    count = np.zeros(SHAPE, int)
    for box in boxes:
        count[tuple(slice(at, at + size) for at, size in zip(box.start, box.shape, strict=True))] += 1
    return count


@settings(max_examples=200)
@given(BOX, BOX)
def test_what_two_boxes_share(one: Box, other: Box) -> None:
    """The box of the common elements; nothing where they only touch, or one of them is empty."""
    both = counted(one) * counted(other)
    shared = overlap(one, other)
    assert (shared is None) == (not both.any())
    if shared is not None:
        assert (counted(shared) == both).all()


@settings(max_examples=200)
@given(st.lists(BOX, max_size=4))
def test_each_element_once(boxes: list[Box]) -> None:
    """No flaw if, and only if, each element lies in one box; what is left is filled up by single elements."""
    assert (flaw(SHAPE, boxes) is None) == bool((counted(*boxes) == 1).all())
    rest = [Box(place, (1, 1)) for place in np.ndindex(*SHAPE) if counted(*boxes)[place] == 0]
    assert (flaw(SHAPE, [*boxes, *rest]) is None) == bool((counted(*boxes) <= 1).all())


def test_as_many_missing_as_doubled() -> None:
    """The number of elements alone is no proof."""
    assert "some of its elements" in (flaw((4,), [Box((0,), (2,)), Box((1,), (2,))]) or "")
    assert flaw((0, 5), []) is None
