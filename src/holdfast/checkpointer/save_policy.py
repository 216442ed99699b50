"""When a run saves and when it stops.

`Schedule` and `Deadline` decide from counters and a clock. `SavePolicy` adds signals, for one process that decides
alone; `holdfast.checkpointer.rank_group` has that of several ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Literal

from holdfast._units import Interval, IntervalLike, parse_span, short_units
from holdfast.errors import ConfigError

from .progress import Progress
from .signals import StopSignals

Call = Literal["save", "stop", "settle", "rollback", "keep"] | None


class Schedule:
    """Decides whether a multiple of any interval has been crossed.

    Args:
        intervals: what ``every=`` gave.
        now: monotonic seconds at the start.

    Attributes:
        counts_samples: an interval is given in samples.
    """

    def __init__(self, intervals: Sequence[Interval], *, now: float) -> None:
        for interval in intervals:
            if interval.unit == "tok":
                raise ConfigError(f"every={str(interval)!r}: a Checkpointer does not count tokens; use steps or time")
        self._steps = [int(interval.value) for interval in intervals if interval.unit == "ba"]
        self._samples = [int(interval.value) for interval in intervals if interval.unit == "sp"]
        self.counts_samples = bool(self._samples)
        self._epochs = [int(interval.value) for interval in intervals if interval.unit == "ep"]
        self._seconds = min((interval.value for interval in intervals if interval.unit == "sec"), default=None)
        self._since = now  # the last save, or the start
        self._intervals = tuple(intervals)
        self.next_time = float("inf") if self._seconds is None else now + self._seconds
        self.auto_s: float | None = None
        self.next_step: float = float("inf")
        self.next_sample: float = float("inf")

    def adjust(self, seconds: float) -> None:
        """Save at least every so many seconds, beside the intervals given; counted from the last save."""
        self.auto_s = seconds
        self.next_time = self._since + min(seconds, self._seconds or seconds)

    def never_due(self, *, epochs: bool, samples: bool) -> str:
        """Name the intervals if none of them can ever come due; "" if one can.

        Args:
            epochs: something counts epochs.
            samples: something counts samples.
        """
        counted = {"ep": epochs, "sp": samples}
        if self.auto_s is not None or any(counted.get(interval.unit, True) for interval in self._intervals):
            return ""
        return ", ".join(repr(str(interval)) for interval in self._intervals)

    def start(self, progress: Progress) -> None:
        """Set the next multiples after a resume (or at 0)."""
        self.next_step = _after(progress.step, self._steps)
        if self.counts_samples:  # to count them is a look at every loader
            self.next_sample = _after(progress.samples, self._samples)

    def due(self, progress: Progress, *, now: float) -> bool:
        """Tell whether a save is due after the current step; `saved` moves the marks on."""
        is_due = progress.step >= self.next_step or now >= self.next_time
        return is_due or (self.counts_samples and progress.samples >= self.next_sample)

    def epoch_due(self, epochs_done: int) -> bool:
        """Tell whether the end of an epoch is a multiple of an epoch interval."""
        return any(epochs_done % every == 0 for every in self._epochs)

    def saved(self, progress: Progress, *, now: float) -> None:
        """Move the marks on after a save was started (or left out by policy)."""
        self.start(progress)
        self._since = now
        if self.auto_s is not None:
            self.adjust(self.auto_s)
        elif self._seconds is not None:
            self.next_time = now + self._seconds


def _after(count: int, intervals: Sequence[int]) -> float:
    """Return the first multiple of any of these intervals after a count; infinity without any."""
    return min(((count // every + 1) * every for every in intervals), default=float("inf"))


class Deadline:
    """The moment at which the process will be ended, and the time that a last save needs before it.

    Args:
        spec: seconds from now, an interval string ("3h50m"), a timedelta, or an aware datetime.
        now: monotonic seconds.
    """

    def __init__(self, spec: float | IntervalLike | datetime | None, *, now: float) -> None:
        self.at = float("inf")
        if spec is None:
            return
        if isinstance(spec, datetime):
            if spec.tzinfo is None:
                raise ConfigError(f"deadline={spec!r} has no time zone: use an aware datetime or a duration ('3h50m')")
            seconds = (spec - datetime.now(timezone.utc)).total_seconds()
        elif isinstance(spec, (int, float)) and not isinstance(spec, bool):
            seconds = float(spec)
        elif isinstance(spec, timedelta):
            seconds = spec.total_seconds()
        else:
            span = parse_span(short_units(spec)) if isinstance(spec, str) else None
            if isinstance(spec, Interval) and spec.unit == "sec":
                span = spec.value
            if span is None:
                raise ConfigError(
                    f"deadline={spec!r}: give a span of time ('3h50m', or seconds), an aware datetime, or 'slurm'"
                )
            seconds = span
        if not seconds > 0:
            raise ConfigError(f"deadline={spec!r} has passed already ({seconds:.0f} s)")
        self.at = now + seconds

    def near(self, *, now: float, step_s: float, save_s: float) -> bool:
        """Tell whether this is the last step boundary with time for a save: twice the last one, and a margin."""
        return now + 2 * step_s + 2 * save_s + 5.0 >= self.at


class SavePolicy:
    """Decides from counters, the clock and signals.

    Args:
        schedule: when saves are due.
        signals: those that ask the run to stop.
        deadline: when this process will be ended.
        progress: the counters.

    Attributes:
        stopping: the body was, or is to be, left for a signal or the deadline.
        snapshots: when the state is kept in memory; None: never, or no more.
        busy: tells whether a snapshot would have to wait for a save: what time calls for is put off until then.
    """

    def __init__(self, schedule: Schedule, signals: StopSignals, deadline: Deadline, progress: Progress) -> None:
        self._schedule, self._signals, self._deadline, self._progress = schedule, signals, deadline, progress
        self.stopping = False
        self.snapshots: Schedule | None = None
        self.busy: Callable[[], bool] = lambda: False

    @property
    def stop_asked(self) -> bool:
        """Whether the run is to end as after a signal."""
        return self.stop_wished

    @property
    def stop_wished(self) -> bool:
        """Whether this process was asked to stop, whatever the other ranks know of it."""
        return self.stopping or self._signals.received is not None

    @property
    def stopped_by(self) -> str:
        """What asked the run to stop: the name of a signal, "the deadline"; "" if nothing did."""
        return self._signals.received or ("the deadline" if self.stopping else "")

    def call(self, now: float, *, step_s: float, save_s: float) -> Call:
        """Return what the step just done calls for; asked once at each boundary, so it costs next to nothing."""
        if self._signals.received is not None or self._deadline.near(now=now, step_s=step_s, save_s=save_s):
            return "stop"
        return "save" if self._schedule.due(self._progress, now=now) else None

    def poll(self, *, step_s: float, save_s: float) -> bool:
        """Return, between steps, whether the run is to stop."""
        if not self.stopping:
            self.stopping = self._deadline.near(now=time.monotonic(), step_s=step_s, save_s=save_s)
        return self.stop_asked

    def must_end(self, tries: int) -> bool:
        """Return, while the step is held, whether to stop; called for the ``tries``-th time in a row."""
        return self.stop_asked

    def keeps(self, now: float) -> bool:
        """Tell whether the step just done is to be kept in memory; the next one is counted from it."""
        if self.snapshots is None or not self._keep_due(self.snapshots, now):
            return False
        self.snapshots.saved(self._progress, now=now)
        return True

    def _keep_due(self, snapshots: Schedule, now: float) -> bool:
        moment = float("-inf") if now >= snapshots.next_time and self.busy() else now
        return snapshots.due(self._progress, now=moment)

    def epoch_due(self, epochs_done: int) -> bool:
        """Tell whether the end of an epoch calls for a save."""
        return self._schedule.epoch_due(epochs_done)

    @property
    def never_due(self) -> str:
        """The intervals of saves, if none of them can come due in this loop, which does not count them; else ""."""
        progress = self._progress
        has_passes = progress.num_passes > 0
        return self._schedule.never_due(epochs=progress.used_epochs or has_passes, samples=has_passes)

    def saved(self) -> None:
        """Count a save that was started, or left out by policy."""
        self._schedule.saved(self._progress, now=time.monotonic())
