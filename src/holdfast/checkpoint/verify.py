"""Check a checkpoint against its own manifest: sizes, and on demand every byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StorageError,
    StoragePermissionError,
)
from holdfast.format.commit import read_manifest
from holdfast.format.verify import verify_files
from holdfast.run.catalog import is_remains
from holdfast.storage.base import FileReader, PrefixStorage, Storage

__all__ = ["Verification", "verify"]

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


def verify(storage: Storage, name: str, *, deep: bool, progress: Progress | None = None) -> Verification:
    """Check the checkpoint in directory ``name``.

    Args:
        storage: the run.
        name: the checkpoint's directory.
        deep: read every byte and compare digests.
        progress: called with the number of bytes just read.

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
    watched = _CountingStorage(storage, name, progress)
    try:
        problems = tuple(str(problem) for problem in verify_files(watched, "", manifest, deep=deep))
        state = "corrupt" if problems else "ok"
    except StoragePermissionError:
        raise
    except StorageError as error:
        problems, state = (f"cannot be read: {error}",), "unreadable"
    files = len(manifest.files)
    return Verification(
        ok=not problems, problems=problems, state=state, deep=deep, files=files, bytes_read=watched.bytes_read
    )


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
