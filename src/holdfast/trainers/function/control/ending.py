"""How a group of workers ends: in order, torn down before its time, or moved after a save that all ranks agree on.

`find_trouble` finds what ends a group without any event: ranks that do not report, do not start, or are silent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast._ranks import rank_list
from holdfast.errors import TrainingError, TrainingFailedError, WorkerHangError

from .actions import Action, KillGroup, Send
from .commits import Commits
from .plan import WaitLimits
from .policy import Cause
from .reports import Reports
from .worker_group import WorkerGroup, first_line

__all__ = ["Ending", "Handover", "Teardown", "find_trouble", "gather_s", "next_check"]

_GATHER_S = 6.0
_SAVES = 4  # after the wait, the time of so many saves and half of the time at first are left


def gather_s(left_s: float, save_s: float | None) -> float:
    """Return the seconds that a save before a preemption may wait for notices about more nodes: one restart serves all.

    The workers train on meanwhile. Without a save whose time is known there is no wait, and none where `should_save` is
    never called: the next reported checkpoint serves there.

    Args:
        left_s: seconds until the first node goes.
        save_s: how long the slowest save took; None: not known.
    """
    return 0.0 if save_s is None else max(0.0, min(_GATHER_S, left_s / 2 - _SAVES * save_s))


@dataclass(slots=True)
class Handover:
    """From the wish to move until a checkpoint is committed.

    Attributes:
        cause: a preemption, or another size.
        why: for people.
        size: number of ranks.
        due: when the ranks are asked where they are.
        is_asked: they have been.
        calls: how often each rank has called `should_save`, as they answer.
        tries: agreed saves that may be made in all before it is given up.
        is_sent: all have answered and know the call to save at.
    """

    cause: Cause
    why: str
    size: int
    tries: int = 1
    due: float = 0.0
    is_asked: bool = False
    calls: dict[int, int] = field(default_factory=dict)
    is_sent: bool = False

    def begin(self, out: list[Action]) -> None:
        """Ask every rank where it is, once."""
        if self.is_asked:
            return
        self.is_asked = True
        for rank in range(self.size):
            out.append(Send(rank=rank, header={"do": "save_soon"}))

    def at(self, rank: int, calls: int, out: list[Action]) -> None:
        """Take the answer of a rank; the last answer settles the call."""
        self.calls[rank] = calls
        if len(self.calls) == self.size and not self.is_sent:
            self.is_sent = True
            for receiver in range(self.size):
                out.append(Send(rank=receiver, header={"do": "save_at", "call": max(self.calls.values()) + 1}))

    def is_served(self, *, agreed: bool) -> bool:
        """Whether a commit ends the handover: the agreed save, or any save where no rank calls `should_save`."""
        return agreed or (self.is_sent and not any(self.calls.values()))


@dataclass(slots=True)
class Teardown:
    """The end of a group before its time: commit what is complete, then kill, then wait for the exits.

    Attributes:
        settle_until: when the cause has to be known.
        drain_until: when what is complete has to be committed, and workers seen to end by themselves have to be gone.
        upto: reports after this one are not taken any more.
        fatal: what ends the run; None: the failure policy decides, unless the run is aborted.
        kill_until: when killed workers have to be gone; None before they are killed.
    """

    settle_until: float
    drain_until: float
    upto: int
    fatal: BaseException | None = None
    kill_until: float | None = None

    def deadline(self, now: float) -> float:
        """When `step` is due if nothing happens."""
        if self.kill_until is not None:
            return self.kill_until
        return self.settle_until if now < self.settle_until else self.drain_until

    def step(self, now: float, group: WorkerGroup, reports: Reports, limits: WaitLimits, out: list[Action]) -> bool:
        """Go on; return True when no worker is left, or waiting for the rest is given up."""
        if self.kill_until is None:
            left = self.drain_until - now
            busy = reports.salvage(group.dead, left, lost=group.lost)
            if left > 0 and (busy or group.has_silent_end):
                return False
            if now < self.settle_until and not group.is_explained:
                return False
            self.kill_until = now + limits.grace_s + limits.stop_s
            if not group.all_exited:
                out.append(KillGroup(grace_s=limits.grace_s))
        if not group.all_exited:
            if now < self.kill_until:
                return False
            left_over = [rank for rank in range(group.size) if rank not in group.exited]
            self.fatal = TrainingError(
                f"{rank_list(left_over)} did not end within {limits.stop_s:g} s of SIGKILL: stuck in the kernel, on a "
                "dead network disk perhaps; no other attempt can be started beside it"
            )
        return True


@dataclass(slots=True)
class Ending:
    """The end of a training that is over: the last commits, the exits, the validations; all of it bounded.

    Attributes:
        commit_until: when the last commits have to be made; None once they are.
        exit_until: when workers have to be gone, by themselves or after a kill; None once they are.
        killed: they were not gone in time.
    """

    commit_until: float | None
    exit_until: float | None
    killed: bool = False

    @classmethod
    def begin(cls, now: float, limits: WaitLimits) -> Ending:
        """Begin when the last rank has finished."""
        return cls(commit_until=now + limits.end_s, exit_until=now + limits.stop_s)

    @property
    def deadline(self) -> float | None:
        """When `step` is due if nothing happens."""
        return min((time for time in (self.commit_until, self.exit_until) if time is not None), default=None)

    def step(
        self, now: float, group: WorkerGroup, reports: Reports, commits: Commits, limits: WaitLimits, out: list[Action]
    ) -> bool | BaseException:
        """Go on; return True when everything is done, an error if that is impossible."""
        if commits.undelivered:
            failures = dict(commits.undelivered)
            text = "; ".join(f"rank {rank}: {first_line(error)}" for rank, error in failures.items())
            message = f"train_func has ended, but its last checkpoint could not be saved: {text}"
            return TrainingFailedError(message, failures=failures)
        if self.commit_until is not None:
            left = self.commit_until - now
            if reports.salvage(group.exited, left, lost=group.lost) or reports.ledger.reports:
                if left > 0:
                    return False
                return TrainingError(
                    f"the last checkpoint was not committed within {limits.end_s:g} s of the end of train_func: is the "
                    "storage stuck?"
                )
            self.commit_until = None
        if not group.all_exited and self.exit_until is not None:
            if now < self.exit_until:
                return False
            if not self.killed:
                self.killed, self.exit_until = True, now + limits.grace_s + limits.stop_s
                out.append(KillGroup(grace_s=limits.grace_s))
                return False
        # All is safe, so a process that even SIGKILL does not end (it hangs in the kernel) is left behind.
        self.exit_until = None
        return not commits.pending_validation


def find_trouble(
    now: float, group: WorkerGroup, reports: Reports, commits: Commits, limits: WaitLimits, last_sign: float
) -> tuple[list[int], TrainingError] | None:
    """Return the ranks that hang or do not report, with the error; None if all are well.

    Args:
        now: the time.
        group: the workers.
        reports: their reports.
        commits: what is being committed.
        limits: bounds of all waits.
        last_sign: when any of them last sent a message or was answered.
    """
    if (found := reports.mismatch(now)) is not None:
        return found
    if not group.all_running:
        if now < group.since + limits.start_s:
            return None
        slow = [rank for rank in range(group.size) if rank not in group.running]
        text = f"train_func did not begin on {rank_list(slow)} within {limits.start_s:g} s; see the logs of the attempt"
        return slow, TrainingError(text)
    if limits.hang_s is None or not _may_hang(group, reports, commits) or now < last_sign + limits.hang_s:
        return None
    last = ", ".join(
        f"rank {rank} {now - group.heard[rank]:.1f} s ago (report {reports.ledger.entered[rank]})"
        for rank in group.unfinished
    )
    return group.unfinished, WorkerHangError(
        f"no worker has given a sign of life for {now - last_sign:.1f} s (hang_timeout_s={limits.hang_s:g}); last "
        f"heard of {last}. Every report, with or without a checkpoint, is a sign of life"
    )


def next_check(
    group: WorkerGroup, reports: Reports, commits: Commits, limits: WaitLimits, last_sign: float
) -> float | None:
    """Return when `find_trouble` may find something if nothing happens."""
    times = [reports.next_deadline()]
    if not group.all_running:
        times.append(group.since + limits.start_s)
    elif limits.hang_s is not None and _may_hang(group, reports, commits):
        times.append(last_sign + limits.hang_s)
    return min((time for time in times if time is not None), default=None)


def _may_hang(group: WorkerGroup, reports: Reports, commits: Commits) -> bool:
    """Whether silence would mean that workers are stuck; not while they may be waiting for storage."""
    return not (group.all_finished or commits.busy or reports.ledger.is_storing)
