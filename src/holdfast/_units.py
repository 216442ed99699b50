"""Interval strings, byte counts and durations: one grammar for parsing and printing them; lists that are cut short."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from .errors import ConfigError

UNITS = ("ba", "ep", "sp", "tok", "sec")
GRAMMAR = (
    "an interval is a number of optimizer steps (500), a string such as '500ba' or '500 steps', '2ep' (epochs), "
    "'1000sp' (samples), '1e6tok' (tokens), '90s', '15min', '36h', '1h20m40s', a timedelta, or a list of these"
)
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "hr": 3600, "d": 86400}
_WORDS = {"step": "ba", "batch": "ba", "epoch": "ep", "sample": "sp", "token": "tok"}
_WORDS |= {"second": "s", "minute": "m", "hour": "h", "day": "d"}
_WORD = re.compile(rf"({'|'.join(_WORDS)})(?:es|s)?")
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for unit, base in (("b", 1000), ("ib", 1024))
}
_NUMBER = r"[0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
_COUNT = re.compile(rf"({_NUMBER})(ba|ep|sp|tok)")
_SPAN = re.compile(rf"({_NUMBER})(sec|min|hr|[smhd])")


@dataclass(frozen=True, slots=True)
class Interval:
    """A recurring distance in training: ``value`` of ``unit`` (``ba`` steps, ``ep``, ``sp``, ``tok`` or ``sec``)."""

    value: float
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ConfigError(f"unknown unit {self.unit!r} in an interval: use one of {', '.join(UNITS)}")
        finite = 0 < self.value < float("inf")
        if not finite or (self.unit != "sec" and self.value != int(self.value)):
            raise ConfigError(f"an interval of {self.value:g}{self.unit} is never due: it must be positive and whole")

    def __str__(self) -> str:
        return format_duration(self.value) if self.unit == "sec" else f"{int(self.value)}{self.unit}"


IntervalLike = int | str | timedelta | Interval


def parse_interval(spec: IntervalLike) -> Interval:
    """Turn one interval as users write it into an `Interval`.

    Raises:
        ConfigError: the text does not follow the grammar (the message gives it).
    """
    if isinstance(spec, Interval):
        return spec
    if isinstance(spec, timedelta):
        return Interval(spec.total_seconds(), "sec")
    if isinstance(spec, int) and not isinstance(spec, bool):
        return Interval(spec, "ba")
    if isinstance(spec, str):
        text = short_units(spec)
        if match := _COUNT.fullmatch(text):
            return Interval(float(match[1].replace("_", "")), match[2])
        if (seconds := parse_span(text)) is not None:
            return Interval(seconds, "sec")
    raise ConfigError(f"cannot read the interval {spec!r}: {GRAMMAR}")


def short_units(text: str) -> str:
    """Spell a time as the grammar does: in lower case, without blanks; "500 steps" becomes "500ba"."""
    return _WORD.sub(lambda word: _WORDS[word[1]], "".join(text.lower().split()))


def parse_span(text: str) -> float | None:
    """Return the seconds of a span of time ("90s", "15min", "1h20m40s"), in lower case; None for another text."""
    parts = _SPAN.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number.replace("_", "")) * _SECONDS[unit] for number, unit in parts)


def parse_intervals(spec: IntervalLike | Sequence[IntervalLike] | None) -> tuple[Interval, ...]:
    """Turn what ``every=`` takes (one interval, several, or None for never) into a tuple of intervals."""
    if spec is None:
        return ()
    if isinstance(spec, (list, tuple)):
        return tuple(parse_interval(interval) for interval in spec)
    return (parse_interval(spec),)  # type: ignore[arg-type]


def parse_bytes(text: str) -> int | None:
    """Return the bytes of a size ("512", "5GB", "128 MiB", "1.5GiB"; in any case); None for another text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _BYTES:
        return None
    return int(float(match[1]) * _BYTES[match[2]])


def format_bytes(count: float) -> str:
    """Print a byte count with a binary unit: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """Print seconds as people say them: 0.0123 -> '12 ms', 75 -> '1m15s'."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds != int(seconds) else f"{int(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m{rest:02d}s" if hours else f"{minutes}m{rest:02d}s"


def listed(names: Iterable[str], most: int = 8, *, between: str = ", ") -> str:
    """Spell out the first names of a list, and count the rest.

    Example:
        >>> listed(["a", "b", "c", "d"], 2)
        'a, b and 2 more'
    """
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return between.join(every[:most]) + more
