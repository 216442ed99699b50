"""When: amounts of training (`Time`), where it is (`Timestamp`), its moments (`Event`), and what is due at which.

Pure values. A `Timestamp` is immutable; each batch makes a new one. What is due is asked for saving and for evaluation.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from fractions import Fraction
from typing import Any, ClassVar

from holdfast._units import parse_span, short_units
from holdfast.errors import ConfigError

from .arguments import check_function

GRAMMAR = (
    "a time is a number and a unit: '2ep' (epochs), '500ba' (batches), '1000sp' (samples), '1e6tok' (tokens), '3iter' "
    "(iterations), '0.1dur' (share of the whole training), '90sec', or a span such as '90s', '15min', '36h', '1h20m40s'"
)
_COUNT = re.compile(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)(ep|iter|ba|sp|tok|dur|sec)")


class TimeUnit(str, Enum):
    """What a `Time` counts; the value is how it is spelt."""

    EPOCH = "ep"
    ITERATION = "iter"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"


_UNITS = {unit.value: unit for unit in TimeUnit} | {unit.name.lower(): unit for unit in TimeUnit}


class Time:
    """An amount of training: immutable, hashable, with arithmetic and comparison within its unit.

    A bare number in arithmetic and comparison has the unit of the other side, a string is parsed.

    Args:
        value: a number, or a whole time string ("10ep").
        unit: how it is counted; left out for a string.

    Raises:
        ConfigError: the string does not follow the grammar, or the value does not fit the unit.

    Example:
        >>> Time("10ep") == Time(10, "ep") == Time.from_timestring("1e1EP")
        True
        >>> Time("10ep") - 4 > "5ep", int(Time("1h20m40s"))
        (True, 4840)
    """

    __slots__ = ("unit", "value")
    value: float
    unit: TimeUnit
    _fractional: ClassVar = (TimeUnit.DURATION, TimeUnit.SECOND)

    def __init__(self, value: float | str, unit: str | TimeUnit | None = None) -> None:
        if isinstance(value, str):
            if unit is not None:
                raise ConfigError(f"Time({value!r}, {unit!r}): a time string has its unit already, leave the other out")
            value, unit = _parse(value)
        elif unit is None:
            raise ConfigError(f"Time({value!r}): a number needs a unit, as in Time({value!r}, 'ep')")
        known = unit if type(unit) is TimeUnit else _UNITS.get(str(getattr(unit, "value", unit)).lower())
        if known is None:
            raise ConfigError(
                f"Time({value!r}, {unit!r}): unknown unit, use one of {', '.join(u.value for u in TimeUnit)}"
            )
        object.__setattr__(self, "unit", known)
        object.__setattr__(self, "value", _checked(value, known))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Time does not change: {name} cannot be set")

    def __reduce__(self) -> Any:
        return Time, (self.value, self.unit.value)

    # -- constructors

    @classmethod
    def from_timestring(cls, text: str) -> Time:
        """Parse a time string."""
        if not isinstance(text, str):
            raise ConfigError(f"cannot read the time {text!r}: {GRAMMAR}")
        return cls(text)

    @classmethod
    def from_input(cls, value: TimeLike, default_unit: str | TimeUnit | None = None) -> Time:
        """Make a `Time` of whatever users write; a bare number gets ``default_unit``."""
        if isinstance(value, Time):
            return value
        if isinstance(value, timedelta):
            return cls(value.total_seconds(), TimeUnit.SECOND)
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and default_unit is not None:
            return cls(value, default_unit)
        raise ConfigError(f"cannot read the time {value!r}: {GRAMMAR}")

    @classmethod
    def from_epoch(cls, value: int) -> Time:
        """Count epochs."""
        return cls(value, TimeUnit.EPOCH)

    @classmethod
    def from_batch(cls, value: int) -> Time:
        """Count batches."""
        return cls(value, TimeUnit.BATCH)

    @classmethod
    def from_sample(cls, value: int) -> Time:
        """Count samples."""
        return cls(value, TimeUnit.SAMPLE)

    @classmethod
    def from_token(cls, value: int) -> Time:
        """Count tokens."""
        return cls(value, TimeUnit.TOKEN)

    @classmethod
    def from_iteration(cls, value: int) -> Time:
        """Count iterations."""
        return cls(value, TimeUnit.ITERATION)

    @classmethod
    def from_duration(cls, value: float) -> Time:
        """Take a share of the whole training."""
        return cls(value, TimeUnit.DURATION)

    @classmethod
    def from_seconds(cls, value: float) -> Time:
        """Count seconds."""
        return cls(value, TimeUnit.SECOND)

    @classmethod
    def from_timedelta(cls, value: str | timedelta) -> Time:
        """Count seconds, of a span such as "1h20m"."""
        return cls.from_input(value)

    # -- reading it

    def to_timestring(self) -> str:
        """Spell it so that `from_timestring` reads it back."""
        return f"{self.value}{self.unit.value}"

    __str__ = to_timestring

    def __repr__(self) -> str:
        return f"Time({self.value!r}, TimeUnit.{self.unit.name})"

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        if not isinstance(self.value, int):
            raise TypeError(f"{self!r} is not a whole number")
        return self.value

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)

    # -- comparing

    def _other(self, other: Any) -> float:
        """Return the value of the other side of an operation, which must have this unit."""
        if type(other) in (int, float):
            return other  # type: ignore[no-any-return]
        if isinstance(other, (str, timedelta)):
            other = Time.from_input(other)
        if not isinstance(other, Time):
            raise TypeError(f"{self!r} and {type(other).__name__}: use a Time, a time string or a number")
        if other.unit is not self.unit:
            raise ConfigError(f"{self!r} and {other!r} have different units: convert one of them first")
        return other.value

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Time):
            return self.unit is other.unit and self.value == other.value
        if isinstance(other, (int, float, str, timedelta)):
            if isinstance(other, str) and _match(other) is None:
                return False
            other = Time.from_input(other, self.unit) if not isinstance(other, (int, float)) else other
            return self == other if isinstance(other, Time) else self.value == other
        return NotImplemented

    def __lt__(self, other: Any) -> bool:
        return self.value < self._other(other)

    def __le__(self, other: Any) -> bool:
        return self.value <= self._other(other)

    def __gt__(self, other: Any) -> bool:
        return self.value > self._other(other)

    def __ge__(self, other: Any) -> bool:
        return self.value >= self._other(other)

    # -- arithmetic

    def _same(self, value: float) -> Time:
        return Time(value if self.unit in self._fractional else int(value), self.unit)

    def __add__(self, other: Any) -> Time:
        return self._same(self.value + self._other(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Time:
        return self._same(self.value - self._other(other))

    def __rsub__(self, other: Any) -> Time:
        return self._same(self._other(other) - self.value)

    def __neg__(self) -> Time:
        return self._same(-self.value)

    def __pos__(self) -> Time:
        return self

    def __mul__(self, other: Any) -> Time:
        """Scale by a number, or take a share: ``Time("0.5dur") * Time("10ep")`` is 5 epochs."""
        if isinstance(other, Time) and self.unit is TimeUnit.DURATION:
            return other._same(self.value * other.value)
        factor = other.value if isinstance(other, Time) and other.unit is TimeUnit.DURATION else other
        if not isinstance(factor, (int, float)):
            raise ConfigError(f"{self!r} * {other!r}: multiply by a number or by a share ('dur')")
        return self._same(self.value * factor)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Time:
        """Divide by a number, or by a time of the same unit, which gives a share ("dur")."""
        if isinstance(other, (int, float)):
            return self._same(self.value / other)
        return Time(self.value / self._other(other), TimeUnit.DURATION)

    def __floordiv__(self, other: Any) -> int:
        return int(self.value // self._other(other))

    def __mod__(self, other: Any) -> Time:
        return self._same(self.value % self._other(other))


TimeLike = int | float | str | timedelta | Time


def _match(text: str) -> tuple[float, str] | None:
    clean = short_units(text)
    if match := _COUNT.fullmatch(clean):
        return float(match[1].replace("_", "")), match[2]
    seconds = parse_span(clean)
    return None if seconds is None else (seconds, "sec")


def _parse(text: str) -> tuple[float, str]:
    found = _match(text)
    if found is None:
        raise ConfigError(f"cannot read the time {text!r}: {GRAMMAR}")
    return found


def _checked(value: Any, unit: TimeUnit) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"Time({value!r}, {unit.value!r}): give a finite number")
    if unit is TimeUnit.DURATION:
        return float(value)
    if value == int(value):
        return int(value)
    if unit is TimeUnit.SECOND:
        return float(value)
    raise ConfigError(f"Time({value!r}, {unit.value!r}): only shares ('dur') and seconds have fractions")


class Event(str, Enum):
    """One moment; the value is the name of the method of a `Callback` that is called.

    In the order of a run::

        init, before_load, after_load, fit_start
            epoch_start
                before_dataloader, after_dataloader, batch_start, before_train_batch
                    before_forward, after_forward, before_loss, after_loss, before_backward, after_backward
                after_train_batch, batch_end
                    eval_before_all, eval_start
                        eval_batch_start, eval_before_forward, eval_after_forward, eval_batch_end
                    eval_end, eval_after_all
                batch_checkpoint
            epoch_end, (evaluation), epoch_checkpoint
        fit_end

    ``Trainer.eval()`` is framed by eval_standalone_start and eval_standalone_end.
    """

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    FIT_END = "fit_end"
    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"

    @classmethod
    def of(cls, value: str | Event) -> Event:
        """Find an event by name in any case ("BEFORE_LOAD", "before_load").

        Raises:
            ValueError: there is no such event.
        """
        return value if isinstance(value, Event) else cls(value.lower())


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


def parse_duration(value: Any, what: str = "max_duration") -> Time | None:
    """Read how long training lasts; a bare number counts epochs.

    Raises:
        ConfigError: it is no time, not positive, or a share of itself.
    """
    if value is None:
        return None
    duration = parse_every(value, what).interval
    if duration.unit is TimeUnit.DURATION:
        raise ConfigError(f"{what}={value!r} would be a share of itself: give epochs ('10ep') or batches ('1000ba')")
    return duration
