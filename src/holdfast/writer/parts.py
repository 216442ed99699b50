"""One checkpoint from the parts of several writers: each stores its own, one of them commits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from holdfast._log import get_logger
from holdfast._paused_gc import paused_gc
from holdfast._ranks import rank_list
from holdfast.errors import CheckpointError, CorruptCheckpointError, HoldfastError, StorageNotFoundError
from holdfast.format.commit import PartSummary, Replaced, assemble, commit_manifest, look_before, read_manifest
from holdfast.format.division import stored_for_all
from holdfast.format.manifest import Manifest
from holdfast.format.names import join, save_id_of
from holdfast.format.parts import check_plan, is_passing, parse_part, part_bytes, part_name, plan_name, sweep_planned
from holdfast.storage.base import Storage
from holdfast.storage.together import together

from .messages import PartsJob, SaveJob, SaveResult
from .open_run import Run
from .save import certainly_uncommitted, committed_already, outcome

__all__ = ["commit_parts", "is_committed", "say_stored_for_all"]

_LOG = get_logger("writer")
# Part files of dead workers' writers announce themselves to nobody: looked for ever less often.
_LOOK_S = (0.02, 0.5)
_NAMED = 5  # tensors and ranks spelled out in a warning
_said: set[str] = set()  # tensors that this process has warned of
_AT_ONCE = 256  # part files: of ten thousand neither the bytes nor what they say has to be in memory all at once


def is_committed(storage: Storage, job: SaveJob) -> bool:
    """Tell whether the checkpoint that lies there is that of this very save.

    Raises:
        StorageError: nobody can tell.
    """
    try:
        return any(save_id_of(entry.path) == job.save_id for entry in read_manifest(storage, job.directory).files)
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
        HoldfastError: nothing was committed; the files of this save are removed, unless the manifest has no answer.
    """
    start = time.perf_counter()
    manifest, data = (committed_already(storage, job.directory, job.manifest) if again else None), None
    seconds = {"wait": 0.0, "commit": 0.0}
    if manifest is None:
        is_sent = False
        try:
            parts = _collect(storage, job)
            seconds["wait"] = time.perf_counter() - start
            manifest, replaced = _prepare(storage, job, run, parts)
            say_stored_for_all(parts)
            void = None if run is None else run.void_at(job.directory)
            is_sent = True
            data = commit_manifest(storage, job.directory, manifest, overwrite=replaced, void=void)
            seconds["commit"] = time.perf_counter() - start - seconds["wait"]
        except BaseException as error:
            if certainly_uncommitted(storage, job.directory, job.manifest, error, is_sent=is_sent):
                _discard(storage, job)
            raise
    try:
        passing = [part_name(writer, job.save_id) for writer in job.writers]
        if any(save_id_of(entry.path) is None for entry in manifest.files):
            passing.append(plan_name(job.save_id))
        storage.delete_many([join(job.directory, name) for name in passing])
    except HoldfastError as error:
        _LOG.warning("%s is committed, but part files stay there for now: %s", job.directory, error)
    seconds["total"] = time.perf_counter() - start
    return outcome(job.directory, manifest, run, seconds=seconds, data=data, kind="ranks")


def say_stored_for_all(parts: Sequence[PartSummary]) -> None:
    """Log, once for each tensor, what ranks hold otherwise than the rank whose values are stored."""
    found = {
        name: writers
        for name, writers in stored_for_all({part.writer: part.division for part in parts}).items()
        if name not in _said
    }
    _said.update(found)
    if names := sorted(found):
        others = rank_list(sorted({writer for writers in found.values() for writer in writers}), most=_NAMED)
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        _LOG.warning(
            "%s%s: other values on %s than on rank 0, whose values alone are stored: every rank gets those when it "
            "loads them. Put what each rank is to get back into holdfast.PerRank(...)",
            ", ".join(names[:_NAMED]), more, others,
        )  # fmt: skip


def _collect(storage: Storage, job: PartsJob) -> list[PartSummary]:
    deadline = time.monotonic() + job.wait_s
    parts: dict[int, PartSummary] = {}
    look_s = _LOOK_S[0]
    while True:
        missing = [writer for writer in job.writers if writer not in parts]
        for start in range(0, len(missing), _AT_ONCE):
            _read_parts(storage, job, missing[start : start + _AT_ONCE], parts)
        missing = [writer for writer in missing if writer not in parts]
        if not missing:
            return [parts[writer] for writer in sorted(parts)]
        if time.monotonic() >= deadline:
            waited = f" within {job.wait_s:g} s" if job.wait_s else ""
            place = join(storage.uri, job.directory)
            raise CheckpointError(f"{place}: not committed: {_missing(job, missing, waited)}")
        time.sleep(min(look_s, job.wait_s))
        look_s = min(look_s * 1.5, _LOOK_S[1])


def _read_parts(storage: Storage, job: PartsJob, writers: list[int], parts: dict[int, PartSummary]) -> None:
    """Add those parts of some writers that are there."""
    looks = [partial(part_bytes, storage, job.directory, job.save_id, writer) for writer in writers]
    read = zip(writers, together(storage, looks), strict=True)
    found = {writer: data for writer, data in read if data is not None}
    with paused_gc():  # not while a storage may try again and again
        for writer, data in found.items():
            part = parse_part(data, job.directory, job.save_id, writer)
            first = next(iter(parts.values()), part).division
            # What all say alike, with 64 samples each, is kept once.
            parts[writer] = replace(part, division=first) if part.division == first else part


def _missing(job: PartsJob, missing: list[int], waited: str) -> str:
    if job.stored:
        return (
            f"what {rank_list(missing)} stored there is not to be seen from rank 0{waited}: all ranks have to save to "
            "one shared place, a network file system or remote storage such as s3://bucket/run; with disks of their "
            "own, save straight to remote storage; the checkpoint before stays"
        )
    return (
        f"no part has come{waited} from the writers of {rank_list(missing)}: they died or failed before theirs was "
        "durable; the checkpoint before stays"
    )


def _prepare(
    storage: Storage, job: PartsJob, run: Run | None, parts: list[PartSummary]
) -> tuple[Manifest, Replaced | None]:
    """Check that all files are there; give the manifest, and what it replaces."""
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
    if any(save_id_of(entry.path) != job.save_id for part in parts for entry in part.files):
        check_plan(storage, job.directory, job.save_id)
    if run is not None:
        run.before_commit()
    with paused_gc():
        manifest = assemble(job.directory, {**job.manifest, "writers": job.writers}, parts)
    return manifest, _replaced(storage, job, parts) if job.overwrite else None


def _replaced(storage: Storage, job: PartsJob, parts: list[PartSummary]) -> Replaced:
    """Tell what all ranks had before their eyes when they began."""
    bases = {part.base for part in parts}
    if len(bases) > 1:
        raise CheckpointError(
            f"{join(storage.uri, job.directory)}: not committed: another process has overwritten this checkpoint while "
            "the ranks were saving, and its one stays. Save from one job under one name"
        )
    return replace(look_before(storage, job.directory), etag=bases.pop())


def _discard(storage: Storage, job: PartsJob) -> None:
    """Remove every file of this save, whoever wrote it. What a writer adds later is swept at the next start."""
    skip = len(job.directory) + 1
    with suppress(HoldfastError):
        names = sorted(info.path[skip:] for info in storage.list(job.directory, recursive=False))
        names = [name for name in names if save_id_of(name) == job.save_id]
        if plan_name(job.save_id) in names:
            sweep_planned(storage, job.directory, plan_name(job.save_id))
            names.remove(plan_name(job.save_id))
        for part in (True, False):  # part files first: a part that is named must be whole
            storage.delete_many([join(job.directory, name) for name in names if is_passing(name) is part])
        storage.tidy(job.directory)
