"""When a save is due: pure decisions from counters and a clock."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from holdfast._units import Interval, IntervalLike, parse_interval
from holdfast.errors import ConfigError

__all__ = ["Deadline", "Schedule"]


class Schedule:
    """Decides whether a multiple of any interval has been crossed.

    Args:
        intervals: what ``every=`` gave.
        now: monotonic seconds at the start.
    """

    def __init__(self, intervals: Sequence[Interval], *, now: float) -> None:
        for interval in intervals:
            if interval.unit == "tok":
                raise ConfigError(f"every={str(interval)!r}: a Checkpointer does not count tokens; use steps or time")
        self._steps = [int(one.value) for one in intervals if one.unit == "ba"]
        self._samples = [int(one.value) for one in intervals if one.unit == "sp"]
        self._epochs = [int(one.value) for one in intervals if one.unit == "ep"]
        self._seconds = min((one.value for one in intervals if one.unit == "sec"), default=None)
        self.next_time = float("inf") if self._seconds is None else now + self._seconds
        self.next_step: float = float("inf")
        self.next_sample: float = float("inf")

    @property
    def counts_samples(self) -> bool:
        """True when an interval is given in samples."""
        return bool(self._samples)

    def start(self, *, step: int, samples: int) -> None:
        """Set the next multiples after a resume (or at 0)."""
        self.next_step = min((_after(step, every) for every in self._steps), default=float("inf"))
        self.next_sample = min((_after(samples, every) for every in self._samples), default=float("inf"))

    def due(self, *, step: int, samples: int, now: float) -> bool:
        """Tell whether a save is due after ``step``; `saved` moves the marks on."""
        return step >= self.next_step or now >= self.next_time or samples >= self.next_sample

    def epoch_due(self, epochs_done: int) -> bool:
        """Tell whether the end of an epoch is a multiple of an epoch interval."""
        return any(epochs_done % every == 0 for every in self._epochs)

    def saved(self, *, step: int, samples: int, now: float) -> None:
        """Move the marks on after a save was started (or left out by policy)."""
        self.start(step=step, samples=samples)
        if self._seconds is not None:
            self.next_time = now + self._seconds


def _after(count: int, every: int) -> int:
    return (count // every + 1) * every


class Deadline:
    """A moment at which the process will be taken away, and how long a last save needs before it.

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
            interval = parse_interval(spec)
            if interval.unit != "sec":
                raise ConfigError(f"deadline={spec!r}: give a time, as in '3h50m', not {interval.unit}")
            seconds = interval.value
        if not seconds > 0:
            raise ConfigError(f"deadline={spec!r} has passed already ({seconds:.0f} s)")
        self.at = now + seconds

    def near(self, *, now: float, step_s: float, save_s: float) -> bool:
        """Tell whether this is the last step boundary with time for a save: twice the last one, and a margin."""
        return now + 2 * step_s + 2 * save_s + 5.0 >= self.at
