"""`Time`: an amount of training in one unit. Pure values."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from enum import Enum
from typing import Any, ClassVar

from holdfast._units import parse_span
from holdfast.errors import ConfigError

__all__ = ["GRAMMAR", "Time", "TimeLike", "TimeUnit"]

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
    clean = text.strip().lower().replace(" ", "")
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
