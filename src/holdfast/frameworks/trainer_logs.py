"""What the log of a `transformers.Trainer` says about a checkpoint, and whether its settings fit the ranking."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast._log import get_logger

from .metrics import scalars
from .places import last_change

__all__ = [
    "misaligned", "missing_metric", "saved_metrics", "say_misaligned", "say_missing", "say_start", "trial_of",
    "written",
]  # fmt: skip

_LOG = get_logger("transformers")
_NOT_METRICS = ("total_flos",)


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
