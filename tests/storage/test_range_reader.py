"""The reader that the adapters share: each range is checked, and the object's version after it."""

from __future__ import annotations

import pytest

from holdfast.errors import StorageError, StorageNotFoundError
from holdfast.storage.adapters.common import RangeReader

DATA = bytes(range(100))


def reader(**given):
    arguments = {
        "fetch": lambda offset, nbytes: DATA[offset : offset + nbytes],
        "look": lambda: "version 1",
        "version": "version 1",
    }
    return RangeReader("store://object", len(DATA), **{**arguments, **given})


def read(opened, offset, nbytes):
    target = bytearray(nbytes)
    opened.read_into(offset, memoryview(target))
    return bytes(target)


def test_ranges_of_the_version_that_was_opened_are_read():
    """Any range up to the end of the object; an empty one asks nobody."""
    with reader() as opened:
        assert read(opened, 0, 100) == DATA
        assert read(opened, 97, 3) == DATA[97:]
    assert read(reader(fetch=None, look=None), 100, 0) == b""


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (98, 3), (101, 0)])
def test_a_range_outside_of_the_object_is_refused(offset, nbytes):
    """Without a request."""
    with pytest.raises(StorageError, match="short read of store://object"):
        read(reader(fetch=None), offset, nbytes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fetch": lambda offset, nbytes: DATA[offset : offset + nbytes - 1]}, "short read of store://object: 4 bytes"),
        ({"fetch": lambda offset, nbytes: DATA}, "answers ranges with the whole object"),
        ({"look": lambda: "version 2"}, "it was replaced while it was read; open it again"),
    ],
)
def test_a_wrong_answer_never_reaches_the_caller(given, message):
    """Too few bytes, too many, or bytes of another version."""
    target = bytearray(4)
    with pytest.raises(StorageError, match=message):
        reader(**given).read_into(10, memoryview(target))
    assert bytes(target) == bytes(4)


def test_errors_of_the_client_are_translated():
    """Of the request and of the look after it."""

    def missing(*_):
        raise FileNotFoundError("gone")

    for given in ({"fetch": missing}, {"look": missing}):
        with pytest.raises(StorageNotFoundError, match="cannot read store://object"):
            read(reader(**given), 0, 1)


def test_close_ends_what_the_requests_use_once():
    """An error of the client while it closes is nobody's concern."""
    ended = []

    def end():
        ended.append(1)
        raise OSError("already gone")

    opened = reader(end=end)
    opened.close()
    opened.close()
    assert ended == [1]
