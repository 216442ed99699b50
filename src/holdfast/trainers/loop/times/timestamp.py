"""`Timestamp`: where training is, in every unit at once; and when something is due: pure decisions from two of them.

A `Timestamp` is immutable; each batch makes a new one. What is due is asked for saving and for evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Any

from holdfast.errors import ConfigError

from ..arguments import check_function
from ..events import Event
from .time import Time, TimeLike, TimeUnit

__all__ = ["COUNTERS", "Every", "IntervalSpec", "Span", "Timestamp", "When", "finished", "parse_every", "parse_when"]

COUNTERS = {
    "iteration": TimeUnit.ITERATION,
    "epoch": TimeUnit.EPOCH,
    "batch": TimeUnit.BATCH,
    "sample": TimeUnit.SAMPLE,
    "token": TimeUnit.TOKEN,
    "batch_in_epoch": TimeUnit.BATCH,
    "sample_in_epoch": TimeUnit.SAMPLE,
    "token_in_epoch": TimeUnit.TOKEN,
}
_CLOCKS = ("total_wct", "epoch_wct", "batch_wct")
_FIELDS = (*COUNTERS, *_CLOCKS)
IntervalSpec = TimeLike | Callable[[Any, Event], bool]
_STEPS = (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT)


class Timestamp:
    """How far training has come: counters as `Time`, wall clocks as ``timedelta``.

    Samples and tokens count over all ranks.

    Example:
        >>> here = Timestamp(epoch=1, batch=7).to_next_batch(samples=32)
        >>> here.batch, int(here.sample), here >= "8ba"
        (Time(8, TimeUnit.BATCH), 32, True)
    """

    __slots__ = ("_values",)
    _values: dict[str, Any]

    def __init__(self, **values: Any) -> None:
        unknown = sorted(values.keys() - set(_FIELDS))
        if unknown:
            raise ConfigError(f"Timestamp has no {', '.join(unknown)}: it has {', '.join(_FIELDS)}")
        found: dict[str, Any] = dict.fromkeys(COUNTERS, 0) | dict.fromkeys(_CLOCKS, timedelta())
        for name, value in values.items():
            if name in COUNTERS:
                found[name] = int(Time.from_input(value, COUNTERS[name]))
            else:
                found[name] = value if isinstance(value, timedelta) else timedelta(seconds=float(value))
        self._values = found

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Timestamp:
        self = cls.__new__(cls)
        self._values = values
        return self

    def count(self, name: str) -> int:
        """Return a counter as a plain number: ``count("batch")``. Cheaper than the attribute."""
        return self._values[name]  # type: ignore[no-any-return]

    def get(self, unit: str | TimeUnit) -> Time:
        """Return the total in ``unit``."""
        unit = TimeUnit(unit)
        if unit is TimeUnit.DURATION:
            raise ConfigError("a Timestamp has no share of the whole ('dur'): ask state.get_elapsed_duration()")
        return Time(self.value(unit), unit)

    def value(self, unit: TimeUnit) -> float:
        """Return the total in ``unit`` as a plain number."""
        if unit is TimeUnit.SECOND:
            return self._values["total_wct"].total_seconds()  # type: ignore[no-any-return]
        return self._values[_TOTALS[unit]]  # type: ignore[no-any-return]

    def to_next_batch(self, samples: int = 0, tokens: int = 0, duration: timedelta | None = None) -> Timestamp:
        """Count one more batch."""
        old, passed = self._values, duration or timedelta()
        return Timestamp._of(
            {
                **old,
                "batch": old["batch"] + 1,
                "batch_in_epoch": old["batch_in_epoch"] + 1,
                "sample": old["sample"] + samples,
                "sample_in_epoch": old["sample_in_epoch"] + samples,
                "token": old["token"] + tokens,
                "token_in_epoch": old["token_in_epoch"] + tokens,
                "total_wct": old["total_wct"] + passed,
                "epoch_wct": old["epoch_wct"] + passed,
                "batch_wct": passed,
            }
        )

    def to_next_epoch(self, duration: timedelta | None = None) -> Timestamp:
        """Count one more epoch; what counts within an epoch starts again.

        Args:
            duration: time that has passed between the last batch and the end of the epoch.
        """
        old, passed = self._values, duration or timedelta()
        fresh = {"batch_in_epoch": 0, "sample_in_epoch": 0, "token_in_epoch": 0}
        clocks = {"total_wct": old["total_wct"] + passed, "epoch_wct": timedelta(), "batch_wct": timedelta()}
        return Timestamp._of({**old, "epoch": old["epoch"] + 1, **fresh, **clocks})

    def copy(self, **changes: Any) -> Timestamp:
        """Return a copy with some fields changed."""
        return Timestamp(**{**self._values, **changes})

    def state_dict(self) -> dict[str, Any]:
        """Return every field as plain data: counters as whole numbers, clocks in seconds."""
        return {name: value.total_seconds() if name in _CLOCKS else value for name, value in self._values.items()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Timestamp:
        """Rebuild what `state_dict` gave; fields of another version are left alone."""
        return cls(**{name: value for name, value in state.items() if name in _FIELDS})

    def _compare(self, other: Any) -> tuple[float, float]:
        other = other if isinstance(other, Time) else Time.from_input(other)
        return self.value(other.unit), other.value

    def __lt__(self, other: Any) -> bool:
        mine, theirs = self._compare(other)
        return mine < theirs

    def __le__(self, other: Any) -> bool:
        mine, theirs = self._compare(other)
        return mine <= theirs

    def __gt__(self, other: Any) -> bool:
        mine, theirs = self._compare(other)
        return mine > theirs

    def __ge__(self, other: Any) -> bool:
        mine, theirs = self._compare(other)
        return mine >= theirs

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, Timestamp) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._values.values()))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self._values.items() if value)
        return f"Timestamp({shown})"

    def __getattr__(self, name: str) -> Any:
        if name in COUNTERS:
            return Time(self._values[name], COUNTERS[name])
        if name in _CLOCKS:
            return self._values[name]
        raise AttributeError(f"Timestamp has no {name!r}: it has {', '.join(_FIELDS)}")


_TOTALS = {
    TimeUnit.ITERATION: "iteration",
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How long training lasts, for shares of it.

    Attributes:
        duration: ``max_duration``; None while it is not known.
        num_batches: batches of one epoch; None if the loader cannot tell.
    """

    duration: Time | None = None
    num_batches: int | None = None


@dataclass(frozen=True, slots=True)
class Every:
    """Something that recurs: due when a multiple of ``interval`` has been crossed.

    Asked at BATCH_CHECKPOINT and EPOCH_CHECKPOINT: intervals in epochs at the end of an epoch, others after a batch.
    """

    interval: Time

    @property
    def event(self) -> Event:
        """The event at which this can become due (apart from the end of training)."""
        return Event.EPOCH_CHECKPOINT if self.interval.unit is TimeUnit.EPOCH else Event.BATCH_CHECKPOINT

    def crossed(self, previous: Timestamp, now: Timestamp, span: Span) -> bool:
        """Tell whether a multiple lies after ``previous``, up to and including ``now``."""
        unit, value = self.interval.unit, self.interval.value
        if type(value) is int:
            return previous.value(unit) // value != now.value(unit) // value
        size = Fraction(str(value))
        if unit is TimeUnit.DURATION:
            unit, whole = _whole(self.interval, span)
            size *= whole
        return Fraction(previous.value(unit)) // size != Fraction(now.value(unit)) // size

    def due(self, event: Event, previous: Timestamp, now: Timestamp, span: Span) -> bool:
        """Tell whether it is due at ``event``: a multiple was crossed, or training has come to its end."""
        if event in _STEPS and finished(now, span.duration):
            return True
        return event is self.event and self.crossed(previous, now, span)

    def check(self, span: Span) -> None:
        """Refuse an interval that cannot be decided with this data.

        Raises:
            ConfigError: it is a share of a training whose length in batches nobody knows.
        """
        if self.interval.unit is TimeUnit.DURATION and span.duration is not None:
            _whole(self.interval, span)


def finished(now: Timestamp, duration: Time | None) -> bool:
    """Tell whether training has lasted as long as it should."""
    return duration is not None and now.value(duration.unit) >= duration.value


def parse_every(spec: Any, what: str) -> Every:
    """Turn what users write (a bare number counts epochs) into an `Every`.

    Raises:
        ConfigError: it is no time, not positive, a share above 1, or in iterations.
    """
    try:
        interval = Time.from_input(spec, TimeUnit.EPOCH)
    except ConfigError as error:
        raise ConfigError(f"{what}={spec!r}: {error}") from None
    if interval.unit is TimeUnit.ITERATION:
        raise ConfigError(f"{what}={spec!r}: this trainer counts no iterations, use epochs ('ep') or batches ('ba')")
    if interval.value <= 0 or (interval.unit is TimeUnit.DURATION and interval.value > 1):
        rule = "a share is above 0 and at most 1" if interval.unit is TimeUnit.DURATION else "it must be positive"
        raise ConfigError(f"{what}={spec!r} would never be due: {rule}")
    return Every(interval)


When = Every | Callable[[Any, Event], bool] | None
"""An interval, a function that decides alone, or None: never."""


def parse_when(spec: Any, what: str) -> When:
    """Turn what users write into an `Every`, their own function, or None for 0: never.

    Raises:
        ConfigError: see `parse_every`; or the function takes other arguments than (state, event).
    """
    if callable(spec):
        return check_function(spec, what, "state", "event")  # type: ignore[no-any-return]
    if isinstance(spec, (int, float, str, Time)) and not isinstance(spec, bool):
        with contextlib.suppress(ConfigError):
            if Time.from_input(spec, TimeUnit.EPOCH).value == 0:
                return None
    return parse_every(spec, what)


def _whole(interval: Time, span: Span) -> tuple[TimeUnit, Fraction]:
    """Return the unit in which a share is counted, and how much the whole training is in it."""
    duration = span.duration
    if duration is None:
        raise ConfigError(f"an interval of {interval} is a share of max_duration: give one")
    if duration.unit is not TimeUnit.EPOCH:
        return duration.unit, Fraction(str(duration.value))
    if span.num_batches is None:
        raise ConfigError(
            f"an interval of {interval} is a share of {duration}, and the training loader does not know its length: "
            "give the interval in batches, samples or seconds, or max_duration in batches"
        )
    return TimeUnit.BATCH, Fraction(int(duration.value) * span.num_batches)
