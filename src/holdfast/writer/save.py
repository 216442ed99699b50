"""One save from job to commit, what must happen when it fails, and how every kind of save ends.

Of a save of several writers each stores its part (`SaveRunner`), and one of them commits all (`commit_parts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from holdfast._log import get_logger
from holdfast._paused_gc import paused_gc
from holdfast._ranks import rank_list
from holdfast._units import listed
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    HoldfastError,
    StorageFullError,
    StorageNotFoundError,
    StorageUnavailableError,
)
from holdfast.format.commit import (
    PartSummary,
    Replaced,
    assemble,
    commit_manifest,
    look_before,
    read_manifest,
    remove,
)
from holdfast.format.division import stored_for_all
from holdfast.format.manifest import Manifest
from holdfast.format.names import MANIFEST_NAME, join, save_id_of
from holdfast.format.parts import (
    check_plan,
    drop_plan,
    is_passing,
    is_plan,
    parse_part,
    part_bytes,
    part_name,
    plan_name,
    put_part,
    put_plan,
    read_part,
    read_plan,
    sweep_planned,
)
from holdfast.storage.base import Storage
from holdfast.storage.together import SerialExecutor, together

from .messages import BlobPlan, FilePlan, IngestJob, PartsJob, SaveJob, SaveResult
from .open_run import Run
from .pipeline import PartWriter, Previous, Watermark, WindowSource, read_previous

__all__ = [
    "SaveRunner", "Task", "commit_parts", "committed_already", "committing", "is_committed", "outcome", "probe",
    "say_stored_for_all", "stored_part",
]  # fmt: skip

_LOG = get_logger("writer")


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
    mine = tuple(entry for entry in files if entry.writer == job.writer and save_id_of(entry.path) == job.save_id)
    return PartSummary(writer=job.writer, files=mine) if mine else None


@contextmanager
def committing(
    storage: Storage, job: SaveJob | IngestJob | PartsJob, run: Run | None, *, undo: Callable[[], object]
) -> Iterator[Callable[..., tuple[Manifest, bytes]]]:
    """Store and commit a job in the block, which is undone if it fails, unless the job may be committed all the same.

    An error after the manifest became visible (say, in a directory fsync) leaves a valid checkpoint: taking its files
    away would make it a broken one. So does a request without an answer that is carried out later, as a gateway does
    with what waits in it: whatever a look says now, the files stay, for the next start or overwrite to sweep.

    Args:
        storage: where.
        job: what; the ``checkpoint_id`` of its manifest tells ours.
        run: the open run that the job belongs to, if any.
        undo: removes what was stored; what it cannot remove is swept at the next start.

    Yields:
        What commits, as `holdfast.format.commit.commit` does, given fields of the manifest, parts and options; it
        returns the manifest, and its bytes as they are stored.
    """
    is_sent = False

    def commit(fields: Mapping[str, Any], parts: Sequence[PartSummary], **options: Any) -> tuple[Manifest, bytes]:
        nonlocal is_sent
        if run is not None:
            run.before_commit()
        with paused_gc():
            manifest = assemble(job.directory, fields, parts)
        void = None if run is None else partial(run.is_void, job.directory)
        is_sent = True
        return manifest, commit_manifest(storage, job.directory, manifest, void=void, **options)

    try:
        yield commit
    except BaseException as error:
        is_in_doubt = is_sent and isinstance(error, StorageUnavailableError)
        with suppress(HoldfastError):
            if not is_in_doubt and committed_already(storage, job.directory, job.manifest) is None:
                undo()
        raise


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

    ``data`` is the manifest as written; for ``is_new`` and ``kind`` see `Run.committed`.
    """
    deleted = () if run is None else run.committed(
        directory, manifest, kind=kind, durable_s=seconds.get("total"), is_new=is_new
    )  # fmt: skip
    return SaveResult(
        directory=directory,
        manifest=manifest.to_bytes() if data is None else data,
        bytes_total=manifest.total_bytes,
        bytes_written=bytes_written,
        bytes_reused=manifest.reused_bytes,
        seconds=seconds,
        deleted=deleted,
        unchanged=unchanged,
        warnings=tuple(warnings),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job with everything it needs.

    Attributes:
        job: what to write.
        storage: where.
        storage_key: number of the storage in this conversation.
        view: memory of the arena.
        blobs: bytes of the small files.
        arriving: the windows of a windowed job; or how much of the arena is filled, for a job that was submitted before
            all of it was.
        again: the job was sent to an earlier writer process that died: it may be committed already.
    """

    job: SaveJob
    storage: Storage
    storage_key: int
    view: memoryview
    blobs: tuple[bytes, ...] = ()
    arriving: WindowSource | Watermark | None = None
    again: bool = False


class SaveRunner:
    """Carries out saves one after another and remembers what the previous save contained.

    Attributes:
        side: the helper thread; whatever else works in turn with the saves may use it.
    """

    def __init__(self) -> None:
        self.side = SerialExecutor()
        self._previous: dict[tuple[int, int], Previous] = {}

    def save(self, task: Task, run: Run | None) -> SaveResult:
        """Write, commit, record in the run, apply its retention; of a part only the first.

        Args:
            task: the job.
            run: the open run that the job belongs to, if any.

        Raises:
            HoldfastError: nothing was committed; the files of this save are removed, older checkpoints untouched. If
                the store did not answer to the manifest, it may yet be committed, and its files stay.
        """
        start = time.perf_counter()
        job = task.job
        if task.again and job.part:
            stored = stored_part(task.storage, job)
            if stored is not None:
                return _part_result(job, stored, {"total": time.perf_counter() - start})
        elif task.again:
            committed = committed_already(task.storage, job.directory, job.manifest)
            if committed is not None:
                return outcome(job.directory, committed, run, seconds={"total": time.perf_counter() - start})
        try:
            writer, part, stored_as, seconds = self._attempt(task, run)
        except StorageFullError:
            # Retention may be behind (it was interrupted, or its rules have changed): catch up, then once more.
            if run is None or not run.make_room() or job.windowed:  # of windows nothing is left to be written again
                raise
            _LOG.warning(
                "%s is full: old checkpoints were removed by the rules of retention, trying once more", job.directory
            )
            writer, part, stored_as, seconds = self._attempt(task, run)
        if job.reuse or job.want_unchanged:  # saves on their own, each in another place, would only pile up tables
            self._previous[task.storage_key, job.writer] = writer.contents
        seconds["total"] = time.perf_counter() - start
        if stored_as is None:
            return _part_result(job, part, seconds, is_new=True, unchanged=writer.unchanged)
        manifest, data = stored_as
        return outcome(
            job.directory,
            manifest,
            run,
            seconds=seconds,
            bytes_written=manifest.total_bytes - manifest.reused_bytes,
            unchanged=writer.unchanged,
            data=data,
            is_new=not task.again,
        )

    def close(self) -> None:
        """End the helper thread."""
        self.side.close()

    def _attempt(
        self, task: Task, run: Run | None
    ) -> tuple[PartWriter, PartSummary, tuple[Manifest, bytes] | None, dict[str, float]]:
        """Write the files and, unless they are a part, the manifest, which is given as it is stored."""
        job = task.job
        if run is not None and task.storage.traits.num_parallel > 1:
            run.hurry()  # the metrics up to this save become durable while its data do
        plans: list[FilePlan | BlobPlan] = [*job.files, *job.blobs]
        if planned := [plan.path for plan in plans if save_id_of(plan.path) != job.save_id]:
            _plan_names(task, planned)
        replaced = look_before(task.storage, job.directory) if job.overwrite else None
        previous = self._previous.get((task.storage_key, job.writer))
        if previous is None:
            previous = _of_life_before(task, run)
        writer = PartWriter(task.storage, job, previous=previous, side=self.side)
        undo = partial(writer.discard, plan=bool(planned), again=task.again)
        with committing(task.storage, job, run, undo=undo) as commit:
            if isinstance(task.arriving, WindowSource):
                part = writer.write_windows(task.view, task.arriving, task.blobs)
            else:
                part = writer.write_arena(task.view, task.blobs, task.arriving)
            begin = time.perf_counter()
            stored_as = None
            if job.part:
                summary = part if replaced is None else replace(part, base=replaced.etag)
                put_part(task.storage, job.directory, job.save_id, summary)
            else:
                if planned:
                    check_plan(task.storage, job.directory, job.save_id)
                stored_as = commit(job.manifest, [part], overwrite=replaced)
        if planned and not job.part:
            drop_plan(task.storage, job.directory, job.save_id)
        return writer, part, stored_as, {**writer.seconds, "commit": time.perf_counter() - begin}


def _of_life_before(task: Task, run: Run | None) -> Previous:
    """Read what the newest checkpoint contains, if that is of use for the first save of this life."""
    job = task.job
    if job.reuse and run is not None and any(plan.stable for plan in job.files):
        latest = run.latest_manifest()
        if latest is not None:
            return read_previous(task.storage, *latest, writer=job.writer)
    return Previous()


def _plan_names(task: Task, names: Sequence[str]) -> None:
    """List, before the first file, those whose names do not tell whose they are.

    Raises:
        CheckpointExistsError: something has one of these names already.
    """
    job, storage = task.job, task.storage
    there, own = _names_in(task), plan_name(job.save_id)
    others: list[str] = []
    if MANIFEST_NAME not in there:
        plans = sorted(name for name in there if is_plan(name))
        if own in plans:  # of this save, by a writer that died
            there -= set(sweep_planned(storage, job.directory, own))
        others = [plan for plan in plans if plan != own]
    expected = {path for plan in others for path in _planned(storage, job.directory, plan)}
    _check_free(task, (there - expected) & {*names, MANIFEST_NAME})
    put_plan(storage, job.directory, job.save_id, names, {})
    now = _names_in(task)
    if new := sorted(name for name in now - there if name == MANIFEST_NAME or (is_plan(name) and name != own)):
        drop_plan(storage, job.directory, job.save_id)
        _check_free(task, new)
    # Of saves that died, as far as we can see: one that lives finds its plan gone, and commits nothing.
    for plan in others:
        sweep_planned(storage, job.directory, plan)


def _names_in(task: Task) -> set[str]:
    skip = len(task.job.directory) + 1
    return {info.path[skip:] for info in task.storage.list(task.job.directory)}


def _planned(storage: Storage, directory: str, plan: str) -> tuple[str, ...]:
    try:
        read = read_plan(storage, directory, plan)
    except CorruptCheckpointError:
        return ()  # its files are left alone
    return () if read is None else read[0]


def _check_free(task: Task, taken: Collection[str]) -> None:
    if taken:
        raise CheckpointExistsError(
            f"{join(task.storage.uri, task.job.directory)} holds {min(taken)} already: files of model_files keep their "
            "names, so none of them can be replaced while the checkpoint stays readable; save into another directory"
        )


def _part_result(
    job: SaveJob,
    part: PartSummary,
    seconds: dict[str, float],
    *,
    is_new: bool = False,
    unchanged: tuple[tuple[int, int, int], ...] = (),
) -> SaveResult:
    total = sum(entry.size for entry in part.files)
    reused = sum(entry.size for entry in part.files if entry.reused_from is not None)
    return SaveResult(
        directory=job.directory,
        manifest=b"",
        bytes_total=total,
        bytes_written=total - reused if is_new else 0,
        bytes_reused=reused,
        seconds=seconds,
        unchanged=unchanged,
    )


def probe(storage: Storage, directory: str, saver: SaveRunner) -> dict[str, Any]:
    """Send a small checkpoint through the whole commit and delete it.

    Returns:
        "free_bytes" (None if unknown) and "seconds".

    Raises:
        HoldfastError: what a save would meet.
    """
    start = time.perf_counter()
    save_id = directory.rpartition("/")[2].rpartition("-")[2] + "-0"  # as the ids of saves are made
    job = SaveJob(
        directory=directory,
        save_id=save_id,
        blobs=(BlobPlan(path=f"state-{save_id}.json", role="state"),),
        manifest={"run_id": "probe", "checkpoint_id": save_id, "step": 0, "attempt": 0},
        overwrite=storage.traits.num_parallel == 1,  # elsewhere it takes time to look, and nobody else has this name
    )
    task = Task(job=job, storage=storage, storage_key=-1, view=memoryview(b""), blobs=(b"{}",))
    try:
        data = saver.save(task, None).manifest
    except CheckpointExistsError:  # of an earlier writer, which died while it tried
        data = saver.save(replace(task, job=replace(job, overwrite=True)), None).manifest
    if storage.traits.num_parallel > 1:
        files = [entry.path for entry in Manifest.from_bytes(data).files]
        storage.delete_many([join(directory, path) for path in (MANIFEST_NAME, *files)])
    else:
        remove(storage, directory)
    return {"free_bytes": storage.free_bytes(), "seconds": time.perf_counter() - start}


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
        with committing(storage, job, run, undo=partial(_discard, storage, job)) as commit:
            parts = _collect(storage, job)
            seconds["wait"] = time.perf_counter() - start
            _check_parts(storage, job, parts)
            replaced = _replaced(storage, job, parts) if job.overwrite else None
            say_stored_for_all(parts)
            manifest, data = commit({**job.manifest, "writers": job.writers}, parts, overwrite=replaced)
            seconds["commit"] = time.perf_counter() - start - seconds["wait"]
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
        _LOG.warning(
            "%s: other values on %s than on rank 0, whose values alone are stored: every rank gets those when it "
            "loads them. Put what each rank is to get back into holdfast.PerRank(...)",
            listed(names, _NAMED), others,
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


def _check_parts(storage: Storage, job: PartsJob, parts: list[PartSummary]) -> None:
    """Check that all files are there, and are those of this save."""
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
    names = sorted(info.path[skip:] for info in storage.list(job.directory, recursive=False))
    names = [name for name in names if save_id_of(name) == job.save_id]
    if plan_name(job.save_id) in names:
        sweep_planned(storage, job.directory, plan_name(job.save_id))
        names.remove(plan_name(job.save_id))
    for part in (True, False):  # part files first: a part that is named must be whole
        storage.delete_many([join(job.directory, name) for name in names if is_passing(name) is part])
    storage.tidy(job.directory)
