"""How a group of workers ends: in order, when train_func has returned everywhere, or torn down before its time."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast._ranks import rank_list
from holdfast.errors import TrainingError, TrainingFailedError

from .actions import Action, KillGroup
from .commits import Commits
from .plan import WaitLimits
from .reports import Reports
from .worker_group import Crew, first_line

__all__ = ["Ending", "Teardown"]


@dataclass(slots=True)
class Teardown:
    """The end of a group before its time: commit what is complete, then kill, then wait for the exits.

    Attributes:
        settle_until: when the cause has to be known.
        drain_until: when what is complete has to be committed.
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

    def step(self, now: float, crew: Crew, reports: Reports, limits: WaitLimits, out: list[Action]) -> bool:
        """Go on; True when no worker is left, or none that could be waited for."""
        if self.kill_until is None:
            left = self.drain_until - now
            busy = reports.salvage(crew.dead, left)
            if (busy and left > 0) or (now < self.settle_until and not crew.is_explained):
                return False
            self.kill_until = now + limits.grace_s + limits.stop_s
            if not crew.all_exited:
                out.append(KillGroup(grace_s=limits.grace_s))
        if not crew.all_exited:
            if now < self.kill_until:
                return False
            left_over = [rank for rank in range(crew.size) if rank not in crew.exited]
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
        self, now: float, crew: Crew, reports: Reports, commits: Commits, limits: WaitLimits, out: list[Action]
    ) -> bool | BaseException:
        """Go on; True when everything is done, an error if it cannot be."""
        if commits.untold:
            failures = dict(commits.untold)
            text = "; ".join(f"rank {rank}: {first_line(error)}" for rank, error in failures.items())
            message = f"train_func has ended, but its last checkpoint could not be saved: {text}"
            return TrainingFailedError(message, failures=failures)
        if self.commit_until is not None:
            left = self.commit_until - now
            if reports.salvage(crew.exited, left) or reports.board.reports:
                if left > 0:
                    return False
                return TrainingError(
                    f"the last checkpoint was not committed within {limits.end_s:g} s of the end of train_func: is the "
                    "storage stuck?"
                )
            self.commit_until = None
        if not crew.all_exited and self.exit_until is not None:
            if now < self.exit_until:
                return False
            if not self.killed:
                self.killed, self.exit_until = True, now + limits.grace_s + limits.stop_s
                out.append(KillGroup(grace_s=limits.grace_s))
                return False
        # All is safe, so one that even SIGKILL does not end (it hangs in the kernel) is left behind.
        self.exit_until = None
        return not commits.pending_validation
