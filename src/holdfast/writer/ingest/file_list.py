"""The file list of a checkpoint made of files that no arena held: entries, digest table, parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.format.commit import PartSummary
from holdfast.format.digest import CHUNK, DigestFile, bytes_digest, file_digest
from holdfast.format.manifest import EMPTY_DIRECTORIES, FileEntry, Manifest
from holdfast.format.names import join
from holdfast.storage.base import Storage

__all__ = ["FileList", "known_fields", "manifest_fields"]


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
        self._digests = DigestFile(self._first, save_id)
        self.digests_path = self._digests.path

    def add(self, entry: FileEntry) -> None:
        """Add a file that is described already."""
        self._entries[entry.writer if entry.writer in self._entries else self._first].append(entry)

    def add_file(self, path: str, size: int, table: bytes, *, writer: int) -> None:
        """Add a file of a user by its chunk digests."""
        # The digest of a single chunk is as good as that of the file.
        chunks = self._digests.add(table) if size > CHUNK else None
        writer = writer if writer in self._entries else self._first
        self.add(FileEntry(path=path, size=size, digest=file_digest(table), writer=writer, chunks=chunks))

    def put_digests(self, storage: Storage, directory: str) -> int:
        """Store the digest table, if there is one; give the bytes written."""
        tables = self._digests.content
        if not tables:
            return 0
        with storage.create(join(directory, self.digests_path), len(tables)) as file:
            file.write(memoryview(tables))
        self.add(
            FileEntry(
                path=self.digests_path,
                size=len(tables),
                digest=bytes_digest(tables),
                role="digests",
                writer=self._first,
            )
        )
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


def manifest_fields(
    given: Mapping[str, Any], known: Mapping[str, Any], *, folders: Sequence[str] = ()
) -> dict[str, Any]:
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
