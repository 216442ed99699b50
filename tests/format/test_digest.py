"""Chunk tables, and the digests of files that are made of them."""

from __future__ import annotations

import json
import random
import struct

import pytest
import xxhash

from holdfast.format.digest import (
    CHUNK,
    Digests,
    bytes_digest,
    check_blanks,
    check_object,
    chunk_digests,
    close_by_blanks,
    close_object,
    file_digest,
    num_chunks,
    table_at,
    table_bytes,
)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 17])
def test_table_holds_xxh3_64_little_endian_for_each_chunk(size):
    """The table is what the specification says, computed here in the plainest way."""
    data = random.Random(size).randbytes(size)
    plain = b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(data[at : at + CHUNK])) for at in range(0, size, CHUNK))
    assert chunk_digests(memoryview(data)) == plain
    assert len(plain) == 8 * num_chunks(size)
    assert bytes_digest(data) == file_digest(plain) == f"xxh3:{xxhash.xxh3_128_hexdigest(plain)}"


def test_a_flipped_bit_changes_exactly_its_chunk():
    """Damage is found and placed."""
    data = bytearray(random.Random(1).randbytes(4 * CHUNK))
    before = chunk_digests(data)
    data[2 * CHUNK + 5] ^= 1
    after = chunk_digests(data)
    assert [n for n in range(4) if before[8 * n : 8 * n + 8] != after[8 * n : 8 * n + 8]] == [2]


def test_each_table_is_found_again_in_the_digest_file():
    """Tables follow each other without gaps; that of an empty file is empty, and none is longer than the content."""
    contents = [b"", b"a", random.Random(1).randbytes(2 * CHUNK + 1), b"b" * CHUNK]
    file, offset = b"".join(map(chunk_digests, contents)), 0
    for data in contents:
        assert table_at(file, offset, len(data)) == chunk_digests(data)
        last, offset = offset, offset + table_bytes(len(data))
    assert offset == len(file)
    assert len(table_at(file, last, 9 * CHUNK)) < table_bytes(9 * CHUNK)


def test_digests_that_are_not_there_fit_nothing():
    """A table that is missing, or too short for the chunk, is no proof of it."""
    data = memoryview(random.Random(1).randbytes(2 * CHUNK))
    table = chunk_digests(data)
    assert Digests({"f": table}).fit("f", 0, data)
    assert Digests({"f": table}).fit("f", 1, data[CHUNK:])
    assert not Digests({}).fit("f", 0, data)
    assert not Digests({"f": table[:8]}).fit("f", 0, data)
    assert not Digests({"f": table}).fit("f", 2, data[:CHUNK])


@pytest.mark.parametrize(("close", "check"), [(close_object, check_object), (close_by_blanks, check_blanks)])
def test_a_text_with_its_digest_in_it(close, check):
    """True as it was written, False after any change of it, None for a text that nobody has closed."""
    text = b'{"step":5,"note":"a b"}'
    closed = close(text)
    assert json.loads(closed)["step"] == 5
    assert check(closed) is True
    for plain in (text, text + b"\n", text + b" " * 8):
        assert check(plain) is None
    for at in range(len(text) - 1):
        assert check(closed[:at] + bytes([closed[at] ^ 1]) + closed[at + 1 :]) is False, at
