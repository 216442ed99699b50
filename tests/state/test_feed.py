"""Blocks of a file: what two threads take in turns, and what the storage is told beforehand."""

from __future__ import annotations

from holdfast.state.load.feed import BLOCK, BlockFeed, split
from holdfast.storage.base import FileReader

MIB = 1 << 20


class Reader(FileReader):
    """Writes down the hints."""

    ahead_bytes = 64 * MIB

    def __init__(self) -> None:
        self.size = 0
        self.hints: list[tuple[int, int]] = []

    def read_into(self, offset: int, view: memoryview) -> None:
        raise AssertionError("nothing is read here")

    def will_read(self, offset: int, size: int) -> None:
        self.hints.append((offset, size))

    def close(self) -> None:
        pass


def test_hints_cover_every_block_once_in_ranges_of_one_request() -> None:
    """No hint is larger than the 8 MiB that a storage asks for at once, else each would cost a second, small one."""
    blocks: list[tuple[int, int, int]] = []
    place = 0
    for owner, nbytes in enumerate([3 * MIB + 512, 40 * MIB + 4096, 100, BLOCK, 7 * MIB]):
        split(place, place + nbytes, owner, blocks)
        place += nbytes
    reader = Reader()
    feed = BlockFeed(blocks, reader)
    taken = []
    while (block := feed.take()) is not None:
        taken.append(block)
        assert sum(size for _, size in reader.hints) >= min(place, block[0] + reader.ahead_bytes)
    assert taken == blocks
    assert max(size for _, size in reader.hints) <= 8 * MIB
    ends = [0, *(offset + size for offset, size in reader.hints)]
    assert [offset for offset, _ in reader.hints] == ends[:-1]
    assert ends[-1] == place


def test_hints_leave_gaps_out() -> None:
    """What nobody wants is not announced."""
    blocks: list[tuple[int, int, int]] = []
    split(0, MIB, 0, blocks)
    split(10 * MIB, 11 * MIB, 1, blocks)
    reader = Reader()
    BlockFeed(blocks, reader).take()
    assert reader.hints == [(0, MIB), (10 * MIB, MIB)]
