"""Reported directories are merged into one checkpoint: a pure function of names, sizes and digests.

One name, one content: stored once. One name, several contents: the lowest rank keeps the name, every other rank that
differs from it gets ``stem.rank-3.ext``. A source that is a Holdfast checkpoint keeps names, roles and digests of its
files, so that it can be loaded. Of several such sources only that of the lowest rank does; the others become plain
files.
"""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import ConfigError
from holdfast.format.codec import decode, encode
from holdfast.format.commit import PartSummary
from holdfast.format.digest import CHUNK, digests_name, file_digest
from holdfast.format.manifest import EMPTY_DIRECTORIES, MANIFEST_NAME, FileEntry, Manifest
from holdfast.format.names import METADATA_FILE, REMOVING_NAME, SIDECARS, join
from holdfast.storage.base import Storage

from .sources import Contents, SourceFile

_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """What a checkpoint made of sources will consist of.

    Attributes:
        items: its files, under their names in the checkpoint.
        writers: ranks for the manifest's ``writers``.
        metadata: bytes of its `.metadata.json`, if it has one.
        fields: those fields of the manifest that a source which is a checkpoint gives, instead of the job.
        warnings: for the user, one sentence each.
        folders: directories that hold nothing on any rank.
    """

    items: tuple[SourceFile, ...] = ()
    writers: tuple[int, ...] = (0,)
    metadata: bytes | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Describe this plan."""
        return {
            "items": [item.to_json() for item in self.items],
            "writers": list(self.writers),
            "metadata": None if self.metadata is None else base64.b64encode(self.metadata).decode(),
            "fields": encode(dict(self.fields)),
            "warnings": list(self.warnings),
            "folders": list(self.folders),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MergePlan:
        """Rebuild what `to_json` described."""
        metadata = data["metadata"]
        return cls(
            items=tuple(SourceFile.from_json(row) for row in data["items"]),
            writers=tuple(data["writers"]),
            metadata=None if metadata is None else base64.b64decode(metadata),
            fields=decode(data["fields"]),
            warnings=tuple(data["warnings"]),
            folders=tuple(data.get("folders", ())),
        )


def contested(sources: Sequence[Contents]) -> list[SourceFile]:
    """List the files whose digests decide: several ranks have the name, and the file that keeps it has their size."""
    keepers: dict[str, SourceFile] = {}
    needed: dict[tuple[int, str], SourceFile] = {}
    for file in _files(_order(sources)):
        keeper = keepers.setdefault(file.name, file)
        if keeper is not file and keeper.size == file.size:
            needed |= {(found.rank, found.name): found for found in (keeper, file) if found.entry is None}
    return list(needed.values())


def merge(sources: Sequence[Contents], digests: Mapping[tuple[int, str], str]) -> MergePlan:
    """Decide where every file goes.

    Args:
        sources: the contents of each rank that reported files.
        digests: (rank, name) -> digest of the `contested` files.

    Raises:
        ConfigError: a name is a file on one rank and a directory on another.
    """
    order = _order(sources)
    manifest = order[0].manifest if order else None
    files = list(_files(order))
    taken = _names(files)
    folders = _folders(order, taken)
    items: list[SourceFile] = []
    keepers: dict[str, SourceFile] = {}
    renamed: dict[str, list[tuple[int, str]]] = {}
    for file in files:
        keeper = keepers.setdefault(file.name, file)
        adopted = manifest is not None and file.rank == order[0].rank
        if keeper is file:
            items.append(_item(file, file.name, adopted=adopted))
        elif not _same(keeper, file, digests):
            path = suffixed(file.name, file.rank, taken)
            items.append(_item(file, path))
            renamed.setdefault(file.name, [(keeper.rank, file.name)]).append((file.rank, path))
    for source in order[1:]:
        # A copy of the adopted checkpoint needs no manifest of its own.
        if source.manifest_file is not None and source.manifest != manifest:
            items.append(_item(source.manifest_file, suffixed(MANIFEST_NAME, source.rank, taken)))
    by_rank = sorted(sources, key=lambda source: source.rank)
    metadata = [(source.rank, source.metadata) for source in by_rank if source.metadata is not None]
    return MergePlan(
        items=tuple(items),
        writers=tuple(source.rank for source in by_rank) or (0,) if manifest is None else manifest.writers,
        metadata=metadata[0][1] if metadata else None,
        fields={} if manifest is None else known_fields(manifest),
        warnings=(
            *_about_names(renamed),
            *_about_metadata(metadata),
            *_about_checkpoints(order),
        ),
        folders=folders,
    )


def suffixed(name: str, rank: int, taken: set[str]) -> str:
    """Return a name with the rank in it that no other file has; it is added to ``taken``.

    Example:
        >>> suffixed("a/model.pt", 3, {"a/model.pt"}), suffixed("model.pt", 3, {"model.rank-3.pt"})
        ('a/model.rank-3.pt', 'model.rank-3-2.pt')
    """
    stem, suffix = posixpath.splitext(name)
    path, number = f"{stem}.rank-{rank}{suffix}", 1
    while path in taken:
        number += 1
        path = f"{stem}.rank-{rank}-{number}{suffix}"
    taken.add(path)
    return path


def _order(sources: Sequence[Contents]) -> list[Contents]:
    """Sort by rank, the checkpoint that is adopted first: its index names its files, so they keep their names."""
    order = sorted(sources, key=lambda source: source.rank)
    adopted = next((source for source in order if source.manifest is not None), None)
    return order if adopted is None else [adopted, *(source for source in order if source is not adopted)]


def _files(sources: Iterable[Contents]) -> Iterable[SourceFile]:
    return (file for source in sources for file in source.files)


def _names(files: Iterable[SourceFile]) -> set[str]:
    """Return all names in use, those of directories and of Holdfast's own files included."""
    names: dict[str, SourceFile] = {entry.name: entry for entry in files}
    folders: dict[str, SourceFile] = {}
    for entry in names.values():
        head = entry.name
        while head := posixpath.dirname(head):
            folders.setdefault(head, entry)
    for name in sorted(names.keys() & folders.keys()):
        file, inside = names[name], folders[name]
        raise ConfigError(
            f"{name!r} is a file of rank {file.rank} ({file.source}) and a directory of rank {inside.rank} "
            f"({inside.source}): the directories of all ranks are merged into one; use other names"
        )
    return {*names, *folders, MANIFEST_NAME, REMOVING_NAME, *SIDECARS}


def _folders(sources: Sequence[Contents], taken: set[str]) -> tuple[str, ...]:
    """Return the directories that hold nothing on any rank; they are added to ``taken``."""
    files = {file.name: file for file in _files(sources)}
    inside = taken - files.keys()  # directories that hold something on some rank
    found: set[str] = set()
    for source in sources:
        for name in source.bare:
            head = name
            while head and head not in files:
                head = posixpath.dirname(head)
            if head:
                raise ConfigError(
                    f"{head!r} is a file of rank {files[head].rank} ({files[head].source}) and a directory of rank "
                    f"{source.rank}: the directories of all ranks are merged into one; use other names"
                )
            if name not in inside:
                found.add(name)
    above: set[str] = set()
    for name in found:
        head = name
        while (head := posixpath.dirname(head)) and head not in above:
            above.add(head)
    taken |= found | above
    return tuple(sorted(found - above))


def _same(file: SourceFile, other: SourceFile, digests: Mapping[tuple[int, str], str]) -> bool:
    return file.size == other.size and _digest(file, digests) == _digest(other, digests)


def _digest(file: SourceFile, digests: Mapping[tuple[int, str], str]) -> str:
    return file.entry.digest if file.entry is not None else digests[file.rank, file.name]


def _item(file: SourceFile, name: str, *, adopted: bool = False) -> SourceFile:
    entry = None
    if adopted and file.entry is not None:
        # At the new place its bytes are shared with no other checkpoint.
        old = file.entry
        entry = FileEntry(
            path=name, size=old.size, digest=old.digest, role=old.role, writer=old.writer, chunks=old.chunks
        )
    return SourceFile(rank=file.rank, name=name, source=file.source, size=file.size, movable=file.movable, entry=entry)


def _about_names(renamed: Mapping[str, Sequence[tuple[int, str]]]) -> list[str]:
    if not renamed:
        return []
    shown_names = []
    for name, places in sorted(renamed.items())[:_NAMED]:
        (keeper, _), *others = places
        shown = ", ".join(path for _, path in others[:_NAMED]) + (" and more" if len(others) > _NAMED else "")
        shown_names.append(f"{name} is that of rank {keeper}, the others are {shown}")
    more = f" (and {len(renamed) - _NAMED} more names)" if len(renamed) > _NAMED else ""
    return [
        f"several ranks reported different files under one name, so all were kept: {'; '.join(shown_names)}{more}. "
        "Give files that differ between ranks distinct names, such as model-rank3.pt"
    ]


def _about_metadata(found: Sequence[tuple[int, bytes]]) -> list[str]:
    others = [rank for rank, data in found[1:] if data != found[0][1]]
    if not others:
        return []
    return [
        f"{METADATA_FILE} of rank {found[0][0]} was kept; what rank {', '.join(map(str, others[:_NAMED]))} has in its "
        "own is left out: set metadata on one rank only"
    ]


def _about_checkpoints(order: Sequence[Contents]) -> list[str]:
    apart = [
        source.rank for source in order[1:] if source.manifest is not None and source.manifest != order[0].manifest
    ]
    if not apart:
        return []
    return [
        f"ranks {', '.join(map(str, [order[0].rank, *apart][:_NAMED]))} reported a Holdfast checkpoint each: load() "
        f"gives that of rank {order[0].rank}, the files of the others are kept beside it. To save one state from all "
        "ranks use report(state=...)"
    ]


class FileList:
    """Gathers entries.

    Args:
        save_id: names the digest file.
        writers: ranks that the manifest will name; files of others go to the first of them.

    Attributes:
        digests_path: name of the digest file, which is only there if a file needs it.
    """

    def __init__(self, save_id: str, writers: Sequence[int]) -> None:
        self._first = min(writers)
        self._entries: dict[int, list[FileEntry]] = {writer: [] for writer in writers}
        self.digests_path = digests_name(self._first, save_id)
        self._tables = bytearray()

    def add(self, entry: FileEntry) -> None:
        """Add a file that is described already."""
        self._entries[entry.writer if entry.writer in self._entries else self._first].append(entry)

    def add_file(self, path: str, size: int, table: bytes, *, writer: int) -> None:
        """Add a file of a user by its chunk digests."""
        # The digest of a single chunk is as good as that of the file.
        chunks = None
        if size > CHUNK:
            chunks = self.digests_path, len(self._tables)
            self._tables += table
        writer = writer if writer in self._entries else self._first
        self.add(FileEntry(path=path, size=size, digest=file_digest(table), writer=writer, chunks=chunks))

    def put_digests(self, storage: Storage, directory: str) -> int:
        """Store the digest table, if there is one; give the bytes written."""
        tables = bytes(self._tables)
        if not tables:
            return 0
        with storage.create(join(directory, self.digests_path), len(tables)) as file:
            file.write(memoryview(tables))
        self.add(FileEntry.of_small(self.digests_path, tables, role="digests", writer=self._first))
        return len(tables)

    def parts(self) -> list[PartSummary]:
        """Give what `commit` takes."""
        return [PartSummary(writer=writer, files=tuple(files)) for writer, files in self._entries.items()]


def known_fields(manifest: Manifest) -> dict[str, Any]:
    """Give what a checkpoint that becomes part of another knows better: how its state was divided, what made it."""
    return {
        "world_size": manifest.world_size,
        "epoch": manifest.epoch,
        "versions": dict(manifest.versions),
        "extra": dict(manifest.extra),
    }


def merged_fields(given: Mapping[str, Any], known: Mapping[str, Any], *, folders: Sequence[str] = ()) -> dict[str, Any]:
    """Merge the manifest fields of a job with `known_fields` (empty for files that were no checkpoint).

    Args:
        given: of the job.
        known: of the checkpoint that it was.
        folders: directories that hold nothing.
    """
    merged = dict(given)
    if known:
        merged["world_size"] = known["world_size"]
        if merged.get("epoch") is None:
            merged["epoch"] = known["epoch"]
        for name in ("versions", "extra"):
            merged[name] = {**known[name], **given.get(name, {})}
    if folders:
        merged["extra"] = {**merged.get("extra", {}), EMPTY_DIRECTORIES: list(folders)}
    return merged
