"""Commit files where they are: somebody has brought them into the checkpoint's directory by himself."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from holdfast._log import get_logger
from holdfast.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    HoldfastError,
    IncompleteCheckpointError,
)
from holdfast.format.commit import commit, look_before, read_manifest
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.format.names import MANIFEST_NAME, REMOVING_NAME, SIDECARS, check_path, join
from holdfast.format.parts import clear_planned, is_passing, plan_name, put_plan
from holdfast.storage.base import Storage

from ..messages import IngestJob, IngestSource, SaveResult
from ..open_run import Run
from ..save import certainly_uncommitted, committed_already, outcome
from ..serial_executor import SerialExecutor
from .merge import FileList, known_fields, manifest_fields
from .sources import Copier, scan

__all__ = ["commit_in_place"]

_LOG = get_logger("writer")
_NAMED = 5


def commit_in_place(
    storage: Storage, job: IngestJob, run: Run | None, side: SerialExecutor, *, again: bool
) -> SaveResult:
    """Make a checkpoint of everything in ``job.directory``. Nothing is moved, copied or removed.

    A Holdfast checkpoint that was saved or copied there keeps roles and digests of its files and gets a new manifest.

    Args:
        storage: where it is.
        job: has no sources.
        run: the open run it belongs to, if any.
        side: helps.
        again: an earlier writer process may have committed it.

    Raises:
        CheckpointExistsError: it is a checkpoint of this run already.
        CheckpointNotFoundError: there is nothing.
        HoldfastError: it is as it was.
    """
    start = time.perf_counter()
    seconds = {"digest": 0.0, "write": 0.0, "commit": 0.0}
    manifest = committed_already(storage, job.directory, job.manifest) if again else None
    written = 0
    if manifest is None:
        replaced = look_before(storage, job.directory)
        before = _manifest_there(storage, job, run)
        listing = FileList(job.save_id, (0,) if before is None else before.writers)
        try:
            # Says whose the digest file is if the commit does not come. Nothing else is ours to remove.
            put_plan(storage, job.directory, job.save_id, [listing.digests_path], {})
            folders = _list(storage, job, before, listing, Copier(side))
            seconds["digest"] = time.perf_counter() - start
            written = listing.put_digests(storage, job.directory)
            if run is not None:
                run.before_commit()
            fields = manifest_fields(job.manifest, {} if before is None else known_fields(before), folders=folders)
            manifest = commit(
                storage,
                job.directory,
                fields,
                listing.parts(),
                overwrite=None if before is None else replaced,
                keep_sidecars=True,
            )
        except BaseException:
            if certainly_uncommitted(storage, job.directory, job.manifest):
                with suppress(HoldfastError):
                    clear_planned(storage, job.directory, plan_name(job.save_id), [listing.digests_path])
            raise
        seconds["commit"] = time.perf_counter() - start - seconds["digest"]
    try:
        storage.delete(join(job.directory, plan_name(job.save_id)))
    except HoldfastError as error:
        _LOG.warning("%s is committed, but its plan stays there for now: %s", job.directory, error)
    seconds["total"] = time.perf_counter() - start
    return outcome(job.directory, manifest, run, seconds=seconds, bytes_written=written, kind="in place")


def _manifest_there(storage: Storage, job: IngestJob, run: Run | None) -> Manifest | None:
    where = join(storage.uri, job.directory)
    try:
        manifest = read_manifest(storage, job.directory, check_sizes=True)
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return None
    except CorruptCheckpointError as error:
        raise ConfigError(
            f"{where}: its {MANIFEST_NAME} is not one of Holdfast, or does not fit the files ({error}): checkpoints "
            "keep theirs under this name; rename the file"
        ) from error
    # One that counts for nothing is of an owner that was taken over: what it lists is listed anew.
    is_void = run is not None and run.void_at(job.directory)(manifest)
    if manifest.run_id is not None and manifest.run_id == job.manifest.get("run_id") and not is_void:
        raise CheckpointExistsError(
            f"{where} is a checkpoint of this run already (step {manifest.step}): report each one once, under a name "
            "of its own"
        )
    return manifest


def _list(
    storage: Storage, job: IngestJob, before: Manifest | None, listing: FileList, copier: Copier
) -> tuple[str, ...]:
    """Digest what no manifest describes; gather the rest. Returns the directories that hold nothing."""
    folders = _check_links(storage, job)
    known: dict[str, FileEntry] = {} if before is None else {entry.path: entry for entry in before.files}
    for entry in known.values():
        listing.add(entry)
    skip = len(job.directory) + 1
    names = {info.path[skip:]: info.size for info in storage.list(job.directory)}
    if not {*names} - {plan_name(job.save_id)}:
        raise CheckpointNotFoundError(
            f"there is nothing at {join(storage.uri, job.directory)}: with NO_UPLOAD, or an upload function of your "
            "own, the files must be there when report() is called"
        )
    if REMOVING_NAME in names:
        raise ConfigError(
            f"{join(storage.uri, job.directory)} is being removed ({REMOVING_NAME}): use another directory"
        )
    own = {MANIFEST_NAME, *SIDECARS, listing.digests_path, *known}
    others = sorted(name for name in names if name not in own and not is_passing(name))
    bad = [name for name in others if not _is_fit(name)]
    if bad:
        raise ConfigError(
            f"{join(storage.uri, job.directory)}: files of a checkpoint cannot be called "
            f"{', '.join(ascii(name) for name in bad[:_NAMED])}: use names in UTF-8, without backslashes"
        )
    storage.sync_all([join(job.directory, name) for name in [*known, *others]])  # who brought them need not have cared
    for name in others:
        table = copier.digest_object(storage, join(job.directory, name))
        listing.add_file(name, names[name], table, writer=0)
    return folders


def _check_links(storage: Storage, job: IngestJob) -> tuple[str, ...]:
    """Refuse links; returns the directories that hold nothing."""
    if storage.local_root is None:
        return ()
    home = os.path.join(storage.local_root, job.directory)
    if not os.path.isdir(home):
        return ()
    found = scan(IngestSource(rank=0, path=home, owned=True))
    links = [file.name for file in found.files if not file.movable]
    if links:
        raise ConfigError(
            f"{home}: {', '.join(links[:_NAMED])} is reached through a link: what is committed where it lies must lie "
            "there itself; copy it (cp -rL), or report the directory without NO_UPLOAD"
        )
    return found.bare


def _is_fit(name: str) -> bool:
    try:
        check_path(name, where=name)
    except CorruptCheckpointError:
        return False
    return True
