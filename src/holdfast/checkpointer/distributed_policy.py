"""What a step calls for where many ranks train: what depends on time or signals happens at a step all agree on."""

from __future__ import annotations

import time
from typing import Any

from holdfast.errors import HoldfastError

from .metrics import MetricLog
from .progress import Progress
from .rank_group import RankGroup
from .save_policy import Call, SavePolicy
from .schedule import Deadline, Schedule
from .signals import StopSignals

__all__ = ["DistributedSavePolicy", "NoLog", "agreed"]

_LOOK_S = 0.0005


class DistributedSavePolicy(SavePolicy):
    """Decides as `SavePolicy` does from steps and epochs, alike on all ranks, and asks the others for the rest.

    Intervals of time or samples (batches need not be equally long) and the deadline are rank 0's affair; a signal may
    come to any rank.

    Args:
        schedule: when saves are due.
        signals: those that ask the run to stop.
        deadline: when the processes will be taken away.
        progress: the counters.
        team: the ranks.
    """

    def __init__(
        self, schedule: Schedule, signals: StopSignals, deadline: Deadline, progress: Progress, team: RankGroup
    ) -> None:
        super().__init__(schedule, signals, deadline, progress)
        self._team = team
        self._wants_save = self._wants_stop = False  # told to the others, and not yet done

    @property
    def stop_asked(self) -> bool:
        """Whether all ranks stop: a signal alone, on one of them, does not count before they have agreed."""
        return self.stopping

    def stepped(self, now: float, *, step_s: float, save_s: float) -> bool:
        """Publish the step; tell whether it may call for anything."""
        team = self._team
        called = team.board.calls(self._progress.step)
        if self._must_stop(now, step_s, save_s):
            self._want_stop()
        elif team.rank == 0 and not self._wants_save and self._wished(now):
            self._wants_save = True
            team.client.tell_ranks("want", kind="save")
        return called or self._due(float("-inf")) or team.board.broken

    def call(self, now: float, *, step_s: float, save_s: float) -> Call:
        """Tell what the step calls for, the same on all ranks; where they are about to agree on it, wait."""
        agreed = self._agreed()
        if agreed is not None and agreed != "settle":
            return agreed
        if self._team.board.broken:
            return "stop"  # a rank is gone, and no save can succeed any more: this one says which, and why
        return "save" if self._due(float("-inf")) else agreed

    def poll(self, *, step_s: float, save_s: float) -> bool:
        """Tell whether the run is to stop: never between steps, where ranks would leave at different places."""
        return self.stopping

    def must_end(self, tries: int) -> bool:
        """Tell whether to stop where all ranks are held at the same step; the same on all of them."""
        if self._must_stop(time.monotonic(), 0.0, 0.0):
            self._want_stop()
        return not self._team.may_go_on(self._progress.step, tries)

    def saved(self) -> None:
        """Count a save."""
        super().saved()
        self._wants_save = False

    def _want_stop(self) -> None:
        if not self._wants_stop:
            self._wants_stop = True
            self._team.client.tell_ranks("want", kind="stop")

    def _wished(self, now: float) -> bool:
        """Tell whether rank 0 wants a save for what the others count differently."""
        schedule = self._schedule
        return now >= schedule.next_time or (schedule.counts_samples and self._progress.samples >= schedule.next_sample)

    def _due(self, now: float) -> bool:
        return self._schedule.due(step=self._progress.step, samples=0, now=now)

    def _must_stop(self, now: float, step_s: float, save_s: float) -> bool:
        if self._signals.received is not None:
            return True
        # Ranks stop two steps after one of them asks, or three.
        return self._team.rank == 0 and self._deadline.near(now=now, step_s=3 * step_s, save_s=save_s)

    def _agreed(self) -> Call:
        """Return what all ranks do at this step, if it is one they agreed on."""
        kind = agreed(self._team, self._progress.step)
        if kind is not None:
            # What was wanted and is not done here is asked for again: wishes that are known count once.
            self._wants_save = self._wants_stop = False
        return kind


def agreed(team: RankGroup, step: int) -> Call:
    """Return what all ranks do at ``step``, if it is one they agreed on; while they are about to agree on it, wait.

    Raises:
        HoldfastError: the word of rank 0's writer does not come.
    """
    board, timeout_s = team.board, team.timeout_s
    until = time.monotonic() + timeout_s
    while board.calls(step):
        target = board.target
        if board.armed and board.target == target:
            kind: Any = board.kind
            board.act(target)
            team.client.tell_ranks("acted", step=target)
            return kind  # type: ignore[no-any-return]
        if board.broken:
            return None
        if time.monotonic() > until:
            raise HoldfastError(
                f"rank {team.rank} waits at step {step} for the word of rank 0's writer, which has not come within "
                f"{timeout_s:g} s (timeout_s)"
            )
        time.sleep(_LOOK_S)
    return None


class NoLog(MetricLog):
    """The metrics of a rank other than 0: not recorded, and costing nothing."""

    def __init__(self) -> None:
        pass

    def add(self, *_: Any) -> None:
        """Forget them."""

    def of_step(self, step: int) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def bind(self, *_: Any) -> None:
        """Bind nothing."""

    def flush(self, *_: Any, **__: Any) -> None:
        """Send nothing."""
