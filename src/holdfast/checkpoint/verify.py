"""Check a checkpoint against its own manifest: sizes, and on demand every byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

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
from holdfast.format.digest import check_blanks
from holdfast.format.manifest import Manifest
from holdfast.format.names import METADATA_FILE, join
from holdfast.run.record import METRICS_FILE, read_sidecar
from holdfast.run.remains import is_remains
from holdfast.storage.base import FileReader, PrefixStorage, Storage

__all__ = ["Verification", "read_metadata", "verify"]

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
        if is_remains(info.path for info in storage.list(name, recursive=False)):
            return Verification(ok=False, problems=(str(error),), state="incomplete")
        why = "foreign: there is no manifest.json of Holdfast, so there is nothing to check against"
        return Verification(ok=False, problems=(why,), state="foreign")
    except CheckpointError as error:
        return Verification(ok=False, problems=(str(error),), state="corrupt")
    from holdfast.format.verify import verify_files  # not above: every handle comes past here

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
        if check_blanks(data) is False:
            raise ValueError("its bytes are not what was written: damaged, or edited by hand")
        return dict(json.loads(data))
    except (RecursionError, ValueError, TypeError) as error:
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
