"""A part of a stored array comes out of its bytes, however these are cut."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.state.load.picks import Pick, can_pick, extent

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.complex64)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_part_is_picked_from_pieces_in_any_order(data):
    """Whatever the box, the dtype, the gaps of the target and the pieces: the part is there, and nothing else is."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    wanted = tuple(
        slice(start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True)
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    stored = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    around = torch.zeros([one.stop - one.start + gap for one, gap in zip(wanted, gaps, strict=True)], dtype=dtype)
    inside = tuple(slice(0, one.stop - one.start) for one in wanted)
    assert can_pick(around[inside], dtype)
    pick = Pick(around[inside], tuple(shape), wanted)
    edges = sorted({0, nbytes, *data.draw(st.lists(st.integers(0, nbytes), max_size=6))})
    pieces = data.draw(st.permutations(list(itertools.pairwise(edges))))
    for low, high in pieces:
        pick.take(low, stored.data_ptr() + low, high - low)
    expected = torch.zeros_like(around)
    expected[inside] = stored.view(dtype).view(shape)[wanted]
    assert torch.equal(around.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(4, 1).expand(4, 3),
        torch.zeros(3, 4).T,
        torch.zeros(8)[::2],
        torch.zeros(12).as_strided((3, 4), (2, 1)),
        torch.zeros((4, 3), dtype=torch.float64),
        torch.zeros((4, 3), device="meta"),
        torch.zeros(()),
        torch.zeros(4, 3).to_sparse(),  # has no address, and raises if it is asked for it
    ],
    ids=["expanded", "transposed", "strided", "overlapping", "dtype", "device", "scalar", "sparse"],
)
def test_targets_that_bytes_cannot_be_copied_into(target):
    """Where rows share memory, have holes or another order, where a cast is needed or no row is, torch has to do it."""
    assert not can_pick(target, torch.float32)


def test_where_the_memory_of_a_tensor_ends():
    """The extent goes to the end of the last element, gaps included."""
    assert extent(torch.zeros(4, 6)[:, :2]) == (3 * 6 + 2) * 4
    assert extent(torch.zeros(0, 6)) == 0
    assert extent(torch.zeros(())) == 4
