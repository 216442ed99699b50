"""Scalar values that JSON does not have: how each type is encoded and decoded.

Modules (datetime, pathlib, numpy) are imported only when a value of theirs occurs; a type can only be met in a state
if its module is loaded, so `sys.modules` answers without importing.
"""

from __future__ import annotations

import binascii
import math
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

from holdfast._outgoing import brief
from holdfast.errors import UnsupportedStateError

__all__ = [
    "DECODERS",
    "describe",
    "encode_float",
    "encode_numpy",
    "encode_scalar",
    "encode_text",
    "is_scalar",
    "is_text",
]

Encode = Callable[[Any, str], Any]
"""Encodes a value that stands at a path."""

_NUMPY_DTYPE = re.compile(r"[<>|=]?(?:[biufc][0-9]{1,2}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)")
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(?:/[A-Za-z0-9_+-]+)*")


def is_text(value: str) -> bool:
    """Tell whether a string has a UTF-8 form (a string with surrogates has none)."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_text(value: str) -> Any:
    """Encode a string; a string with surrogates by its bytes, since JSON would join two halves into one character."""
    return value if is_text(value) else {"$": "str", "v": value.encode("utf-8", "surrogatepass").hex()}


def encode_float(value: float) -> Any:
    """Encode a float; NaN with all its bits."""
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    return {"$": "float", "v": _SPECIAL_BITS.get(bits) or bits.hex()}


_SPECIAL_BITS = {struct.pack(">d", number): name for name, number in
                 (("inf", math.inf), ("-inf", -math.inf), ("nan", math.nan))}  # fmt: skip
_SPECIALS = {name: bits for bits, name in _SPECIAL_BITS.items()}


def _decode_float(text: str) -> float:
    bits = _SPECIALS.get(text) or bytes.fromhex(text)
    return float(struct.unpack(">d", bits)[0])


def _base64(data: Any) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _unbase64(text: str) -> bytes:
    # binascii skips characters that do not belong; a stored value has none.
    data = binascii.a2b_base64(text.encode("ascii"))
    if _base64(data) != text:
        raise ValueError("malformed base64")
    return data


def _decode_zone(key: str) -> Any:
    from zoneinfo import ZoneInfo

    if not _ZONE.fullmatch(key):
        raise ValueError(f"{key[:80]!r} is no time zone")
    return ZoneInfo(key)


def _decode_timezone(parts: list[Any]) -> Any:
    from datetime import timedelta, timezone

    offset = timedelta(*_ints(parts[:3]))
    return timezone(offset) if len(parts) == 3 else timezone(offset, parts[3])


def _decode_datetime(parts: list[Any]) -> Any:
    from datetime import datetime

    text, fold, zone = parts
    return datetime.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _decode_time(parts: list[Any]) -> Any:
    from datetime import time

    text, fold, zone = parts
    return time.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _decode_date(text: str) -> Any:
    from datetime import date

    return date.fromisoformat(text)


def _decode_timedelta(parts: list[Any]) -> Any:
    from datetime import timedelta

    return timedelta(*_ints(parts))


def _decode_path(parts: list[str]) -> Any:
    import pathlib

    kind, text = parts
    return {"path": pathlib.Path, "posix": pathlib.PurePosixPath, "windows": pathlib.PureWindowsPath}[kind](text)


def _decode_numpy(parts: list[Any]) -> Any:
    import numpy as np

    name, data = parts
    if name == "U":
        return np.str_(data)
    if name == "S":
        return np.bytes_(data)
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"{brief(name, 40)!r} is no dtype of a stored NumPy number")
    dtype = np.dtype(name)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes do not make one {name}")
    return np.frombuffer(data, dtype)[0]


def _ints(parts: list[Any]) -> list[int]:
    if not all(type(part) is int for part in parts):
        raise TypeError("whole numbers were expected")
    return parts


DECODERS: dict[str, Any] = {
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "float": _decode_float,
    "complex": lambda parts: complex(*map(float, parts)),
    "bytes": _unbase64,
    "bytearray": lambda text: bytearray(_unbase64(text)),
    "bigint": lambda text: int(text, 16),
    "range": lambda parts: range(*_ints(parts)),
    "slice": lambda parts: slice(*parts),
    "datetime": _decode_datetime,
    "date": _decode_date,
    "time": _decode_time,
    "timedelta": _decode_timedelta,
    "timezone": _decode_timezone,
    "zoneinfo": _decode_zone,
    "path": _decode_path,
    "npscalar": _decode_numpy,
}
"""By tag: makes a value from the decoded ``"v"`` of its node."""


def _complex(value: complex, encode: Encode, path: str) -> Any:
    return "complex", [encode_float(value.real), encode_float(value.imag)]


def _bytes(value: bytes, encode: Encode, path: str) -> Any:
    return type(value).__name__, _base64(value)


def _span(value: Any, encode: Encode, path: str) -> Any:
    parts = [value.start, value.stop, value.step]
    return type(value).__name__, [encode(part, f"{path}.{name}") for part, name in
                                  zip(parts, ("start", "stop", "step"), strict=True)]  # fmt: skip


def _moment(value: Any, encode: Encode, path: str) -> Any:
    zone = None if value.tzinfo is None else encode(value.tzinfo, f"{path}.tzinfo")
    return type(value).__name__, [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, zone]


def _date(value: Any, encode: Encode, path: str) -> Any:
    return "date", value.isoformat()


def _timedelta(value: Any, encode: Encode, path: str) -> Any:
    return "timedelta", [value.days, value.seconds, value.microseconds]


def _timezone(value: Any, encode: Encode, path: str) -> Any:
    offset, *name = value.__getinitargs__()
    return "timezone", [offset.days, offset.seconds, offset.microseconds, *map(encode_text, name)]


def _zone(value: Any, encode: Encode, path: str) -> Any:
    if value.key is None or not _ZONE.fullmatch(value.key):
        raise UnsupportedStateError(f"{path}: a ZoneInfo without a key cannot be saved: use ZoneInfo('Area/City')")
    return "zoneinfo", value.key


def _path(value: Any, encode: Encode, path: str) -> Any:
    kind = {"PurePosixPath": "posix", "PureWindowsPath": "windows"}.get(type(value).__name__, "path")
    return "path", [kind, encode_text(str(value))]


# By module and class name, so that no module need be imported to build the table.
_ENCODERS: dict[tuple[str, str], Any] = {
    ("builtins", "complex"): _complex,
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytes,
    ("builtins", "range"): _span,
    ("builtins", "slice"): _span,
    ("datetime", "datetime"): _moment,
    ("datetime", "time"): _moment,
    ("datetime", "date"): _date,
    ("datetime", "timedelta"): _timedelta,
    ("datetime", "timezone"): _timezone,
    ("zoneinfo", "ZoneInfo"): _zone,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "WindowsPath"): _path,
    ("pathlib", "PurePosixPath"): _path,
    ("pathlib", "PureWindowsPath"): _path,
}


def _encoder_of(kind: type) -> Any:
    encoder = _ENCODERS.get((kind.__module__.removesuffix("._local"), kind.__qualname__))
    # A class of the user's own may have the same names; only the class of the standard library counts.
    if encoder is None or getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind:
        return None
    return encoder


def is_scalar(value: Any) -> bool:
    """Tell whether this module encodes a value; NumPy scalars are included."""
    return _encoder_of(type(value)) is not None or _is_numpy(value)


def encode_scalar(value: Any, encode: Encode, path: str) -> Any:
    """Encode a value of the standard library; NotImplemented for any other type.

    Args:
        value: what to encode.
        encode: encodes the values that it consists of (the ends of a slice, the zone of a time).
        path: where it stands, for messages.
    """
    encoder = _encoder_of(type(value))
    if encoder is None:
        return NotImplemented
    tag, parts = encoder(value, encode, path)
    return {"$": tag, "v": parts}


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def encode_numpy(value: Any, path: str) -> Any:
    """Encode a NumPy scalar; NotImplemented for anything else."""
    if not _is_numpy(value):
        return NotImplemented
    import numpy as np

    # Slices, because str() and bytes() of these drop zeros at the end.
    if type(value) is np.str_:
        return {"$": "npscalar", "v": ["U", encode_text(value[:])]}
    if type(value) is np.bytes_:
        return {"$": "npscalar", "v": ["S", {"$": "bytes", "v": _base64(value[:])}]}
    name = value.dtype.str
    # long double has no agreed size or layout; records and objects have no bytes of their own.
    if isinstance(value, (np.longdouble, np.clongdouble)) or not _NUMPY_DTYPE.fullmatch(name):
        raise UnsupportedStateError(
            f"{path}: a NumPy {type(value).__name__} ({value.dtype}) cannot be saved: its bytes differ between "
            "machines; convert it (float(x), or plain data)"
        )
    return {"$": "npscalar", "v": [name, {"$": "bytes", "v": _base64(value.tobytes())}]}


def describe(value: Any) -> str:
    """Say why a value cannot be saved and what to do."""
    kind = type(value)
    name = kind.__qualname__
    if any(base.__name__ == "Enum" and base.__module__ == "enum" for base in kind.__mro__):
        advice = "save its .value, and make the member again after loading"
    elif isinstance(value, type) or hasattr(value, "__code__"):
        name = f"{name} {getattr(value, '__qualname__', '')}".rstrip()
        advice = "code is not stored: save a name and look it up after loading"
    elif advice_of_kind := _GENERATORS.get((kind.__module__, name)):
        advice = advice_of_kind
    else:
        plain = next((base.__name__ for base in kind.__mro__[1:] if base in _PLAIN_BASES), None)
        convert = f"convert it with {plain}(...)" if plain else "convert it to plain data (dict, list, numbers, text)"
        advice = f"give it state_dict() and load_state_dict(), or {convert}"
    return f"{name} cannot be saved: {advice}; or pass unsupported='drop' to leave it out"


_GENERATORS = {
    ("numpy.random._generator", "Generator"): "save its bit_generator.state, and assign that after a resume",
    ("numpy.random.mtrand", "RandomState"): "save its get_state(), and give that to set_state() after a resume",
    ("random", "Random"): "save its getstate(), and give that to setstate() after a resume",
}
_PLAIN_BASES = frozenset({dict, list, tuple, set, frozenset, int, float, str, bytes})
