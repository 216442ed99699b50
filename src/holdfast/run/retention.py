"""Which checkpoints of a run stay: a pure decision over records, acted upon elsewhere.

The rules of a `Keep` form a union. On top of them these always stay: the newest checkpoint, pinned ones, the one the
run was resumed from, and whatever the caller protects. So a history that is not empty never becomes empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast._units import Interval
from holdfast.config import Keep

from .record import Record, metric_value

__all__ = ["Milestones", "Record", "Verdict", "best_of", "decide", "is_number", "otherwise", "rank", "rank_key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What happens to one checkpoint, and why in a few words."""

    name: str
    keep: bool
    why: str


def decide(keep: Keep, records: Iterable[Record], protect: frozenset[str] = frozenset()) -> list[Verdict]:
    """Decide about every record.

    Args:
        keep: the rules.
        records: the checkpoints of one run, in any order, without quarantined ones.
        protect: names that stay whatever the rules say (a save in progress refers to them).

    Returns:
        One verdict for each record, newest first.
    """
    newest_first = sorted(records, key=lambda record: record.order, reverse=True)
    if keep.last is None and keep.best is None and keep.every is None:
        return [Verdict(name=record.name, keep=True, why="no rule deletes") for record in newest_first]
    why: dict[str, str] = {}
    # The first rule that keeps a checkpoint gives the reason, so the strongest claim comes first.
    for record in newest_first:
        if record.pinned:
            why[record.name] = "pinned"
        elif record.resumed_from:
            why[record.name] = "resumed from"
    for record in newest_first[:1]:
        why.setdefault(record.name, "newest")
    if keep.best is not None and keep.metric is not None:
        for place, record in enumerate(rank(newest_first, keep.metric, keep.mode)[: keep.best], start=1):
            value = _shown(metric_value(record.metrics, keep.metric))
            why.setdefault(record.name, f"best {keep.best} by {keep.metric} (rank {place}: {value})")
    if keep.interval is not None:
        milestones = Milestones(keep.interval)
        for record in reversed(newest_first):
            if (reason := milestones.add(record)) is not None:
                why.setdefault(record.name, reason)
    if keep.last is not None:
        for record in newest_first[: keep.last]:
            why.setdefault(record.name, f"last {keep.last}")
    for name in protect:
        why.setdefault(name, "in use")
    none = otherwise(keep)
    return [Verdict(name=r.name, keep=r.name in why, why=why.get(r.name, none)) for r in newest_first]


def rank(records: Iterable[Record], metric: str, mode: str) -> list[Record]:
    """Sort best first.

    A missing value, NaN and anything that is not a number rank equal, below every number (infinities too) in both
    modes. Among equals the newer one is better. ``metric`` may lead into nested metrics (see `metric_value`).
    """
    return sorted(records, key=lambda record: rank_key(record, metric, mode), reverse=True)


def rank_key(record: Record, metric: str, mode: str) -> tuple[Any, ...]:
    """Return the key of `rank`; of two records the one with the higher key is better. The name is its last part."""
    value = metric_value(record.metrics, metric)
    if not is_number(value):
        return (0, 0, *record.order)
    return (1, value if mode == "max" else -value, *record.order)


def best_of(records: Iterable[Record], metric: str | None, mode: str) -> Record | None:
    """Return the best record by a metric; None where no one has a number for it, or no metric is given."""
    ranked = rank(records, metric, mode) if metric else []
    return ranked[0] if metric and ranked and is_number(metric_value(ranked[0].metrics, metric)) else None


def is_number(value: Any) -> bool:
    """Whether a value of a metric can be ranked: NaN cannot."""
    return isinstance(value, (int, float)) and value == value  # noqa: PLR0124  NaN is what differs from itself


def _shown(value: Any) -> str:
    if not is_number(value):
        return "no value"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Milestones:
    """Finds the first checkpoint at or after each multiple of an interval; told of all of them, oldest first.

    A resume from an older step makes a new branch: it gets milestones of its own, and those of the branch left
    behind stay too, for a milestone is promised to stay for ever. A checkpoint of an earlier attempt with a step at
    or beyond the one looked at cannot be its ancestor, which is what tells the branches apart.
    """

    def __init__(self, every: Interval) -> None:
        self._every = every
        self._holder: dict[int, Record] = {}

    def add(self, record: Record) -> str | None:
        """Say why this one is a milestone; None if it is none."""
        every, holder = self._every, self._holder
        place = {"ba": record.step, "ep": record.epoch, "sec": record.created}[every.unit]
        if place is None:
            return None
        multiple = int(place // every.value)
        earlier = holder.get(multiple)
        if every.unit == "sec":
            if earlier is not None:
                return None
            holder[multiple] = record
            return f"first in its {every}"
        # Multiple 0 is the start of the run, not a milestone.
        if multiple >= 1 and (earlier is None or (earlier.attempt < record.attempt and earlier.step >= record.step)):
            holder[multiple] = record
            return f"milestone {int(multiple * every.value)}{every.unit}"
        return None


def otherwise(keep: Keep) -> str:
    """Say why the others go."""
    return f"not among {_rules(keep)}"


def _rules(keep: Keep) -> str:
    rules = [f"last {keep.last}"] if keep.last is not None else []
    if keep.best is not None:
        rules.append(f"best {keep.best} by {keep.metric}")
    if keep.interval is not None:
        rules.append(f"every {keep.interval}")
    return ", ".join(rules)
