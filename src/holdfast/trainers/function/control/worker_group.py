"""A group of workers as the controller sees it: who has started, who runs, who ended and how.

It ends in order (`Ending`), is torn down before its time (`Teardown`), or is moved after a save that all ranks agree on
(`Handover`). `find_trouble` finds what ends a group without any event: ranks that do not report, do not start, or are
silent.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast._ranks import rank_list
from holdfast.errors import TrainingError, TrainingFailedError, WorkerHangError

from ..engine import Exited, Placed
from .actions import Action, KillGroup, Send
from .plan import Cause, WaitLimits, ended_by_preemption
from .reports import Reports

_MAX_SHOWN = 300
_HINTS = {
    signal.SIGKILL: " (killed by somebody, or by the kernel for lack of memory: dmesg tells)",
    signal.SIGSEGV: " (a crash in native code, whose Python stack is in the log of the rank)",
    signal.SIGTERM: " (it was told to go)",
}
_GATHER_S = 6.0
_SAVES = 4  # after the wait, the time of so many saves and half of the time at first are left


@dataclass(slots=True)
class Clock:
    """Seconds that the phases of an attempt took: finding a checkpoint, starting, loading, stopping.

    Attributes:
        since: when the phase that runs began.
        seconds: of the phases that ended, by name.
    """

    since: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def begin(self, now: float) -> None:
        """Begin a phase."""
        self.since = now

    def end(self, phase: str, now: float) -> None:
        """End a phase and begin the next; a phase that has ended already counts no more."""
        if phase not in self.seconds:
            self.seconds[phase] = round(now - self.since, 4)
            self.since = now


class WorkerGroup:
    """Workers of one attempt.

    Attributes:
        size: how many they are.
        since: when they were started.
        placed: where each rank is, if the engine says so.
        started: ranks whose process exists.
        running: ranks that have called train_func.
        finished: ranks whose train_func has returned.
        left: those of them that ended by ``sys.exit``.
        exited: how each ended, by rank.
        dying: place of each rank in the order in which their ends were first seen, before how is known.
        failures: what went wrong, by rank.
        died: ranks whose process ended without a message, not killed by us: the cause of errors of other ranks.
        preempted: a worker was preempted.
        rolling_back: ranks that end for a bad step that the guard of rank 0 has found.
        unplaced: there was no room for a worker.
        moved: why they were ended although nothing had failed, with the cause that counts; None: they were not.
        running_since: when train_func was running on all of them; None before.
        growth_s: from the end of a smaller group until then; 0 if this one has not grown.
        heard: when each rank last gave a sign of life.
    """

    def __init__(self, size: int, now: float) -> None:
        self.size, self.since = size, now
        self.placed: dict[int, Placed] = {}
        self.started: set[int] = set()
        self.running: set[int] = set()
        self.finished: set[int] = set()
        self.left: set[int] = set()
        self.exited: dict[int, Exited] = {}
        self.dying: dict[int, int] = {}
        self.failures: dict[int, BaseException] = {}
        self.died: set[int] = set()
        self.preempted = self.unplaced = False
        self.rolling_back: set[int] = set()
        self.moved: tuple[Cause, str] | None = None
        self.running_since: float | None = None
        self.growth_s = 0.0
        self.heard = [now] * size

    @property
    def all_running(self) -> bool:
        """Whether train_func was called on every rank."""
        return len(self.running) == self.size

    @property
    def all_finished(self) -> bool:
        """Whether train_func returned on every rank."""
        return len(self.finished) == self.size

    @property
    def all_exited(self) -> bool:
        """Whether no process is left."""
        return len(self.exited) == self.size

    @property
    def dead(self) -> set[int]:
        """Ranks that will say nothing more."""
        return {*self.exited, *self.failures}

    @property
    def lost(self) -> set[int]:
        """Ranks whose node is lost too, or was given up: it cannot finish what they have handed over."""
        return {rank for rank, exited in self.exited.items() if exited.reason not in ("process", "garbled")}

    @property
    def unfinished(self) -> list[int]:
        """Ranks whose train_func has not returned."""
        return [rank for rank in range(self.size) if rank not in self.finished]

    @property
    def rolled_back(self) -> bool:
        """Whether its guard takes the training back: rank 0 decides, and may find that it must not go on."""
        if 0 in self.rolling_back:
            return True
        # It may be ended by us before it says so: it waits for uploads, which the others do not.
        return bool(self.rolling_back) and 0 not in self.failures and 0 not in self.finished

    @property
    def cause(self) -> Cause:
        """Why it ended before its time."""
        if self.moved is not None:
            return self.moved[0]
        if self.preempted:
            return Cause.PREEMPTION
        return Cause.ROLLBACK if self.rolled_back else Cause.FAILURE

    @property
    def causes(self) -> dict[int, BaseException]:
        """The failures, those of ranks that died first, in that order: others often fail because a peer is gone."""
        last = len(self.dying)

        def place(rank: int) -> int:
            if rank in self.died:
                return self.dying.get(rank, last)
            return last + 1 + (rank in self.rolling_back)  # these have only done what rank 0 has asked for

        return {rank: self.failures[rank] for rank in sorted(self.failures, key=place)}

    @property
    def is_explained(self) -> bool:
        """Whether the cause is known, so that waiting longer tells no more."""
        return bool(self.died) or self.moved is not None or len(self.dead) == self.size

    @property
    def has_silent_end(self) -> bool:
        """Whether others have failed while a process ends without a word: how it ended is about to be known."""
        silent = self.dying.keys() - self.dead - self.finished
        return bool(silent and self.failures) and self.moved is None

    def odd_ends(self, entered: Sequence[int]) -> str | None:
        """Say which ranks left by ``sys.exit`` while others did not; None if there are none.

        Args:
            entered: the last report of each rank.
        """
        if not self.left or len(self.left) == self.size:
            return None
        gone = ", ".join(f"rank {rank} after report {entered[rank]}" for rank in sorted(self.left))
        rest = max(entered[rank] for rank in range(self.size) if rank not in self.left)
        return (
            f"by sys.exit(0) train_func ended on {gone}; the others returned, the last after report {rest}. It counts "
            "as an end like any other: raise an exception if the training has failed there"
        )

    def ended_before(self, entered: Sequence[int]) -> str:
        """Say which ranks had ended when others failed, who may have waited for them; "" if none had."""
        gone = [
            f"rank {rank} after report {entered[rank]}{' (by sys.exit)' if rank in self.left else ''}"
            for rank in sorted(self.finished - self.failures.keys())
        ]
        return f"train_func had ended before on {', '.join(gone)}" if gone else ""

    def note_dying(self, rank: int) -> None:
        """Note that a process is about to end; its first sign counts."""
        self.dying.setdefault(rank, len(self.dying))

    def fail(self, rank: int, error: BaseException) -> None:
        """Note a failure; the first of a rank counts."""
        self.failures.setdefault(rank, error)

    def die(self, exited: Exited) -> None:
        """Note the end of a process that should not have ended."""
        error, preempted = describe_exit(exited)
        self.fail(exited.rank, error)
        if exited.rank == 0 or exited.rank not in self.rolling_back:  # else rank 0 says what it comes to
            self.died.add(exited.rank)
        self.preempted = self.preempted or preempted
        self.unplaced = self.unplaced or exited.reason == "unplaced"

    def summary(self) -> str:
        """Write the roots of the failure in one line."""
        if self.moved is not None:
            return self.moved[1]
        roots = [rank for rank in self.causes if rank in self.died or not self.died]
        return "; ".join(f"{self.label(rank)}: {first_line(self.failures[rank])[:_MAX_SHOWN]}" for rank in roots)

    def label(self, rank: int) -> str:
        """Name a rank; with its node if it failed by itself, for a disk may be full only there, say."""
        placed = self.placed.get(rank) if rank not in self.died else None
        return f"rank {rank}" if placed is None else f"rank {rank} on {placed.where}"


def describe_exit(exited: Exited) -> tuple[TrainingError, bool]:
    """Return the error of a worker that ended without a message, and whether it was preempted."""
    number, where = exited.signal, f" on {exited.node}" if exited.node else ""
    if exited.reason != "process":
        return TrainingError(f"the worker{where} is lost: {exited.detail}"), exited.reason == "drained"
    if number is not None:
        known = number in signal.valid_signals() and number in set(signal.Signals)
        name = signal.Signals(number).name if known else f"signal {number}"
        how = f"was ended by {name}{_HINTS.get(signal.Signals(number), '') if known else ''}"
    elif exited.exit_code is not None:
        how = f"exited with status {exited.exit_code} before train_func had returned"
    else:
        how = "ended in an unknown way"
    detail = f"\n{exited.detail}" if exited.detail else ""
    return TrainingError(f"the worker{where} {how}{detail}"), ended_by_preemption(exited.exit_code, number)


def first_line(error: BaseException) -> str:
    """Write an error in one line."""
    lines = str(error).splitlines()
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def training_failed(group: WorkerGroup, why: str, uri: str, newest: str | None, ended: str = "") -> TrainingFailedError:
    """Make the error of a run that gives up.

    Args:
        group: the workers that failed last.
        why: the limit that is reached.
        uri: of the run.
        newest: name of its newest checkpoint.
        ended: which ranks had ended before, if any.
    """
    shown = "\n".join(f"  {group.label(rank)}: {first_line(error)}" for rank, error in group.causes.items())
    shown += f"\n  {ended}" if ended else ""
    left = "there is no checkpoint" if newest is None else f"the newest checkpoint is {newest}"
    error = TrainingFailedError(
        f"training failed ({why}):\n{shown}\n{left} in {uri}; the output of the workers is in its logs/. Run the same "
        "script again to go on from there",
        failures=dict(group.causes),
    )
    error.__cause__ = next(iter(group.causes.values()), None)
    return error


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
        self, now: float, group: WorkerGroup, reports: Reports, limits: WaitLimits, out: list[Action]
    ) -> bool | BaseException:
        """Go on; return True when everything is done, an error if that is impossible."""
        if reports.undelivered:
            failures = dict(reports.undelivered)
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
        return not reports.pending_validation


def find_trouble(
    now: float, group: WorkerGroup, reports: Reports, limits: WaitLimits, last_sign: float
) -> tuple[list[int], TrainingError] | None:
    """Return the ranks that hang or do not report, with the error; None if all are well.

    Args:
        now: the time.
        group: the workers.
        reports: their reports, and what is being committed.
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
    if limits.hang_s is None or not _may_hang(group, reports) or now < last_sign + limits.hang_s:
        return None
    last = ", ".join(
        f"rank {rank} {now - group.heard[rank]:.1f} s ago (report {reports.ledger.entered[rank]})"
        for rank in group.unfinished
    )
    uploads = ", ".join(f"report {index} of rank {rank}" for rank, index in reports.ledger.uploading.items())
    return group.unfinished, WorkerHangError(
        (
            f"checkpoint_upload_fn has not returned for {uploads}: give its requests a time limit, or the run a "
            "hang_timeout_s that is longer than an upload; "
            if uploads
            else ""
        )
        + f"no worker has given a sign of life for {now - last_sign:.1f} s (hang_timeout_s={limits.hang_s:g}); last "
        f"heard of {last}. Every report, with or without a checkpoint, is a sign of life"
    )


def next_check(group: WorkerGroup, reports: Reports, limits: WaitLimits, last_sign: float) -> float | None:
    """Return when `find_trouble` may find something if nothing happens."""
    times = [reports.next_deadline()]
    if not group.all_running:
        times.append(group.since + limits.start_s)
    elif limits.hang_s is not None and _may_hang(group, reports):
        times.append(last_sign + limits.hang_s)
    return min((time for time in times if time is not None), default=None)


def _may_hang(group: WorkerGroup, reports: Reports) -> bool:
    """Whether silence would mean that workers are stuck.

    Not while a commit is under way, which they may wait for. Those whose parts are being stored say so ("storing").
    """
    return not (group.all_finished or reports.busy)
