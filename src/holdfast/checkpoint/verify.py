"""Check a checkpoint against its own manifest: sizes, and on demand every byte, however large its tensors are.

Tensors are read through one buffer. The small files (indexes and structure) are kept: together they must describe every
tensor, each element once, for digests alone do not say that a signed checkpoint can be loaded.

What was found is noted beside run.json, in ``.verified.json``, on which nothing depends: without it nothing counts as
verified. Each entry has a fingerprint of the files as they were then (names, sizes, times of change), so that a
checkpoint whose files were written or exchanged since is not taken for a verified one. What rots without a change of
time is not seen.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

import xxhash
from xxhash import xxh3_128_hexdigest

from holdfast._log import get_logger
from holdfast._units import listed
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    StorageNotFoundError,
    StoragePermissionError,
)
from holdfast.format.commit import read_manifest
from holdfast.format.contents import unite
from holdfast.format.digest import (
    CHUNK,
    DIGEST_BYTES,
    bytes_digest,
    check_object,
    close_object,
    closed_object,
    digested,
    file_digest,
    table_bytes,
)
from holdfast.format.division import Box, flaw
from holdfast.format.index import FileNumbers, Index, IndexFile, Piece
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.format.names import METADATA_FILE, check_links, join, save_id_of
from holdfast.format.strict_json import loads
from holdfast.run.names import RUN_FILE, VERIFIED_FILE
from holdfast.run.record import METRICS_FILE, read_sidecar
from holdfast.run.remains import holds_remains
from holdfast.storage.base import FileReader, Storage
from holdfast.storage.wrapped import PrefixStorage

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a check found; true in a condition when all is well.

    Attributes:
        ok: nothing is wrong.
        problems: one line each, naming the file and, where known, the tensor.
        state: "ok", "foreign" (no manifest of ours: nothing to check against), "incomplete", "corrupt", "missing" or
            "unreadable" (the storage failed).
        deep: every byte was read, not just sizes.
        files: number of files in the manifest.
        bytes_read: bytes compared with their digests.
    """

    ok: bool
    problems: tuple[str, ...] = ()
    state: str = "ok"
    deep: bool = False
    files: int = 0
    bytes_read: int = 0

    def __bool__(self) -> bool:
        return self.ok


def verify(
    storage: Storage,
    name: str,
    *,
    deep: bool | Collection[str],
    progress: Progress | None = None,
    beside: bool = True,
) -> Verification:
    """Check the checkpoint in directory ``name``.

    Args:
        storage: the run.
        name: the checkpoint's directory.
        deep: read every byte and compare digests, of the files of these roles if it names roles.
        progress: called with the number of bytes just read.
        beside: check what may change after the commit too (late metrics, pin, metadata); no resume depends on it.

    Raises:
        StoragePermissionError: it may not be read, which says nothing about it.
    """
    try:
        manifest = read_manifest(storage, name)
    except CheckpointNotFoundError as error:
        return Verification(ok=False, problems=(str(error),), state="missing")
    except IncompleteCheckpointError as error:
        if holds_remains(storage, name):
            return Verification(ok=False, problems=(str(error),), state="incomplete")
        why = "foreign: there is no manifest.json of Holdfast, so there is nothing to check against"
        return Verification(ok=False, problems=(why,), state="foreign")
    except CheckpointError as error:
        return Verification(ok=False, problems=(str(error),), state="corrupt")
    watched = _CountingStorage(storage, name, progress)
    try:
        problems = [str(problem) for problem in verify_files(watched, "", manifest, deep=deep)]
        problems += _problems_beside(storage, name) if beside else []
        state = "corrupt" if problems else "ok"
    except StoragePermissionError:
        raise
    except StorageError as error:
        problems, state = [f"cannot be read: {error}"], "unreadable"
    if problems and not _is_still_there(storage, name, manifest):
        # Retention, or a save that replaces it, was at work meanwhile; what was read says nothing about either.
        return verify(storage, name, deep=deep, progress=progress, beside=beside)
    return Verification(
        ok=not problems,
        problems=tuple(problems),
        state=state,
        deep=deep is True,
        files=len(manifest.files),
        bytes_read=watched.bytes_read,
    )


def _is_still_there(storage: Storage, name: str, manifest: Manifest) -> bool:
    """Tell whether the manifest is the one that was read; a deletion takes it first, a replacement puts another."""
    try:
        return read_manifest(storage, name).checkpoint_id == manifest.checkpoint_id
    except (CheckpointError, StorageError):
        return False


def _problems_beside(storage: Storage, name: str) -> list[str]:
    problems = []
    damage = read_sidecar(storage, name).damage
    if damage:
        problems.append(
            f"{METRICS_FILE}: {damage}: its late metrics are lost; it counts as pinned and is not ranked until it is "
            "pinned or unpinned (holdfast pin, holdfast unpin)"
        )
    try:
        read_metadata(storage, join(name, METADATA_FILE))
    except CorruptCheckpointError as error:
        problems.append(str(error))
    return problems


def read_metadata(storage: Storage, path: str) -> dict[str, Any]:
    """Read the user's metadata of a checkpoint; {} if there is none.

    Raises:
        CorruptCheckpointError: it is no JSON object, or differs from its digest.
    """
    try:
        data = storage.read(path)
    except StorageNotFoundError:
        return {}
    try:
        return closed_object(data)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{storage.uri.rstrip('/')}/{path} is not the JSON object that was written ({error}); "
            "set_metadata() replaces it",
            file=METADATA_FILE,
        ) from error


class _CountingStorage(PrefixStorage):
    """The checkpoint's directory, counting the bytes read from it."""

    def __init__(self, storage: Storage, name: str, progress: Progress | None) -> None:
        super().__init__(storage, name)
        self.bytes_read = 0
        self._progress = progress

    def open(self, path: str) -> FileReader:
        return _Counting(super().open(path), self._count)

    def _count(self, nbytes: int) -> None:
        self.bytes_read += nbytes
        if self._progress is not None:
            self._progress(nbytes)


class _Counting(FileReader):
    def __init__(self, reader: FileReader, count: Progress) -> None:
        self._reader, self._count = reader, count
        self.size = reader.size

    def read_into(self, offset: int, view: memoryview) -> None:
        self._reader.read_into(offset, view)
        self._count(len(view))

    def close(self) -> None:
        self._reader.close()


_MAX_BYTES = 16 << 20
_LONGEST = 300
_LATER = {METRICS_FILE, METADATA_FILE}  # may change at any time, and no resume depends on them
_LOG = get_logger("catalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of a check.

    Attributes:
        time: when it ended, in seconds since 1970.
        deep: every byte was compared with its digest, not only manifest and sizes.
        ok: nothing was wrong.
        problem: the first that was found, or "".
        files: `fingerprint` of the files that were checked.
    """

    time: float
    deep: bool
    ok: bool
    problem: str = ""
    files: str = ""

    def describe(self, storage: Storage, name: str) -> dict[str, Any]:
        """Describe as JSON, with "unchanged": whether the files are those that were checked; "words" for a reader."""
        row = asdict(self)
        row["unchanged"] = row.pop("files") == fingerprint(storage, name)
        what = "every byte" if self.deep else "manifest and sizes"
        found = "right" if self.ok else f"damaged: {self.problem}"
        when = datetime.fromtimestamp(self.time, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        since = "" if row["unchanged"] else "; its files have changed since"
        return {**row, "words": f"{when}: {what}, {found}{since}"}


def fingerprint(storage: Storage, name: str) -> str:
    """Return a digest of names, sizes and times of the files of a checkpoint; "" if they cannot be listed."""
    try:
        rows = [(info.path, info.size, info.modified) for info in storage.list(name)]
    except StorageError:
        return ""
    files = sorted(row for row in rows if row[0].rpartition("/")[2] not in _LATER)
    return xxh3_128_hexdigest(json.dumps(files).encode()) if files else ""


def read_verified(storage: Storage, found: Collection[str] = ()) -> dict[str, Verified]:
    """Return what is known of the checkpoints of a run by name; {} if nothing is, or what is stored is damaged.

    Args:
        storage: the run.
        found: names that a listing of the run has, if there was one: it may save a request.
    """
    if found and VERIFIED_FILE not in found:
        return {}
    try:
        data = storage.read(VERIFIED_FILE)
        if len(data) > _MAX_BYTES or not check_object(data):
            raise ValueError("it differs from its digest")
        rows = json.loads(data)["checkpoints"]
        return {name: _entry(row) for name, row in rows.items()}
    except FileNotFoundError:
        return {}
    except (StorageError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _LOG.warning("%s/%s is left out: %s", storage.uri, VERIFIED_FILE, error)
        return {}


def known_damaged(storage: Storage, names: Collection[str], found: Collection[str] = ()) -> dict[str, str]:
    """Return which of ``names`` were found damaged, and have the same files since, with the first problem of each.

    ``found`` is as in `read_verified`.
    """
    return {
        name: entry.problem or "no reason is known"
        for name, entry in read_verified(storage, found).items()
        if not entry.ok and name in names and entry.files == fingerprint(storage, name)
    }


def note_verified(storage: Storage, found: Mapping[str, Verified], present: Collection[str]) -> None:
    """Record results in the run at ``storage``, if it is one and can be written to; entries of names that are gone go.

    A look at sizes alone that finds nothing wrong does not replace a look at every byte of the same files, which saw
    more, damage too.

    Args:
        storage: the run.
        found: results by name.
        present: all names that are there.
    """
    with contextlib.suppress(StorageError):  # of somebody else, or read-only: nothing depends on it
        if not found or not storage.exists(RUN_FILE):
            return
        known = {name: entry for name, entry in read_verified(storage).items() if name in present or name in found}
        for name, entry in found.items():
            before = known.get(name)
            saw_more = before is not None and before.deep and entry.ok and not entry.deep
            if before is None or not saw_more or before.files != entry.files:
                known[name] = entry
        body = {
            "checkpoints": {
                name: asdict(replace(entry, problem=entry.problem[:_LONGEST])) for name, entry in sorted(known.items())
            }
        }
        storage.put(VERIFIED_FILE, close_object(json.dumps(body).encode()))


def _entry(row: Mapping[str, Any]) -> Verified:
    entry = Verified(**{name: row[name] for name in ("time", "deep", "ok", "problem", "files")})
    kinds = (type(entry.deep), type(entry.ok), type(entry.problem), type(entry.files))
    if kinds != (bool, bool, str, str) or type(entry.time) not in (int, float) or not 0 <= entry.time < 1e11:
        raise ValueError("an entry is not what was written")
    return entry


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
    from holdfast.format.index_group import (
        read_indexes,  # not above: it imports NumPy, which a look at sizes does without
    )

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
        shown = listed(tensors, 5)
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
