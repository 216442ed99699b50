"""Who reads which block: all ranks work it out alike."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.manifest import FileEntry
from holdfast.state.load.shared_blocks import ChunkNumbers

MIB = 1 << 20


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_division_is_even_and_complete(data):
    """Every block that several ranks want has one owner among them, all agree, and the work is even."""
    sizes = {"a": data.draw(st.integers(1, 40 * MIB)), "b": data.draw(st.integers(1, 9 * MIB))}
    numbers = ChunkNumbers(
        [FileEntry(path=path, size=size, digest="xxh3:0", role="tensors") for path, size in sizes.items()]
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    world = data.draw(st.integers(2, 5))
    share = data.draw(st.floats(0.0, 1.0))
    wants = [(torch.rand(numbers.total, generator=generator) < share).to(torch.uint8) for _ in range(world)]
    blocks = numbers.divide(wants)
    assert [block.number for block in blocks] == list(range(len(blocks)))
    turns = [[block.turn for block in blocks if block.owner == rank] for rank in range(world)]
    assert all(row == list(range(len(row))) for row in turns)
    for block in blocks:
        first = numbers.first[block.file] + block.offset // 65536
        rows = [one[first : first + 32] for one in wants]
        assert block.takers == tuple(rank for rank in range(world) if rows[rank].any())
        assert block.owner in block.takers
        assert len(block.takers) > 1
        assert block.chunks == tuple(torch.stack(rows).any(0).nonzero().flatten().tolist())
