"""Checkpoints that are one file: ``.pt`` for ``torch.load``, ``.safetensors`` for weights.

A file is put together in memory: the trainer copies its tensors to their places in it, another thread adds everything
else, digests it and stores it in one atomic step. What is known about it (step, attempt, digest) stands in the file.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch
import xxhash

from holdfast.errors import (
    ConfigError,
    CorruptCheckpointError,
    StorageConflictError,
    StorageExistsError,
    StorageNotFoundError,
)
from holdfast.format.digest import chunk_digests, file_digest
from holdfast.format.layout import header_bytes, order_key
from holdfast.state.save.plan import Layout
from holdfast.state.save.signature import Signature
from holdfast.state.save.staging import stage
from holdfast.state.save.torch_file import Late, TorchFileWriter
from holdfast.state.tree import arrays
from holdfast.storage.base import Storage
from holdfast.storage.stream import InputStream
from holdfast.writer.arena import Arena

__all__ = ["FileImage", "read_note"]

_NOTE = "holdfast.json"
_FORMAT = "holdfast-file"
_DIGEST = "xxh3:" + "0" * 32
_VIEW = 64 << 20


@dataclass(slots=True)
class _Tensors:
    """Tensors and their places in the file."""

    tensors: list[torch.Tensor]
    offsets: list[int]

    @property
    def sizes(self) -> list[int]:
        return [one.numel() * one.itemsize for one in self.tensors]


class FileImage:
    """One file in memory, reused from save to save. One owner, one file at a time."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._size = 0
        self._finish: Any = None

    def take_torch(self, value: Any, note: Mapping[str, Any]) -> None:
        """Copy a state for ``torch.load``; the caller may change its tensors when this returns.

        Args:
            value: nested plain data and tensors.
            note: what the file says about itself.
        """
        hasher = xxhash.xxh3_128()

        def last() -> bytes:
            return _note(note, "xxh3:" + hasher.hexdigest())

        writer = TorchFileWriter(value, records={_NOTE: Late(size=len(_note(note, _DIGEST)), make=last)})
        places = _Tensors(writer.tensors, writer.offsets)
        arena = self._copy(places, writer.size)

        def finish() -> None:
            view, at = arena.view, 0

            def sink(part: memoryview) -> None:
                nonlocal at
                hasher.update(part)
                # Tensors are in their places already.
                if at not in starts:
                    view[at : at + len(part)] = part
                at += len(part)

            spans = list(zip(places.offsets, places.sizes, strict=True))
            starts = {start for start, size in spans if size}
            writer.write(sink, [[view[start : start + size]] for start, size in spans])

        self._finish = finish

    def take_weights(self, weights: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
        """Copy the weights of a model for a safetensors file.

        Args:
            weights: tensors by name. Tied ones are stored under each of their names.
            note: what the file says about itself.
        """
        named = sorted(weights.items(), key=lambda one: order_key(arrays.dtype_name(one[1].dtype)))
        rows = [(name, arrays.dtype_name(t.dtype), tuple(t.shape), t.numel() * t.itemsize) for name, t in named]

        def header(digest: str) -> bytes:
            return header_bytes(rows, {"format": "pt", "holdfast": _note(note, digest).decode()})

        at = len(header(_DIGEST))
        offsets = []
        for _, _, _, size in rows:
            offsets.append(at)
            at += size
        arena = self._copy(_Tensors([tensor.detach() for _, tensor in named], offsets), at)

        def finish() -> None:
            start = offsets[0] if offsets else at
            begin = header(file_digest(chunk_digests(arena.view[start:at])))
            arena.view[: len(begin)] = begin

        self._finish = finish

    def store(self, storage: Storage, path: str, *, confirm: Callable[[], object] | None = None) -> int:
        """Complete the file and store it, atomically and durably; returns its bytes. Runs on another thread.

        May be called again for the same file where the storage did not take it.

        Args:
            storage: where to.
            path: its path.
            confirm: raises if the name is not ours any more. It is asked before the file is stored, which then takes
                the place of what was there at that moment and of nothing that came later; and again when it is there.
        """
        assert self._arena is not None
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        view = self._arena.view
        if confirm is not None:
            if storage.local_root is not None or self._size <= _VIEW:
                _replace(storage, path, view[: self._size], confirm)
                return self._size
            confirm()
        if storage.local_root is not None or self._size <= _VIEW:
            storage.put(path, view[: self._size])
            return self._size
        with storage.create(path, self._size) as writer:
            for start in range(0, self._size, _VIEW):
                writer.write(view[start : min(start + _VIEW, len(view))])
        if confirm is not None:
            confirm()
        return self._size

    def _copy(self, places: _Tensors, size: int) -> Arena:
        if self._arena is None or self._arena.size < size:
            self.close()
            self._arena = Arena.create(size)
        arena, self._size = self._arena, size
        empty = Signature([], [], [], [], set(), {}, [], [], {})
        sizes = places.sizes
        layout = Layout(empty, [], places.offsets, sizes, arena.size, sum(sizes))
        fresh = None if arena.prefaulted.is_set() else arena.fd
        stage(layout, places.tensors, arena.address, arena.view, fresh_fd=fresh)
        arena.prefault()
        return arena

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._finish = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _replace(storage: Storage, path: str, data: memoryview, confirm: Callable[[], object]) -> None:
    """Store a file in place of the one that is there now."""
    for is_last in (False, False, True):
        try:
            etag, is_there = storage.stat(path).etag, True
        except StorageNotFoundError:
            etag, is_there = None, False
        confirm()
        try:
            storage.put(path, data, if_absent=not is_there, if_match=etag)
            break
        except (StorageExistsError, StorageConflictError, StorageNotFoundError):
            if is_last:
                raise
    confirm()


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
            return _weights_note(stream, reader.size, where, verify=verify)
        return _torch_note(stream, where, verify=verify)


def _torch_note(stream: BinaryIO, where: str, *, verify: bool) -> dict[str, Any] | None:
    try:
        with zipfile.ZipFile(stream) as archive:
            found = next((one for one in archive.infolist() if one.filename.endswith(f"/{_NOTE}")), None)
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


def _weights_note(stream: BinaryIO, size: int, where: str, *, verify: bool) -> dict[str, Any] | None:
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or 8 + length > size:
        raise CorruptCheckpointError(f"{where} is no complete safetensors file: it has {size} bytes", file=where)
    try:
        header = json.loads(stream.read(length))
        told = header.get("__metadata__", {}).get("holdfast")
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise CorruptCheckpointError(f"{where}: not a sound safetensors header: {error}", file=where) from error
    if told is None:
        return None
    note = _parsed(told, where)
    if 8 + length + max(ends, default=0) != size:
        raise CorruptCheckpointError(f"{where} is cut short or has bytes too many: {size}", file=where)
    if verify:
        _compare(file_digest(b"".join(chunk_digests(data) for data in _blocks(stream, size - 8 - length))), note, where)
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
    except ValueError as error:
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
