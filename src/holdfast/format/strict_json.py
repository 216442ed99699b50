"""JSON of untrusted bytes: bounded, without duplicate keys, NaN or depth that overflows a stack."""

from __future__ import annotations

import json
import math
from array import array
from itertools import accumulate
from typing import Any, NoReturn

from holdfast._paused_gc import paused_gc
from holdfast.errors import ConfigError, CorruptCheckpointError

MAX_BYTES = 2 << 30
MAX_DEPTH = 640
"""Nesting of JSON that is read; `codec` needs up to three levels for each of its own 200."""
BIG_INT_BITS = 2048
"""Integers beyond this are written as hex: Python limits decimal digits (at the least to 640), never hex ones."""

_MANY = 1_000_000
_DENSE = 5  # bytes for each list or object in a file that has many: a pair of small numbers takes six
# Brackets become +1 and -1 (as signed bytes); everything else is deleted before.
_MEANINGLESS = bytes({*range(256)} - {*b'[]{}"\\/bfnrtu'})
_SQUARE = bytes.maketrans(b"{}", b"[]")
_STEPS = bytes.maketrans(b"[]", b"\x01\xff")
_LEVELS = 16  # that are counted in this way, the quick one where there are few of them
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))


def dumps(tree: Any) -> bytes:
    """Write a JSON-able tree (from `codec.encode`) as compact UTF-8."""
    try:
        return _UNICODE.encode(tree).encode()
    except UnicodeEncodeError:
        # Lone surrogates have no UTF-8 form; as \\uXXXX escapes they survive.
        return _ASCII.encode(tree).encode()
    except ValueError:
        # An integer beyond Python's digit limit that did not come through `codec.encode`.
        return _ASCII.encode(_tame(tree)).encode()


def _tame(tree: Any) -> Any:
    kind = type(tree)
    if kind is dict:
        return {key: _tame(item) for key, item in tree.items()}
    if kind is list or kind is tuple:
        return [_tame(item) for item in tree]
    return encode_big_int(tree) if kind is int and tree.bit_length() > BIG_INT_BITS else tree


def encode_big_int(value: int) -> dict[str, str]:
    """Return the node of an integer that is too long for decimal digits."""
    return {"$": "bigint", "v": hex(value)}


def check_length(value: Any, name: str) -> None:
    """Check that a metric is no integer of so many digits that Python does not write it.

    Raises:
        ConfigError: it is.
    """
    if type(value) is int and value.bit_length() > BIG_INT_BITS:
        raise ConfigError(
            f"metric {name!r} is an integer of {value.bit_length()} bits, and a metric has {BIG_INT_BITS} at most: "
            "give a float (its logarithm), or put it into the state"
        )


def loads(
    data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH, where: str = "JSON"
) -> Any:
    """Read JSON.

    Args:
        data: UTF-8.
        max_bytes: longer input is refused.
        max_depth: deeper nesting is refused, before any parser recurses.
        where: name of the file, for messages.

    Raises:
        CorruptCheckpointError: the input is not strict JSON within the bounds.
    """
    if len(data) > max_bytes:
        raise _corrupt(where, f"{len(data)} bytes are more than the {max_bytes} that such a file may have")
    data = bytes(data)
    check_depth(data, max_depth=max_depth, where=where)
    if len(data) > _MANY and (num := data.count(b"[") + data.count(b"{")) > max(_MANY, len(data) // _DENSE):
        num = sum(map(_outside_strings(data).count, (b"[", b"{")))
        if num > max(_MANY, len(data) // _DENSE):
            raise _corrupt(where, f"{num} lists and objects in {len(data)} bytes, of which each takes fifty in memory")
    try:
        with paused_gc():
            return _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise _corrupt(where, f"not the JSON that was written ({error})") from error


def check_depth(data: bytes, *, max_depth: int, where: str) -> None:
    """Refuse JSON that nests too deep, before any parser recurses.

    Raises:
        CorruptCheckpointError: it nests deeper than ``max_depth``.
    """
    # No more brackets than levels: nothing to measure (small files, the usual case).
    if data.count(b"[") + data.count(b"{") > max_depth and (depth := _depth(data)) > max_depth:
        raise _corrupt(where, f"nested {depth} levels deep, at most {max_depth} are read")


def _corrupt(where: str, problem: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{where}: {problem}: this checkpoint is damaged; use another one", file=where)


def _depth(data: bytes) -> int:
    """Return how deep brackets nest outside of strings, in linear time and without recursion."""
    left, levels = _outside_strings(data).translate(_SQUARE), 0
    while left and levels < _LEVELS:  # without the innermost pairs all is one level less deep
        before, left = left, left.replace(b"[]", b"")
        if len(left) == len(before):
            break
        levels += 1
    return levels + max(accumulate(array("b", left.translate(_STEPS))), default=0)


def _outside_strings(data: bytes) -> bytes:
    if b"\\" in data:
        # First without letters that mean nothing here: half of the time. All that may follow a backslash stays, so it
        # escapes what it did; where something else follows one, the parser stops before it can come to what is behind.
        data = data.translate(None, _MEANINGLESS)
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    data = data.translate(None, _NOT_STRUCTURE)
    bare = data.replace(b'""', b"")  # strings without brackets, unless there is one with
    return bare if b'"' not in bare else b"".join(data.split(b'"')[::2])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:100]!r} occurs twice in one object")
    return tree


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


# Made once, not for each of 10 000 small files.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant)
_UNICODE, _ASCII = (
    json.JSONEncoder(ensure_ascii=ascii_only, allow_nan=False, check_circular=False, separators=(",", ":"))
    for ascii_only in (False, True)
)
