"""A checkpoint as one file: ``.pt`` for ``torch.load``, ``.safetensors`` for weights; written and read.

A file is laid out in memory: rank 0 gathers what every rank has for itself, copies the tensors to their places and puts
everything around them. The writer fills in digest and checksums and stores the file in one atomic step. What is known
about it (step, attempt, digest) stands in the file. Read, its tensors stay mapped where they are (`lay`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import torch
import xxhash

from holdfast._units import listed
from holdfast.copying.transfer import copy_file
from holdfast.errors import ConfigError, CorruptCheckpointError, StorageNotFoundError, UnsupportedStateError
from holdfast.format.codec import dumps
from holdfast.format.digest import chunk_digests, file_digest
from holdfast.format.index import Piece, TensorEntry
from holdfast.format.manifest import Manifest
from holdfast.format.tensor_file import DTYPES, lay_out, read_header
from holdfast.interop.gathered import forget, mapped_ranges
from holdfast.interop.unpickle import Opaque, read_plain, read_torch
from holdfast.state.load.selection import covers
from holdfast.state.load.stored import Stored, decode_tree
from holdfast.state.save.plan import signature
from holdfast.state.save.staging import stage
from holdfast.state.save.torch_file import TorchFileWriter, from_plain
from holdfast.state.tree import arrays
from holdfast.state.tree.arrays import dtype_name, dtype_of, move
from holdfast.state.tree.flatten import flatten
from holdfast.storage.base import BLOCK, FileReader, FileWriter, ObjectInfo, Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.storage.wrapped import InputStream
from holdfast.writer.arena import Arena
from holdfast.writer.messages import DIGEST_DIGITS, SafetensorsFile, TorchFile

from .layout import as_torch_file, from_torch_file

_NOTE = "holdfast.json"
_FORMAT = "holdfast-file"
_DIGEST = "xxh3:" + "0" * DIGEST_DIGITS  # until the writer knows it
_ROW_BYTES = 24  # of the table of records
_WEIGHTS = "torch.save({'state': {'model': model.state_dict()}}, path), for load_weights_only=True"
_INSTEAD = f"where it was made, save tensors and plain data instead, {_WEIGHTS}"
_OF_SAFETENSORS = {code: name for name, (code, _) in DTYPES.items()}
_STEP = 4 << 20  # mapped bytes that are copied before their pages are given back
_AROUND = 2 << 20


class FileImage:
    """One file in memory, reused from save to save. One owner, one file at a time.

    Attributes:
        arena: the memory, after the first file was taken.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self._container: SafetensorsFile | TorchFile | None = None

    def container(self, *, lease: str | None) -> SafetensorsFile | TorchFile:
        """Describe the file that was taken last to the writer, which stores it under a lease of its name."""
        assert self._container is not None
        return replace(self._container, lease=lease)

    def take(self, state: dict[str, Any], container: str, note: Mapping[str, Any]) -> None:
        """Copy a state of `gathered` for its container, "torch" or "safetensors", which takes the weights alone."""
        if container == "torch":
            self.take_torch(as_torch_file(state), note)
        else:
            weights = state["state"]["model"]
            self.take_weights({name: value for name, value in weights.items() if torch.is_tensor(value)}, note)

    def take_torch(self, value: Any, note: Mapping[str, Any]) -> None:
        """Copy a state for ``torch.load``; the caller may change its tensors when this returns.

        Args:
            value: nested plain data and tensors.
            note: what the file says about itself.
        """
        text = _note(note, _DIGEST)
        writer = TorchFileWriter(value, records={_NOTE: text})
        note_at = writer.place_of(_NOTE)
        records_at = -(-writer.size // BLOCK) * BLOCK  # the last page of the file is written whole
        table_bytes = _ROW_BYTES * writer.num_records
        arena = self._copy(writer.tensors, writer.offsets, records_at + table_bytes)
        arena.view[records_at : records_at + table_bytes] = writer.lay_out(arena.view)
        self._container = TorchFile(
            size=writer.size, lease=None, num_records=writer.num_records, records_at=records_at, digested=note_at,
            digest_at=note_at + _digits_at(text),
        )  # fmt: skip

    def take_weights(self, weights: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
        """Copy the weights of a model for a safetensors file.

        Args:
            weights: tensors by name. Tied ones are stored under each of their names.
            note: what the file says about itself.
        """
        rows = [
            (name, arrays.dtype_name(t.dtype), tuple(t.shape), t.numel() * t.itemsize) for name, t in weights.items()
        ]
        text = _note(note, _DIGEST)
        file = lay_out(rows, {"holdfast": text.decode()})
        escaped = json.dumps(text.decode()).encode()  # as it stands in the header, before the names of tensors
        tensors = list(weights.values())
        arena = self._copy(
            [tensors[at].detach() for at in file.order], [file.offsets[at] for at in file.order], file.size
        )
        arena.view[: len(file.header)] = file.header
        self._container = SafetensorsFile(
            size=file.size, lease=None, data_at=len(file.header),
            digest_at=file.header.index(escaped) + _digits_at(escaped),
        )  # fmt: skip

    def _copy(self, tensors: list[torch.Tensor], offsets: Sequence[int], size: int) -> Arena:
        if self.arena is None or self.arena.size < size:
            self.close()
            self.arena = Arena.create(size)
        arena = self.arena
        stage(tensors, offsets, [tensor.numel() * tensor.itemsize for tensor in tensors], arena)
        arena.prefault()
        return arena

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._container = None
        if self.arena is not None:
            self.arena.close()
            self.arena = None


def _digits_at(text: bytes) -> int:
    """Return where the digits of the digest begin in a note: they are the last thing that it says."""
    return text.rindex(_DIGEST.encode()) + len(_DIGEST) - DIGEST_DIGITS


def _note(note: Mapping[str, Any], digest: str) -> bytes:
    return json.dumps({"format": _FORMAT, "version": 1, **note, "digest": digest}, separators=(",", ":")).encode()


def read_note(storage: Storage, path: str, *, verify: bool = False) -> dict[str, Any] | None:
    """Return what a file says about itself; None for one that Holdfast did not write.

    Args:
        storage: where it is.
        path: its path.
        verify: read the whole file and compare it with its digest.

    Raises:
        CorruptCheckpointError: it is cut short, or differs from its digest.
        StorageNotFoundError: there is no file.
    """
    with storage.open(path) as reader:
        stream = cast("BinaryIO", io.BufferedReader(InputStream(reader), 1 << 20))
        where = f"{storage.uri}/{path}"
        if path.endswith(".safetensors"):
            return _weights_note(reader, stream, where, verify=verify)
        return _torch_note(stream, where, verify=verify)


def _torch_note(stream: BinaryIO, where: str, *, verify: bool) -> dict[str, Any] | None:
    try:
        with zipfile.ZipFile(stream) as archive:
            found = next((record for record in archive.infolist() if record.filename.endswith(f"/{_NOTE}")), None)
            if found is None:
                return None
            note = _parsed(archive.read(found), where)
            start = found.header_offset
    except (zipfile.BadZipFile, EOFError, struct.error, ValueError) as error:
        raise CorruptCheckpointError(f"{where} is no complete torch file: {error}", file=where) from error
    if verify:
        stream.seek(start)
        head = stream.read(30)
        end = start + 30 + sum(struct.unpack("<HH", head[26:30]))
        hasher = xxhash.xxh3_128()
        stream.seek(0)
        for data in _blocks(stream, end):
            hasher.update(data)
        _compare("xxh3:" + hasher.hexdigest(), note, where)
    return note


def _weights_note(reader: FileReader, stream: BinaryIO, where: str, *, verify: bool) -> dict[str, Any] | None:
    header = read_header(reader, where)
    if (text := header.metadata.get("holdfast")) is None:
        return None
    note = _parsed(text, where)
    if verify:
        stream.seek(header.start)
        table = b"".join(chunk_digests(data) for data in _blocks(stream, reader.size - header.start))
        _compare(file_digest(table), note, where)
    return note


def _blocks(stream: BinaryIO, count: int) -> Any:
    while count:
        data = stream.read(min(count, 1 << 23))
        if not data:
            return
        count -= len(data)
        yield data


def _parsed(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        note = json.loads(text)
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(f"{where}: what the file says about itself is damaged", file=where) from error
    if not isinstance(note, dict) or note.get("format") != _FORMAT:
        raise CorruptCheckpointError(f"{where}: what the file says about itself is damaged", file=where)
    if note.get("version") != 1:
        raise ConfigError(f"{where} was written by a newer Holdfast (version {note.get('version')}): update it")
    return note


def _compare(found: str, note: Mapping[str, Any], where: str) -> None:
    if found != note.get("digest"):
        raise CorruptCheckpointError(
            f"{where} is damaged: its bytes have the digest {found}, it was written with {note.get('digest')}",
            file=where,
        )


@contextlib.contextmanager
def opened(storage: Storage, name: str, uri: str) -> Iterator[tuple[dict[str, Any], Sequence[tuple[int, int]]]]:
    """Yield a file as nested dictionaries, of which tensors are read while the block lasts, and what `lay` has to know.

    Raises:
        ConfigError: there is no state of a trainer in it, or what loading would execute.
        CorruptCheckpointError: it is damaged.
    """
    with _local_copy(storage, name) as path:
        found = (_read_weights if name.endswith(".safetensors") else _read_torch)(path, uri)
        yield found, mapped_ranges(path)


@contextlib.contextmanager
def _local_copy(storage: Storage, name: str) -> Iterator[str]:
    """Give a file a path of this machine; it is fetched if it lies elsewhere."""
    if (root := storage.local_root) is not None:
        yield str(root / name)
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch:
        own = f"checkpoint{PurePosixPath(name).suffix}"
        copy_file(storage, name, LocalStorage(scratch), own)
        yield f"{scratch}/{own}"


def _verify(path: str, uri: str) -> None:
    try:
        read_note(LocalStorage(os.path.dirname(path) or "."), os.path.basename(path), verify=True)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(str(error).replace(f"file://{path}", uri), file=uri) from None


def _read_torch(path: str, uri: str) -> dict[str, Any]:
    """Open a torch file; its tensors are mapped, so that nothing is read before it is wanted."""
    is_zip = zipfile.is_zipfile(path)
    if not is_zip and path.endswith(".pt"):
        raise CorruptCheckpointError(f"{uri} is no complete torch file", file=uri)
    if is_zip:
        _verify(path, uri)
    try:
        found = _without_objects(path, mmap=is_zip)
    except pickle.UnpicklingError as error:
        if not is_zip and not _is_pickle(path):
            raise CorruptCheckpointError(
                f"{uri} cannot be read as a file of torch.save: it is none", file=uri
            ) from error
        raise ConfigError(f"{uri} holds pickled objects, which loading would execute: {_INSTEAD}") from error
    except UnsupportedStateError:  # a program
        raise
    except (RuntimeError, EOFError, OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        # Of what is no torch file at all its reader says all kinds of things.
        raise CorruptCheckpointError(
            f"{uri} cannot be read as a file of torch.save: {type(error).__name__}: {error}", file=uri
        ) from error
    found = from_plain(found)
    if not isinstance(found, dict) or not isinstance(found.get("state"), dict):
        raise ConfigError(
            f"{uri} was not saved by a trainer: it has no 'state' with 'model' in it; save it as {_WEIGHTS}"
        )
    return from_torch_file(found)


def _without_objects(path: str, *, mmap: bool) -> Any:
    """Read a file of torch; objects of classes that are more than data are `Opaque`, see `refuse_objects`."""
    try:
        return read_plain(path, mmap=mmap)
    except pickle.UnpicklingError as error:
        try:
            return read_torch(path)
        except UnsupportedStateError:
            raise error from None


def refuse_objects(found: dict[str, Any], uri: str, *, globs: Sequence[str], weights_only: bool) -> dict[str, Any]:
    """Leave out objects of foreign classes where nobody wants them, and refuse them anywhere else.

    Args:
        found: of `opened`.
        uri: what it is called in messages.
        globs: what is not wanted.
        weights_only: nothing but the weights is.

    Raises:
        ConfigError: naming them.
    """
    objects = dict(_objects(found))
    if not objects:
        return found

    def unwanted(path: str) -> bool:
        return covers(globs, path) or (weights_only and not path.startswith("state/model"))

    if wanted := [f"{path} ({name})" for path, name in objects.items() if not unwanted(path)]:
        raise ConfigError(
            f"{uri} holds pickled objects, which loading would execute: {listed(wanted)}: "
            f"load_ignore_keys leaves them out, load_weights_only=True all but the weights; or {_INSTEAD}"
        )
    kept: dict[str, Any] = _pruned(found)
    return kept


def _objects(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Opaque):
        yield path, value.name
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _objects(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for number, item in enumerate(value):
            yield from _objects(item, f"{path}/{number}")


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _pruned(item) for key, item in value.items() if not isinstance(item, Opaque)}
    if isinstance(value, (list, tuple)):
        return [_pruned(item) for item in value if not isinstance(item, Opaque)]
    return value


def _is_pickle(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(1) == pickle.PROTO


def _read_weights(path: str, uri: str) -> dict[str, Any]:
    """Open a safetensors file; its tensors are mapped."""
    _verify(path, uri)
    with LocalStorage(os.path.dirname(path) or ".").open(os.path.basename(path)) as reader:
        entries = read_header(reader, uri).entries
    whole = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)
    model = {}
    for key, entry in entries.items():
        known = _OF_SAFETENSORS.get(entry.dtype)
        if known is None:
            raise ConfigError(f"{uri}: tensor {key!r} has the type {entry.dtype}, which cannot be loaded here")
        dtype = dtype_of(known)
        data = whole[entry.offset : entry.offset + entry.nbytes]
        # Somebody else's header may end anywhere: torch wants a tensor to begin at a multiple of its element size.
        data = data if entry.offset % dtype.itemsize == 0 else data.clone()
        model[key] = data.view(dtype).view(entry.shape)
    return {"state": {"model": model}}


def lay(state: Mapping[str, Any], uri: str, *, mapped: Sequence[tuple[int, int]] = ()) -> Stored:
    """Return ``state`` as an opened checkpoint; its tensors stay where they are.

    Args:
        state: nested plain data and tensors.
        uri: what it is called in messages.
        mapped: memory that is mapped from a file and that nobody has written to: its pages are given back once read.
    """
    flat = flatten(state)
    ties = signature(flat).aliases
    memory = _Memory(uri, mapped)
    stored = Stored(memory, Manifest(versions={}))
    stored.tree = decode_tree(dumps(flat.tree), uri, stored.refs)
    if flat.per_rank:
        stored.per_rank = decode_tree(dumps(flat.per_rank), uri, stored.refs)
    order = sorted(range(len(flat.tensors)), key=lambda number: flat.tensors[number].data_ptr())
    for place, number in enumerate(order):
        name, tensor = flat.names[number], flat.tensors[number]
        if number in ties:
            stored.aliases[name] = flat.names[ties[number]]
            continue
        file = f"{place:09d}"  # files are read in the order of their names: so a mapped one is from front to back
        memory.tensors[file] = tensor
        piece = Piece(file, 0, tensor.numel() * tensor.itemsize)
        stored.entries[name] = TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), (piece,))
    return stored


class _Memory(Storage):
    """Tensors as files, to be read only."""

    def __init__(self, uri: str, mapped: Sequence[tuple[int, int]]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._uri, self._mapped = uri, mapped

    @property
    def uri(self) -> str:
        return self._uri

    def open(self, path: str) -> FileReader:
        if path not in self.tensors:
            raise StorageNotFoundError(f"{self._uri} holds no tensor {path!r}")
        return _TensorReader(self.tensors[path], self._mapped)

    def stat(self, path: str) -> ObjectInfo:
        with self.open(path) as reader:
            return ObjectInfo(path=path, size=reader.size)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        yield from (self.stat(name) for name in self.tensors)

    def put(
        self, path: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        raise UnsupportedStateError(f"{self._uri} is only read")

    def copy(self, source: str, target: str) -> None:
        raise UnsupportedStateError(f"{self._uri} is only read")

    def create(self, path: str, size: int) -> FileWriter:
        raise UnsupportedStateError(f"{self._uri} is only read")

    def delete(self, path: str) -> None:
        raise UnsupportedStateError(f"{self._uri} is only read")


class _TensorReader(FileReader):
    def __init__(self, tensor: torch.Tensor, mapped: Sequence[tuple[int, int]]) -> None:
        self.size = tensor.numel() * tensor.itemsize
        # A tensor of other strides is brought into order first: a copy of this one, for as long as it is read.
        self._tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        first, own = self._tensor.data_ptr(), self._tensor.data_ptr() == tensor.data_ptr()
        begins = (low for low, high in mapped if own and low <= first and first + self.size <= high)
        self._mapped_from: int | None = next(begins, None)  # where the file begins in memory

    def read_into(self, offset: int, view: memoryview) -> None:
        source, target = self._tensor.data_ptr() + offset, _address(view.cast("B"))
        step = max(1, view.nbytes) if self._mapped_from is None else _STEP
        for start in range(0, view.nbytes, step):
            size = min(step, view.nbytes - start)
            move(target + start, source + start, size)
            if self._mapped_from is not None:
                forget(source + start, size)

    def close(self) -> None:
        if self._mapped_from is not None:
            # The kernel maps pages around each fault, among them some that were given back before.
            first = self._tensor.data_ptr()
            begin = max(self._mapped_from, first - _AROUND)
            forget(begin, first + self.size - begin)


def _address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr() if len(view) else 0
