"""Typed JSON: plain Python data with its exact types and bits, and no code.

None, bool, str, list, finite floats, integers of moderate size and dicts with text keys are themselves. Everything
else is a node: an object with the key ``"$"``, whose value is a tag. Here are the tags of
values without parts and those of containers; docs/format.md lists them all.

Modules (datetime, pathlib, numpy) are imported only when a value of theirs occurs; a type can only be met in a state
if its module is loaded, so `sys.modules` answers without importing.
"""

from __future__ import annotations

import binascii
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable
from functools import lru_cache
from keyword import iskeyword
from math import isfinite
from operator import itemgetter
from struct import error as struct_error
from typing import Any

from holdfast._outgoing import brief
from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsupportedStateError

from .strict_json import BIG_INT_BITS, dumps, encode_big_int, loads

__all__ = [
    "BESIDE", "DECODERS", "MAX_NESTING", "OUTER", "decode", "describe", "dumps", "encode", "encode_float",
    "encode_numpy", "encode_text", "is_scalar", "is_text", "loads", "nesting_error",
]  # fmt: skip

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
    elif advice_of_kind := _ADVICE.get((kind.__module__, name)):
        advice = advice_of_kind
    else:
        plain = next((base.__name__ for base in kind.__mro__[1:] if base in _PLAIN_BASES), None)
        convert = f"convert it with {plain}(...)" if plain else "convert it to plain data (dict, list, numbers, text)"
        ways = ["give it state_dict() and load_state_dict()", f"or {convert}"]
        slots = getattr(kind, "__slots__", ())
        held = (*getattr(value, "__dict__", ()), *((slots,) if isinstance(slots, str) else slots))
        if names := [name for name in held if str(name)[:1] != "_"]:
            shown = ", ".join([*map(repr, names[:3]), *(["..."] if len(names) > 3 else [])])
            ways.insert(1, f"name its attributes, holdfast.attrs(it, {shown})")
        advice = ", ".join(ways)
    return f"{name} cannot be saved: {advice}; or pass unsupported='drop' to leave it out"


_ADVICE = {
    ("numpy.random._generator", "Generator"): "save its bit_generator.state, and assign that after a resume",
    ("numpy.random.mtrand", "RandomState"): "save its get_state(), and give that to set_state() after a resume",
    ("random", "Random"): "save its getstate(), and give that to setstate() after a resume",
    (
        "torch.utils.data.dataloader",
        "DataLoader",
    ): "leave it out, and draw from ck.batches(loader), which keeps its place",
    ("pandas", "DataFrame"): "save frame.to_dict('split'), and make it again from that, pandas.DataFrame(**it)",
    ("decimal", "Decimal"): "save str(it), and make it again after loading",
}
_PLAIN_BASES = frozenset({dict, list, tuple, set, frozenset, int, float, str, bytes})


MAX_NESTING = 200
"""Containers within containers that are stored."""

OUTER = "__tensor__"
"""Key under which a tensor that wraps others has what makes it beside these: class, size, stride, context."""

BESIDE = "__state_metadata__"
"""Key under which an OrderedDict in the state of an object has what its attribute ``_metadata`` says."""

Leaf = Callable[[Any, str], Any]
NodeLeaf = Callable[[str, dict[str, Any]], Any]

_BIG = 1 << BIG_INT_BITS
_SHOWN_DEPTH = 12
_MANY = 1000
# What constructors raise when a node does not hold what its tag says; a time zone is a file, hence OSError.
_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    OSError,
    struct_error,
)
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (int, float, list, dict, set, str, bool, tuple, complex, bytes, frozenset)
}


def encode(value: Any, leaf: Leaf | None = None, *, path: str = "state", dropped: list[str] | None = None) -> Any:
    """Turn plain data into a JSON-able tree.

    Args:
        value: what to encode. It is not changed, and the tree shares no container with it.
        leaf: asked first for every value whose exact type is not a plain one; returns a node (an object with a
            ``"$"``) or NotImplemented.
        path: how messages and ``leaf`` call ``value``.
        dropped: if given, dict entries and list, set and deque items that cannot be encoded are left out, and their
            paths added here. A tuple is left out as a whole, since its positions mean something.

    Raises:
        UnsupportedStateError: naming the path, the type and what to do.
    """
    return _Encoder(leaf, dropped).value(value, path)


def decode(tree: Any, leaf: NodeLeaf | None = None, *, where: str = "state") -> Any:
    """Turn a tree back into the data it came from.

    Args:
        tree: what `encode` returned, or `loads` read.
        leaf: called with the tag and the node for tags that this module does not know; without it such nodes stay
            as they are.
        where: name of the file, for messages.

    Raises:
        CorruptCheckpointError: a node is malformed.
    """
    try:
        return _Decoder(leaf).value(tree)
    except _MALFORMED as error:
        if isinstance(error, HoldfastError):
            raise
        reason = f"{type(error).__name__}: {brief(error, 400)}"
    except CorruptCheckpointError as error:
        if error.file is not None:
            raise
        reason = str(error)
    raise CorruptCheckpointError(
        f"{where}, at {_place(tree, leaf)!a}: a stored value cannot be rebuilt ({reason:.400}): this checkpoint is "
        "damaged; use another one",
        file=where,
    )


def nesting_error(value: Any, path: str, active: Container[int]) -> UnsupportedStateError:
    """Say why a container is refused that stands in itself, or nested deeper than a reader would read.

    Args:
        value: the container.
        path: where it stands.
        active: ids of the containers around it.
    """
    if id(value) in active:
        return UnsupportedStateError(
            f"{path}: this {type(value).__name__} contains itself: save plain data without cycles"
        )
    return UnsupportedStateError(
        f"{path}: nested more than {MAX_NESTING} levels deep: flatten it, or store it as a list"
    )


def _place(tree: Any, leaf: NodeLeaf | None) -> str:
    """Find the innermost node that cannot be rebuilt: only for a message, so in a second pass."""
    keys: list[str] = []
    while len(keys) < _SHOWN_DEPTH:
        inner: Any = tree.get("v", tree.get("state", {})) if type(tree) is dict and "$" in tree else tree
        rows = inner.items() if type(inner) is dict else enumerate(inner) if type(inner) is list else ()
        for part, child in rows:
            if type(child) in _TREES and part != "$":
                try:
                    _Decoder(leaf).value(child)
                except (*_MALFORMED, HoldfastError):
                    keys.append(brief(part, 40))
                    tree = child
                    break
        else:
            break
    return "/".join(keys)


class _Encoder:
    __slots__ = ("active", "dropped", "leaf")

    def __init__(self, leaf: Leaf | None, dropped: list[str] | None) -> None:
        self.leaf, self.dropped = leaf, dropped
        self.active: set[int] = set()  # ids of the containers around the current value

    def value(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is str:
            return value if value.isascii() else encode_text(value)
        if kind is float:
            return value if isfinite(value) else encode_float(value)
        if kind is int:
            return value if -_BIG < value < _BIG else encode_big_int(value)
        if kind is bool or value is None:
            return value
        encoder = _CONTAINERS.get(kind)
        if encoder is None:
            if (scalar := _encoder_of(kind)) is not None:
                tag, parts = scalar(value, self.value, path)
                return {"$": tag, "v": parts}
            if self.leaf is not None and (node := self.leaf(value, path)) is not NotImplemented:
                return node
            if not _is_named_tuple(value):
                if (node := encode_numpy(value, path)) is not NotImplemented:
                    return node
                raise UnsupportedStateError(f"{path}: {describe(value)}")
            encoder = _Encoder.named
        key = id(value)
        if key in self.active or len(self.active) >= MAX_NESTING:
            raise nesting_error(value, path, self.active)
        self.active.add(key)
        try:
            return encoder(self, value, path)
        finally:
            self.active.discard(key)

    # -- containers: one frame each, because 200 levels must fit on a stack that the caller has used already

    def items(self, values: Iterable[Any], path: str) -> list[Any]:
        tree: list[Any] = []
        append = tree.append
        for number, item in enumerate(values):
            kind = type(item)
            if (
                (kind is int and -_BIG < item < _BIG)
                or (kind is float and isfinite(item))
                or (kind is str and item.isascii())
            ):
                append(item)
                continue
            try:
                append(self.value(item, f"{path}[{number}]"))
            except UnsupportedStateError:
                if self.dropped is None:
                    raise
                self.dropped.append(f"{path}[{number}]")
        return tree

    def plain_dict(self, value: dict[Any, Any], path: str) -> dict[str, Any]:
        if "$" in value or not _TEXT.issuperset(map(type, value)) or not is_text("".join(value)):
            return {"$": "dict", "v": self.pairs(value, path)}
        tree: dict[str, Any] = {}
        for key, item in value.items():
            kind = type(item)
            if (
                (kind is int and -_BIG < item < _BIG)
                or (kind is float and isfinite(item))
                or (kind is str and item.isascii())
            ):
                tree[key] = item
                continue
            try:
                tree[key] = self.value(item, f"{path}[{key!r}]")
            except UnsupportedStateError:
                if self.dropped is None:
                    raise
                self.dropped.append(f"{path}[{key!r}]")
        return tree

    def pairs(self, value: dict[Any, Any], path: str) -> list[list[Any]]:
        rows: list[list[Any]] = []
        for key, item in value.items():
            where = f"{path}[{key!r}]" if type(key) in _KEYS else f"{path}[{type(key).__name__} key]"
            try:
                rows.append([self.key(key, where), self.value(item, where)])
            except UnsupportedStateError:
                if self.dropped is None:
                    raise
                self.dropped.append(where)
        return rows

    def key(self, key: Any, path: str) -> Any:
        if not _is_key(key):
            raise UnsupportedStateError(
                f"{path}: {type(key).__name__} as a dict key cannot be saved: use text, numbers or tuples of these"
            )
        return self.value(key, path)

    def ordered(self, value: OrderedDict[Any, Any], path: str) -> dict[str, Any]:
        return {"$": "odict", "v": self.pairs(value, path)}

    def default(self, value: defaultdict[Any, Any], path: str) -> dict[str, Any]:
        factory = value.default_factory
        name = getattr(factory, "__name__", None)
        if factory is not None and _FACTORIES.get(name) is not factory:  # type: ignore[arg-type]
            raise UnsupportedStateError(
                f"{path}: a defaultdict with the factory {name or type(factory).__name__!r} cannot be saved: only "
                f"{', '.join(_FACTORIES)} or None; or save dict(it)"
            )
        return {"$": "ddict", "f": None if factory is None else name, "v": self.pairs(value, path)}

    def counter(self, value: Counter[Any], path: str) -> dict[str, Any]:
        return {"$": "counter", "v": self.pairs(value, path)}

    def tuple_(self, value: tuple[Any, ...], path: str) -> dict[str, Any]:
        # Not `items`: an item that cannot be stored leaves out the whole tuple, since positions mean something.
        return {"$": "tuple", "v": [self.value(item, f"{path}[{number}]") for number, item in enumerate(value)]}

    def named(self, value: Any, path: str) -> dict[str, Any]:
        items = [self.value(item, f"{path}.{name}") for name, item in zip(value._fields, value, strict=True)]
        return {"$": "namedtuple", "n": type(value).__name__, "f": list(value._fields), "v": items}

    def set_(self, value: set[Any] | frozenset[Any], path: str) -> dict[str, Any]:
        try:
            members = sorted(value)
        except TypeError:
            members = list(value)
        items = self.items(members, path)
        if not {type(member) for member in members} <= {str} and not {type(member) for member in members} <= {int}:
            items.sort(key=dumps)  # mixed or only partly ordered (NaN, frozensets): by what is written
        return {"$": type(value).__name__, "v": items}

    def deque_(self, value: deque[Any], path: str) -> dict[str, Any]:
        return {"$": "deque", "m": value.maxlen, "v": self.items(value, path)}


_CONTAINERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    dict: _Encoder.plain_dict,
    list: _Encoder.items,
    tuple: _Encoder.tuple_,
    OrderedDict: _Encoder.ordered,
    defaultdict: _Encoder.default,
    Counter: _Encoder.counter,
    set: _Encoder.set_,
    frozenset: _Encoder.set_,
    deque: _Encoder.deque_,
}
_KEYS = frozenset({str, int, float, bool, type(None), tuple, bytes, complex, frozenset})


def _is_key(key: Any) -> bool:
    if type(key) in (tuple, frozenset):
        return all(map(_is_key, key))
    return type(key) in _KEYS or is_scalar(key) or (_is_named_tuple(key) and all(map(_is_key, key)))


_TREES = frozenset({dict, list})
_TEXT = frozenset({str})


class _Decoder:
    """Rebuilds values from their tree."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: NodeLeaf | None) -> None:
        self.leaf = leaf

    def value(self, tree: Any) -> Any:
        kind = type(tree)
        if kind is list:
            return [self.value(item) if type(item) in _TREES else item for item in tree] if tree else tree
        if kind is not dict:
            return tree
        if not tree:
            return tree
        if "$" not in tree:
            return {key: self.value(item) if type(item) in _TREES else item for key, item in tree.items()}
        tag = tree["$"]
        if type(tag) is not str:
            raise TypeError(f"a node has the tag {brief(tag, 40)!r}")
        if (build := _NODES.get(tag)) is not None:
            return build(self, tree)
        if (make := DECODERS.get(tag)) is not None:
            return make(self.value(tree["v"]))
        return tree if self.leaf is None else self.leaf(tag, tree)

    def items(self, node: dict[str, Any]) -> list[Any]:
        if type(node["v"]) is not list:
            raise TypeError(f"{node['$']} without a list")
        return [self.value(item) if type(item) in _TREES else item for item in node["v"]]

    def pairs(self, node: dict[str, Any]) -> list[Any]:
        rows = []
        for key, item in node["v"]:
            rows.append((self.value(key), self.value(item)))
        if len(_distinct([key for key, _ in rows])) != len(rows):
            raise ValueError("a key occurs twice")
        return rows

    def default(self, node: dict[str, Any]) -> Any:
        factory = node["f"]
        return defaultdict(None if factory is None else _FACTORIES[factory], self.pairs(node))

    def counter(self, node: dict[str, Any]) -> Any:
        return Counter(dict(self.pairs(node)))

    def named(self, node: dict[str, Any]) -> Any:
        return _named_tuple(node["n"], tuple(node["f"]))._make(self.items(node))


def _distinct(members: list[Any]) -> set[Any]:
    """Make a set, but not of thousands of values that were chosen to have one hash: that takes minutes."""
    if len(members) > _MANY and len({hash(member) for member in members}) < len(members) // 2:
        values = len({repr(member) for member in members})
        raise ValueError(f"{values} different values with the same hashes")
    return set(members)


_NODES: dict[str, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "dict": lambda decoder, node: dict(decoder.pairs(node)),
    "odict": lambda decoder, node: OrderedDict(decoder.pairs(node)),
    "ddict": _Decoder.default,
    "counter": _Decoder.counter,
    "tuple": lambda decoder, node: tuple(decoder.items(node)),
    "namedtuple": _Decoder.named,
    "set": lambda decoder, node: _distinct(decoder.items(node)),
    "frozenset": lambda decoder, node: frozenset(_distinct(decoder.items(node))),
    "deque": lambda decoder, node: deque(decoder.items(node), node["m"]),
}


# -- named tuples: a type with the stored name and fields, made without ``eval``


def _is_named_tuple(value: Any) -> bool:
    """Tell whether a value is a tuple with names for its items."""
    names = getattr(type(value), "_fields", None)
    return (
        isinstance(value, tuple)
        and type(names) is tuple
        and type(value).__name__.isidentifier()
        and len(names) == len(value)
        and all(_is_field(name) for name in names)
    )


@lru_cache(maxsize=1024)
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """Return a named tuple type; equal arguments give the same type.

    ``collections.namedtuple`` compiles source text. Loading a checkpoint must not, however well that text is checked.

    Raises:
        ValueError: a name is not an identifier, or a field occurs twice.
    """
    if type(name) is not str or not name.isidentifier() or iskeyword(name):
        raise ValueError(f"{brief(name, 80)!r} is no name for a named tuple")
    if not all(_is_field(field) for field in fields) or len(set(fields)) != len(fields):
        raise ValueError(f"{brief(fields, 200)} are no names for the fields of a named tuple")
    body: dict[str, Any] = {field: property(itemgetter(number)) for number, field in enumerate(fields)}
    return type(name, (_Named,), {**body, "__slots__": (), "_fields": fields, "__match_args__": fields})


def _is_field(name: object) -> bool:
    # "_0" is what namedtuple(rename=True) gives; other names with an underscore could hide the methods below.
    if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
        return False
    return not name.startswith("_") or name[1:].isdigit()


class _Named(tuple[Any, ...]):
    """Base of these types; behaves as ``collections.namedtuple`` types do."""

    __slots__ = ()
    _fields: tuple[str, ...] = ()
    _field_defaults: dict[str, Any] = {}  # noqa: RUF012

    def __new__(cls, *args: Any, **kwargs: Any) -> _Named:
        if kwargs:
            missing = [name for name in cls._fields[len(args) :] if name not in kwargs]
            if missing or len(args) + len(kwargs) != len(cls._fields):
                raise TypeError(f"{cls.__name__} takes exactly {', '.join(cls._fields)}")
            args = (*args, *(kwargs[name] for name in cls._fields[len(args) :]))
        return cls._make(args)

    @classmethod
    def _make(cls, values: Any) -> _Named:
        made = tuple.__new__(cls, values)
        if len(made) != len(cls._fields):
            raise TypeError(f"{cls.__name__} takes {len(cls._fields)} values, not {len(made)}")
        return made

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes: Any) -> _Named:
        if unknown := changes.keys() - set(self._fields):
            raise ValueError(f"{type(self).__name__} has no fields {sorted(unknown)}")
        return self._make(changes.get(name, item) for name, item in zip(self._fields, self, strict=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={item!r}' for name, item in self._asdict().items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The type belongs to no module, so copies and pickles make it again from its names.
        return _rebuild, (type(self).__name__, self._fields, tuple(self))


def _rebuild(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return _named_tuple(name, fields)._make(values)
