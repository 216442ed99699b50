"""Frozen configuration values, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._units import Interval, IntervalLike, parse_interval
from .errors import ConfigError

__all__ = ["Keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints of a run stay: the union of all rules given.

    The newest checkpoint, pinned ones and the one resumed from always stay. A bare ``Keep()`` keeps everything.

    Example:
        >>> Keep(last=3, best=2, metric="val_loss", mode="min", every="10000ba").last
        3

    Attributes:
        last: number of newest checkpoints.
        best: number of best checkpoints by ``metric``.
        metric: name of the metric that ranks; a missing or NaN value ranks below everything.
        mode: "min" or "max".
        every: milestones that stay for ever: one for each multiple of this interval in steps ("10000ba"),
            epochs ("5ep") or wall time ("6h"; the first checkpoint in each span).
    """

    last: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: str = "min"
    every: IntervalLike | None = None

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("best", self.best)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"Keep({name}={value!r}): give a whole number of at least 1, or leave it out")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"Keep(mode={self.mode!r}): use 'min' (smaller is better) or 'max'")
        if self.best is not None and not self.metric:
            raise ConfigError(f"Keep(best={self.best}) needs the metric that ranks, as in metric='val_loss'")
        if self.every is not None and self.interval.unit not in ("ba", "ep", "sec"):  # type: ignore[union-attr]
            raise ConfigError(f"Keep(every={self.every!r}): give steps ('1000ba'), epochs ('5ep') or a time ('6h')")

    @property
    def interval(self) -> Interval | None:
        """The parsed ``every``."""
        return None if self.every is None else parse_interval(self.every)

    def to_json(self) -> dict[str, Any]:
        """Describe this value so that the writer process can rebuild it with `from_json`."""
        every = self.interval
        return {
            "last": self.last,
            "best": self.best,
            "metric": self.metric,
            "mode": self.mode,
            "every": None if every is None else f"{every.value:g}s" if every.unit == "sec" else str(every),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Keep:
        """Rebuild what `to_json` described."""
        return cls(**data)
