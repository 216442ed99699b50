"""What can go wrong without any event: ranks that do not report, do not start, or give no sign of life."""

from __future__ import annotations

from holdfast._ranks import rank_list
from holdfast.errors import TrainingError, WorkerHangError

from .commits import Commits
from .plan import WaitLimits
from .reports import Reports
from .worker_group import Crew

__all__ = ["find_trouble", "next_check"]


def find_trouble(
    now: float, crew: Crew, reports: Reports, commits: Commits, limits: WaitLimits, last_sign: float
) -> tuple[list[int], TrainingError] | None:
    """Give the ranks that something is wrong with, and what.

    Args:
        now: the time.
        crew: the workers.
        reports: their reports.
        commits: what is being committed.
        limits: bounds of all waits.
        last_sign: when anything was last heard of or done for any of them.
    """
    if (found := reports.mismatch(now)) is not None:
        return found
    if not crew.all_running:
        if now < crew.since + limits.start_s:
            return None
        slow = [rank for rank in range(crew.size) if rank not in crew.running]
        text = f"train_func did not begin on {rank_list(slow)} within {limits.start_s:g} s; see the logs of the attempt"
        return slow, TrainingError(text)
    if limits.hang_s is None or not _may_hang(crew, reports, commits) or now < last_sign + limits.hang_s:
        return None
    last = ", ".join(
        f"rank {rank} {now - crew.heard[rank]:.1f} s ago (report {reports.board.entered[rank]})"
        for rank in crew.unfinished
    )
    return crew.unfinished, WorkerHangError(
        f"no worker has given a sign of life for {now - last_sign:.1f} s (hang_timeout_s={limits.hang_s:g}); last "
        f"heard of {last}. Every report, with or without a checkpoint, is a sign of life"
    )


def next_check(crew: Crew, reports: Reports, commits: Commits, limits: WaitLimits, last_sign: float) -> float | None:
    """When `find_trouble` may find something if nothing happens."""
    times = [reports.next_deadline()]
    if not crew.all_running:
        times.append(crew.since + limits.start_s)
    elif limits.hang_s is not None and _may_hang(crew, reports, commits):
        times.append(last_sign + limits.hang_s)
    return min((time for time in times if time is not None), default=None)


def _may_hang(crew: Crew, reports: Reports, commits: Commits) -> bool:
    """Whether silence would mean that workers are stuck; not while they may be waiting for storage."""
    return not (crew.all_finished or commits.busy or reports.board.is_storing)
