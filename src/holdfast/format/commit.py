"""What makes a directory a checkpoint: all files first, the manifest last. Works alike on a disk and an object store.

Overwriting = new file names, manifest replaced by compare-and-swap, old files removed. Removing = manifest first. A
crash at any point leaves the old checkpoint, the new one, or files without a manifest, which `sweep` removes.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from itertools import chain
from typing import Any

from holdfast._log import get_logger
from holdfast._units import listed
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCheckpointError,
    StorageConflictError,
    StorageError,
    StorageExistsError,
    StorageNotFoundError,
)
from holdfast.storage.base import Storage
from holdfast.storage.together import together

from .division import Division, disagreement
from .manifest import MAX_MANIFEST_BYTES, FileEntry, Manifest
from .names import MANIFEST_NAME, REMOVING_NAME, SIDECARS, check_links, join, start_id_of

__all__ = [
    "PartSummary", "Replaced", "assemble", "commit", "commit_manifest", "look_before", "make_folders",
    "read_manifest", "read_manifest_bytes", "remove", "sweep",
]  # fmt: skip

_LOG = get_logger("format")
_FIELDS = frozenset(item.name for item in fields(Manifest)) - {"files", "total_bytes", "reused_bytes", "writers"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSummary:
    """What one writer contributed: files that are complete and durable in the checkpoint's directory.

    Attributes:
        writer: its rank.
        files: its files.
        division: how it and others divided one state; None for a part that is independent of the others.
        base: of an overwrite: etag of the manifest that was there before the first of these files ("" for none).
    """

    writer: int
    files: tuple[FileEntry, ...] = ()
    division: Division | None = None
    base: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Describe this part for another process."""
        row: dict[str, Any] = {"writer": self.writer, "files": [entry.to_json() for entry in self.files]}
        if self.division is not None:
            row["division"] = self.division.to_json()
        if self.base is not None:
            row["base"] = self.base
        return row

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PartSummary:
        """Rebuild what `to_json` described."""
        stated = data.get("division")
        return cls(
            writer=data["writer"],
            files=tuple(FileEntry.from_json(row) for row in data["files"]),
            division=None if stated is None else Division.from_json(stated),
            base=data.get("base"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """What was in a directory before an overwrite wrote its first file there; `look_before` finds it.

    The manifest of the overwrite replaces exactly this manifest. Of several overwrites at once one wins, and it may
    remove ``stale``: the saves that wrote those files have looked before it as well, and cannot commit any more.

    Attributes:
        etag: of the manifest; "" if there was none, None if the storage has no etags.
        stale: files of that manifest, or of a removal that was cut off, and of saves that had not committed.
        is_clear: there was no checkpoint, and nothing that is said about one.
    """

    etag: str | None = ""
    stale: frozenset[str] = frozenset()
    is_clear: bool = False


def look_before(storage: Storage, directory: str) -> Replaced:
    """Look at what an overwrite is going to replace. The caller has not written its first file yet."""

    def manifest() -> tuple[str | None, frozenset[str]]:
        try:
            etag = storage.stat(join(directory, MANIFEST_NAME)).etag
        except StorageNotFoundError:
            return "", frozenset()
        return etag, _listed(storage, directory)[0]

    looks: list[Callable[[], Any]] = [manifest, lambda: _names(storage, directory)]
    (etag, listed), names = together(storage, looks)
    if etag == "" and REMOVING_NAME in names:  # what a removal that was cut off in its middle had still to remove
        listed, _ = _listed(storage, directory, REMOVING_NAME)
    beside = names & {REMOVING_NAME, *SIDECARS}
    return Replaced(etag=etag, stale=listed | _only_ours(names), is_clear=etag == "" and not beside)


def commit(
    storage: Storage,
    directory: str,
    manifest_fields: Mapping[str, Any],
    parts: Sequence[PartSummary],
    *,
    overwrite: Replaced | None = None,
    void: Callable[[Manifest], bool] | None = None,
) -> Manifest:
    """Write the manifest: from its return on, ``directory`` is a checkpoint, durably.

    Args:
        storage: holds the directory.
        directory: where the files of ``parts`` are.
        manifest_fields: fields of `Manifest`; ``writers`` names the ranks that must have a part (default: those that
            have one); keys that are no fields go to ``extra``.
        parts: what each writer contributed.
        overwrite: the content before the first of these files: replace it, then remove what ``parts`` do not have.
        void: decides whether a manifest that is in the way counts for nothing and may be replaced.

    Raises:
        CheckpointExistsError: there is a manifest, and it must not be replaced.
        CheckpointError: parts are missing, or they are no parts of one state; or another process has overwritten the
            checkpoint since ``overwrite`` was looked at: that process's checkpoint stays.
    """
    manifest = assemble(directory, manifest_fields, parts)
    commit_manifest(storage, directory, manifest, overwrite=overwrite, void=void)
    return manifest


def assemble(directory: str, manifest_fields: Mapping[str, Any], parts: Sequence[PartSummary]) -> Manifest:
    """Make the manifest of ``parts`` without writing it; see `commit`.

    Raises:
        CheckpointError: parts are missing, or they are no parts of one state.
    """
    given = dict(manifest_fields)
    divisions = {part.writer: part.division for part in parts}
    missing = sorted(set(given.pop("writers", None) or divisions) - divisions.keys())
    if missing or not parts or len(divisions) != len(parts):
        raise CheckpointError(
            f"{directory}: parts of the ranks {sorted(divisions)} are there, those of {missing or 'any rank'} are "
            "missing or doubled: a checkpoint commits only when each writer has handed in one part"
        )
    if problem := disagreement(divisions):
        advice = (
            "All ranks have to save, and the same state: a model in DDP is the same everywhere "
            "(holdfast.torch.prepare_model); holdfast.PerRank(value) is for what differs"
        )
        raise CheckpointError(f"{directory}: not committed: {problem}" + ("" if "alike=" in problem else f". {advice}"))
    entries = tuple(chain.from_iterable(part.files for part in parts))
    paths = Counter(entry.path for entry in entries)
    if len(paths) != len(entries):
        twice = sorted(path for path, times in paths.items() if times > 1)
        raise CheckpointError(f"{directory}: more than one part brings {listed(twice, 5)}: give them other names")
    values = {name: given.pop(name) for name in _FIELDS & given.keys()}
    if values.get("run_id"):
        values["name"] = directory
    values.setdefault("created", datetime.now(timezone.utc).isoformat(timespec="milliseconds"))
    return Manifest(
        **{
            **values,
            "extra": {**values.get("extra", {}), **given},
            "writers": tuple(sorted(divisions)),
            "total_bytes": sum(entry.size for entry in entries),
            "reused_bytes": sum(entry.size for entry in entries if entry.reused_from is not None),
            "files": entries,
        }
    )


def commit_manifest(
    storage: Storage,
    directory: str,
    manifest: Manifest,
    *,
    overwrite: Replaced | None = None,
    keep_sidecars: bool = False,
    void: Callable[[Manifest], bool] | None = None,
) -> bytes:
    """Write a manifest whose files are all there, and return its bytes. See `commit`.

    A stored manifest with the same bytes counts as written. With ``keep_sidecars`` what was said about a replaced
    checkpoint (metadata, late metrics) is true of the new one.
    """
    entries = manifest.files
    data = manifest.to_bytes()
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{directory}: {len(entries)} files make a manifest of {len(data)} bytes, at most {MAX_MANIFEST_BYTES} are "
            "read: put small files together (an archive)"
        )
    target = join(directory, MANIFEST_NAME)
    try:
        if overwrite is None or overwrite.etag == "":
            storage.put(target, data, if_absent=True)
        else:
            storage.put(target, data, if_match=overwrite.etag)
    except (StorageExistsError, StorageConflictError) as error:
        _settle(storage, directory, data, error, overwrite=overwrite is not None, void=void)
    if overwrite is None:
        return data
    beside = set() if overwrite.is_clear else {REMOVING_NAME, *(() if keep_sidecars else SIDECARS)}
    stale = (overwrite.stale | beside) - {entry.path for entry in entries}
    if stale and _read_bytes(storage, target) == data:  # else somebody replaced ours, and cleans up
        _delete(storage, directory, stale)
    return data


def _settle(
    storage: Storage,
    directory: str,
    data: bytes,
    error: Exception,
    *,
    overwrite: bool,
    void: Callable[[Manifest], bool] | None,
) -> None:
    """Handle a manifest that `commit_manifest` did not expect: raises unless ours is stored at the end."""
    target, where = join(directory, MANIFEST_NAME), join(storage.uri, directory)
    etag, stored = None, b""
    with suppress(StorageNotFoundError):
        etag = storage.stat(target).etag
        stored = _read_bytes(storage, target)
    # A store that retries a request by itself may refuse its own first success.
    if stored == data:
        return
    if void is not None and stored and void(Manifest.from_bytes(stored, where=target)):
        with suppress(StorageConflictError, StorageNotFoundError):
            storage.put(target, data, if_match=etag)
            return
    if overwrite:
        raise CheckpointError(
            f"{where}: not committed: another process has overwritten this checkpoint at the same time, and its "
            "manifest stays. Save from one process (one rank) under one name"
        ) from error
    raise CheckpointExistsError(
        f"{where} is a committed checkpoint: pass overwrite=True to replace it, or save under another name"
    ) from error


def read_manifest(storage: Storage, directory: str, *, check_sizes: bool = False) -> Manifest:
    """Read the manifest of the checkpoint at ``directory`` ("" is the root of the storage).

    Args:
        storage: holds the directory.
        directory: the checkpoint.
        check_sizes: also compare the listed files with a listing of the directory; one request, no reads.

    Raises:
        CheckpointNotFoundError: there is nothing.
        IncompleteCheckpointError: there are files, but no manifest.
        CorruptCheckpointError: the manifest is damaged or, with ``check_sizes``, a file is missing or of another size.
        FormatVersionError: written by a newer Holdfast.
    """
    where = join(storage.uri, directory) if directory else storage.uri
    try:
        data = read_manifest_bytes(storage, directory)
    except StorageNotFoundError:
        if _has_files(storage, directory):
            raise IncompleteCheckpointError(
                f"{where} has files but no {MANIFEST_NAME}: a save that never committed, or not a Holdfast checkpoint"
            ) from None
        root = storage.local_root
        is_file = root is not None and (root / directory).is_file()
        advice = "that is a file: torch.load, or `holdfast import`, takes a .pt" if is_file else "check the path"
        raise CheckpointNotFoundError(f"there is no checkpoint at {where}: {advice}") from None
    manifest = Manifest.from_bytes(data, where=join(where, MANIFEST_NAME))
    check_links(storage, directory, (entry.path for entry in manifest.files))
    if check_sizes:
        _check_sizes(storage, directory, manifest)
    return manifest


def _has_files(storage: Storage, directory: str) -> bool:
    try:
        return any(True for _ in storage.list(directory))
    except StorageError as error:
        if error.errno != errno.EILSEQ:  # else objects whose names are no paths are there
            raise
        return True


def read_manifest_bytes(storage: Storage, directory: str) -> bytes:
    """Read the manifest of the checkpoint at ``directory`` as it is stored, for copying it.

    Raises:
        StorageNotFoundError: there is no manifest.
        CorruptCheckpointError: it is too long for a manifest, or a link out of the checkpoint.
    """
    check_links(storage, directory, (MANIFEST_NAME,))  # before it is opened: what lies outside is not even read
    return _read_bytes(storage, join(directory, MANIFEST_NAME))


def remove(storage: Storage, directory: str) -> None:
    """Remove a checkpoint, manifest first: a reader sees all of it or none.

    Only files that Holdfast wrote or listed are removed; files that somebody put into the directory later stay. Safe to
    repeat after a crash. A missing checkpoint is no error.
    """
    listed, folders = _listed(storage, directory)
    if not listed and not folders:
        listed, folders = _listed(storage, directory, REMOVING_NAME)  # an earlier try failed after its first step
    elif folders or any(start_id_of(path) is None for path in listed):
        # User files have names that tell nothing: after a crash only this list says that they are ours to remove.
        storage.put(join(directory, REMOVING_NAME), _read_bytes(storage, join(directory, MANIFEST_NAME)))
    storage.delete(join(directory, MANIFEST_NAME))
    _finish_removal(storage, directory, listed, folders)


def make_folders(storage: Storage, directory: str, manifest: Manifest) -> None:
    """Create the empty directories of a checkpoint on a local disk, as far as they are missing.

    After the commit: the manifest lists them, so that a process which dies in between loses none. A storage that cannot
    be written to does without.
    """
    root = storage.local_root
    if root is None or not manifest.empty_directories:
        return
    paths = [join(directory, folder) for folder in manifest.empty_directories]
    try:
        storage.make_directories([path for path in paths if not os.path.isdir(os.path.join(root, path))])
    except StorageError as error:
        _LOG.warning("%s: a directory without files cannot be made: %s", join(storage.uri, directory), error)


def sweep(storage: Storage, directory: str, keep_start_id: str | None = None) -> list[str]:
    """Remove what dead lives left in ``directory``: files of saves that never committed, half-done removals.

    Files of the start id ``keep_start_id`` stay, as do all that a valid manifest lists and all that no save of
    Holdfast named. Under a damaged manifest nothing is touched: people may want to look at it.

    Returns:
        The removed paths, relative to ``directory``.
    """
    try:
        listed = frozenset(entry.path for entry in read_manifest(storage, directory).files)
    except (CorruptCheckpointError, FormatVersionError):
        return []
    except CheckpointNotFoundError:
        return []
    except IncompleteCheckpointError:
        if storage.exists(join(directory, REMOVING_NAME)):
            listed, folders = _listed(storage, directory, REMOVING_NAME)
            _finish_removal(storage, directory, listed, folders)
            return sorted(listed)
        listed = frozenset()
    stale = {path for path in _ours(storage, directory) - listed if start_id_of(path) != keep_start_id}
    _delete(storage, directory, stale)
    return sorted(stale)


def _read_bytes(storage: Storage, path: str) -> bytes:
    with storage.open(path) as reader:
        if reader.size > MAX_MANIFEST_BYTES:
            raise CorruptCheckpointError(f"{path} has {reader.size} bytes: refused to read that much", file=path)
        buffer = bytearray(reader.size)
        if buffer:
            reader.read_into(0, memoryview(buffer))
    return bytes(buffer)


def _listed(storage: Storage, directory: str, name: str = MANIFEST_NAME) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the files and empty directories that a manifest lists; none if it cannot be read."""
    try:
        manifest = Manifest.from_bytes(_read_bytes(storage, join(directory, name)))
        return frozenset(entry.path for entry in manifest.files), manifest.empty_directories
    except (StorageNotFoundError, CorruptCheckpointError, FormatVersionError):
        return frozenset(), ()


def _names(storage: Storage, directory: str) -> frozenset[str]:
    """Return the names of the files directly in the directory."""
    skip = len(directory) + 1 if directory else 0
    return frozenset(info.path[skip:] for info in storage.list(directory, recursive=False))


def _only_ours(names: Iterable[str]) -> frozenset[str]:
    """Return the names that only a save of Holdfast gives."""
    return frozenset(name for name in names if start_id_of(name) is not None)


def _ours(storage: Storage, directory: str) -> frozenset[str]:
    return _only_ours(_names(storage, directory))


def _finish_removal(storage: Storage, directory: str, listed: frozenset[str], folders: Iterable[str]) -> None:
    _delete(storage, directory, listed | _ours(storage, directory) | set(SIDECARS))
    for folder in folders:
        storage.tidy(join(directory, folder))  # unless somebody has put a file there
    storage.delete(join(directory, REMOVING_NAME))


def _delete(storage: Storage, directory: str, paths: Iterable[str]) -> None:
    storage.delete_many([join(directory, path) for path in sorted(paths)])


def _check_sizes(storage: Storage, directory: str, manifest: Manifest) -> None:
    skip = len(directory) + 1 if directory else 0
    sizes = {info.path[skip:]: info.size for info in storage.list(directory)}
    for entry in manifest.files:
        size = sizes.get(entry.path)
        if size != entry.size:
            state = "is missing" if size is None else f"has {size} bytes"
            raise CorruptCheckpointError(
                f"{join(storage.uri, directory)}: {entry.path} {state}, the manifest says {entry.size} bytes: "
                "this checkpoint is damaged; use another one",
                file=entry.path,
            )
