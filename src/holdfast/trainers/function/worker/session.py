"""What train_func calls on its worker: `report`, `get_checkpoint`, `get_context` and related functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.model_files import Content, ModelFiles

from ..config import ValidationTaskConfig
from ..types import CheckpointConsistencyMode, CheckpointUploadMode, ReportedCheckpoint
from ._session import Context, Session, current_session

__all__ = [
    "Session",
    "current_session",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "should_save",
    "world_rank",
    "world_size",
]


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
            they are. In the background under ASYNC; the directory then has to stay until it is done.
        validation: run the trainer's validation function on this checkpoint. A dict gives it arguments,
            `ValidationTaskConfig` a time limit as well.
        model_files: with ``state``: small files committed beside it, for other libraries; see `holdfast.save`.
        values: metrics, in place of ``metrics``.

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
    current_session("report").report(
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
