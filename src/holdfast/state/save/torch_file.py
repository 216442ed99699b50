"""torch's own file format (``torch.save``): written in one pass, without holding the tensors or pickling objects.

The file is a zip of stored records: ``data.pkl`` with the structure, in which a tensor is a reference to a record
``data/<number>``, then those records, each aligned to 64 bytes so that ``torch.load(mmap=True)`` can map it. Sizes are
known before the first tensor is read. The checksums are not: they stand behind the data (the "data descriptor" of the
zip format) and in the directory at the end.

The structure keeps to what torch's weights-only reader knows (`to_plain`). A value that reader has no class for (a
deque, a date, a NumPy array) is written as ``{"$holdfast": node}`` with a node of `holdfast.format.codec`, in which
tensors stay tensors. `from_plain` turns it back.
"""

from __future__ import annotations

import _codecs
import io
import pickle
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import CorruptCheckpointError, UnsupportedStateError
from holdfast.format.codec import decode, encode

from ..tree import arrays

__all__ = ["MARK", "TorchFileWriter", "from_plain", "tensor_bytes", "to_plain"]

_ALIGNMENT = 64  # what torch uses
_WINDOW = 8 << 20
_BIG = 0xFFFFFFFF  # sizes and offsets from here on are written in 64 bits
_FLAGS = 0x0808  # checksum and sizes follow the data; names are UTF-8
_CHECKSUM_AT = 16  # in an entry of the directory
_ROW = struct.Struct("<QQQ")
_DATE = (1 << 5) | 1  # 1980-01-01: equal states make equal files
MARK = "$holdfast"
"""The only key of a dict that stands for a value torch's reader has no class for."""

_MAX_BITS = 2000  # the reader knows integers of at most 255 bytes
_SCALARS = frozenset({type(None), bool, float, str, bytes, complex, torch.dtype, torch.device, torch.Size})
_MAPS = frozenset({dict, OrderedDict, Counter})

Bytes = bytes | bytearray | memoryview
Sink = Callable[[memoryview], object]
Leaf = Callable[[Any, str], Any]


@dataclass(slots=True)
class _Record:
    name: str
    size: int
    data: bytes | None  # None: the next tensor
    offset: int = 0  # of its header
    header: bytes = b""
    checksum: int = 0

    @property
    def is_big(self) -> bool:
        return self.size >= _BIG

    @property
    def end(self) -> int:
        return self.offset + len(self.header) + self.size + (24 if self.is_big else 16)


class TorchFileWriter:
    """One file for ``torch.load``, with ``weights_only=True`` too.

    Args:
        value: what ``torch.load`` shall return: dicts, lists, tuples, text, numbers, None, tensors and other values
            that the weights-only reader takes (`to_plain` converts the rest). Tensors may be on any device, "meta" as
            well: only `write` needs their bytes. Tensors that are the same memory stay tied.
        records: further records, which ``torch.load`` ignores; written after the tensors, in this order.

    Attributes:
        size: bytes of the whole file.
        tensors: the tensors in the order of the file, each memory once.

    Raises:
        UnsupportedStateError: ``value`` holds what the weights-only reader would refuse.

    Example:
        >>> writer = TorchFileWriter({"weight": torch.arange(3.0), "step": 7}, records={"note": b"mine"})
        >>> file = io.BytesIO()
        >>> writer.write(file.write)
        >>> len(file.getvalue()) == writer.size
        True
        >>> torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        {'weight': tensor([0., 1., 2.]), 'step': 7}
    """

    def __init__(self, value: Any, *, records: Mapping[str, bytes] | None = None) -> None:
        structure = io.BytesIO()
        pickler = _Pickler(structure)
        pickler.dump(value)
        self.tensors: list[torch.Tensor] = pickler.tensors
        body = structure.getvalue()
        self._records = [_Record("data.pkl", len(body), body), _Record("byteorder", 6, b"little")]
        for number, tensor in enumerate(self.tensors):
            self._records.append(_Record(f"data/{number}", tensor.numel() * tensor.itemsize, None))
        for name, content in (records or {}).items():
            self._records.append(_Record(name, len(content), content))
        self._records.append(_Record("version", 2, b"3\n"))
        offset = 0
        for record in self._records:
            record.offset, record.header = offset, _header(record, offset)
            offset = record.end
        self._blank = list(map(_entry, self._records))  # without checksums
        self.size = offset + sum(map(len, self._blank)) + len(self._end(offset))

    @property
    def offsets(self) -> list[int]:
        """Where in the file the bytes of each of `tensors` begin."""
        return [record.offset + len(record.header) for record in self._records if record.data is None]

    def place_of(self, name: str) -> int:
        """Return where in the file the content of a record begins."""
        record = next(record for record in self._records if record.name == name)
        return record.offset + len(record.header)

    @property
    def num_records(self) -> int:
        """How many records the file has, those of `tensors` included."""
        return len(self._records)

    def lay_out(self, view: memoryview) -> bytes:
        """Put the file together in memory, without the bytes of the tensors and without checksums.

        Args:
            view: at least `size` bytes.

        Returns:
            Start, size and entry of each record in the order of the file, as unsigned numbers of 64 bits (little
            endian): where its content lies, and where its CRC-32 (four bytes, little endian) belongs in the directory.
            The CRC-32 belongs behind the content as well, 4 bytes after its end.
        """
        rows = []
        entry = directory = self._records[-1].end
        gap = 0  # begins behind the last byte that is written
        fixed: list[bytes] = []
        for record, blank in zip(self._records, self._blank, strict=True):
            fixed.append(record.header)
            start = record.offset + len(record.header)
            if record.data is None:
                view[gap:start] = b"".join(fixed)
                gap, fixed = start + record.size, []
            else:
                fixed.append(record.data)
            fixed.append(_descriptor(record))
            rows.append(_ROW.pack(start, record.size, entry + _CHECKSUM_AT))
            entry += len(blank)
        fixed += [*self._blank, self._end(directory)]
        view[gap : self.size] = b"".join(fixed)
        return b"".join(rows)

    def write(self, sink: Sink, data: Iterable[Iterable[Bytes]] | None = None) -> None:
        """Write the file.

        Args:
            sink: called with each part of the file in turn.
            data: for each of `tensors` its bytes in any number of parts (elements in row-major order, little endian);
                None takes them from the tensors.

        Raises:
            ValueError: ``data`` has more or fewer bytes for a tensor than its size.
        """
        contents = iter(map(tensor_bytes, self.tensors) if data is None else data)
        for record in self._records:
            sink(memoryview(record.header))
            if record.data is None:
                parts: Iterable[Bytes] = next(contents)
            else:
                parts = (record.data,)
            checksum = count = 0
            for part in parts:
                view = memoryview(part).cast("B") if len(part) else memoryview(b"")
                checksum, count = zlib.crc32(view, checksum), count + len(view)
                sink(view)
            if count != record.size:
                raise ValueError(f"the record {record.name} got {count} bytes, {record.size} were announced")
            record.checksum = checksum
            sink(memoryview(_descriptor(record)))
        sink(memoryview(b"".join(map(_entry, self._records)) + self._end(self._records[-1].end)))

    def _end(self, start: int) -> bytes:
        """Return the last bytes of the file, which say where the entries of all records begin, and their size."""
        count, size = len(self._records), sum(map(len, self._blank))
        end = b""
        if count >= 0xFFFF or start >= _BIG or size >= _BIG:
            end += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, start)
            end += struct.pack("<IIQI", 0x07064B50, 0, start + size, 1)
        short = min(count, 0xFFFF)
        end += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, short, short, min(size, _BIG), min(start, _BIG), 0)
        return end


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the elements of a tensor, on any device, with any strides, in row-major order; copies at most 8 MiB."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.numel():
        return
    if tensor.is_contiguous() and tensor.is_cpu:
        yield _view(tensor)
        return
    if tensor.dim() == 0 or tensor.numel() * tensor.itemsize <= _WINDOW:
        yield _view(tensor.cpu().contiguous())
        return
    rows = max(1, _WINDOW * tensor.shape[0] // (tensor.numel() * tensor.itemsize))
    for start in range(0, len(tensor), rows):
        # A single row has one dimension less, so the recursion ends.
        yield from tensor_bytes(tensor[start] if rows == 1 else tensor[start : start + rows])


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _name(record: _Record) -> bytes:
    return f"archive/{record.name}".encode()


def _header(record: _Record, offset: int) -> bytes:
    name = _name(record)
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if record.is_big else b""
    # Padding is a field of its own, of four bytes at least; torch calls it "FB", too.
    padding = -(offset + 30 + len(name) + len(extra) + 4) % _ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    size = _BIG if record.is_big else 0
    version = 45 if record.is_big else 20
    fixed = struct.pack("<IHHHHHIIIHH", 0x04034B50, version, _FLAGS, 0, 0, _DATE, 0, size, size, len(name), len(extra))
    return fixed + name + extra


def _descriptor(record: _Record) -> bytes:
    """Return the data descriptor, which follows the content: signature, checksum, and the size twice."""
    return struct.pack(
        "<4sIQQ" if record.is_big else "<4sIII", b"PK\x07\x08", record.checksum, record.size, record.size
    )


def _entry(record: _Record) -> bytes:
    name = _name(record)
    size, offset = min(record.size, _BIG), min(record.offset, _BIG)
    wide = struct.pack("<QQ", record.size, record.size) if record.is_big else b""
    wide += struct.pack("<Q", record.offset) if record.offset >= _BIG else b""
    extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
    version = 45 if wide else 20
    fixed = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, version, version, _FLAGS, 0, 0, _DATE, record.checksum, size,
                        size, len(name), len(extra), 0, 0, 0, 0, offset)  # fmt: skip
    return fixed + name + extra


class _Storage:
    """A reference to the memory of a tensor in the structure."""

    __slots__ = ("kind", "number", "numel")

    def __init__(self, kind: Any, number: int, numel: int) -> None:
        self.kind, self.number, self.numel = kind, number, numel


_ALLOWED = (torch.Size, torch.dtype, torch.device, OrderedDict, Counter, set, bytearray, complex, bytes)


class _Pickler(pickle.Pickler):
    """Pickles the structure, with no class but those that torch's weights-only reader knows."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)  # the protocol that the weights-only reader knows
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._new_dtypes = frozenset(torch.storage._new_dtypes())
        self._kinds = torch.storage._dtype_to_storage_type_map()
        # Functions of torch that the reader knows; others are refused by `reducer_override`.
        self._functions = (
            torch._utils._rebuild_tensor_v2,
            torch._utils._rebuild_tensor_v3,
            torch._utils._rebuild_parameter,
            *(getattr(torch, name) for name in self._kinds.values()),
            torch.storage.UntypedStorage,
            _codecs.encode,  # encodes bytes in this protocol
        )

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, str(obj.number), "cpu", obj.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if type(obj) in _ALLOWED or any(obj is allowed for allowed in (*_ALLOWED, *self._functions)):
            return NotImplemented
        name = obj.__qualname__ if isinstance(obj, type) or callable(obj) else type(obj).__name__
        raise UnsupportedStateError(
            f"a value of type {name} cannot be in a file for torch.load(weights_only=True): give plain "
            "data, or encode it with holdfast.state.save.torch_file.to_plain"
        )

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, OrderedDict())
        if not tensor.is_meta:
            arrays.check_tensor(tensor, "the file")
        number = self._number(tensor)
        shape = tuple(tensor.shape)
        stride = _row_major(shape)
        tail: tuple[Any, ...]
        if tensor.dtype in self._new_dtypes:
            kind, numel, tail = torch.storage.UntypedStorage, tensor.numel() * tensor.itemsize, (tensor.dtype,)
            make: Any = torch._utils._rebuild_tensor_v3
        else:
            kind, numel, tail = getattr(torch, self._kinds[tensor.dtype]), tensor.numel(), ()
            make = torch._utils._rebuild_tensor_v2
        return make, (_Storage(kind, number, numel), 0, shape, stride, tensor.requires_grad, OrderedDict(), *tail)

    def _number(self, tensor: torch.Tensor) -> int:
        memory = tensor.untyped_storage()._cdata
        as_read = (tensor.is_conj(), tensor.is_neg())
        key = (memory, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride(), as_read)
        number = self._numbers.setdefault(key, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return number


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def to_plain(value: Any, leaf: Leaf | None = None, *, path: str = "state") -> Any:
    """Return ``value`` made of values that ``torch.load(weights_only=True)`` knows.

    Args:
        value: plain data, tensors, NumPy arrays. It is not changed.
        leaf: called first for every value that is no plain container or scalar; returns what replaces it (such a value,
            or a tensor), or NotImplemented.
        path: how messages call ``value``.

    Raises:
        UnsupportedStateError: names path and type of a value that cannot be stored.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is int:
        return value if value.bit_length() <= _MAX_BITS else _encoded(value, leaf, path)
    if kind in _MAPS:
        if MARK in value or not all(map(_is_key, value)):
            return _encoded(value, leaf, path)
        items = ((key, to_plain(item, leaf, path=f"{path}[{key!r}]")) for key, item in value.items())
        return kind(dict(items)) if kind is Counter else kind(items)
    if kind is list:
        return [to_plain(item, leaf, path=f"{path}[{number}]") for number, item in enumerate(value)]
    if kind is tuple:
        return tuple(to_plain(item, leaf, path=f"{path}[{number}]") for number, item in enumerate(value))
    if kind is set and all(map(_is_key, value)):
        return value
    if leaf is not None and (replacement := leaf(value, path)) is not NotImplemented:
        return replacement
    if isinstance(value, torch.Tensor):
        return value
    return _encoded(value, leaf, path)


def from_plain(value: Any, *, where: str = "state") -> Any:
    """Turn what `to_plain` returned into the original again; anything else stays as it is.

    Raises:
        CorruptCheckpointError: a node is malformed.
    """
    kind = type(value)
    if kind in _MAPS:
        if kind is dict and len(value) == 1 and MARK in value:
            return decode(value[MARK], _from_node, where=where)
        if kind is Counter:
            return value
        return kind((key, from_plain(item, where=where)) for key, item in value.items())
    if kind is list:
        return [from_plain(item, where=where) for item in value]
    if kind is tuple:
        return tuple(from_plain(item, where=where) for item in value)
    return value


def _is_key(key: Any) -> bool:
    kind = type(key)
    if kind is tuple:
        return all(map(_is_key, key))
    return kind in (str, float, bool, bytes, type(None)) or (kind is int and key.bit_length() <= _MAX_BITS)


def _encoded(value: Any, leaf: Leaf | None, path: str) -> Any:
    def inner(item: Any, where: str) -> Any:
        if leaf is not None and (replacement := leaf(item, where)) is not NotImplemented:
            # The codec takes nodes only: this node hides the value from it.
            return replacement if isinstance(replacement, torch.Tensor) else {"$": "plain", "v": replacement}
        if isinstance(item, torch.Tensor):
            return item
        if arrays.is_array(item):
            tensor, extra = arrays.array_to_tensor(item, where)
            return {"$": "array", "t": tensor, **extra}
        node = arrays.encode_torch_value(item)
        return NotImplemented if node is None else node

    return {MARK: encode(value, inner, path=path)}


def _from_node(tag: str, node: dict[str, Any]) -> Any:
    try:
        if tag == "array":
            return arrays.array_from_tensor(node["t"], node)
        if tag == "plain":
            return from_plain(node["v"])
    except (KeyError, AttributeError) as error:
        raise CorruptCheckpointError(f"a stored {tag!r} node is malformed ({error!r})") from error
    if tag == "torch":
        return arrays.decode_torch_value(node)
    raise CorruptCheckpointError(f"unknown node {tag!r}: written by a newer Holdfast?")
