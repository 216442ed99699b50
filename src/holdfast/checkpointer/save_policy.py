"""What a step calls for where one process decides alone: nothing, a save, or the end of the run."""

from __future__ import annotations

import time
from typing import Literal

from .progress import Progress
from .schedule import Deadline, Schedule
from .signals import StopSignals

__all__ = ["Call", "SavePolicy"]

Call = Literal["save", "stop", "settle"] | None


class SavePolicy:
    """Decides from counters, the clock and signals.

    Args:
        schedule: when saves are due.
        signals: those that ask the run to stop.
        deadline: when this process will be taken away.
        progress: the counters.

    Attributes:
        stopping: the body was, or is to be, left for a signal or the deadline.
    """

    def __init__(self, schedule: Schedule, signals: StopSignals, deadline: Deadline, progress: Progress) -> None:
        self._schedule, self._signals, self._deadline, self._progress = schedule, signals, deadline, progress
        self.stopping = False

    @property
    def stop_asked(self) -> bool:
        """Whether the run is to end as after a signal."""
        return self.stopping or self._signals.received is not None

    def stop_details(self) -> dict[str, str]:
        """Say what asked the run to stop, for its history; nothing if nothing did."""
        received = self._signals.received
        if received is not None:
            return {"stop": received}
        return {"stop": "deadline"} if self.stopping else {}

    def stepped(self, now: float, *, step_s: float, save_s: float) -> bool:
        """Tell, as cheaply as can be, whether the step just done may call for anything."""
        return self.call(now, step_s=step_s, save_s=save_s) is not None

    def call(self, now: float, *, step_s: float, save_s: float) -> Call:
        """Tell what the step just done calls for."""
        if self._signals.received is not None or self._deadline.near(now=now, step_s=step_s, save_s=save_s):
            return "stop"
        return "save" if self._due(now) else None

    def poll(self, *, step_s: float, save_s: float) -> bool:
        """Tell, between steps, whether the run is to stop."""
        if not self.stopping:
            self.stopping = self._deadline.near(now=time.monotonic(), step_s=step_s, save_s=save_s)
        return self.stop_asked

    def must_end(self, tries: int) -> bool:
        """Tell, while the step is held, whether to stop; asked for the ``tries``-th time in a row."""
        return self.stop_asked

    def epoch_due(self, epochs_done: int) -> bool:
        """Tell whether the end of an epoch calls for a save."""
        return self._schedule.epoch_due(epochs_done)

    def saved(self) -> None:
        """Count a save that was started, or left out by policy."""
        progress = self._progress
        self._schedule.saved(step=progress.step, samples=progress.samples, now=time.monotonic())

    def _due(self, now: float) -> bool:
        schedule = self._schedule
        samples = self._progress.samples if schedule.counts_samples else 0
        return schedule.due(step=self._progress.step, samples=samples, now=now)
