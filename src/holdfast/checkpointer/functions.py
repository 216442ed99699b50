"""`save`, `save_async` and `load`: one checkpoint, no run.

`SaveTarget` is where such a save goes, who makes it, and through which writer.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast._fork import after_fork_in_child
from holdfast._log import get_logger
from holdfast._meant import suggests
from holdfast._ranks import RankInfo, current_ranks
from holdfast._units import listed
from holdfast.checkpoint.handle import Checkpoint, newest_of_run
from holdfast.errors import CheckpointNotFoundError, ConfigError, HoldfastError, IncompleteCheckpointError, SessionError
from holdfast.run.names import check_free
from holdfast.state.load.restore import Loaded, load_state, set_attributes
from holdfast.state.load.selection import Fit, covers, patterns_of
from holdfast.state.save.snapshot import Snapshotter
from holdfast.storage.base import Storage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import SaveJob

from .meeting import Alone, Meeting, meet
from .pending_saves import ANSWER_MARGIN_S, manifest_fields, new_start_id
from .progress import RESERVED
from .rank_group import RankGroup

if TYPE_CHECKING:
    import torch

    from holdfast.model_files import Content, ModelFiles
    from holdfast.state.tree.sharded import Alike

_LOG = get_logger("state")
_LOAD_S = 600.0  # that ranks which load together wait for each other
_TIMEOUT_S = 600.0  # of a save of several ranks, from the first of them to the last
_SYNC_STAGING = 64 << 20  # `save` streams through two windows of half this size

# May be asked for again by a signal handler of the user in the middle of what it guards.
_lock = threading.RLock()  # one `save_async` at a time: they share an arena
_async: dict[str, Snapshotter] = {}
_idle: dict[str, Snapshotter] = {}  # of `save`, between two calls: its windows are warm, its layout is known
_pending: dict[str, Future[Any]] = {}
_copying = False  # `save_async` is between its first and its last use of the arena
_PROCESS, _THREAD = "process", "thread"  # kinds of writers
_clients_lock = threading.RLock()
_clients: dict[str, WriterClient] = {}
_rank_groups: dict[tuple[str, int, int], tuple[RankGroup, itertools.count[int]]] = {}
_start_id = ""
_FILE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
_directory_said = False
_numbers = itertools.count(1)


class SaveHandle:
    """A save under way, in the manner of ``concurrent.futures.Future``.

    Attributes:
        held_s: how long the caller was held.
        dropped: paths that ``unsupported="drop"`` left out; they are NOT saved.
    """

    def __init__(self, future: Future[Any], checkpoint: Checkpoint, *, held_s: float, dropped: tuple[str, ...]) -> None:
        self._future, self._checkpoint = future, checkpoint
        self.held_s, self.dropped = held_s, dropped

    def result(self, timeout_s: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is durable and return it.

        Raises:
            TimeoutError: not durable after ``timeout_s`` seconds; the save goes on.
            HoldfastError: the save failed; nothing half-written is visible.
        """
        if not wait((self._future,), timeout_s).done:  # the future's own error is no TimeoutError in Python 3.10
            raise TimeoutError(f"{self._checkpoint.uri} is not durable after {timeout_s:g} s; the save goes on")
        self._future.result()
        return self._checkpoint

    def done(self) -> bool:
        """Tell whether the save has ended, well or not."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Wait for the end and return what went wrong, or None."""
        return self._future.exception()


@suggests()
def save(
    path: str | os.PathLike[str] | Checkpoint,
    state: Mapping[Any, Any],
    *,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    ranks: str = "all",
    unsupported: str = "raise",
    alike: Alike = None,
    model_files: ModelFiles | Mapping[str, Content] | str | None = None,
) -> Checkpoint:
    """Save ``state`` as one checkpoint; durable when this returns.

    Needs up to 64 MiB of memory beside the state, and keeps it for the next call.

    Args:
        path: where the checkpoint goes: a path, a URI or a `Checkpoint`.
        state: mapping of names to values (see docs/state.md for what a value may be).
        step: training step to record, a whole number from 0.
        metrics: numbers to record.
        overwrite: replace a committed checkpoint there; the old one is readable until the new one commits.
        ranks: "all" (every rank calls, as often and with the same paths; the first call sets up a channel between
            their writers) or "this" (only this one saves: the ``if rank == 0:`` habit).
        unsupported: "raise", or "drop" to leave out what cannot be saved; a warning in the log lists it.
        alike: the ranks that hold the same as this one (a DeviceMesh, a process group, or a list of ranks), where
            others hold something else: stages of a pipeline, experts. None: what meshes and process groups in the state
            say, else all ranks. See docs/parallel.md.
        model_files: small files committed with the checkpoint, for other libraries: ``{name: bytes, text or a
            function}``, or `holdfast.transformers.model_files`. Not with ``overwrite``. See docs/model-directory.md.

    Raises:
        UnsupportedStateError: a value cannot be saved; nothing was written.
        CheckpointExistsError: there is a committed checkpoint and ``overwrite`` is False.
        ConfigError: an argument is wrong; nothing was written.
        StorageError: the storage failed; an older checkpoint there is untouched.
        HoldfastError: a rank failed, died or did not come within ten minutes; the same error on all ranks names it.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> save(f"{folder}/first", {"weights": torch.ones(3)}).keys()
        ['weights']
    """
    beside = _beside(model_files, state, overwrite=overwrite)
    target = open_target(path, ranks=ranks, overwrite=overwrite, unsupported=unsupported)
    _say_directory(target.checkpoint)
    with target.broadcast_errors():
        group = target.group(alike)
    snapshotter: Snapshotter | None = None
    layout = target.layout
    try:
        # Taken out while in use: another thread, or a signal handler, that saves meanwhile makes its own snapshotter.
        snapshotter = _idle.pop(layout, None) or target.snapshotter(max_staging_bytes=_SYNC_STAGING)
        snapshotter.alike, snapshotter.model_files = group, beside
        with target.broadcast_errors():
            future = target.submit(snapshotter, state, step, metrics)
        target.wait(future, target.checkpoint.uri)
        future.result()
        snapshotter.rest()
        if _idle.setdefault(layout, snapshotter) is not snapshotter:
            snapshotter.close()
    except BaseException:
        if snapshotter is not None:
            if _idle.get(layout) is snapshotter:
                del _idle[layout]
            snapshotter.close()  # the job may still read its memory
        raise
    return target.checkpoint


@suggests()
def save_async(
    path: str | os.PathLike[str] | Checkpoint,
    state: Mapping[Any, Any],
    *,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    ranks: str = "all",
    unsupported: str = "raise",
    alike: Alike = None,
    model_files: ModelFiles | Mapping[str, Content] | str | None = None,
) -> SaveHandle:
    """Copy ``state`` aside and return; the writer makes it durable. The caller may change the state at once.

    One copy of the state is kept in memory for the next call; a call while the last save is still being written
    waits for it. Arguments and errors are those of `save`; errors of the writing come from `SaveHandle.result`.

    Raises:
        SessionError: a signal handler interrupted `save_async` and calls it again: there is one copy, and it is half
            made. Let the handler set a flag, or call `save`.
    """
    handle = begin_save(
        path, state, step=step, metrics=metrics, overwrite=overwrite, ranks=ranks, unsupported=unsupported, alike=alike,
        model_files=model_files,
    )  # fmt: skip
    _say_directory(handle._checkpoint)
    return handle


def _say_directory(target: Checkpoint) -> None:
    """Log, once in a process, that a path with the name of a file of another library becomes a directory."""
    global _directory_said
    suffix = os.path.splitext(target.directory)[1].lower()
    if suffix in _FILE_SUFFIXES and not _directory_said:
        _directory_said = True
        _LOG.warning(
            "%s is a directory, as every checkpoint is: holdfast.load reads it, torch.load and others do not. For one "
            "file for them: holdfast export %s NAME%s --to %s",
            target.uri, target.uri, suffix, "safetensors" if suffix == ".safetensors" else "torch",
        )  # fmt: skip


def begin_save(
    path: str | os.PathLike[str] | Checkpoint,
    state: Mapping[Any, Any],
    *,
    step: int | None,
    metrics: Mapping[str, Any] | None,
    overwrite: bool,
    ranks: str,
    unsupported: str,
    alike: Alike = None,
    model_files: ModelFiles | Mapping[str, Content] | str | None = None,
    fields: Mapping[str, Any] | None = None,
) -> SaveHandle:
    """Do as `save_async` does; ``fields`` are more of the manifest, such as "attempt" and "extra"."""
    global _copying
    beside = _beside(model_files, state, overwrite=overwrite)
    target = open_target(path, ranks=ranks, overwrite=overwrite, unsupported=unsupported)
    with _lock, target.broadcast_errors():
        if _copying:
            raise SessionError(
                "save_async was interrupted by a signal handler that calls it again: let the handler set a flag that "
                "the loop looks at, or call save"
            )
        group = target.group(alike)
        _copying = True
        try:
            arena = target.layout  # the layout of an arena is that of the files
            snapshotter = _async.setdefault(arena, target.snapshotter())
            snapshotter.alike, snapshotter.model_files = group, beside
            before = _pending.get(arena)
            if before is not None:
                # Until it has let go of the arena; its own handle reports how it ended.
                target.wait(before, "the save before this one, whose memory is needed,")
            begun = time.perf_counter()
            try:
                _pending[arena] = future = target.submit(
                    snapshotter, state, step, metrics, aside=True, fields=fields
                )  # fmt: skip
            except BaseException:
                # Interrupted after the hand-over, the job may be complete and still read the arena: never reuse it.
                snapshotter.close()
                raise
            held_s, dropped = time.perf_counter() - begun, snapshotter.dropped
        finally:
            _copying = False
    return SaveHandle(future, target.checkpoint, held_s=held_s, dropped=dropped)


@suggests(also={"device": "map_location", "map": "map_location", "weights_only": "only", "keys": "only"})
def load(
    source: str | os.PathLike[str] | Checkpoint,
    into: Mapping[Any, Any] | None = None,
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    strict: bool = True,
    allow_missing: str | Iterable[str] | None = (),
    rename: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    map_location: torch.device | str | None = None,
    verify: bool = True,
    ranks: str = "this",
    alike: Alike = None,
) -> Any:
    """Load a checkpoint.

    With ``into`` tensors are restored in place, objects through their ``load_state_dict``, the attributes that
    `holdfast.attrs` names are set, and the mapping is returned with the stored plain data in it. Without it, nested
    dicts with new tensors come back. What a run adds to its checkpoints (`holdfast`: step, data position, generators)
    is left out of ``into`` unless ``only`` names it.

    Args:
        source: path, URI or `Checkpoint`; of a run its newest checkpoint is taken.
        into: live state, of the kinds of values `save` takes.
        only: names or globs over "/"-joined paths to load ("model", "optimizer/state/*"); None loads everything.
        skip: names or globs to leave out.
        strict: refuse any difference between checkpoint and ``into``; False takes what fits. A warning in the log
            lists what was not restored.
        allow_missing: names or globs of ``into`` that the checkpoint need not have.
        rename: glob of stored names -> their names in ``into`` (``{"model/backbone.*": "model/encoder.*"}``).
        dtype: cast floating tensors to this; without ``into`` only those with dimensions (the rest count steps).
        map_location: device of new tensors (without ``into``).
        verify: check the digest of everything read.
        ranks: "this" (this rank reads for itself, whatever the others do) or "all" (every rank calls, as often: what
            several ranks of one machine need is read once and shared, and an error of one rank is raised by all).
        alike: as in `save`: the checkpoint may have more than ``into``, which is for ranks that hold something else.
            With ``ranks="all"`` every entry has to be for some rank.

    Raises:
        ConfigError: an argument is wrong, or the ranks have no process group to meet through.
        HoldfastError: with "all": another rank failed, or did not come within ten minutes.
        StateMismatchError: checkpoint and ``into`` differ; raised before the live state changes, lists every entry.
        CorruptCheckpointError: stored bytes are damaged; names file and tensor.
        CheckpointNotFoundError: there is no checkpoint at ``source``.
    """
    if into is not None and not isinstance(into, Mapping):
        raise ConfigError(
            f"load(..., into={type(into).__name__}(...)): a state is a mapping {{name: value}}: wrap it with the name "
            "that it was saved under, as in {'model': model}"
        )
    if ranks not in ("all", "this"):
        raise ConfigError(f"ranks={ranks!r}: use 'all' (every rank calls load) or 'this' (only the calling rank loads)")
    # Once: what gives them only once, such as a generator, would be empty where they are asked for again.
    taken = None if only is None else patterns_of(only, "only")
    left_out, may_lack = patterns_of(skip, "skip"), patterns_of(allow_missing, "allow_missing")
    info = current_ranks()
    together = ranks == "all" and info.world_size > 1
    meeting: Meeting = Alone()
    if together:
        meeting = meet(info, name="load", timeout_s=_LOAD_S, otherwise="load with ranks='this'")
    found: list[Checkpoint] = []
    groups: list[tuple[int, ...] | None] = []

    def begin() -> bool:
        given = _checkpoint(source)
        # Ranks that load together decide first whether it is the newest of a run.
        found.append(newest_of_run(given) if together else given)
        groups.append(_group(alike, into, info))
        return groups[0] is not None

    # Agreed on separately: a rank whose source is not even valid must not leave the others waiting for its reads.
    is_apart = meeting.agree("source", begin, any)
    (checkpoint,), (group,) = found, groups
    apart = (group or tuple(range(info.world_size))) if is_apart else None
    outcome: list[Loaded] = []

    def read(checkpoint: Checkpoint) -> None:
        fit = Fit(
            only=taken, skip=left_out, rename=rename, strict=strict, apart=apart, allow_missing=may_lack,
            bookkeeping=None if taken is not None and covers(taken, RESERVED) else RESERVED,
        )  # fmt: skip
        loaded = load_state(
            checkpoint.storage.child(checkpoint.directory), into, fit, dtype=dtype, map_location=map_location,
            verify=verify, rank=info.rank, world_size=info.world_size, swap=meeting.swap if together else None,
        )  # fmt: skip
        outcome.append(loaded)

    def once() -> None:
        try:
            read(checkpoint)
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            # Looked at only now: a checkpoint that is there costs no request more.
            newest = checkpoint if together else newest_of_run(checkpoint)
            if newest is checkpoint:
                raise
            read(newest)

    meeting.agree("load", once)
    (loaded,) = outcome
    for note in loaded.notes if info.rank == 0 else ():
        _LOG.warning("%s: %s", checkpoint.uri, note)
    loaded.not_restored += set_attributes(into, loaded.state)
    if (left := loaded.not_restored) and (info.rank == 0 or not together or is_apart):
        what = listed(f"{path} ({why})" for path, why in left)
        _LOG.warning("%s: NOT restored: %s", checkpoint.uri, what)
    return loaded.state


def _beside(given: Any, state: Mapping[str, Any], *, overwrite: bool) -> ModelFiles | None:
    if given is None:
        return None
    from holdfast.model_files import model_files_of  # not above: few checkpoints have any

    model_files = model_files_of(given, state)
    if model_files is not None and overwrite:
        raise ConfigError(
            "overwrite=True with model_files: these files keep their names, so the old checkpoint could not stay "
            "readable until the new one is committed. Save under a new name each time (step_1000), or use a "
            "Checkpointer, whose run has a link `latest`"
        )
    return model_files


def _group(alike: Alike, into: Mapping[Any, Any] | None, info: RankInfo) -> tuple[int, ...] | None:
    """Return the ranks that hold the same as this one; None for all of them."""
    rank, world_size = info.rank, info.world_size
    if world_size == 1 or into is None:
        return None
    from holdfast.state.tree.sharded import group_of, ranks_alike  # not above: a process alone needs neither

    return ranks_alike(alike, rank=rank, world_size=world_size) or group_of(into, rank=rank, world_size=world_size)


def _recorded_step(step: Any) -> int | None:
    """Return the step that a manifest can have; one of NumPy or torch is taken as its number."""
    if step is None:
        return None
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 62:
        raise ConfigError(f"step={step!r}: give a whole number of at least 0, or leave it out")
    return number


def _checkpoint(path: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    return path if isinstance(path, Checkpoint) else Checkpoint(path)


@after_fork_in_child
def _after_fork_in_child() -> None:
    """Forget everything that belongs to the parent: its arenas, its writers, its save ids."""
    global _copying, _lock, _clients_lock, _start_id
    _lock, _clients_lock = threading.RLock(), threading.RLock()  # another thread may have held them
    _copying, _start_id = False, ""
    for held in (_async, _idle, _pending, _clients, _rank_groups):
        held.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTarget:
    """Destination and writer of one save that belongs to no run.

    Attributes:
        checkpoint: what it becomes.
        client: the writer.
        save_id: of this save; the same on all ranks that make it.
        rank_group: the ranks that make it, None for this process alone.
        overwrite: a committed checkpoint there is replaced.
        unsupported: what becomes of values that cannot be saved: "raise" or "drop".
    """

    checkpoint: Checkpoint
    client: WriterClient
    save_id: str
    rank_group: RankGroup | None = None
    overwrite: bool = False
    unsupported: str = "raise"

    @property
    def layout(self) -> str:
        """Key of targets that can use the same arena."""
        ranks = "" if self.rank_group is None else f" {self.rank_group.rank} of {self.rank_group.world_size}"
        return f"{_kind(self.checkpoint.storage)} {self.checkpoint.storage.traits.max_file_bytes}{ranks}"

    def group(self, alike: Alike) -> tuple[int, ...] | None:
        """Return the ranks that ``alike`` names; None for a process that saves alone.

        Raises:
            ConfigError: it names no ranks, or not this one.
        """
        if self.rank_group is None:
            return None
        from holdfast.state.tree.sharded import ranks_alike  # not above: a process alone does not need it

        return ranks_alike(alike, rank=self.rank_group.rank, world_size=self.rank_group.world_size)

    def snapshotter(self, *, max_staging_bytes: int | None = None) -> Snapshotter:
        """Make a snapshotter that lays files out as this target needs."""
        rank, world_size = (0, 1) if self.rank_group is None else (self.rank_group.rank, self.rank_group.world_size)
        return Snapshotter(
            rank=rank,
            world_size=world_size,
            max_file_bytes=self.checkpoint.storage.traits.max_file_bytes,
            max_staging_bytes=max_staging_bytes,
        )

    def broadcast_errors(self) -> contextlib.AbstractContextManager[None]:
        """Send an error to the other ranks, which wait for our part of this save."""
        return contextlib.nullcontext() if self.rank_group is None else self.rank_group.broadcast_errors(self.save_id)

    def submit(
        self,
        snapshotter: Snapshotter,
        state: Mapping[Any, Any],
        step: int | None,
        metrics: Mapping[str, Any] | None,
        *,
        aside: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> Future[Any]:
        """Copy the state and hand it to the writer; inside `broadcast_errors`. For ``aside`` see `Snapshotter.submit`.

        ``fields`` are more of the manifest.

        Raises:
            CheckpointExistsError: there is a committed checkpoint and ``overwrite`` is False, or a run.
        """
        checkpoint, joint = self.checkpoint, self.rank_group is not None
        check_free(checkpoint.storage, checkpoint.directory, overwrite=self.overwrite)
        manifest = manifest_fields(
            checkpoint_id=uuid.uuid4().hex,
            step=_recorded_step(step),
            epoch=None,
            metrics=metrics or {},
            world_size=1 if self.rank_group is None else self.rank_group.world_size,
        )
        job = SaveJob(
            directory=checkpoint.directory,
            save_id=self.save_id,
            manifest={**manifest, **(fields or {})},
            overwrite=self.overwrite,
            part=joint,
            joint=joint,
        )
        return snapshotter.submit(
            state, self.client, checkpoint.storage, job, unsupported=self.unsupported, aside=aside
        )  # fmt: skip

    def wait(self, future: Future[Any], what: str) -> None:
        """Wait until a save has ended, well or not; for a bounded time where several ranks save.

        Args:
            future: of the save.
            what: names it in the error.
        """
        limit_s = None if self.rank_group is None else self.rank_group.timeout_s + ANSWER_MARGIN_S
        wait([future], timeout=limit_s)
        if not future.done():
            whose = "" if self.rank_group is None else f"rank {self.rank_group.rank}: "
            raise HoldfastError(f"{whose}{what} is not durable after {limit_s:.0f} s")


def open_target(
    path: str | os.PathLike[str] | Checkpoint, *, ranks: str, overwrite: bool, unsupported: str
) -> SaveTarget:
    """Find the writer for ``path``; with several ranks the first call brings them together.

    Raises:
        ConfigError: an argument is wrong, or the ranks have no process group to meet through.
        HoldfastError: another rank did not come.
    """
    global _start_id
    if ranks not in ("all", "this"):
        raise ConfigError(f"ranks={ranks!r}: use 'all' (every rank calls save) or 'this' (only the calling rank saves)")
    if unsupported not in ("raise", "drop"):
        raise ConfigError(f"unsupported={unsupported!r}: use 'raise' or 'drop'")
    info = current_ranks()
    if ranks == "this" or info.world_size == 1:
        checkpoint = _checkpoint(path)
        with _clients_lock:
            _start_id = _start_id or new_start_id()
            return SaveTarget(
                checkpoint=checkpoint, client=_client(checkpoint.storage), save_id=f"{_start_id}-{next(_numbers):x}",
                overwrite=overwrite, unsupported=unsupported,
            )  # fmt: skip
    found: Checkpoint | HoldfastError
    try:
        found = _checkpoint(path)
    except HoldfastError as error:  # the other ranks have to receive it too
        found = error
    kind = _PROCESS if isinstance(found, HoldfastError) else _kind(found.storage)
    with _clients_lock:
        rank_group, numbers = _rank_group(info, kind)
        # Counted in any case: the n-th saves of all ranks belong together, also after a failure on this rank alone.
        save_id = f"{rank_group.start_id}-{next(numbers):x}"
    if isinstance(found, HoldfastError):
        with rank_group.broadcast_errors(save_id):
            raise found
    if rank_group.client.closed:
        # No second meeting: this rank cannot know whether the others come too.
        raise HoldfastError(
            f"rank {rank_group.rank}: the writer process of this rank has ended, and with it the saves of all ranks: "
            "start the ranks again, or save on one of them with ranks='this'"
        )
    return SaveTarget(
        checkpoint=found, client=rank_group.client, save_id=save_id, rank_group=rank_group, overwrite=overwrite,
        unsupported=unsupported,
    )  # fmt: skip


def _rank_group(info: RankInfo, kind: str) -> tuple[RankGroup, itertools.count[int]]:
    key = (kind, info.rank, info.world_size)
    known = _rank_groups.get(key)
    if known is None:
        otherwise = "save on one rank alone with ranks='this'"
        meeting = meet(info, name=f"save-{kind}", timeout_s=_TIMEOUT_S, otherwise=otherwise)
        client = WriterClient.start(thread=kind == _THREAD or None)
        try:
            rank_group = RankGroup(meeting, client, timeout_s=_TIMEOUT_S)
        except BaseException:
            client.close(0.0)
            raise
        known = _rank_groups[key] = (rank_group, itertools.count(1))
    return known


def _kind(storage: Storage) -> str:
    return _THREAD if storage.describe() is None else _PROCESS


def _client(storage: Storage) -> WriterClient:
    """Return this process's writer for one-off saves, started on first use."""
    with _clients_lock:
        kind = _kind(storage)
        client = _clients.get(kind)
        if client is None or client.closed:
            client = _clients[kind] = WriterClient.start(storage)
        return client
