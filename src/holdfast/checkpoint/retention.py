"""Which checkpoints of a run stay: a pure decision over records, acted upon elsewhere.

The rules of a `Keep` form a union. On top of them these always stay: the newest checkpoint, pinned ones, the one the
run was resumed from, and whatever the caller protects. So a history that is not empty never becomes empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast._units import Interval
from holdfast.config import Keep

from .record import Record, metric_value

__all__ = ["Record", "Verdict", "decide", "is_number", "rank"]


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
        for name, reason in _milestones(keep.interval, newest_first):
            why.setdefault(name, reason)
    if keep.last is not None:
        for record in newest_first[: keep.last]:
            why.setdefault(record.name, f"last {keep.last}")
    for name in protect:
        why.setdefault(name, "in use")
    otherwise = f"not among {_rules(keep)}"
    return [Verdict(name=r.name, keep=r.name in why, why=why.get(r.name, otherwise)) for r in newest_first]


def rank(records: Iterable[Record], metric: str, mode: str) -> list[Record]:
    """Sort best first.

    A missing value, NaN and anything that is not a number rank equal, below every number (infinities too) in both
    modes. Among equals the newer one is better. ``metric`` may lead into nested metrics (see `metric_value`).
    """

    def key(record: Record) -> tuple[Any, ...]:
        value = metric_value(record.metrics, metric)
        if not is_number(value):
            return (0, 0, *record.order)
        return (1, value if mode == "max" else -value, *record.order)

    return sorted(records, key=key, reverse=True)


def is_number(value: Any) -> bool:
    """Whether a value of a metric can be ranked: NaN cannot."""
    return isinstance(value, (int, float)) and value == value  # noqa: PLR0124  NaN is what differs from itself


def _shown(value: Any) -> str:
    if not is_number(value):
        return "no value"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _milestones(every: Interval, newest_first: Sequence[Record]) -> list[tuple[str, str]]:
    """Name the first checkpoint at or after each multiple of ``every``.

    A resume from an older step makes a new branch: it gets milestones of its own, and those of the branch left
    behind stay too, for a milestone is promised to stay for ever. A checkpoint of an earlier attempt with a step at
    or beyond the one looked at cannot be its ancestor, which is what tells the branches apart.
    """
    chosen: list[tuple[str, str]] = []
    holder: dict[int, Record] = {}
    for record in reversed(newest_first):
        place = {"ba": record.step, "ep": record.epoch, "sec": record.created}[every.unit]
        if place is None:
            continue
        multiple = int(place // every.value)
        earlier = holder.get(multiple)
        if every.unit == "sec":
            if earlier is None:
                chosen.append((record.name, f"first in its {every}"))
                holder[multiple] = record
        # Multiple 0 is the start of the run, not a milestone.
        elif multiple >= 1 and (earlier is None or (earlier.attempt < record.attempt and earlier.step >= record.step)):
            count = int(multiple * every.value)
            chosen.append((record.name, f"milestone {count}{every.unit}"))
            holder[multiple] = record
    return chosen


def _rules(keep: Keep) -> str:
    rules = [f"last {keep.last}"] if keep.last is not None else []
    if keep.best is not None:
        rules.append(f"best {keep.best} by {keep.metric}")
    if keep.interval is not None:
        rules.append(f"every {keep.interval}")
    return ", ".join(rules)
