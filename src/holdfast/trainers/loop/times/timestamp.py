"""`Timestamp`: where training is, in every unit at once. Immutable; each batch makes a new `Timestamp`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from holdfast.errors import ConfigError

from .time import Time, TimeUnit

__all__ = ["COUNTERS", "Timestamp"]

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
