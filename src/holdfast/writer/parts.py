"""One checkpoint from the parts of several writers: each stores its own, one of them commits."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from holdfast.errors import CheckpointError, CorruptCheckpointError, HoldfastError, StorageNotFoundError
from holdfast.format.commit import PartSummary, assemble, commit_manifest, read_manifest
from holdfast.format.manifest import Manifest
from holdfast.format.names import join, save_id_of
from holdfast.format.parts import parse_part, part_bytes, part_name, read_part
from holdfast.format.strict_json import paused_gc
from holdfast.storage.base import Storage

from .messages import PartsJob, SaveJob, SaveResult
from .outcome import certainly_uncommitted, committed_already, outcome
from .run import Run

__all__ = ["commit_parts", "is_committed", "stored_part"]

_LOG = logging.getLogger("holdfast.writer")
# Part files of dead workers' writers announce themselves to nobody: looked for ever less often.
_LOOK_S = (0.02, 0.5)
_NAMED = 5


def stored_part(storage: Storage, job: SaveJob) -> PartSummary | None:
    """Give the part that an earlier writer process stored for this very job: it must not be written again.

    Once it is complete, somebody may commit it at any moment, and the commit takes the part file away.
    """
    part = read_part(storage, job.directory, job.save_id, job.writer)
    if part is not None:
        return part
    try:
        files = read_manifest(storage, job.directory).files
    except CheckpointError:
        return None
    mine = tuple(one for one in files if one.writer == job.writer and save_id_of(one.path) == job.save_id)
    return PartSummary(writer=job.writer, files=mine) if mine else None


def is_committed(storage: Storage, job: SaveJob) -> bool:
    """Tell whether the checkpoint that lies there is that of this very save.

    Raises:
        StorageError: nobody can tell.
    """
    try:
        return any(save_id_of(one.path) == job.save_id for one in read_manifest(storage, job.directory).files)
    except CheckpointError:
        return False


def commit_parts(storage: Storage, job: PartsJob, run: Run | None, *, again: bool) -> SaveResult:
    """Commit a checkpoint whose parts are stored, remove the part files, record it in the run.

    Args:
        storage: where the parts are.
        job: which ones.
        run: the open run it belongs to, if any.
        again: an earlier writer process may have committed it.

    Raises:
        CheckpointError: a part is missing, or the parts are none of one checkpoint.
        HoldfastError: nothing was committed; the files of this save are removed.
    """
    start = time.perf_counter()
    manifest, data = (committed_already(storage, job.directory, job.manifest) if again else None), None
    seconds = {"wait": 0.0, "commit": 0.0}
    if manifest is None:
        try:
            parts = _collect(storage, job)
            seconds["wait"] = time.perf_counter() - start
            manifest, data = _commit(storage, job, run, parts)
            seconds["commit"] = time.perf_counter() - start - seconds["wait"]
        except BaseException:
            if certainly_uncommitted(storage, job.directory, job.manifest):
                _discard(storage, job)
            raise
    try:
        for writer in job.writers:
            storage.delete(join(job.directory, part_name(writer, job.save_id)))
    except HoldfastError as error:
        _LOG.warning("%s is committed, but part files stay there for now: %s", job.directory, error)
    seconds["total"] = time.perf_counter() - start
    return outcome(job.directory, manifest, run, seconds=seconds, data=data)


def _collect(storage: Storage, job: PartsJob) -> list[PartSummary]:
    deadline = time.monotonic() + job.wait_s
    parts: dict[int, PartSummary] = {}
    look_s = _LOOK_S[0]
    while True:
        found: dict[int, bytes] = {}
        for writer in job.writers:
            if writer not in parts:
                data = part_bytes(storage, job.directory, job.save_id, writer)
                if data is not None:
                    found[writer] = data
        with paused_gc():  # not while a storage may try again and again
            parts.update({one: parse_part(data, job.directory, job.save_id, one) for one, data in found.items()})
        missing = [writer for writer in job.writers if writer not in parts]
        if not missing:
            return [parts[writer] for writer in sorted(parts)]
        if time.monotonic() >= deadline:
            waited = f" within {job.wait_s:g} s" if job.wait_s else ""
            place = join(storage.uri, job.directory)
            raise CheckpointError(f"{place}: not committed: {_missing(job, missing, waited)}")
        time.sleep(min(look_s, job.wait_s))
        look_s = min(look_s * 1.5, _LOOK_S[1])


def _missing(job: PartsJob, missing: list[int], waited: str) -> str:
    if job.stored:
        return (
            f"what {_ranks(missing)} stored there is not to be seen from rank 0{waited}: all ranks have to save to one "
            "shared place, a network file system or remote storage such as s3://bucket/run; with disks of their own, "
            "save straight to remote storage; the checkpoint before stays"
        )
    return (
        f"no part has come{waited} from the writers of {_ranks(missing)}: they died or failed before theirs was "
        "durable; the checkpoint before stays"
    )


def _commit(storage: Storage, job: PartsJob, run: Run | None, parts: list[PartSummary]) -> tuple[Manifest, bytes]:
    skip = len(job.directory) + 1
    there = {info.path[skip:]: info.size for info in storage.list(job.directory, recursive=False)}
    for part in parts:
        for entry in part.files:
            size = there.get(entry.path)
            if size is None:  # on a network file system a listing may be older than the message that it is there
                with suppress(StorageNotFoundError):
                    size = storage.stat(join(job.directory, entry.path)).size
            if size != entry.size:
                raise CorruptCheckpointError(
                    f"{join(storage.uri, job.directory)}: not committed: {entry.path} of rank {part.writer} has "
                    f"{'no' if size is None else size} bytes, {entry.size} were written: something else works in this "
                    "directory",
                    file=entry.path,
                )
    if run is not None:
        run.before_commit()
    with paused_gc():
        manifest = assemble(job.directory, {**job.manifest, "writers": job.writers}, parts)
    return manifest, commit_manifest(storage, job.directory, manifest, overwrite=job.overwrite)


def _discard(storage: Storage, job: PartsJob) -> None:
    """Remove every file of this save, whoever wrote it. What a writer adds later is swept at the next start."""
    skip = len(job.directory) + 1
    with suppress(HoldfastError):
        names = [info.path[skip:] for info in storage.list(job.directory, recursive=False)]
        # Part files first: a part that is named must be whole.
        for name in sorted(names, key=lambda name: (not name.startswith("part-"), name)):
            if save_id_of(name) == job.save_id:
                storage.delete(join(job.directory, name))
        storage.tidy(job.directory)


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more}"
