"""When something is due: pure decisions from two timestamps. Used for saving and for evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from holdfast.errors import ConfigError

from ..arguments import check_function
from ..events import Event
from .time import Time, TimeLike, TimeUnit
from .timestamp import Timestamp

__all__ = ["Every", "IntervalSpec", "Span", "When", "finished", "parse_every", "parse_when"]

IntervalSpec = TimeLike | Callable[[Any, Event], bool]
_STEPS = (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT)


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
