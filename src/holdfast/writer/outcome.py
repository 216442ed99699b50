"""How every kind of save ends: was it committed already, and what is told about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import CheckpointError, StorageError
from holdfast.format.commit import read_manifest
from holdfast.format.manifest import Manifest
from holdfast.storage.base import Storage

from .messages import SaveResult
from .open_run import Run

__all__ = ["certainly_uncommitted", "committed_already", "outcome"]


def committed_already(storage: Storage, directory: str, fields: Mapping[str, Any]) -> Manifest | None:
    """Give the manifest of the very job that has these fields, if it is there.

    Raises:
        StorageError: the storage failed: nobody can say.
    """
    try:
        manifest = read_manifest(storage, directory)
    except CheckpointError:
        return None
    return manifest if manifest.checkpoint_id == fields.get("checkpoint_id") else None


def certainly_uncommitted(storage: Storage, directory: str, fields: Mapping[str, Any]) -> bool:
    """Tell whether the files of a failed job may be removed.

    An error after the manifest became visible (say, in a directory fsync) leaves a valid checkpoint: taking its files
    away would make it a broken one.
    """
    try:
        return committed_already(storage, directory, fields) is None
    except StorageError:
        return False


def outcome(
    directory: str,
    manifest: Manifest,
    run: Run | None,
    *,
    seconds: dict[str, float],
    bytes_written: int = 0,
    unchanged: tuple[tuple[int, int, int], ...] = (),
    warnings: Sequence[str] = (),
    data: bytes | None = None,
    is_new: bool = False,
    kind: str = "state",
) -> SaveResult:
    """Record a commit in its run, apply retention there, and describe it.

    ``data`` is the manifest as written; nothing can lie beside a checkpoint that ``is_new``. ``kind`` is how it was
    made (`holdfast.run.journal.JournalEvent`).
    """
    if run is not None:
        run.note_saved(directory, manifest, kind=kind, durable_s=seconds.get("total"))
    return SaveResult(
        directory=directory,
        manifest=manifest.to_bytes() if data is None else data,
        bytes_total=manifest.total_bytes,
        bytes_written=bytes_written,
        bytes_reused=manifest.reused_bytes,
        seconds=seconds,
        deleted=() if run is None else run.committed(directory, manifest, is_new=is_new),
        unchanged=unchanged,
        warnings=tuple(warnings),
    )
