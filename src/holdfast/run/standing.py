"""Which checkpoints of a run go, kept up to date: what `retention.decide` says, without looking at all of them.

A checkpoint that stayed goes later only if something took its claim: newer ones came after it, better ones above it, a
pin was taken back. So after each change those around the bounds of the rules are looked at, and no others: a save
costs the same with ten checkpoints and with ten thousand.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

from holdfast.config import Keep

from .record import Record
from .retention import Milestones, Verdict, otherwise, rank_key

__all__ = ["RetentionIndex"]


class RetentionIndex:
    """The checkpoints of one run under one set of rules.

    Args:
        keep: the rules.
        records: what there is, without quarantined ones.

    Attributes:
        pinned: names of those that are pinned, in order of arrival.
    """

    def __init__(self, keep: Keep, records: Iterable[Record]) -> None:
        self._keep = keep
        self._records = {record.name: record for record in records}
        self._order = sorted(record.order for record in self._records.values())
        self._ranked = sorted(map(self._rank, self._records.values())) if self._by_rank else []
        self.pinned = {name: None for name, record in self._records.items() if record.pinned}
        self._protected: frozenset[str] = frozenset()
        self._milestones: Milestones | None = None  # made anew when the past has changed
        self._milestone_names: set[str] = set()
        self._open = set(self._records)  # to be looked at
        self._moves = 0  # changes of the two orders since the last look

    @property
    def _by_rank(self) -> bool:
        return self._keep.best is not None and self._keep.metric is not None

    def _rank(self, record: Record) -> tuple[Any, ...]:
        return rank_key(record, self._keep.metric or "", self._keep.mode)

    def put(self, record: Record) -> None:
        """Enter a checkpoint, or what has become of it."""
        before = self._records.get(record.name)
        if before == record:
            return
        places = [(one.order, one.epoch, one.created) for one in (before, record) if one is not None]
        is_same_place = len(places) == 2 and places[0] == places[1]
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
        """Forget a checkpoint that is not there, or not usable, any more."""
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
        """Return those that go, newest first."""
        keep, order, ranked = self._keep, self._order, self._ranked
        if keep.last is None and keep.best is None and keep.every is None:
            return []
        self._mark_milestones()
        last, best = max(keep.last or 0, 1), keep.best or 0
        self._open |= self._protected - protect
        self._open.update(one[-1] for one in _below(order, last, self._moves))
        self._open.update(one[-1] for one in _below(ranked, best, self._moves))
        lowest = order[-last] if len(order) >= last else ()
        worst = ranked[-best] if 0 < best <= len(ranked) else ()

        def stays(record: Record) -> bool:
            claims = record.pinned or record.resumed_from or record.name in protect or record.order >= lowest
            claims = claims or record.name in self._milestone_names
            return claims or (best > 0 and self._by_rank and self._rank(record) >= worst)

        looked_at = [self._records[name] for name in self._open if name in self._records]
        goes = sorted((one for one in looked_at if not stays(one)), key=lambda one: one.order, reverse=True)
        self._open, self._moves, self._protected = {one.name for one in goes}, 0, protect
        why = otherwise(keep)
        return [Verdict(name=one.name, keep=False, why=why) for one in goes]

    def _mark_milestones(self) -> None:
        if self._keep.interval is None or self._milestones is not None:
            return
        self._milestones = Milestones(self._keep.interval)
        names = [name for _, _, name in self._order if self._milestones.add(self._records[name]) is not None]
        self._open |= self._milestone_names.difference(names)
        self._milestone_names = set(names)


def _below(ordered: list[Any], places: int, moves: int) -> list[Any]:
    """Return as many as may have fallen below the best ``places`` of an ascending list."""
    end = max(0, len(ordered) - places)
    return ordered[max(0, end - moves) : end] if places else []
