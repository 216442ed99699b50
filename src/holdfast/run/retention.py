"""Which checkpoints of a run stay: a pure decision over records, acted upon elsewhere.

The rules of a `Keep` form a union. Beyond them these always stay: the newest checkpoint, pinned checkpoints, the
checkpoint that the run was resumed from, and those that the caller protects. So a history that is not empty never
becomes empty.

`decide` looks at all checkpoints. `RetentionIndex` decides the same without that: a checkpoint that stayed goes later
only if it lost its claim (newer or better checkpoints came, a pin was removed). So after each change only checkpoints
around the bounds of the rules are looked at: a save costs the same with ten checkpoints and with ten thousand.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from holdfast._log import get_logger
from holdfast._units import Interval
from holdfast.config import Keep, rules_of

from .record import Record, flat_metrics, metric_value

__all__ = [
    "Milestones", "Record", "RetentionIndex", "Verdict", "best_of", "decide", "is_number", "otherwise", "rank",
    "rank_key", "rankable", "warn_unranked",
]  # fmt: skip

_log = get_logger("catalog")
_PLACE = attrgetter("order", "epoch", "created")  # what milestones go by


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a checkpoint stays, and why in a few words."""

    name: str
    keep: bool
    why: str


def decide(keep: Keep, records: Iterable[Record], protect: frozenset[str] = frozenset()) -> list[Verdict]:
    """Decide about every record.

    Args:
        keep: the rules.
        records: the checkpoints of one run, in any order, without the quarantined.
        protect: names that stay whatever the rules say (a save in progress refers to them).

    Returns:
        One verdict for each record, newest first.
    """
    newest_first = sorted(records, key=lambda record: record.order, reverse=True)
    if not rules_of(keep):
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
    modes. Among equals the newer checkpoint is better. ``metric`` may lead into nested metrics (see `metric_value`).
    """
    return sorted(records, key=lambda record: rank_key(record, metric, mode), reverse=True)


def rank_key(record: Record, metric: str, mode: str) -> tuple[Any, ...]:
    """Return the key of `rank`; of two records that with the higher key is better. The name is its last part."""
    value = metric_value(record.metrics, metric)
    if not is_number(value):
        return (0, 0, *record.order)
    return (1, value if mode == "max" else -value, *record.order)


def best_of(records: Iterable[Record], metric: str | None, mode: str) -> Record | None:
    """Return the best record by a metric; None where no record has a number for it, or no metric is given."""
    ranked = rank(records, metric, mode) if metric else []
    return ranked[0] if metric and ranked and is_number(metric_value(ranked[0].metrics, metric)) else None


def warn_unranked(metric: str, records: Iterable[Record], where: str) -> None:
    """Warn that checkpoints go by their age alone, if no checkpoint has the metric that ranks them."""
    metrics = [record.metrics for record in records]
    if not any(is_number(metric_value(values, metric)) for values in metrics):
        known = rankable(metrics)
        _log.warning(
            "no checkpoint of %s has a number for %r, the metric that ranks them (they have: %s), so the newest ones "
            "stay; name one of these, or report %r too for the steps that are saved",
            where, metric, ", ".join(known) or "no metrics at all", metric,
        )  # fmt: skip


def rankable(metrics: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics that have a number somewhere; a name with "_" in front is a note of ours."""
    pairs = ((name, value) for values in metrics for name, value in flat_metrics(values).items())
    return sorted({name for name, value in pairs if is_number(value) and not name.startswith("_")})


def is_number(value: Any) -> bool:
    """Tell whether the value of a metric can be ranked: NaN cannot."""
    return isinstance(value, (int, float)) and value == value  # noqa: PLR0124  NaN differs from itself


def _shown(value: Any) -> str:
    if not is_number(value):
        return "no value"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Milestones:
    """Finds the first checkpoint at or after each multiple of an interval; gets all checkpoints, oldest first.

    A resume from an older step makes a new branch: it gets milestones of its own, and those of the branch left
    behind stay too, for a milestone is promised to stay for ever. A checkpoint of an earlier attempt whose step is not
    lower cannot be an ancestor, which distinguishes the branches.
    """

    def __init__(self, every: Interval) -> None:
        self._every = every
        self._holder: dict[int, Record] = {}

    def add(self, record: Record) -> str | None:
        """Add the next checkpoint; return why it is a milestone, None if it is none."""
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
    """Return why checkpoints go that no rule keeps."""
    return f"not among {', '.join(rule.short for rule in rules_of(keep))}"


class RetentionIndex:
    """The checkpoints of one run under one set of rules.

    Args:
        keep: the rules.
        records: the checkpoints, without the quarantined.

    Attributes:
        pinned: names of the pinned checkpoints, in order of arrival.
    """

    def __init__(self, keep: Keep, records: Iterable[Record]) -> None:
        self._keep, self._every, self._deletes = keep, keep.interval, bool(rules_of(keep))
        self._by_rank = keep.best is not None and keep.metric is not None
        self._records = {record.name: record for record in records}
        self._order = sorted(record.order for record in self._records.values())
        self._ranked = sorted(map(self._rank, self._records.values())) if self._by_rank else []
        self.pinned = {name: None for name, record in self._records.items() if record.pinned}
        self._protected: frozenset[str] = frozenset()
        self._milestones: Milestones | None = None  # None after a change of older checkpoints
        self._milestone_names: set[str] = set()
        self._open = set(self._records)  # names to look at
        self._moves = 0  # changes of the two orders since the last look

    def _rank(self, record: Record) -> tuple[Any, ...]:
        return rank_key(record, self._keep.metric or "", self._keep.mode)

    def put(self, record: Record) -> None:
        """Enter a checkpoint, or its new record."""
        before = self._records.get(record.name)
        if before == record:
            return
        is_same_place = before is not None and _PLACE(before) == _PLACE(record)
        if before is not None:
            self._take_out(before, is_same_place=is_same_place)
        self._records[record.name] = record
        is_newest = not self._order or self._order[-1] < record.order
        insort(self._order, record.order)
        if self._by_rank:
            insort(self._ranked, self._rank(record))
        if record.pinned:
            self.pinned[record.name] = None
        if self._milestones is not None and not is_same_place:
            if not is_newest:
                self._milestones = None
            elif self._milestones.add(record) is not None:
                self._milestone_names.add(record.name)
        self._open.add(record.name)
        self._moves += 1

    def drop(self, name: str) -> None:
        """Forget a checkpoint that was removed or is not usable any more."""
        record = self._records.get(name)
        if record is not None:
            self._take_out(record)

    def _take_out(self, record: Record, *, is_same_place: bool = False) -> None:
        name = record.name
        del self._records[name]
        del self._order[bisect_left(self._order, record.order)]
        if self._by_rank:
            del self._ranked[bisect_left(self._ranked, self._rank(record))]
        self.pinned.pop(name, None)
        self._open.discard(name)
        if not is_same_place and name in self._milestone_names:
            self._milestones = None

    def doomed(self, protect: frozenset[str] = frozenset()) -> list[Verdict]:
        """Return the verdicts on the checkpoints that go, newest first."""
        keep, order, ranked = self._keep, self._order, self._ranked
        if not self._deletes:
            return []
        if self._every is not None and self._milestones is None:
            self._milestones = Milestones(self._every)
            names = [name for _, _, name in order if self._milestones.add(self._records[name]) is not None]
            self._open |= self._milestone_names.difference(names)
            self._milestone_names = set(names)
        last, best = max(keep.last or 0, 1), keep.best or 0
        self._open |= self._protected - protect
        for ordered, places in ((order, last), (ranked, best)):
            self._open.update(key[-1] for key in _below(ordered, places, self._moves))
        lowest = order[-last] if len(order) >= last else ()
        worst = ranked[-best] if 0 < best <= len(ranked) else ()

        def stays(record: Record) -> bool:
            claims = record.pinned or record.resumed_from or record.name in protect or record.order >= lowest
            claims = claims or record.name in self._milestone_names
            return claims or (best > 0 and self._by_rank and self._rank(record) >= worst)

        looked_at = map(self._records.get, self._open)
        goes = [record for record in looked_at if record is not None and not stays(record)]
        goes.sort(key=lambda record: record.order, reverse=True)
        self._open, self._moves, self._protected = {record.name for record in goes}, 0, protect
        why = otherwise(keep) if goes else ""
        return [Verdict(name=record.name, keep=False, why=why) for record in goes]


def _below(ordered: list[Any], places: int, moves: int) -> list[Any]:
    """Return the keys that ``moves`` changes may have moved below the best ``places`` of an ascending list."""
    end = max(0, len(ordered) - places)
    return ordered[max(0, end - moves) : end] if places else []
