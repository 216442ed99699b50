"""Files that are there only while a checkpoint is being made: parts of several writers, and the plan of an intake.

A *part file* says what one of several writers has stored; whoever commits reads them all. A *plan file* comes before
files whose names do not say who wrote them (those of users): without a commit, it lists the files to remove.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    HoldfastError,
    StorageNotFoundError,
)
from holdfast.storage.base import Storage, errors_of
from holdfast.storage.local.local_storage import door_of

from .commit import PartSummary, read_manifest, sweep
from .manifest import MAX_MANIFEST_BYTES
from .names import MANIFEST_NAME, REMOVING_NAME, SIDECARS, check_links, check_path, join, save_id_of, start_id_of
from .strict_json import dumps, loads

_LOG = get_logger("format")
_PART, _PLAN, _STAGED = "part-", "plan-", "staged-"


def part_name(writer: int, save_id: str) -> str:
    """Name the part file of one writer."""
    return f"{_PART}{writer:05d}-{save_id}.json"


def plan_name(save_id: str) -> str:
    """Name the plan file of an intake."""
    return f"{_PLAN}00000-{save_id}.json"


def staged_name(save_id: str) -> str:
    """Name the file that holds the future manifest of a save whose parts lie on the disks of several machines."""
    return f"{_STAGED}00000-{save_id}.json"


def is_staged(name: str) -> bool:
    """Tell whether a file directly in a checkpoint's directory is named by `staged_name`."""
    return name.startswith(_STAGED) and name.endswith(".json") and save_id_of(name) is not None


def is_passing(name: str) -> bool:
    """Tell whether a file directly in a checkpoint's directory is a part or plan file."""
    return name.startswith((_PART, _PLAN)) and name.endswith(".json") and save_id_of(name) is not None


def is_plan(name: str) -> bool:
    """Tell whether a file directly in a checkpoint's directory is a plan file."""
    return is_passing(name) and name.startswith(_PLAN)


def put_part(storage: Storage, directory: str, save_id: str, part: PartSummary) -> None:
    """Write the part file of a part whose files are complete; they must be durable by now."""
    storage.put(join(directory, part_name(part.writer, save_id)), dumps(part.to_json()))


def read_part(storage: Storage, directory: str, save_id: str, writer: int) -> PartSummary | None:
    """Read a part file; None if it is not there (yet).

    Raises:
        CorruptCheckpointError: it is not what `put_part` wrote.
    """
    data = part_bytes(storage, directory, save_id, writer)
    return None if data is None else parse_part(data, directory, save_id, writer)


def part_bytes(storage: Storage, directory: str, save_id: str, writer: int) -> bytes | None:
    """Return a part file as it is stored, for `parse_part`; None if it is not there (yet)."""
    try:
        return storage.read(join(directory, part_name(writer, save_id)))
    except StorageNotFoundError:
        return None


def parse_part(data: bytes, directory: str, save_id: str, writer: int) -> PartSummary:
    """Understand what `part_bytes` returned for the same arguments; see `read_part`."""
    path = join(directory, part_name(writer, save_id))
    try:
        part = PartSummary.from_json(loads(data, max_bytes=MAX_MANIFEST_BYTES, where=path))
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path}: malformed ({error!r})", file=path) from error
    if part.writer != writer:
        raise CorruptCheckpointError(f"{path} is the part of writer {part.writer!r}", file=path)
    return part


def remove_part(storage: Storage, directory: str, save_id: str, writer: int) -> None:
    """Remove the part of one writer, its part file first: a part whose part file exists is whole."""
    part = read_part(storage, directory, save_id, writer)
    if part is not None:
        storage.delete(join(directory, part_name(writer, save_id)))
        storage.delete_many([join(directory, entry.path) for entry in part.files])
        if any(save_id_of(entry.path) is None for entry in part.files):
            storage.delete(join(directory, plan_name(save_id)))
        storage.tidy(directory)


def put_plan(storage: Storage, directory: str, save_id: str, paths: Iterable[str], work: Mapping[str, Any]) -> None:
    """Write the plan file: which files are about to come, before the first of them does.

    Args:
        storage: holds the directory.
        directory: the checkpoint to be.
        save_id: of the intake.
        paths: files relative to the directory; none of them is there yet.
        work: whatever the writer needs to go on after a crash.

    Raises:
        CheckpointError: there are too many files.
    """
    files = sorted(paths)
    data = dumps({"plan": 1, "files": files, "work": dict(work)})
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{directory}: {len(files)} files are too many for one checkpoint: put them into an archive"
        )
    storage.put(join(directory, plan_name(save_id)), data)


def read_plan(storage: Storage, directory: str, name: str) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """Read a plan file: its paths, checked, and the writer's own notes; None if there is none.

    Raises:
        CorruptCheckpointError: it is damaged, or a path leaves the checkpoint.
    """
    where = join(directory, name)
    try:
        body = loads(storage.read(where), max_bytes=MAX_MANIFEST_BYTES, where=where)
    except StorageNotFoundError:
        return None
    if not isinstance(body, dict) or not isinstance(body.get("files"), list) or not isinstance(body.get("work"), dict):
        raise CorruptCheckpointError(f"{where}: malformed", file=where)
    paths = tuple(check_path(path, where=where) for path in body["files"])
    check_links(storage, directory, paths)
    return paths, body["work"]


def has_plan(storage: Storage, directory: str, save_id: str) -> bool:
    """Tell whether the plan of a save is there still: if not, another save has taken the planned names over."""
    return storage.exists(join(directory, plan_name(save_id)))


def check_plan(storage: Storage, directory: str, save_id: str) -> None:
    """Make sure, before a commit, that the planned files are those of this save.

    Raises:
        CheckpointExistsError: another save has begun in the same directory.
    """
    if not has_plan(storage, directory, save_id):
        raise CheckpointExistsError(
            f"{join(storage.uri, directory)}: not committed: another save has begun there, and files of model_files "
            "have one name in both. Save from one process under one name"
        )


def drop_plan(storage: Storage, directory: str, save_id: str) -> None:
    """Remove the plan of a save that is committed; a failure is only said."""
    try:
        storage.delete(join(directory, plan_name(save_id)))
    except HoldfastError as error:
        _LOG.warning("%s is committed, but its plan stays there for now: %s", directory, error)


def clear_planned(storage: Storage, directory: str, name: str, paths: Iterable[str]) -> None:
    """Remove planned files, the directories made for them, and last the plan itself. Safe to repeat."""
    parents = set()
    paths = sorted(paths)
    storage.delete_many([join(directory, path) for path in paths])
    for path in paths:
        while path := path.rpartition("/")[0]:
            parents.add(path)
    for parent in sorted(parents, key=len, reverse=True):
        storage.tidy(join(directory, parent))  # empty where its first file never came
    storage.delete(join(directory, name))


def sweep_planned(storage: Storage, directory: str, name: str) -> list[str]:
    """Remove what an intake that never committed has left in a directory without a manifest.

    Returns:
        What the plan listed and the plan, relative to ``directory``; nothing if the plan cannot be trusted.
    """
    try:
        plan = read_plan(storage, directory, name)
    except CorruptCheckpointError as error:
        _LOG.warning("%s/%s: its files are left alone: %s", storage.uri, join(directory, name), error)
        return []
    if plan is None:
        return []
    clear_planned(storage, directory, name, plan[0])
    return [*plan[0], name]


def sweep_given_up(storage: Storage, directory: str, keep_start_id: str | None = None) -> list[str]:
    """Remove what `commit.sweep` does, and what plans in a directory without a manifest list."""
    swept: list[str] = []
    if not storage.exists(join(directory, MANIFEST_NAME)):
        for name in sorted(filter(is_plan, _names(storage, directory))):
            if start_id_of(name) != keep_start_id:
                swept += sweep_planned(storage, directory, name)
    return swept + sweep(storage, directory, keep_start_id=keep_start_id)


def sweep_passing(storage: Storage, directory: str, start_ids: Iterable[str]) -> list[str]:
    """Remove what dead processes left beside a manifest: they were killed right after a commit, or before a removal.

    Returns:
        The removed paths, relative to ``directory``.
    """
    names = _names(storage, directory)
    dead = frozenset(start_ids)
    stale = {name for name in names if is_passing(name) and start_id_of(name) in dead}
    stale |= {REMOVING_NAME} & names  # nothing has been removed yet, and perhaps nothing will be
    if not stale:
        return []
    try:
        listed = {entry.path for entry in read_manifest(storage, directory).files}
        stale -= listed  # somebody may have reported files of such names
        for name in filter(is_plan, sorted(stale)):
            # If this intake never committed, the manifest is of another save, and the planned files are remains.
            plan = read_plan(storage, directory, name)
            if plan is not None:
                stale |= {path for path in plan[0] if path not in listed and path not in SIDECARS}
    except CheckpointError as error:
        _LOG.warning("%s/%s: remains in it are left alone: %s", storage.uri, directory, error)
        return []
    for passing in (False, True):
        storage.delete_many([join(directory, name) for name in sorted(stale) if is_passing(name) is passing])
    return sorted(stale)


def _names(storage: Storage, directory: str) -> set[str]:
    """List a directory; on a disk without looking at each file, for there may be thousands and a start waits."""
    if (located := door_of(storage)) is not None:
        door, prefix = located
        with errors_of("list", directory):
            try:
                with door.listed(f"{prefix}/{directory}" if prefix else directory) as folder:
                    return set(os.listdir(folder.fd))
            except FileNotFoundError:
                return set()
    skip = len(directory) + 1
    return {info.path[skip:] for info in storage.list(directory, recursive=False)}
