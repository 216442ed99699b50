"""Import a directory of torch.distributed.checkpoint, without running code in pickles or holding its tensors."""

from __future__ import annotations

import io
import os
from collections import Counter
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any

import torch

from holdfast.errors import CorruptCheckpointError, StorageNotFoundError
from holdfast.format.division import Box
from holdfast.format.names import MANIFEST_NAME, check_links, check_path
from holdfast.state.save.torch_file import from_plain, tensor_bytes
from holdfast.state.tree.arrays import dtype_name
from holdfast.storage.base import FileReader
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.storage.wrapped import InputStream

from .blobs import Blob, BoxReader, assemble
from .export import METADATA_NAME
from .gathered import Gathered, nested, node_of, tensor_name, tensor_names
from .part import Row
from .unpickle import MAX_METADATA, Opaque, read_metadata, read_torch_stream

__all__ = ["from_dcp"]


def from_dcp(folder: str, stack: ExitStack) -> Gathered:
    """Read a directory; its files stay open in ``stack``.

    Raises:
        CorruptCheckpointError: the metadata is damaged or hostile, or points outside of the files.
    """
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

    files = _DcpFiles(folder, stack)
    metadata = read_metadata(files.small(METADATA_NAME))
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()}
    gathered = Gathered()
    nodes: dict[tuple[str | int, ...], Any] = {}
    names: set[str] = set()
    for fqn, entry in metadata.state_dict_metadata.items():
        path = _path(paths.get(fqn), fqn)
        if path in nodes:
            raise CorruptCheckpointError(f"{folder}: .metadata has two entries at {list(path)}", file=METADATA_NAME)
        name = tensor_name(path, names)
        if isinstance(entry, TensorStorageMetadata):
            blob = _tensor(name, entry, fqn, places, files)
            gathered.rows.append(Row(name, blob, blob.shape))
            names.add(name)
            nodes[path] = {"$": "tensor", "n": name}
        elif isinstance(entry, BytesStorageMetadata):
            value = from_plain(read_torch_stream(files.part(_place(places, fqn, ())).stream(), name), where=name)
            if isinstance(value, Opaque):
                gathered.not_taken.append((name, f"an object of {value.name}, which is not made here"))
                continue
            node, flat = node_of(value, name, unsupported="drop", taken=names)
            names.update(flat.names)
            gathered.not_taken += [(dropped, "no plain data") for dropped in flat.dropped]
            gathered.add(flat)
            nodes[path] = node
        else:
            raise CorruptCheckpointError(f"{folder}: .metadata describes {fqn!r} as a {type(entry).__name__}")
    gathered.tree.update(nested(nodes))
    counts = Counter(str(path[0]) for path, node in nodes.items() for _ in tensor_names(node))
    gathered.taken += [(key, f"{counts[key]} tensors" if counts[key] else "plain data") for key in gathered.tree]
    known = {METADATA_NAME, MANIFEST_NAME, *files.used}  # the manifest of a reported directory is Holdfast's
    gathered.not_taken += [
        (name, "a file that .metadata does not name") for name in sorted(set(os.listdir(folder)) - known)
    ]
    return gathered


class _DcpFiles:
    """The data files of a directory."""

    def __init__(self, folder: str, stack: ExitStack) -> None:
        self._storage, self._stack = LocalStorage(folder), stack
        self._open: dict[str, FileReader] = {}

    @property
    def used(self) -> set[str]:
        return set(self._open)

    def small(self, name: str) -> bytes:
        reader = self._reader(name)
        if reader.size > MAX_METADATA:
            raise CorruptCheckpointError(f"{name} has {reader.size} bytes: refused", file=name)
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
        return bytes(data)

    def part(self, info: Any) -> _Slice:
        """Open the part of a file that belongs to one item."""
        name, offset, length = (getattr(info, key, None) for key in ("relative_path", "offset", "length"))
        if not (type(offset) is int and type(length) is int and offset >= 0 and length >= 0):
            raise CorruptCheckpointError(f".metadata has the range {str(info)[:200]}", file=METADATA_NAME)
        if getattr(info, "transform_descriptors", None):
            raise CorruptCheckpointError(
                f".metadata says that items of {name} were transformed ({info.transform_descriptors}): load them with "
                "the extension that wrote them, and save again",
                file=METADATA_NAME,
            )
        reader = self._reader(check_path(name, where=METADATA_NAME))
        if offset + length > reader.size:
            message = f"{name} has {reader.size} bytes, .metadata points to {offset + length}"
            raise CorruptCheckpointError(message, file=name)
        return _Slice(reader, offset, length)

    def _reader(self, name: str) -> FileReader:
        reader = self._open.get(name)
        if reader is None:
            check_links(self._storage, "", (name,))
            try:
                reader = self._open[name] = self._stack.enter_context(self._storage.open(name))
            except StorageNotFoundError as error:
                raise CorruptCheckpointError(f"{name} is gone: this checkpoint is damaged", file=name) from error
        return reader


class _Slice(FileReader):
    """A range of a file as a file of its own; closing it leaves the file open."""

    def __init__(self, reader: FileReader, offset: int, length: int) -> None:
        self._reader, self._offset, self.size = reader, offset, length

    def stream(self) -> io.BufferedReader:
        return io.BufferedReader(InputStream(self), 1 << 16)

    def read_into(self, offset: int, view: memoryview) -> None:
        self._reader.read_into(self._offset + offset, view)

    def close(self) -> None:
        pass


def _path(path: Any, fqn: str) -> tuple[str | int, ...]:
    if isinstance(path, tuple) and path and all(type(step) in (str, int) for step in path):
        return path
    return (fqn,)


def _place(places: dict[Any, Any], fqn: str, start: tuple[int, ...]) -> Any:
    info = places.get((fqn, start))
    if info is None:
        raise CorruptCheckpointError(f".metadata does not say where {fqn!r} {list(start)} is", file=METADATA_NAME)
    return info


def _tensor(name: str, entry: Any, fqn: str, places: dict[Any, Any], files: _DcpFiles) -> Blob:
    dtype, shape = entry.properties.dtype, tuple(entry.size)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f".metadata gives {name!r} the dtype {str(dtype)[:80]}", file=METADATA_NAME)
    parts = []
    for chunk in entry.chunks:
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        inside = len(box.start) == len(box.shape) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= whole
            for start, size, whole in zip(box.start, box.shape, shape, strict=True)
        )
        if not inside:
            raise CorruptCheckpointError(f".metadata gives {name!r} a box outside of its shape", file=METADATA_NAME)
        if prod(box.shape):
            info = _place(places, fqn, box.start)
            parts.append(BoxReader(box, _Chunk(name, box, dtype, info, files).read))
    return Blob(name, dtype_name(dtype), shape, partial(assemble, name, shape, dtype.itemsize, parts), dtype.itemsize)


class _Chunk:
    """A stored box: a file of ``torch.save`` within a file. The first read finds out where its elements are."""

    def __init__(self, name: str, box: Box, dtype: torch.dtype, info: Any, files: _DcpFiles) -> None:
        self._name, self._box, self._dtype = name, box, dtype
        self._part = files.part(info)
        self._start: int | None = None  # first byte of the elements within the part
        self._data: memoryview | None = None  # the elements, if they are not contiguous in the file

    def read(self, offset: int, view: memoryview) -> None:
        if self._start is None and self._data is None:
            self._find()
        if self._data is None:
            self._part.read_into((self._start or 0) + offset, view)
            return
        view[:] = self._data[offset : offset + len(view)]
        if offset + len(view) == len(self._data):
            self._data = None  # read to its end; a further pass reads it again

    def _find(self) -> None:
        # On the "meta" device torch reads the structure only, which says where in the file the elements are.
        tensor = read_torch_stream(self._part.stream(), self._name, map_location="meta")
        if (
            not isinstance(tensor, torch.Tensor)
            or tuple(tensor.shape) != self._box.shape
            or tensor.dtype != self._dtype
        ):
            raise CorruptCheckpointError(
                f"tensor {self._name!r}: its file does not hold what .metadata says", tensor=self._name
            )
        place = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if place is not None and tensor.is_contiguous():
            start = place + tensor.storage_offset() * tensor.itemsize
            if start + tensor.nbytes > self._part.size:
                raise CorruptCheckpointError(f"tensor {self._name!r}: its file ends too early", tensor=self._name)
            self._start = start
        else:  # strided, or an older torch: read the whole box at once
            whole = read_torch_stream(self._part.stream(), self._name)
            self._data = memoryview(b"".join(tensor_bytes(whole)))
