"""Directories that a framework has written already, at a place of its own, and what its log says about them."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast._log import get_logger
from holdfast._ranks import current_ranks
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.meeting import meet
from holdfast.copying.local import clone_tree
from holdfast.errors import CheckpointNotFoundError, ConfigError
from holdfast.trainers.function.config import CheckpointUploadMode, ValidationTaskConfig
from holdfast.trainers.function.worker.session import current_session

from .places import claim, last_change
from .reporting import scalars

__all__ = [
    "all_written",
    "check_shared",
    "misaligned",
    "missing_metric",
    "report_finished",
    "saved_metrics",
    "say_misaligned",
    "say_missing",
    "say_start",
    "trial_of",
    "written",
]

_LOG = get_logger("transformers")
_NOT_METRICS = ("total_flos",)

_TIMEOUT_S = 600.0
_numbers = itertools.count()


def all_written(directory: str, *, shared: bool = False, timeout_s: float = _TIMEOUT_S) -> bool:
    """Wait until every rank has written its files; True on the rank of each directory that hands them over.

    Every rank calls this when its own files are complete. Ranks that share a directory have one of them, the lowest,
    hand it over; a rank with a directory of its own does it itself.

    Args:
        directory: where this rank wrote; it need not exist on a rank that has nothing to write.
        shared: rank 0 is to see what all have written.
        timeout_s: how long ranks wait for one another.

    Raises:
        ConfigError: (``shared``) a rank has written where rank 0 does not see it.
        HoldfastError: a rank did not come.
    """
    info = current_ranks()
    meeting = meet(info, name="written", timeout_s=timeout_s, otherwise="train with one process")

    def place() -> list[Any] | None:
        if not os.path.isdir(directory):
            return None
        found = os.stat(directory)
        names = sorted(os.listdir(directory)) if shared else []
        return [os.path.realpath(directory), found.st_dev, found.st_ino, names]

    def lowest(places: list[Any]) -> list[int]:
        if shared:
            check_shared(directory, places)
        places = [None if entry is None else entry[:3] for entry in places]
        return [rank for rank, entry in enumerate(places) if entry is not None and places.index(entry) == rank]

    return info.rank in meeting.agree("written", place, lowest)


def check_shared(directory: str, places: list[Any]) -> None:
    """Refuse directories (path, device, inode, names in it) of several ranks that differ from that of rank 0.

    Of one directory, devices differ on machines that mount it, and inodes with some file systems; names alone may come
    late to another machine.
    """
    first = places[0] or ["", 0, 0, []]
    for rank, seen in enumerate(places):
        if seen is not None and seen[2] != first[2] and (missing := sorted(set(seen[3]) - set(first[3]))):
            raise ConfigError(
                f"rank {rank} has written {missing[0]} into {directory}, and rank 0 does not see it there: with "
                "several machines output_dir must be on a file system that they share; a checkpoint would lack files"
            )


def report_finished(
    directory: str,
    metrics: Mapping[str, Any],
    *,
    inside: str,
    delete: bool = False,
    validation: bool | Mapping[str, Any] | ValidationTaskConfig = False,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Report what a framework has written, from inside the function trainer; every rank calls this, equally often.

    Returns when the framework may do with its directory what it likes. No copy is made on the way: with ``delete`` the
    directory is renamed; else its files are cloned where the file system can share blocks; else this waits until the
    writer has read them.

    Args:
        directory: what this rank (or another, into the same directory) has written.
        metrics: of rank 0 are kept.
        inside: name of the directory within the checkpoint.
        delete: the directory may be taken away.
        validation: as in `holdfast.report`.
        timeout_s: how long ranks wait for one another.

    Raises:
        CheckpointNotFoundError: no rank has written anything.
        SessionError: called outside of train_func.
        HoldfastError: a rank did not come, or the commit failed.
    """
    session = current_session("report")
    if not all_written(directory, timeout_s=timeout_s):
        if session.rank == 0:
            raise CheckpointNotFoundError(
                f"there is no {directory} to report: nothing was written on rank 0, or the framework has deleted it "
                "already (directories of an older run beside it can make it do so: use an empty place)"
            )
        session.report(metrics, validation=validation)
        return
    place = session.new_place(f"finished-{next(_numbers)}-{session.rank}")
    root = session.context.get_storage().storage
    if root is None or root.local_root is None:
        claim(os.path.dirname(place))
    os.makedirs(place)
    target = os.path.join(place, inside)
    safe = _moved(directory, target) if delete else clone_tree(directory, target)
    if not safe:
        os.symlink(os.path.abspath(directory), target)
    try:
        session.report(
            metrics,
            Checkpoint.from_directory(place),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC if safe else CheckpointUploadMode.SYNC,
            delete_local_checkpoint_after_upload=safe,
            validation=validation,
        )
    except BaseException:
        if safe and delete and os.path.isdir(target) and not os.path.lexists(directory):
            os.rename(target, directory)
        raise
    finally:
        if not safe:
            os.unlink(target)
        with contextlib.suppress(OSError):
            os.rmdir(place)
    if delete and not safe:
        shutil.rmtree(directory, ignore_errors=True)


def _moved(source: str, target: str) -> bool:
    try:
        os.rename(source, target)
    except OSError:
        return False  # another file system
    return True


def saved_metrics(history: Sequence[Mapping[str, Any]], *, step: int, epoch: float | None) -> dict[str, Any]:
    """Return the metrics of the checkpoint of a step: the newest training log, and all that was logged at that step.

    An evaluation of an earlier step judged other weights, so it is left out.

    Args:
        history: ``state.log_history``.
        step: of the checkpoint.
        epoch: of the checkpoint.
    """
    training: Mapping[str, Any] = next((entry for entry in reversed(history) if "loss" in entry), {})
    here = [entry for entry in history if entry.get("step") == step]
    found = scalars(training, *here, {"step": step}, {} if epoch is None else {"epoch": epoch})
    return {name: value for name, value in found.items() if name not in _NOT_METRICS}


def missing_metric(metric: str | None, metrics: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what to log where a checkpoint lacks the metric that ranks checkpoints; None where it has it."""
    if metric is None or metric in metrics:
        return None
    earlier = [int(entry.get("step", 0)) for entry in history if metric in entry]
    last = f"it was last logged at step {earlier[-1]}" if earlier else "it was never logged"
    return (
        f"the checkpoint of step {metrics.get('step')} has no {metric!r}, which ranks checkpoints ({last}), so it "
        f"ranks below all others; there are {sorted(metrics)}. Log or evaluate at the steps that save: make save_steps "
        "a multiple of eval_steps (logging_steps), with the same strategy for both"
    )


def misaligned(args: Any, *, metric: str | None, save_steps: float, eval_steps: float | None) -> list[str]:
    """List what in the settings of a trainer keeps checkpoints from being made, ranked or resumed from.

    Args:
        args: the `TrainingArguments`.
        metric: what ranks checkpoints, if anything does.
        save_steps: as the trainer uses it, a number of steps.
        eval_steps: likewise.
    """
    save, evaluate = _strategy(args.save_strategy), _strategy(args.eval_strategy)
    if save == "no":
        return ["save_strategy='no': nothing will ever be saved; use save_strategy='steps' or 'epoch'"]
    found = []
    if getattr(args, "save_only_model", False):
        found.append("save_only_model=True: the checkpoints hold weights only, and training cannot go on from them")
    if metric is None or not metric.startswith("eval_") or save == "best":
        return found
    what = f"checkpoints are ranked by {metric!r}, "
    if evaluate == "no":
        found.append(f"{what}but eval_strategy='no', so it is never there: use eval_strategy={save!r}")
    elif evaluate != save:
        found.append(
            f"{what}but eval_strategy={evaluate!r} and save_strategy={save!r}: not every checkpoint has been "
            "evaluated; use one strategy for both"
        )
    elif save == "steps" and eval_steps and save_steps % eval_steps:
        found.append(
            f"{what}but save_steps={save_steps:g} is no multiple of eval_steps={eval_steps:g}: some checkpoints are "
            "saved without an evaluation and rank below all others"
        )
    return found


def say_misaligned(args: Any, state: Any, metric: str | None) -> None:
    """Say, once for all ranks, what in the settings does not fit; see `misaligned`."""
    if args.process_index == 0:
        for found in misaligned(args, metric=metric, save_steps=state.save_steps, eval_steps=state.eval_steps):
            _LOG.warning("%s", found)


def say_start(args: Any, state: Any, metric: str | None, *, uri: str) -> None:
    """Print, once for all ranks, where training begins; and say like `say_misaligned` what does not fit."""
    step, last = state.global_step, state.max_steps
    if args.process_index == 0 and not state.is_hyper_param_search:
        lines = [f"holdfast: {f'goes on after step {step}' if step else 'starts fresh'} (of {last}); saves to {uri}"]
        if step >= last and args.max_steps > 0:
            lines.append(
                "  nothing is left to train: give more max_steps, or leave train() out; transformers looks after a "
                "step whether it was the last, and in the middle of an epoch trains one too many"
            )
        print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201 - the one thing a run prints
    say_misaligned(args, state, metric)


def say_missing(args: Any, state: Any, metric: str | None, metrics: Mapping[str, Any]) -> None:
    """Say, once for all ranks, that a checkpoint lacks the metric that ranks it; see `missing_metric`."""
    found = missing_metric(metric, metrics, state.log_history)
    if found is not None and args.process_index == 0:
        _LOG.warning("%s", found)


def written(args: Any, state: Any) -> str:
    """Return the directory in which the trainer has saved the current step; a trial of a search has its own place."""
    name = f"checkpoint-{state.global_step}"
    home = os.path.join(args.output_dir, name)
    if not state.is_hyper_param_search:
        return home
    if state.trial_name:
        return os.path.join(args.output_dir, state.trial_name, name)
    # Nobody tells a callback the number of the trial, but every rank has just written files of its own there.
    found = glob.glob(os.path.join(glob.escape(args.output_dir), "*", name))
    return max(found, key=last_change, default=home)


def trial_of(args: Any, state: Any, directory: str) -> dict[str, Any]:
    """Return, as the metric "trial", the name of the trial that has written a directory; nothing outside a search."""
    if not state.is_hyper_param_search:
        return {}
    return {"trial": os.path.relpath(os.path.dirname(directory), args.output_dir)}


def _strategy(value: Any) -> str:
    return str(getattr(value, "value", value))
