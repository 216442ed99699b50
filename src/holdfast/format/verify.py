"""Compare a checkpoint with its digests, and what it says with what it holds, however large its tensors are.

Tensors are read through one buffer. The small files (indexes and structure) are kept: together they must describe every
tensor, each element once, for digests alone do not say that a signed checkpoint can be loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from holdfast.errors import CorruptCheckpointError, StorageError, StorageNotFoundError
from holdfast.storage.base import FileReader, Storage

from .boxes import Box, flaw
from .contents import unite
from .digest import CHUNK, DIGEST_BYTES, bytes_digest, digested, file_digest, table_bytes
from .index import FileNumbers, Index, IndexFile, Piece
from .manifest import FileEntry, Manifest
from .names import check_links, join, save_id_of
from .strict_json import loads

__all__ = ["Problem", "verify_files"]

_BLOCK = 128 * CHUNK
_SMALL = ("index", "state", "rank")
_MAX_JSON = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a checkpoint.

    Attributes:
        file: path inside the checkpoint.
        message: what is wrong, for people; names file, bytes and tensors.
        chunk: number of the damaged 64 KiB chunk, if it is known.
        tensors: names of the tensors that have bytes in it.
    """

    file: str
    message: str
    chunk: int | None = None
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.message


def verify_files(
    storage: Storage, directory: str, manifest: Manifest, *, deep: bool | Collection[str] = True
) -> list[Problem]:
    """Compare the files of a checkpoint with its manifest.

    Args:
        storage: holds the directory.
        directory: the checkpoint.
        manifest: its manifest.
        deep: read every byte, compare digests, and look whether each tensor is there whole; roles: digests of the
            files of these roles alone; otherwise sizes only.

    Returns:
        The problems, in the order of the manifest; each damaged chunk by itself.

    Raises:
        StorageError: the storage failed; that says nothing about the checkpoint.
    """
    problems: list[Problem] = []
    names = _TensorNames(storage, directory, manifest)
    roles: Collection[str] | None = None if deep is True else deep or ()
    small: dict[str, bytearray] = {}
    for entry in manifest.files:
        is_deep = roles is None or entry.role in roles
        try:
            check_links(storage, directory, (entry.path,))
            with storage.open(join(directory, entry.path)) as reader:
                kept = small.setdefault(entry.path, bytearray()) if is_deep and entry.role in _SMALL else None
                problems.extend(_verify(storage, directory, entry, reader, names, deep=is_deep, kept=kept))
        except StorageNotFoundError:
            problems.append(Problem(file=entry.path, message=f"{entry.path} is missing"))
        except CorruptCheckpointError as error:
            problems.append(Problem(file=entry.path, message=str(error)))
    if deep is True and not problems:
        problems.extend(_incomplete(manifest, small))
    return problems


def _incomplete(manifest: Manifest, small: dict[str, bytearray]) -> Iterator[Problem]:
    """Yield why a load refuses the indexes of all writers, and what these leave out or list twice."""
    from .index_group import read_indexes  # not above: it imports NumPy, which a look at sizes does without

    sizes = {entry.path: entry.size for entry in manifest.files}
    files, wanted = FileNumbers(), dict[str, str]()
    stored = [entry.path for entry in sorted(manifest.with_role("index"), key=lambda entry: entry.writer)]
    try:
        texts = [IndexFile(path, save_id_of(path), bytes(small.pop(path))) for path in stored]
        tensors = unite(read_indexes(texts, files, sizes=sizes), where="the indexes", files=files)
        for path, structure in small.items():
            tree = loads(bytes(structure), max_bytes=_MAX_JSON, where=path)
            wanted |= dict.fromkeys(_tensors_of(tree), path)
    except CorruptCheckpointError as error:
        yield Problem(file=error.file or next(iter(stored), ""), message=str(error))
        return
    for name, _, shape, pieces in tensors.entries.values():
        if (problem := flaw(shape, (_box(piece, shape) for piece in pieces))) is not None:
            yield Problem(file=stored[0], message=f"{stored[0]}: tensor {name!r}: {problem}", tensors=(name,))
    for name in wanted.keys() - tensors.entries.keys() - tensors.aliases.keys():
        path = wanted[name]
        message = f"{path}: the structure names a tensor {name!r} that no index lists"
        yield Problem(file=path, message=message, tensors=(name,))


def _box(piece: Piece, shape: tuple[int, ...]) -> Box:
    if piece.box_start is None or piece.box_shape is None:
        return Box((0,) * len(shape), shape)
    return Box(piece.box_start, piece.box_shape)


def _tensors_of(tree: Any) -> Iterator[str]:
    """Yield the names of the tensors in a structure; what is malformed there is for those who load it to say."""
    waiting: list[Sequence[Any]] = [[tree]]
    while waiting:
        for node in waiting.pop():
            if type(node) is list:
                waiting.append(node)
            elif type(node) is dict:
                tag, at, keys = node.get("$"), node.get("at"), node.get("k")
                if tag == "tensor" and type(node.get("n")) is str:
                    yield node["n"]
                elif tag == "tensors" and type(at) is str and type(keys) is list:
                    yield from (at + key for key in keys if type(key) is str)
                else:
                    waiting.append(list(node.values()))


def _verify(
    storage: Storage, directory: str, entry: FileEntry, reader: FileReader, names: _TensorNames, *,
    deep: bool, kept: bytearray | None,
) -> Iterator[Problem]:  # fmt: skip
    if reader.size != entry.size:
        message = f"{entry.path} has {reader.size} bytes, the manifest says {entry.size}"
        yield Problem(file=entry.path, message=message)
        return
    if not deep:
        return
    if entry.chunks is None:
        table = bytearray()
        for _, view, digests in digested(reader, _buffer(reader)):
            table += digests
            if kept is not None:
                kept += view
        if file_digest(bytes(table)) != entry.digest:
            yield Problem(file=entry.path, message=f"{entry.path}: its bytes are not what was written (digest differs)")
        return
    table_path, offset = entry.chunks
    whole = xxhash.xxh3_128()
    damaged = False
    try:
        tables = storage.open(join(directory, table_path))
    except StorageNotFoundError as error:
        yield Problem(file=entry.path, message=f"{entry.path}: its chunk digests cannot be read ({error})")
        return
    with tables:
        if tables.size < offset + table_bytes(entry.size):
            message = f"{entry.path}: its chunk digests cannot be read ({table_path} has only {tables.size} bytes)"
            yield Problem(file=entry.path, message=message)
            return
        for start, view, digests in digested(reader, _buffer(reader)):
            if kept is not None:
                kept += view
            expected = bytearray(len(digests))
            tables.read_into(offset + start // CHUNK * DIGEST_BYTES, memoryview(expected))
            whole.update(expected)
            if digests != expected:
                damaged = True
                yield from _damaged_chunks(entry, start // CHUNK, digests, bytes(expected), names)
    if not damaged and f"xxh3:{whole.hexdigest()}" != entry.digest:
        message = f"{entry.path}: {table_path} does not hold the digests of this file"
        yield Problem(file=entry.path, message=message)


def _buffer(reader: FileReader) -> memoryview:
    return memoryview(bytearray(_BLOCK if reader.size > _BLOCK else max(1, reader.size)))


def _damaged_chunks(
    entry: FileEntry, first: int, digests: bytes, expected: bytes, names: _TensorNames
) -> Iterator[Problem]:
    for chunk, at in enumerate(range(0, len(digests), DIGEST_BYTES), first):
        if digests[at : at + DIGEST_BYTES] == expected[at : at + DIGEST_BYTES]:
            continue
        start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, entry.size)
        tensors = names.between(entry.path, start, stop)
        shown = ", ".join(tensors[:5]) + (f" and {len(tensors) - 5} more" if len(tensors) > 5 else "")
        message = f"{entry.path}: bytes {start}..{stop} (chunk {chunk}) are not what was written"
        yield Problem(
            file=entry.path, message=message + (f"; tensors: {shown}" if shown else ""), chunk=chunk, tensors=tensors
        )


class _TensorNames:
    """Says which tensors have bytes in a range. Reads the indexes only when something is damaged."""

    def __init__(self, storage: Storage, directory: str, manifest: Manifest) -> None:
        self._storage, self._directory, self._manifest = storage, directory, manifest
        self._ranges: dict[str, list[tuple[int, int, str]]] | None = None

    def between(self, path: str, start: int, stop: int) -> tuple[str, ...]:
        if self._ranges is None:
            self._ranges = self._read()
        rows = self._ranges.get(path, ())
        return tuple(name for first, last, name in rows if first < stop and last > start)

    def _read(self) -> dict[str, list[tuple[int, int, str]]]:
        ranges: dict[str, list[tuple[int, int, str]]] = {}
        for entry in self._manifest.with_role("index"):
            try:
                data = self._storage.read(join(self._directory, entry.path))
                if bytes_digest(data) != entry.digest:
                    continue
                index = Index.from_bytes(data, where=entry.path, save_id=save_id_of(entry.path))
            except (StorageError, CorruptCheckpointError):
                continue  # reported under its own entry; here it only costs the names
            for tensor in index.tensors.values():
                for piece in tensor.pieces:
                    ranges.setdefault(piece.file, []).append((piece.offset, piece.offset + piece.nbytes, tensor.name))
        return ranges
