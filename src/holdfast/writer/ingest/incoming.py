"""A reported directory goes through the store where the driver's writer cannot read the disk of the rank.

The rank's node puts its files, under numbers, below a hidden directory of the run; a listing comes last. The driver's
writer copies them to their names inside the store. So nobody but that writer ever puts anything under the name of a
checkpoint, and what a node stores that was given up is swept with the hidden directories of dead starts.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, HoldfastError, StorageNotFoundError
from holdfast.format.digest import file_digest, table_at, table_bytes
from holdfast.format.manifest import MAX_MANIFEST_BYTES, FileEntry, Manifest
from holdfast.format.names import MANIFEST_NAME, join
from holdfast.format.strict_json import dumps, loads
from holdfast.storage.base import Storage
from holdfast.storage.together import SerialExecutor

from ..messages import IngestSource
from .sources import SMALL_BYTES, Contents, Copier, SourceFile, check_contents, damaged, scan

__all__ = ["Incoming", "put_incoming", "read_incoming", "remove_incoming"]

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
                target = _object(home, number)
                if file.size <= SMALL_BYTES:
                    table = copier.copy_small(file.source, file.size, batch, target)
                else:
                    table = copier.copy(file.source, file.size, storage, target)
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
