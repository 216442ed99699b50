"""Reading ahead: what is asked for early is read once, bounded, and never wrong."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.storage.object.object_storage import _MAX_BYTES, _PIECE, Ahead

SIZE = 120 << 20
_PATTERN = bytes(range(251)) * (40 << 10)


def source(begin: int, end: int) -> bytes:
    """Bytes of the object, which is not held whole: a process of tests that holds much is slow to fork."""
    assert end - begin < len(_PATTERN) - 251
    return _PATTERN[begin % 251 : begin % 251 + end - begin]


@pytest.fixture
def reads():
    return []


@pytest.fixture
def ahead(reads):
    def read(offset: int, view: memoryview) -> None:
        reads.append((offset, len(view)))
        view[:] = source(offset, offset + len(view))

    with ThreadPoolExecutor(4) as pool:
        yield Ahead(read, lambda: pool)


def test_what_was_asked_for_is_taken_once(ahead, reads) -> None:
    """Small takes in order are filled from few large reads; what was not asked for is not there."""
    ahead.ask(1000, 20 << 20)
    found = bytearray(1 << 20)
    for start in range(1000, 1000 + (20 << 20), 1 << 20):
        assert ahead.take(start, memoryview(found)) == 1 << 20
        assert found == source(start, start + (1 << 20))
    assert sorted(reads) == [(1000, _PIECE), (1000 + _PIECE, _PIECE), (1000 + 2 * _PIECE, 4 << 20)]
    assert ahead.take(1000, memoryview(found)) == 0
    assert ahead.take(50 << 20, memoryview(found)) == 0


def test_only_the_head_may_be_there(ahead) -> None:
    """The caller reads the rest itself."""
    ahead.ask(0, 1000)
    found = bytearray(3000)
    assert ahead.take(500, memoryview(found)) == 500
    assert found[:500] == source(500, 1000)


def test_memory_is_bounded(ahead, reads) -> None:
    """Hints beyond the bound are not followed; room that is given back is used again."""
    ahead.ask(0, SIZE)
    found = bytearray(_PIECE)
    for start in range(0, _MAX_BYTES, _PIECE):
        assert ahead.take(start, memoryview(found)) == _PIECE
    assert sum(length for _, length in reads) == _MAX_BYTES
    ahead.ask(_MAX_BYTES, _PIECE)
    assert ahead.take(_MAX_BYTES, memoryview(found)) == _PIECE
    assert found == source(_MAX_BYTES, _MAX_BYTES + _PIECE)


def test_a_read_that_fails_is_left_to_the_caller() -> None:
    """No error comes out of a hint: who wants the bytes meets it, or has better luck."""

    def fail(offset: int, view: memoryview) -> None:
        raise OSError("lost")

    with ThreadPoolExecutor(1) as pool:
        ahead = Ahead(fail, lambda: pool)
        ahead.ask(0, 1000)
        assert ahead.take(0, memoryview(bytearray(10))) == 0
        ahead.close()
        assert ahead.take(0, memoryview(bytearray(10))) == 0


def test_threads_that_overlap_never_see_other_bytes(ahead) -> None:
    """Also where the same bytes are taken twice, and buffers are used again at once."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            start = chance.randrange(0, 40 << 20)
            ahead.ask(start, 3 << 20)
            found = bytearray(chance.randrange(1, 2 << 20))
            for begin in (start + chance.randrange(1 << 20), start):
                done = ahead.take(begin, memoryview(found))
                if found[:done] != source(begin, begin + done):
                    wrong.append(begin)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
