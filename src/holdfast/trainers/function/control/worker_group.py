"""A group of workers as the controller sees it: who has started, who runs, who ended and how."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.errors import TrainingError, TrainingFailedError

from ..engine import Exited, Placed
from .policy import Cause, ended_by_preemption

__all__ = ["Clock", "WorkerGroup", "describe_exit", "first_line", "training_failed"]

_MAX_SHOWN = 300
_HINTS = {
    signal.SIGKILL: " (killed by somebody, or by the kernel for lack of memory: dmesg tells)",
    signal.SIGSEGV: " (a crash in native code, whose Python stack is in the log of the rank)",
    signal.SIGTERM: " (it was told to go)",
}


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

    def descriptions(self) -> dict[str, str]:
        """Return a line for each failure by rank, for the index of the run."""
        return {str(rank): first_line(error) for rank, error in self.causes.items()}

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
