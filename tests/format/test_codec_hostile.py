"""Bytes that no writer of ours made give CorruptCheckpointError, or a value; never anything else."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import math
import pathlib
import random

import pytest

from holdfast.errors import CorruptCheckpointError
from holdfast.format.codec import decode, dumps, encode, loads

# One value of every kind of node.
VALUES = [
    None,
    [1, 2.5, "text", True],
    math.nan,
    10**700,
    1 + 2j,
    "\ud800",
    b"bytes",
    bytearray(b"x"),
    (1, (2,)),
    range(3),
    slice(1, 2),
    {"$": 1},
    {1: "a", (1, "b"): 2},
    collections.OrderedDict(a=1),
    collections.defaultdict(list, a=[1]),
    collections.Counter("aab"),
    collections.deque([1], maxlen=2),
    {1, 2},
    frozenset({"a"}),
    collections.namedtuple("Point", "x y")(1, 2),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "X")),
    dt.date(2024, 1, 1),
    dt.time(1, 2),
    dt.timedelta(1, 2, 3),
    pathlib.Path("/a"),
    pathlib.PureWindowsPath("C:/"),
]

BAD_NODES = [
    {"$": 1},
    {"$": "tuple"},
    {"$": "tuple", "v": 1},
    {"$": "dict", "v": [[1]]},
    {"$": "dict", "v": [[1, 2], [1, 3]]},
    {"$": "dict", "v": [[[], 1]]},
    {"$": "set", "v": [[]]},
    {"$": "bigint", "v": "x"},
    {"$": "float", "v": "zz"},
    {"$": "float", "v": "00"},
    {"$": "bytes", "v": "?"},
    {"$": "bytes", "v": "YQ"},
    {"$": "ddict", "f": "eval", "v": []},
    {"$": "namedtuple", "n": "X", "f": ["__class__"], "v": [1]},
    {"$": "namedtuple", "n": "X", "f": ["a"], "v": []},
    {"$": "namedtuple", "n": "import os", "f": [], "v": []},
    {"$": "namedtuple", "n": "X", "f": ["_make"], "v": [1]},
    {"$": "namedtuple", "n": "X", "f": ["a", "a"], "v": [1, 2]},
    {"$": "namedtuple", "n": "X", "f": [[1]], "v": [1]},
    {"$": "deque", "m": -1, "v": []},
    {"$": "range", "v": [1, 2, 0]},
    {"$": "range", "v": ["1"]},
    {"$": "datetime", "v": ["x", 0, None]},
    {"$": "timedelta", "v": [10**30, 0, 0]},
    {"$": "timezone", "v": [9, 0, 0]},
    {"$": "zoneinfo", "v": "../../etc/passwd"},
    {"$": "zoneinfo", "v": "No/Where"},
    {"$": "zoneinfo", "v": "America"},
    {"$": "path", "v": ["x", "y"]},
    {"$": "path", "v": 3},
    {"$": "npscalar", "v": ["O", {"$": "bytes", "v": "AAAAAAAAAAA="}]},
    {"$": "npscalar", "v": ["<f8", "abc"]},
    {"$": "npscalar", "v": ["<f8", {"$": "bytes", "v": "AAAA"}]},
    {"$": "str", "v": "c3"},
    {"$": "complex", "v": [1, 2, 3]},
]


@pytest.mark.parametrize("node", BAD_NODES, ids=repr)
def test_malformed_nodes_are_corruption(node):
    """A node that does not hold what its tag says is CorruptCheckpointError, with the file's name."""
    with pytest.raises(CorruptCheckpointError, match=r"state\.json") as caught:
        decode({"a": [node]}, where="state.json")
    assert caught.value.file == "state.json"


def test_keys_of_one_hash_do_not_take_for_ever():
    """Whole numbers may be chosen so that all of them have one hash: a set of them is refused, not built."""
    numbers = [{"$": "bigint", "v": hex(number * (2**61 - 1))} for number in range(1, 3000)]
    with pytest.raises(CorruptCheckpointError, match="with the same hashes"):
        decode({"$": "set", "v": numbers})
    assert len(decode({"$": "set", "v": list(range(3000))})) == 3000


def _fuzz(cases, seed):
    rng = random.Random(seed)
    good = dumps(encode({str(number): value for number, value in enumerate(VALUES)}))
    small = [dumps(encode(value)) for value in VALUES]
    alphabet = b'{}[]",:0123456789.eE+-\\u$vntruefalsnl \x00\xff'
    for _ in range(cases):
        data = bytearray(rng.choice(small) if rng.random() < 0.9 else good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(data) + 1)
            choice = rng.random()
            if choice < 0.4:
                data[at : at + 1] = bytes([rng.choice(alphabet)])
            elif choice < 0.6:
                data[at:] = b""
            elif choice < 0.8:
                other = rng.choice(small)
                data[at:at] = other[rng.randrange(len(other)) :]
            else:
                data[at:at] = rng.randbytes(4)
        with contextlib.suppress(CorruptCheckpointError):  # anything else fails the test
            decode(loads(bytes(data)))


def test_damaged_bytes_give_corruption_or_a_value():
    """No mutation of good bytes makes any other exception; 500 cases."""
    _fuzz(500, 1)


@pytest.mark.slow
def test_damaged_bytes_give_corruption_or_a_value_at_length():
    """No mutation of good bytes makes any other exception; 10 000 cases."""
    _fuzz(10_000, 2)
