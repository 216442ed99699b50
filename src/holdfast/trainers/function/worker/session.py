"""What train_func calls on its worker: `report`, `get_checkpoint`, `get_context` and related functions.

`Session` is the worker's side of a run, from "begin" to the end of train_func; `Context`: who it is, and where.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast._fork import after_fork_in_child
from holdfast.checkpoint.handle import Checkpoint, file_system
from holdfast.errors import ConfigError, SessionError
from holdfast.model_files import Content, ModelFiles
from holdfast.run.record import plain_metrics
from holdfast.storage.base import Storage, check_path
from holdfast.writer.frames import Channel

from ..config import (
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
    ValidationTaskConfig,
)
from ..handoff import HandoffArea
from ..transit import checkpoint_at, open_root, unpack_checkpoint
from .delivery import REPORT_OPTIONS, Delivery, check_request, check_score
from .link import ControllerLink, end_process

_current: Session | None = None


def report(
    metrics: Mapping[str, Any] | None = None,
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    validation: bool | Mapping[str, Any] | ValidationTaskConfig = False,
    *,
    state: Mapping[Any, Any] | None = None,
    model_files: ModelFiles | Mapping[str, Content] | str | None = None,
    **values: Any,
) -> None:
    """Report metrics, and with them a checkpoint: a directory (`checkpoint`) or live objects (`state`).

    Every rank calls this equally often. Metrics of rank 0 are kept; the directories of all ranks become one
    checkpoint, and ranks may come without one. Without a checkpoint this takes microseconds and never waits.

    Args:
        metrics: numbers, strings, None, one-element tensors, and dicts and lists of these. Without it the other
            keywords are the metrics, as in Ray 1.x: ``report(loss=0.3)``.
        checkpoint: files that are written already: a directory, or one file.
        state: what `holdfast.save` takes, the same on all ranks. Copied when this returns, stored in the background by
            all ranks together; no temporary directory; ``checkpoint_upload_mode`` does not apply.
        checkpoint_dir_name: name of the checkpoint's directory; ``checkpoint_000000``, ... by default.
        checkpoint_upload_mode: SYNC returns when the checkpoint is committed. ASYNC returns when the caller may change
            or delete the directory: at once where it could be renamed (deletion is the default here) or cloned, else
            when it has been copied. NO_UPLOAD: it lies in the run's storage already.
        delete_local_checkpoint_after_upload: None means True for ASYNC, False else. Without it the directory is never
            changed.
        checkpoint_upload_fn: uploads the files to the run's storage in place of the built-in way, and returns where
            they are. In the background under ASYNC, for an hour at most (``HOLDFAST_REPORT_TIMEOUT_S`` if that is
            longer); the directory then has to stay until it is done.
        validation: run the trainer's validation function on this checkpoint. A dict gives it arguments,
            `ValidationTaskConfig` a time limit as well.
        model_files: with ``state``: small files committed beside it, for other libraries; see `holdfast.save`.
        values: metrics, in place of ``metrics``.

    A call that raises counts too, and its report makes no checkpoint on any rank.

    Raises:
        ConfigError: an argument is wrong, or a value is no metric; names it.
        CheckpointNotFoundError: there are no such files on this rank.
        ReportMismatchError: other ranks did not call this.
        SessionError: called outside of train_func.
        HoldfastError: the commit failed; under ASYNC and with ``state`` the next call of any function here raises it.

    Example:
        >>> holdfast.report({"loss": 0.3}, state={"model": model, "optimizer": optimizer})  # doctest: +SKIP
    """
    if metrics is None:
        metrics = values
    elif values:
        raise TypeError(f"report() got an unexpected keyword argument {sorted(values)[0]!r}")
    session = current_session("report")
    if checkpoint is None and state is None and model_files is None and not validation:
        session.report_metrics(metrics)
        return
    session.report(
        metrics,
        checkpoint,
        state=state,
        model_files=model_files,
        checkpoint_dir_name=checkpoint_dir_name,
        checkpoint_upload_mode=checkpoint_upload_mode,
        delete_local_checkpoint_after_upload=delete_local_checkpoint_after_upload,
        checkpoint_upload_fn=checkpoint_upload_fn,
        validation=validation,
    )


def get_checkpoint() -> Checkpoint | None:
    """Return the newest committed checkpoint, the same on all ranks; at the start, what to resume from.

    Waits for checkpoints that were reported with SYNC before. None if there is no checkpoint.

    Raises:
        SessionError: called outside of train_func.
    """
    return current_session("get_checkpoint").get_checkpoint()


def get_context() -> Context:
    """Return who this worker is: rank, world size, name and storage of the run.

    Raises:
        SessionError: called outside of train_func.
    """
    return current_session("get_context").context


def get_all_reported_checkpoints(
    consistency_mode: str | CheckpointConsistencyMode = "validated", timeout_s: float | None = None
) -> list[ReportedCheckpoint]:
    """Return all checkpoints of the run that still exist, oldest first, once what was reported before has ended.

    Args:
        consistency_mode: "committed" (or `CheckpointConsistencyMode`) waits for commits, "validated" also for
            validations.
        timeout_s: return what there is after so many seconds.

    Raises:
        SessionError: called outside of train_func.
    """
    return current_session("get_all_reported_checkpoints").get_all_reported_checkpoints(consistency_mode, timeout_s)


def save_checkpoint(**values: Any) -> None:
    """Save a dictionary of values, as in Ray 1.x; those of rank 0 are kept. Counts as a report.

    Returns on rank 0 when it is committed, or when ``CheckpointStrategy`` says that it is not worth keeping. Takes what
    `holdfast.save` takes; state dicts lose a ``module.`` that all their names have.

    Raises:
        ConfigError: (rank 0) the score attribute of ``CheckpointStrategy`` is missing or no number.
        SessionError: called outside of train_func.

    Example:
        >>> holdfast.save_checkpoint(epoch=3, model=model.state_dict())  # doctest: +SKIP
    """
    current_session("save_checkpoint").save_checkpoint(**values)


def load_checkpoint() -> dict[str, Any] | None:
    """Return the values of the newest `save_checkpoint`, or of ``resume_from_checkpoint``; None at a fresh start.

    Raises:
        ConfigError: the newest checkpoint is a directory of files, not a dictionary.
        SessionError: called outside of train_func.
    """
    return current_session("load_checkpoint").load_checkpoint()


def should_save() -> bool:
    """Return whether to report a checkpoint now, because the workers are about to move; the same on all ranks.

    On a Ray cluster this is so before a drained or preempted node goes, and before a run with a range of
    ``num_workers`` grows. Every rank calls this equally often, once in each step: it takes microseconds and waits
    only while a save is being agreed on. After that report the workers are ended and started again elsewhere; where
    it is never called, the next reported checkpoint serves instead. On one machine it is always False.

    Raises:
        SessionError: called outside of train_func.

    Example:
        >>> if step % 1000 == 0 or holdfast.should_save():  # doctest: +SKIP
        ...     holdfast.report({"loss": loss}, state={"model": model, "optimizer": optimizer})
    """
    return current_session("should_save").should_save()


def world_rank() -> int:
    """Return the rank among all workers, as in Ray 1.x; the same as ``get_context().get_world_rank()``."""
    return current_session("world_rank").context.get_world_rank()


def local_rank() -> int:
    """Return the rank among the workers of this machine, as in Ray 1.x."""
    return current_session("local_rank").context.get_local_rank()


def world_size() -> int:
    """Return the number of workers, as in Ray 1.x."""
    return current_session("world_size").context.get_world_size()


class Session:
    """Reports and questions of a worker. All methods may be called from any thread: reports then follow one another.

    A new session becomes the current session of the process and starts its threads; from then on only the session
    receives on the channel. Methods that users reach through functions have their docstrings there.

    Args:
        channel: to the controller.
        begin: the controller's "begin" message.
        memory: a packed dictionary checkpoint to start from, in place of ``begin["checkpoint"]``.
        on_gone: what to do when the driver is gone; ends the process by default.

    Attributes:
        rank: of this worker.
        context: what `get_context` returns.
    """

    def __init__(
        self,
        channel: Channel,
        begin: dict[str, Any],
        memory: bytes | None = None,
        *,
        on_gone: Callable[[], None] = end_process,
    ) -> None:
        global _current
        location = begin["run_root"]
        root = None if location["storage"] is None else open_root(location)
        uri = root.uri if root is not None else f"{location['uri'].rstrip('/')}/{location['name']}".rstrip("/")
        self.rank: int = begin["rank"]
        self._begin, self._memory = begin, memory or None
        self._lock = threading.RLock()  # re-entrant: a signal handler may report too
        self._area = HandoffArea(
            root=root,
            uri=uri,
            start_id=begin["start_id"],
            rank=self.rank,
            apart=begin.get("apart", False),
            past=frozenset(begin.get("past", ())),
        )
        local = self._area.local
        self.context = Context(
            begin,
            StorageContext(
                uri=uri,
                storage=root,
                experiment_dir_name=begin["run_name"],
                experiment_fs_path=uri.partition("://")[2] or uri if local is None else str(root and root.local_root),
            ),
        )
        self._link = ControllerLink(
            channel,
            first_index=begin["first_index"],
            timeout_s=begin["report_timeout_s"],
            on_gone=on_gone,
            beat_s=begin.get("beat_s"),
        )
        self._delivery = Delivery(self._link, begin, self._area)
        _current = self

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, **options: Any) -> None:
        """See `holdfast.report`, which has the options."""
        given, validates = options.get, self.rank == 0 and options.get("validation")
        if checkpoint is None and given("state") is None and given("model_files") is None and not validates:
            if unknown := options.keys() - REPORT_OPTIONS:
                raise TypeError(f"report() got an unexpected keyword argument {min(unknown)!r}")
            self.report_metrics(metrics)
            return
        try:
            request = check_request(metrics, checkpoint, **options)
            score = self._begin["score"]
            if self.rank == 0 and score is not None:
                check_score(request.metrics, score["attribute"])
        except Exception as error:
            with self._lock:
                self._link.check()
                self._link.refuse(None, error)
            raise
        with self._lock:
            self._check_data(request.metrics)
            with self._counting(request.metrics):
                finish = self._delivery.enter(request, self._link.count + 1)
        # Outside of the lock: other threads may report while this one waits for its commit.
        if finish is not None:
            finish()

    def report_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Report without data."""
        try:
            plain = plain_metrics(metrics)  # on every rank, so that a mistake shows on all of them
        except Exception:
            with self._lock:
                self._link.check()
                self._link.skip()
            raise
        row = self._row(plain)
        with self._lock:
            self._link.check()
            self._link.add(row)
            # After it has been counted: a caller that goes on after the error still reports as often as the others.
            self._link.raise_trouble()

    def _check_data(self, metrics: dict[str, Any] | None = None) -> None:
        """Refuse a report with data if something earlier has failed."""
        self._link.check()
        if (trouble := self._link.next_trouble()) is not None:
            root, error = trouble
            self._link.refuse(self._row(metrics or {}), error, root=root)
            raise error

    @contextmanager
    def _counting(self, metrics: dict[str, Any] | None) -> Iterator[None]:
        """Let a report of which the body raises count, with its metrics, and fail on all ranks."""
        index = self._link.count + 1
        try:
            yield
        except Exception as error:
            if self._link.count < index:
                self._link.refuse(None if metrics is None else self._row(metrics), error)
            raise

    def _row(self, metrics: dict[str, Any]) -> dict[str, Any] | None:
        """Return the row of a report without data; None on ranks whose metrics are not kept."""
        wanted = self.rank == 0 or self._begin.get("all_metrics")
        return {"metrics": metrics, "time": time.time()} if wanted else None

    def _check_question(self) -> None:
        self._link.check()
        self._link.raise_trouble()

    def save_checkpoint(self, **values: Any) -> None:
        """See `holdfast.save_checkpoint`."""
        with self._lock:
            self._check_data()
            if self.rank != 0:
                self._link.add(self._row({}))
                return
            with self._counting(None):  # values make no row
                finish = self._delivery.save_values(values, self._link.count + 1)
        if finish is not None:
            finish()

    def load_checkpoint(self) -> dict[str, Any] | None:
        """See `holdfast.load_checkpoint`."""
        checkpoint = self.get_checkpoint()
        if checkpoint is None:
            return None
        manifest = checkpoint.manifest
        if manifest is None or not manifest.with_role("state"):
            raise ConfigError(
                f"{checkpoint.uri} is a directory of files, not a dictionary: get_checkpoint().as_directory() opens it"
            )
        return checkpoint.to_dict()

    def get_checkpoint(self) -> Checkpoint | None:
        """See `holdfast.get_checkpoint`."""
        with self._lock:
            self._check_question()
            upto = self._link.count
            if upto < self._begin["first_index"]:
                return self._first_checkpoint()
            answer = self._link.ask({"what": "checkpoint", "upto": upto})
        message = answer()
        value = message.header["value"]
        if value.get("memory"):
            return unpack_checkpoint(message.attachments[0])
        return None if value["checkpoint"] is None else checkpoint_at(value["checkpoint"])

    def _first_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint that every rank began with, without asking the controller."""
        if self._memory is not None:
            return unpack_checkpoint(self._memory)
        location = self._begin["checkpoint"]
        return None if location is None else checkpoint_at(location)

    def get_all_reported_checkpoints(
        self, consistency_mode: Any = "validated", timeout_s: float | None = None
    ) -> list[ReportedCheckpoint]:
        """See `holdfast.get_all_reported_checkpoints`."""
        mode = str(getattr(consistency_mode, "value", consistency_mode)).lower()
        if mode not in ("committed", "validated"):
            raise ConfigError(f"consistency_mode={consistency_mode!r}: use 'committed' or 'validated'")
        if timeout_s is not None and not timeout_s >= 0:
            raise ConfigError(f"timeout_s={timeout_s!r}: give seconds, or None to wait as long as it takes")
        with self._lock:
            self._check_question()
            answer = self._link.ask({"what": "all", "mode": mode, "upto": self._link.count, "timeout_s": timeout_s})
        return [
            ReportedCheckpoint(
                checkpoint=checkpoint_at(row["checkpoint"]),
                metrics=row["metrics"],
                status=ReportedCheckpointStatus(row["status"]),
            )
            for row in answer().header["value"]["checkpoints"]
        ]

    def should_save(self) -> bool:
        """See `holdfast.should_save`."""
        return self._link.agreement.ask()

    @property
    def report_timeout_s(self) -> float:
        """How long ranks wait for one another."""
        return float(self._begin["report_timeout_s"])

    @property
    def score_attribute(self) -> str | None:
        """Name of the metric by which the run ranks checkpoints."""
        score = self._begin["score"]
        return None if score is None else str(score["attribute"])

    def new_place(self, name: str) -> str:
        """Return a path, the same on all ranks, where a directory may be written that will be reported.

        On the disk of the run if that is local, so that reporting costs a rename. Creates nothing.
        """
        return self._area.new(name)

    # -- the end -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until everything reported is safe; called when train_func has returned.

        Raises:
            BaseException: what failed in the background and was not raised yet.
        """
        self._link.drain()
        self._delivery.drain()

    def abandon(self, timeout_s: float = 10.0) -> None:
        """Send what is ready, after train_func has raised; never raises, takes ``timeout_s`` at most."""
        deadline = time.monotonic() + timeout_s
        self._delivery.abandon(timeout_s)
        self._link.abandon(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End the threads and close the channel; idempotent. What was handed to writers is still committed."""
        global _current
        if _current is self:
            _current = None
        self._delivery.close()
        self._link.close()


def in_session() -> bool:
    """Whether this process runs a train function."""
    return _current is not None


def current_session(function: str) -> Session:
    """Return the session of this process.

    Args:
        function: name of the caller, for the message.

    Raises:
        SessionError: there is none.
    """
    if _current is None:
        raise SessionError(
            f"holdfast.{function}() was called outside of train_func: it works in the worker processes that "
            "TorchTrainer(train_func).fit() starts, not in the driver and not in processes forked from a worker; in a "
            "loop of your own use holdfast.Checkpointer or holdfast.save, in a trial of Ray Tune holdfast.ray_tune"
        )
    return _current


@after_fork_in_child
def _after_fork_in_child() -> None:
    global _current
    if _current is not None:
        _current._link.forget_in_child()
        _current = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageContext:
    """Where a run is stored, under the names of Ray Train.

    Attributes:
        uri: of the run.
        storage: the storage of the run; None if it lives in the memory of the driver.
        experiment_dir_name: name of the run.
        experiment_fs_path: path of the run: absolute on a local disk, else without its scheme.
    """

    uri: str
    storage: Storage | None
    experiment_dir_name: str
    experiment_fs_path: str

    @property
    def storage_filesystem(self) -> Any:
        """The file system of the paths: see `Checkpoint.filesystem`; None if it lives in the memory of the driver."""
        return None if self.storage is None else file_system(self.storage)

    @property
    def storage_fs_path(self) -> str:
        """The path that holds this run and others."""
        path, name = self.experiment_fs_path.rstrip("/"), f"/{self.experiment_dir_name}"  # a name may have folders
        return path.removesuffix(name) if path.endswith(name) else path.rpartition("/")[0]

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Return where a checkpoint of this name lies: what to upload to with ``NO_UPLOAD``.

        Raises:
            ConfigError: the name is not that of a single directory.
        """
        if "/" in check_path(checkpoint_name):
            raise ConfigError(f"checkpoint name {checkpoint_name!r}: give the name of a single directory, without '/'")
        return f"{self.experiment_fs_path.rstrip('/')}/{checkpoint_name}"


class Context:
    """What a worker knows about itself and its run. Cheap, never waits.

    Example:
        >>> context = holdfast.get_context()  # doctest: +SKIP
        >>> context.get_world_rank(), context.get_world_size()  # doctest: +SKIP
        (0, 2)
    """

    __slots__ = ("_begin", "_storage")

    def __init__(self, begin: dict[str, Any], storage: StorageContext) -> None:
        self._begin, self._storage = begin, storage

    def get_world_rank(self) -> int:
        """Rank among all workers, from 0."""
        return int(self._begin["rank"])

    def get_world_size(self) -> int:
        """Number of all workers."""
        return int(self._begin["world_size"])

    def get_local_rank(self) -> int:
        """Rank among the workers of this machine."""
        return int(self._begin["local_rank"])

    def get_local_world_size(self) -> int:
        """Number of workers on this machine."""
        return int(self._begin["local_world_size"])

    def get_node_rank(self) -> int:
        """Number of this machine among those of the run."""
        return int(self._begin["node_rank"])

    def get_experiment_name(self) -> str:
        """Name of the run (`RunConfig.name`)."""
        return str(self._begin["run_name"])

    def get_storage(self) -> StorageContext:
        """Where the run is stored."""
        return self._storage

    # Ray Train has no trials any more; scripts that still ask get the run.

    get_trial_name = get_experiment_name

    def get_trial_id(self) -> str:
        """Name of the run and number of this attempt: changes with each start of the workers."""
        return f"{self._begin['run_name']}-{self._begin['attempt']:05d}"

    def get_trial_dir(self) -> str:
        """Path of the run."""
        return self._storage.experiment_fs_path

    def get_trial_resources(self) -> dict[str, Any]:
        """Number of workers."""
        return {"num_workers": self.get_world_size()}

    def get_metadata(self) -> dict[str, Any]:
        """Deprecated in Ray Train and empty here; put what you want to pass into ``train_loop_config``."""
        warnings.warn("get_metadata() is always {}: pass it in train_loop_config", DeprecationWarning, stacklevel=2)
        return {}


TrainContext = Context  # what Ray Train calls it
