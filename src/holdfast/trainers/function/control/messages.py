"""What a run of workers prints: a block when it starts, single lines when something happens, a line at its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast._outgoing import masked, visible
from holdfast._units import format_duration
from holdfast.checkpointer.console import listed
from holdfast.config import Keep, rules_of
from holdfast.writer.messages import RunOpened

from .actions import RunState
from .plan import RunSpec
from .starts import RunContents, Start

__all__ = ["end_line", "say", "start_block"]


def say(*lines: str) -> None:
    """Print lines for people."""
    print("\n".join(visible(masked(line)) for line in lines), file=sys.stderr, flush=True)  # noqa: T201 - what a run prints, it prints here


def start_block(
    plan: RunSpec, opened: RunOpened, contents: RunContents, start: Start, *, keep: Keep, use_gpu: bool
) -> list[str]:
    """Return the lines about what a start found and does."""
    attempt = f"(attempt {opened.attempt})"
    if start.kept is not None:
        headline = f"{plan.run_name} resumes from {start.words} at report {start.step} {attempt}"
    elif start.location is not None or start.memory is not None:
        headline = f"{plan.run_name} starts from {start.words} {attempt}"
    else:
        headline = f"{plan.run_name} starts fresh: there is no checkpoint {attempt}"
    group = "" if plan.num_workers == 1 else f", process group {'nccl' if use_gpu else 'gloo'}"
    lines = [
        f"holdfast: {headline}",
        f"  storage   {plan.uri}",
        "  workers   none: train_func runs in this process"
        if plan.inline and plan.num_workers == 1
        else f"  workers   {plan.num_workers} processes that torchrun has started, which restarts them{group}"
        if plan.inline
        else f"  workers   {_workers(plan)} {plan.where}{group}",
        f"  keeps     {_rules(plan, keep)}",
    ]
    return [*lines, *(f"  {note}" for note in _notes(plan, opened, contents, start))]


def _notes(plan: RunSpec, opened: RunOpened, contents: RunContents, start: Start) -> list[str]:
    notes = [
        f"set aside {name}, its files are left alone: {reason.partition(chr(10))[0]}"
        for name, reason in {**opened.quarantined, **dict(contents.skipped)}.items()
    ]
    if start.kept is not None and (plan.first_checkpoint is not None or plan.first_memory is not None):
        notes.append("this run has checkpoints of its own: resume_from_checkpoint is not used")
    if opened.finished is not None:
        notes.append(
            f"this run had finished after report {opened.finished.get('step', 0)}: train_func runs again and goes on "
            "from there; give another name for a new run"
        )
    if opened.swept:
        gone = sorted({path.split("/")[0] for path in opened.swept})
        notes.append(f"removed what unfinished saves left: {listed(gone)}")
    if opened.waited_s > 1:
        notes.append(f"waited {opened.waited_s:.1f} s for the writer of the previous attempt to finish")
    if contents.unvalidated and plan.validates:
        notes.append(f"takes up the validation of {listed(contents.unvalidated)}")
    return notes


def _workers(plan: RunSpec) -> str:
    return str(plan.num_workers) if plan.min_workers is None else f"{plan.min_workers} to {plan.num_workers}"


def _rules(plan: RunSpec, keep: Keep) -> str:
    if plan.strategy is not None and plan.strategy["num_to_keep"] == 0:
        return "nothing on disk, the newest values in memory"
    rules = rules_of(keep)
    if not rules:
        return "all checkpoints"
    newest = "" if any(rule.keeps_newest for rule in rules) else ", and the newest"
    return ", ".join(rule.long for rule in rules) + newest


def end_line(
    plan: RunSpec, state: RunState, reason: str, *, reports: int, restarts: int, names: Sequence[str], seconds: float
) -> str:
    """Return the line that says how a run ended.

    Args:
        plan: of the run.
        state: its last state.
        reason: in a few words.
        reports: number of the last report.
        restarts: how often workers were started again.
        names: checkpoints that exist, oldest first.
        seconds: since `fit` was called.
    """
    ended = {RunState.FINISHED: "finished", RunState.ABORTED: f"was stopped ({reason})"}.get(state, "failed")
    again = f", {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    kept = f"{len(names)} checkpoint{'s' if len(names) > 1 else ''}, newest {names[-1]}" if names else "no checkpoint"
    line = f"holdfast: {plan.run_name} {ended} at report {reports} after {format_duration(seconds)}{again}; {kept}"
    return line if state is RunState.FINISHED else f"{line}; run the same script again to go on"
