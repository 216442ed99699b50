"""The contents of reported directories: every file, where its bytes are, whether it may be moved; and its digests.

Bytes of files that are no arena are digested where they are, or copied and digested in the same pass.

Where the driver's writer cannot read the disk of the rank, the directory goes through the store (`Incoming`). The
rank's node puts its files, under numbers, below a hidden directory of the run; a listing comes last. The driver's
writer copies them to their names inside the store. So nobody but that writer ever puts anything under the name of a
checkpoint, and what a node stores that was given up is swept with the hidden directories of dead starts.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from holdfast._units import listed
from holdfast.copying.sending import Windows
from holdfast.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FormatVersionError,
    HoldfastError,
    StorageError,
    StorageNotFoundError,
)
from holdfast.format.digest import chunk_digests, closed_object, digested, file_digest, table_at, table_bytes
from holdfast.format.manifest import MAX_FOLDERS, MAX_MANIFEST_BYTES, FileEntry, Manifest
from holdfast.format.names import MANIFEST_NAME, METADATA_FILE, REMOVING_NAME, SIDECARS, check_path, join
from holdfast.format.parts import is_passing
from holdfast.format.strict_json import dumps, loads
from holdfast.run.record import METRICS_FILE
from holdfast.storage.base import TEMPORARY, FileBatch, FileReader, Storage, errors_of
from holdfast.storage.local.beneath import Inside
from holdfast.storage.together import SerialExecutor

from ..messages import IngestSource

_NAMED = 5
SMALL_BYTES = 1 << 20
"""Up to here a file goes through the page cache, together with others, and is digested where it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a source, or of the checkpoint that is made of them.

    Attributes:
        rank: the rank that reported it.
        name: path inside the source, with "/"; or inside the checkpoint.
        source: absolute path of its bytes; one in the storage: relative to its root.
        size: in bytes.
        movable: the file may be moved instead of copied: it is owned and not reached through a link.
        entry: its entry in the manifest of a source that is a checkpoint; of the checkpoint that is made: under its
            name there.
    """

    rank: int
    name: str
    source: str
    size: int
    movable: bool
    entry: FileEntry | None = None

    def to_json(self) -> list[Any]:
        """Describe this file."""
        entry = None if self.entry is None else self.entry.to_json()
        return [self.name, self.rank, self.source, self.size, self.movable, entry]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> SourceFile:
        """Rebuild what `to_json` described."""
        name, rank, source, size, movable, entry = row
        known = None if entry is None else FileEntry.from_json(entry)
        return cls(rank=rank, name=name, source=source, size=size, movable=movable, entry=known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of a source.

    Attributes:
        rank: the rank that reported it.
        files: in order of their names, without the files of the attributes below.
        metadata: bytes of its `.metadata.json`.
        manifest: the manifest of a source that is a Holdfast checkpoint.
        manifest_file: that manifest as a file.
        bare: sub-directories that hold nothing.
    """

    rank: int
    files: tuple[SourceFile, ...] = ()
    metadata: bytes | None = None
    manifest: Manifest | None = None
    manifest_file: SourceFile | None = None
    bare: tuple[str, ...] = ()


def scan(source: IngestSource) -> Contents:
    """List a source. Reads names and sizes, its metadata and, if it has one, its manifest.

    Links are resolved: what they lead to is part of the source. Directories that hold nothing are listed too.

    Raises:
        CheckpointNotFoundError: there is nothing.
        ConfigError: something in it can be no part of a checkpoint.
        CorruptCheckpointError: the source is a Holdfast checkpoint, and a file that it lists is missing or cut short.
        StorageError: it cannot be read.
    """
    root = source.path
    movable = source.owned and not os.path.islink(root)
    if os.path.isfile(root):
        head, name = os.path.split(root)
        if name in (MANIFEST_NAME, REMOVING_NAME, *SIDECARS):
            raise ConfigError(f"{root} (rank {source.rank}): checkpoints keep something of their own under this name")
        file = SourceFile(rank=source.rank, name=name, source=root, size=os.stat(root).st_size, movable=movable)
        metadata = _read(f"{head}/.{name}{METADATA_FILE}")
        return check_contents(root, Contents(rank=source.rank, files=(file,), metadata=metadata))
    if not os.path.isdir(root):
        raise CheckpointNotFoundError(
            f"rank {source.rank} reported {root}, and there is no such directory: it must stay until report() has "
            "taken it over; give each rank a directory of its own if they delete it themselves"
        )
    with errors_of("read", root):
        bare: list[str] = []
        walk = _walk(source, root, "", movable, (os.path.realpath(root),), bare)
        found = sorted(walk, key=lambda file: file.name)
    manifest = _manifest(source, found)
    metadata = _read(os.path.join(root, METADATA_FILE))
    if manifest is None:
        files = tuple(file for file in found if file.name != METADATA_FILE)
        return check_contents(
            root, Contents(rank=source.rank, files=files, metadata=metadata, bare=tuple(sorted(bare)))
        )
    bare = sorted({*bare, *manifest.empty_directories})
    contents = _of_checkpoint(source, found, manifest)
    return check_contents(
        root,
        Contents(
            rank=source.rank,
            files=contents,
            metadata=metadata,
            manifest=manifest,
            manifest_file=next(file for file in found if file.name == MANIFEST_NAME),
            bare=tuple(bare),
        ),
    )


def _walk(
    source: IngestSource, directory: str, prefix: str, movable: bool, inside: tuple[str, ...], bare: list[str]
) -> Iterator[SourceFile]:
    with os.scandir(directory) as entries:
        listed = list(entries)
    if not listed and prefix:
        bare.append(prefix.rstrip("/"))
    for entry in listed:
        name = prefix + entry.name
        linked = entry.is_symlink()
        try:
            status = entry.stat()
        except FileNotFoundError:
            if not linked:
                raise
            raise ConfigError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, which is not there: a checkpoint holds what "
                "links lead to; remove it"
            ) from None
        if stat.S_ISDIR(status.st_mode):
            home = os.path.realpath(entry.path)
            if home in inside:
                raise ConfigError(f"{entry.path} is a link to a directory that it lies in ({home}): remove it")
            yield from _walk(source, entry.path, f"{name}/", movable and not linked, (*inside, home), bare)
        elif stat.S_ISREG(status.st_mode):
            yield SourceFile(
                rank=source.rank,
                name=name,
                source=entry.path,
                size=status.st_size,
                movable=movable and not linked,
            )
        else:
            raise ConfigError(
                f"{entry.path} is neither a file nor a directory (a socket, a pipe or a device): no checkpoint can "
                "hold it; remove it before report()"
            )


def _manifest(source: IngestSource, found: list[SourceFile]) -> Manifest | None:
    """Read the manifest of a source that is a Holdfast checkpoint; refuse files with names that checkpoints reserve."""
    names = {file.name: file for file in found}
    where = os.path.join(source.path, MANIFEST_NAME)
    manifest = None
    if MANIFEST_NAME in names:
        data = _read(where) if names[MANIFEST_NAME].size <= MAX_MANIFEST_BYTES else b""
        try:
            manifest = Manifest.from_bytes(data or b"", where=where)
        except FormatVersionError as error:
            raise ConfigError(f"rank {source.rank} reported a checkpoint that cannot be read: {error}") from error
        except CorruptCheckpointError as error:
            raise ConfigError(
                f"{where} is not a manifest of Holdfast: checkpoints keep theirs under this name. Rename the file, or "
                f"put it into a directory of the reported one. (If it is one of Holdfast, it is damaged: {error})"
            ) from error
    ours = [REMOVING_NAME] if manifest is not None else [REMOVING_NAME, METRICS_FILE]
    for name in ours:
        if name in names:
            raise ConfigError(
                f"{os.path.join(source.path, name)}: checkpoints keep something of their own under this name; rename "
                "the file, or report a directory without it"
            )
    return manifest


def _of_checkpoint(source: IngestSource, found: list[SourceFile], manifest: Manifest) -> tuple[SourceFile, ...]:
    """Add to each file its entry in the manifest; leave out files that belong to the old place only."""
    listed = {entry.path: entry for entry in manifest.files}
    names = {file.name: file for file in found}
    for path, entry in listed.items():
        there = names.get(path)
        if there is None or there.size != entry.size:
            state = "is missing" if there is None else f"has {there.size} bytes"
            raise CorruptCheckpointError(
                f"{source.path} (rank {source.rank}): {path} {state}, its manifest says {entry.size} bytes: this "
                "checkpoint is damaged; report another one",
                file=path,
            )
    kept = []
    for file in found:
        own = file.name in (MANIFEST_NAME, METRICS_FILE, METADATA_FILE) or file.name.startswith(TEMPORARY)
        if file.name in listed:
            # Not `dataclasses.replace`: ten thousand files would take 30 ms.
            kept.append(
                SourceFile(
                    rank=file.rank,
                    name=file.name,
                    source=file.source,
                    size=file.size,
                    movable=file.movable,
                    entry=listed[file.name],
                )
            )
        elif not own and not is_passing(file.name):
            kept.append(file)
    return tuple(kept)


def check_contents(where: str, contents: Contents) -> Contents:
    """Refuse names that no checkpoint can have, and metadata that nobody could read; return the contents.

    Args:
        where: the source, for messages.
        contents: what is in it.

    Raises:
        ConfigError: a file or directory has such a name, too many directories hold nothing, or the metadata are no JSON
            object.
    """
    if contents.metadata is not None:
        check_metadata(f"{where} (rank {contents.rank})", contents.metadata)
    bad = []
    for name in (*[file.name for file in contents.files], *contents.bare):
        try:
            check_path(name, where=where)
        except CorruptCheckpointError:
            bad.append(name)
            continue
        if any(part.startswith(TEMPORARY) for part in name.split("/")):
            bad.append(name)
    own = (MANIFEST_NAME, REMOVING_NAME, *SIDECARS)
    bad += [name for name in contents.bare if name.partition("/")[0] in own]
    if sum(name.count("/") + 1 for name in contents.bare) > MAX_FOLDERS:
        raise ConfigError(
            f"{where} (rank {contents.rank}): {len(contents.bare)} directories hold nothing, more than the "
            f"{MAX_FOLDERS} that a checkpoint may have with those they lie in: remove them before report()"
        )
    if bad:
        raise ConfigError(
            f"{where} (rank {contents.rank}): files and directories of a checkpoint cannot be called "
            f"{listed(map(ascii, bad), _NAMED)}: use names in UTF-8, without backslashes, that "
            f"do not start with {TEMPORARY!r}"
        )
    return contents


def check_metadata(where: str, data: bytes) -> None:
    """Refuse a metadata file that nobody could read.

    Raises:
        ConfigError: it is no JSON object, or differs from its digest.
    """
    try:
        closed_object(data)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {METADATA_FILE} is not the JSON object that Checkpoint.get_metadata() reads ({error}): write it "
            "with set_metadata(), or give the file another name"
        ) from error


def damaged(source: str, name: str) -> CorruptCheckpointError:
    """Say that a file of a reported checkpoint is not what that was committed with."""
    return CorruptCheckpointError(
        f"{source}: its bytes are not those that its checkpoint was committed with: this checkpoint is damaged; report "
        "another one",
        file=name,
    )


def _read(path: str) -> bytes | None:
    """Read a small file; None if it is not there."""
    with errors_of("read", path):
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError:
            return None
    if len(data) > MAX_MANIFEST_BYTES:
        raise StorageError(f"cannot read {path}: it has more than {MAX_MANIFEST_BYTES} bytes")
    return data


class Copier:
    """Reads through two reused buffers; one thread at a time.

    Args:
        side: reads and digests into one buffer while the other is written.
    """

    def __init__(self, side: SerialExecutor) -> None:
        self._windows = Windows(side.run, 2)

    def digest_file(self, path: str, size: int) -> bytes:
        """Give the chunk digests of a local file."""
        with opened(path, size) as fd:
            return self.digest_open(fd, path, size)

    def digest_open(self, fd: int, path: str, size: int) -> bytes:
        """Give the chunk digests of an open file, without the help of the side thread."""
        return self._digest(_OpenFile(fd, path, size))

    def digest_object(self, storage: Storage, path: str) -> bytes:
        """Give the chunk digests of an object."""
        with storage.open(path) as reader:
            return self._digest(reader)

    def copy(self, path: str, size: int, storage: Storage, target: str, batch: FileBatch) -> bytes:
        """Copy a local file; give its chunk digests.

        It is durable on return, or, up to `SMALL_BYTES`, when ``batch`` (of the same storage) is closed.

        Raises:
            StorageError: it could not be read or written, or changed meanwhile.
        """
        if size <= SMALL_BYTES:
            return self._copy_small(path, size, batch, target)
        table = bytearray()
        with (
            opened(path, size) as fd,
            storage.create(target, size) as writer,
            _unchanged(fd, path),
            closing(self._windows.read(_OpenFile(fd, path, size))) as windows,
        ):
            for window in windows:
                table += window.digests
                # Whole pages, so that the tail goes past the page cache as well; the storage cuts it to size.
                writer.write(window.view)
        return bytes(table)

    def _copy_small(self, path: str, size: int, batch: FileBatch, target: str) -> bytes:
        with self._windows.buffer() as buffer:
            view = buffer[:size]
            with opened(path, size) as fd, _unchanged(fd, path):
                _OpenFile(fd, path, size).read_into(0, view)
            batch.add(target, view)
            return chunk_digests(view)

    def _digest(self, reader: FileReader) -> bytes:
        with self._windows.buffer() as buffer:
            return b"".join(digests for _, _, digests in digested(reader, buffer))


class _OpenFile(FileReader):
    """A local file that its owner may change while it is read; whoever opened ``fd`` closes it."""

    def __init__(self, fd: int, path: str, size: int) -> None:
        self._fd, self._path, self.size = fd, path, size

    def read_into(self, offset: int, view: memoryview) -> None:
        with errors_of("read", self._path):
            done = 0
            while done < len(view):
                count = os.preadv(self._fd, [view[done:]], offset + done)
                if count == 0:
                    raise changed(self._path)
                done += count

    def close(self) -> None:
        pass


@contextmanager
def _unchanged(fd: int, path: str) -> Iterator[None]:
    """Refuse a file that is written to in the block."""
    before = os.fstat(fd)
    yield
    after = os.fstat(fd)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise changed(path)


@contextmanager
def opened(path: str, size: int) -> Iterator[int]:
    """Open a local file for reading, an `Inside` by its directory; it must have ``size`` bytes."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    with errors_of("read", path):
        if isinstance(path, Inside):
            fd = os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=path.dir_fd)
        else:
            fd = os.open(path, flags)
    try:
        if os.fstat(fd).st_size != size:
            raise changed(path)
        yield fd
    finally:
        os.close(fd)


def changed(path: str) -> StorageError:
    """Say that a file is not what it was when it was looked at."""
    return StorageError(
        f"cannot take {path}: it changed while it was read; leave a reported directory alone until report() returns "
        "(SYNC), or has taken it over (ASYNC)"
    )


_LISTING, _DIGESTS = "listing.json", "digests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """What a rank has stored.

    Attributes:
        contents: as `scan` gives them; sources are paths in the storage.
        tables: chunk digests by source.
    """

    contents: Contents
    tables: Mapping[str, bytes]


def put_incoming(
    storage: Storage, home: str, source: IngestSource, *, go_on: Callable[[], object] = lambda: None
) -> None:
    """Store a directory, or one file, of this machine below ``home``, complete when this returns.

    Args:
        storage: root of the run.
        home: `holdfast.run.remains.INCOMING`, the start id, and a name that nothing else has.
        source: the directory or file; it is only read.
        go_on: called before each file; what it raises ends this.

    Raises:
        CheckpointNotFoundError: there is nothing.
        ConfigError: something in it can be no part of a checkpoint.
        CorruptCheckpointError: it is a Holdfast checkpoint with other bytes than it was committed with.
        StorageError: it could not be read or stored; nothing is left below ``home``.
    """
    contents = scan(source)
    files = [*contents.files, *([] if contents.manifest_file is None else [contents.manifest_file])]
    tables = []
    try:
        with (
            closing(SerialExecutor()) as side,
            storage.batch(sum(file.size <= SMALL_BYTES for file in files)) as batch,
        ):
            copier = Copier(side)
            for number, file in enumerate(files):
                go_on()
                table = copier.copy(file.source, file.size, storage, _object(home, number), batch)
                if file.entry is not None and file_digest(table) != file.entry.digest:
                    raise damaged(file.source, file.name)
                tables.append(table)
        storage.put(join(home, _DIGESTS), b"".join(tables))
        storage.put(join(home, _LISTING), dumps(_to_json(contents)))
    except BaseException:
        remove_incoming(storage, home)
        raise


def read_incoming(storage: Storage, home: str, rank: int) -> Incoming:
    """Read what `put_incoming` has stored.

    Raises:
        CheckpointNotFoundError: it is not there, or not whole.
        CorruptCheckpointError: the listing is damaged.
    """
    where = join(home, _LISTING)
    try:
        listing = loads(storage.read(where), max_bytes=MAX_MANIFEST_BYTES, where=where)
        digests = storage.read(join(home, _DIGESTS))
    except StorageNotFoundError as error:
        raise CheckpointNotFoundError(
            f"what rank {rank} reported is not in {join(storage.uri, home)} any more: somebody has removed it, or has "
            "taken this run over"
        ) from error
    try:
        return _from_json(storage, home, rank, listing, digests)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{where}: malformed ({error!r})", file=where) from error


def remove_incoming(storage: Storage, home: str) -> None:
    """Remove what was stored below ``home``, the listing first. What stays because of an error is swept later."""
    with suppress(HoldfastError):
        storage.delete(join(home, _LISTING))
        storage.delete_tree(home)


def _object(home: str, number: int) -> str:
    return join(home, f"{number:06d}")


def _to_json(contents: Contents) -> dict[str, Any]:
    metadata, last = contents.metadata, contents.manifest_file
    return {
        "incoming": 1,
        "files": [
            [file.name, file.size, None if file.entry is None else file.entry.to_json()] for file in contents.files
        ],
        "manifest_bytes": None if last is None else last.size,
        "metadata": None if metadata is None else base64.b64encode(metadata).decode(),
        "bare": list(contents.bare),
    }


def _from_json(storage: Storage, home: str, rank: int, listing: Mapping[str, Any], digests: bytes) -> Incoming:
    files = []
    for number, (name, size, entry) in enumerate(listing["files"]):
        known = None if entry is None else FileEntry.from_json(entry)
        place = _object(home, number)
        files.append(SourceFile(rank=rank, name=str(name), source=place, size=int(size), movable=False, entry=known))
    manifest, last = None, None
    if (size := listing["manifest_bytes"]) is not None:
        place = _object(home, len(files))
        manifest = Manifest.from_bytes(storage.read(place), where=join(storage.uri, place))
        last = SourceFile(rank=rank, name=MANIFEST_NAME, source=place, size=int(size), movable=False)
    metadata = listing["metadata"]
    contents = Contents(
        rank=rank,
        files=tuple(files),
        metadata=None if metadata is None else base64.b64decode(metadata),
        manifest=manifest,
        manifest_file=last,
        bare=tuple(map(str, listing["bare"])),
    )
    tables, offset = {}, 0
    for file in [*files, *([] if last is None else [last])]:
        tables[file.source] = table_at(digests, offset, file.size)
        offset += table_bytes(file.size)
    if offset != len(digests):
        raise ValueError(f"{len(digests)} bytes of digests, {offset} expected")
    return Incoming(contents=check_contents(join(storage.uri, home), contents), tables=tables)
