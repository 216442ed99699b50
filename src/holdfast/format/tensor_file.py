"""The safetensors files of a checkpoint: the layout of a file to write, and the checked header of any file.

`lay_out` decides order, header and offsets for every writer of such a file: a save into the arena, an import, an
export, a file of weights. The file is ordinary safetensors (8 bytes little-endian length, JSON header, data without
holes). The header is padded with spaces, which the format allows, so that the data starts at a multiple of 4096 bytes.
Nothing in a header that is read is trusted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from holdfast._paused_gc import paused_gc
from holdfast.errors import CorruptCheckpointError
from holdfast.storage.base import FileReader

from .strict_json import loads

BLOCK = 4096
_LINE = 64
MAX_HEADER = 100 << 20  # the limit of the safetensors library
_MAX_COUNT = 1 << 62
_MAX_DIMS = 64

# torch-like name -> (safetensors name, item size in bytes). Only what safetensors 0.5 can read: one newer name in a
# header keeps it from opening the whole file, so other dtypes are stored as bytes and the index has the true one.
DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
_FOREIGN_SIZES = {
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
# By the name in a header, which others may have written. Types below a byte are not here: their shapes count elements.
_SIZES = dict(DTYPES.values()) | {"C64": 8, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1}


def item_size(dtype: str) -> int | None:
    """Return the bytes of one element, None for a dtype this version does not know."""
    if dtype in DTYPES:
        return DTYPES[dtype][1]
    return _FOREIGN_SIZES.get(dtype)


TensorRow = tuple[str, str, tuple[int, ...], int]
"""A tensor of a file: name, torch-like dtype, shape, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """The layout of a file of tensors.

    Attributes:
        header: the first bytes of the file, up to the first tensor.
        order: the tensors in file order, as positions among the rows given.
        offsets: first byte of each tensor within the file, by position among the rows given.
        size: bytes of the file.
    """

    header: bytes
    order: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int


def lay_out(tensors: Sequence[TensorRow], metadata: Mapping[str, str] | None = None) -> TensorFile:
    """Lay out a file of tensors.

    Tensors of whole cache lines go first, then the widest elements: so every tensor is aligned without holes, which
    safetensors does not allow, and step counts of four bytes do not move large tensors off the lines. The kernel takes
    half as long again to copy bytes that lie otherwise in the file than in memory.

    Args:
        tensors: in any order.
        metadata: strings for the ``__metadata__`` of safetensors, beside ``format``; they come first in the header.

    Raises:
        ValueError: a tensor's bytes do not make its dtype and shape.
    """
    keys = [
        (nbytes % _LINE > 0, -(item_size(dtype) or nbytes // max(1, prod(shape))))  # no table has it: by its bytes
        for _, dtype, shape, nbytes in tensors
    ]
    order = sorted(range(len(tensors)), key=keys.__getitem__)
    header = _header([tensors[number] for number in order], {"format": "pt", **(metadata or {})})
    offsets, end = [0] * len(tensors), len(header)
    for number in order:
        offsets[number] = end
        end += tensors[number][3]
    return TensorFile(header=header, order=tuple(order), offsets=tuple(offsets), size=end)


def split_by_size(sizes: Sequence[int], limit: int | None) -> Iterator[list[int]]:
    """Divide tensors into files, in order, each of at most ``limit`` bytes of tensors; a larger tensor is alone.

    Args:
        sizes: bytes of each tensor.
        limit: in bytes; None: one file.

    Yields:
        Positions among ``sizes``; nothing if ``sizes`` is empty.
    """
    part: list[int] = []
    total = 0
    for number, size in enumerate(sizes):
        if part and limit is not None and total + size > limit:
            yield part
            part, total = [], 0
        part.append(number)
        total += size
    if part:
        yield part


def _header(tensors: Iterable[TensorRow], metadata: Mapping[str, str]) -> bytes:
    with paused_gc():
        body = _header_text(tensors, metadata).encode()
    padded = -(-(8 + len(body)) // BLOCK) * BLOCK
    return (padded - 8).to_bytes(8, "little") + body + b" " * (padded - 8 - len(body))


def _header_text(tensors: Iterable[TensorRow], metadata: Mapping[str, str]) -> str:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        known = DTYPES.get(dtype)
        if known and prod(shape) * known[1] != nbytes:
            raise ValueError(f"tensor {name!r}: {nbytes} bytes do not make {dtype} of shape {list(shape)}")
        header[_header_name(name, header)] = {
            "dtype": known[0] if known else "U8",
            "shape": shape if known else [nbytes],
            "data_offsets": (end, end + nbytes),
        }
        end += nbytes
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False, check_circular=False)


def _header_name(name: str, taken: Mapping[str, Any]) -> str:
    """Change a name that safetensors does not allow. Other readers use these names; Holdfast goes by the index."""
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()
    while name in taken or name == "__metadata__":
        name += "~"
    return name


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file: safetensors dtype, shape, and its bytes (``offset`` counts from the start of the file)."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(NamedTuple):
    """The header of a file: the offset at which data starts, the tensors by name, in file order, and the metadata."""

    start: int
    entries: dict[str, HeaderEntry]
    metadata: dict[str, Any]


def read_header(reader: FileReader, where: str = "file") -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        CorruptCheckpointError: lengths, offsets or shapes do not add up.
    """
    if reader.size < 8:
        raise _bad(where, f"the file has only {reader.size} bytes")
    prefix = bytearray(8)
    reader.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER or 8 + length > reader.size:
        raise _bad(where, f"it claims {length} bytes in a file of {reader.size}")
    body = bytearray(length)
    if length:
        reader.read_into(8, memoryview(body))
    header = loads(body, max_bytes=MAX_HEADER, max_depth=8, where=where)
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(metadata, dict):
        raise _bad(where, "it, or its metadata, is no JSON object")
    start = 8 + length
    entries = {name: _entry(name, item, start, where) for name, item in header.items()}
    entries = dict(sorted(entries.items(), key=lambda row: (row[1].offset, row[1].nbytes)))
    end = start
    for name, entry in entries.items():
        if entry.offset != end:
            raise _bad(where, f"entry {name!r} starts at byte {entry.offset}, but the entry before it ends at {end}")
        end += entry.nbytes
    if end != reader.size:
        raise _bad(where, f"its tensors end at byte {end}, the file has {reader.size}")
    return Header(start, entries, metadata)


def _entry(name: str, item: Any, data_start: int, where: str) -> HeaderEntry:
    row = item if isinstance(item, dict) else {}
    dtype: Any = row.get("dtype")
    shape: Any = row.get("shape")
    offsets: Any = row.get("data_offsets")
    if not isinstance(dtype, str) or not _are_counts(shape, _MAX_DIMS) or not _are_counts(offsets, 2):
        raise _bad(where, f"entry {name!r} is malformed")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(where, f"entry {name!r} has the offsets {offsets}")
    nbytes = offsets[1] - offsets[0]
    size = _SIZES.get(dtype)
    if size is not None and prod(shape) * size != nbytes:
        raise _bad(where, f"entry {name!r} has {nbytes} bytes for shape {shape} of {dtype}")
    return HeaderEntry(dtype, tuple(shape), data_start + offsets[0], nbytes)


def _are_counts(values: Any, limit: int) -> bool:
    # type, not isinstance: true is no size.
    return (
        isinstance(values, list)
        and len(values) <= limit
        and all(type(item) is int and 0 <= item < _MAX_COUNT for item in values)
    )


def _bad(where: str, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{where}: not a sound safetensors header: {why}", file=where)
