"""Tensors spread over ranks: any layout is saved without a word between ranks and read by any other, bit for bit."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mesh_kit import Layout, load_ranks, playing, save_ranks
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from holdfast.format.division import Box, flaw
from holdfast.format.index import Piece
from holdfast.state.load import targets
from holdfast.state.load import targets as targets_module
from holdfast.state.load.reader import read_tensors
from holdfast.state.load.restore import load_state
from holdfast.state.load.targets import spans
from holdfast.state.tree.arrays import local_tensor
from holdfast.state.tree.sharded import Cut, held, local_parts
from holdfast.storage import MemoryStorage

_numbers = itertools.count()


@st.composite
def layouts(draw, dims):
    """Draw a mesh of up to two dimensions, and placements for a tensor of so many."""
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (2, 2), (3, 2), (1, 3), (2, 3)]))
    kinds = [st.just("R")]
    if dims:
        kinds.append(st.integers(0, dims - 1))
        kinds.append(st.tuples(st.just("S"), st.integers(0, dims - 1), st.integers(2, 3)))
    return Layout(mesh, [draw(st.one_of(kinds)) for _ in mesh])


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    return shape, draw(layouts(len(shape))), draw(layouts(len(shape)))


def oracle(shape, layout, coordinate):
    """Return the indices, in a flattened tensor, of what one place in the mesh holds: NumPy alone."""
    local = np.arange(int(np.prod(shape))).reshape(shape)

    def chunk(array, parts, number, dim):
        full = -(-array.shape[dim] // parts)
        picked = range(min(full * number, array.shape[dim]), min(full * (number + 1), array.shape[dim]))
        return np.take(array, list(picked), axis=dim)

    for parts, placement, number in zip(layout.mesh, layout.placements, coordinate, strict=True):
        if placement == "R":
            continue
        dim, factor = (placement, 1) if isinstance(placement, int) else placement[1:]
        pieces = [chunk(local, factor, one, dim) for one in range(factor)]
        local = np.concatenate([chunk(piece, parts, number, dim) for piece in pieces], axis=dim)
    return local


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_layout_to_any_layout(case):
    """What ranks of one mesh saved, ranks of another read: exactly the elements NumPy says are theirs."""
    shape, one, other = case
    count = int(np.prod(shape))
    values = torch.arange(count, dtype=torch.float32).reshape(shape)
    found = []
    storage = save_ranks(one.world, lambda _: {"w": one.shard(values), "n": 1}, keep=found)
    assert torch.equal(load_state(storage).state["w"], values)
    assert sum(layout.tensor_bytes for layout in found) == 4 * count  # each element once
    plain = torch.full(shape, -1.0)
    load_state(storage, {"w": plain, "n": 1})
    assert torch.equal(plain, values)

    def check(_, state):
        coordinate = state["w"].device_mesh.get_coordinate()
        expected = oracle(shape, other, coordinate).astype(np.float32)
        assert np.array_equal(local_tensor(state["w"]).numpy(), expected)

    load_ranks(storage, other.world, lambda _: {"w": other.shard(torch.full(shape, -1.0)), "n": 1}, check)


@given(cases(), st.data())
def test_boxes_are_those_of_the_oracle(case, data):
    """Shape and boxes from cuts alone are what NumPy splits, wherever in the mesh."""
    shape, layout, _ = case
    coordinate = [data.draw(st.integers(0, size - 1)) for size in layout.mesh]
    cuts = []
    for placement, parts, number in zip(layout.placements, layout.mesh, coordinate, strict=True):
        if placement != "R":
            dim, factor = (placement, 1) if isinstance(placement, int) else placement[1:]
            cuts.append(Cut(dim, parts, number, factor))
    local_shape, parts = held(shape, tuple(cuts))
    expected = oracle(shape, layout, coordinate)
    assert local_shape == expected.shape
    whole, filled = np.arange(int(np.prod(shape))).reshape(shape), np.full(local_shape, -1)
    for box, at in parts:
        source = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
        target = tuple(slice(start, start + size) for start, size in zip(at, box.shape, strict=True))
        filled[target] = whole[source]
    assert np.array_equal(filled, expected)


@given(cases(), st.data())
def test_torch_tells_the_same_offset(case, data):
    """The first box begins where torch's own metadata says, for placements that torch cuts without strides."""
    shape, layout, _ = case
    rank = data.draw(st.integers(0, layout.world - 1))
    with playing(rank, layout.world):
        one = layout.shard(torch.zeros(shape))
        local_shape, offset = compute_local_shape_and_global_offset(one.shape, one.device_mesh, one.placements)
        parts = local_parts(one)
    assert tuple(local_shape) == tuple(local_tensor(one).shape)
    if parts:
        assert parts[0][0].start == tuple(offset)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_small_reads_make_up_any_box(data):
    """However a stored box is cut into reads, direct or by a detour, exactly the wanted elements arrive."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    spot = [sorted((data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1)))) for size in shape]
    wanted = Box(tuple(low for low, _ in spot), tuple(high - low + 1 for low, high in spot))
    strided = data.draw(st.booleans())
    target = torch.zeros((*wanted.shape, 2) if strided else wanted.shape, dtype=torch.int16)
    place = target[..., 0] if strided else target
    storage = MemoryStorage(f"spans-{next(_numbers)}")
    storage.put("file", b"head" + values.numpy().tobytes())
    piece = Piece("file", 4, values.numel() * 2)
    box = Box((0,) * len(shape), shape)
    sizes = {"_GAP": data.draw(st.sampled_from([1, 8, 40, 1 << 20])), "BATCH": data.draw(st.sampled_from([4, 16, 64]))}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(targets_module, name, size)
        requests = list(spans("w", piece, box, wanted, place, torch.int16))
    read_tensors(storage, requests, None)
    assert torch.equal(place, values[tuple(slice(low, high + 1) for low, high in spot)])


def test_reads_along_the_first_dimension_are_little_more_than_what_is_needed():
    """Digests are checked by 64 KiB at both ends of a range, and nothing else is read beside it."""
    values = torch.randn(2048, 2048)  # 16 MiB
    storage = MemoryStorage("amplification")
    save_ranks(4, lambda _: {"w": Layout((4,), (0,)).shard(values)}, storage=storage)
    for world in (1, 2, 3, 8):
        layout = Layout((world,), (0,))
        for rank in range(world):
            with playing(rank, world):
                live = layout.shard(torch.zeros_like(values))
                read = load_state(storage.child("one"), {"w": live}, rank=rank).bytes_read
                assert read <= 1.10 * local_tensor(live).nbytes


def by_arrays(shape, boxes):
    """Ask the arrays: nothing is wrong, or look yourself."""
    return targets._flaw(shape, targets.Cuts.of(shape, boxes).boxes)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_boxes_that_do_not_make_up_the_whole_are_found(data):
    """Boxes cut out of a tensor make it up; without one of them, with one twice, or with one moved they do not."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        start, size = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1)) if shape else 0
        at = data.draw(st.integers(0, size[dim])) if shape else 0
        low, high = list(size), list(size)
        moved = list(start)
        if shape:
            low[dim], high[dim], moved[dim] = at, size[dim] - at, start[dim] + at
            boxes += [Box(start, tuple(low)), Box(tuple(moved), tuple(high))]
        else:
            boxes.append(Box(start, size))
    assert flaw(shape, boxes) is None
    assert by_arrays(shape, boxes) == ""
    full = [number for number, box in enumerate(boxes) if all(box.shape)]
    chosen = data.draw(st.sampled_from(full))
    rest = boxes[:chosen] + boxes[chosen + 1 :]
    assert "missing" in flaw(shape, rest)
    assert "twice" in flaw(shape, [*boxes, boxes[chosen]])
    assert by_arrays(shape, rest) is by_arrays(shape, [*boxes, boxes[chosen]]) is None
    other = data.draw(st.sampled_from(full))
    if boxes[other].shape == boxes[chosen].shape and other != chosen:
        assert "missing and as many are stored twice" in flaw(shape, [*rest, boxes[other]])
        assert by_arrays(shape, [*rest, boxes[other]]) is None


def test_a_range_that_two_boxes_want_is_read_once():
    """A rank whose columns lie apart reads the rows that hold both parts once."""
    values = torch.randn(512, 64)
    storage = MemoryStorage("once")
    save_ranks(1, lambda _: {"w": values}, storage=storage)
    layout = Layout((2,), (("S", 1, 2),))
    with playing(0, 2):
        live = layout.shard(torch.zeros_like(values))
        assert len(local_parts(live)) == 2
        read = load_state(storage.child("one"), {"w": live}).bytes_read
    assert torch.equal(local_tensor(live), torch.cat([values[:, :16], values[:, 32:48]], 1))
    assert read <= values.nbytes + 2 * 65536


@pytest.mark.parametrize("placement", [0, 1, ("S", 0, 2), ("S", 1, 2)])
def test_boxes_stream_through_a_small_arena(placement):
    """With bounded memory, boxes that are no one piece of memory come out the same."""
    values = torch.randn(1500, 1024)  # each rank holds more than two windows of 1 MiB
    storage = save_ranks(2, lambda _: {"w": Layout((2,), (placement,)).shard(values)}, max_staging_bytes=2 << 20)
    assert torch.equal(load_state(storage).state["w"], values)


def test_no_rank_has_more_in_memory_than_it_holds():
    """Nobody gathers: what each rank copies aside for a save, rank 0 as well, is its own boxes and little more."""
    values = torch.randn(1024, 1024)  # 4 MiB, 1 MiB on each rank
    found = []
    save_ranks(4, lambda _: {"w": Layout((4,), (0,)).shard(values), "n": 1}, keep=found)
    assert all(layout.tensor_bytes == 1 << 20 for layout in found)
    assert all(layout.arena_bytes <= (1 << 20) + (64 << 10) for layout in found)
