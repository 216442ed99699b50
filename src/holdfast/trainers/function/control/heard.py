"""What callbacks hear of reports: the metrics of all ranks, once all have made a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .actions import Call
from .report_ledger import LedgerEntry, ReportLedger

__all__ = ["Heard"]

_MAX_WAITING = 10_000


class Heard:
    """Gathers metrics by report and rank until ``after_report`` can be called with all of them.

    Args:
        world_size: number of ranks.
        wanted: there are callbacks; without, nothing is gathered.
    """

    def __init__(self, world_size: int, *, wanted: bool) -> None:
        self._size, self._wanted = world_size, wanted
        self._waiting: dict[int, dict[int, Mapping[str, Any]]] = {}

    def begin(self, world_size: int) -> None:
        """Begin with the reports of a new group of so many ranks."""
        self._size, self._waiting = world_size, {}

    def note(self, index: int, rank: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of one rank for report ``index``."""
        if self._wanted:
            self._waiting.setdefault(index, {})[rank] = metrics

    def complete(self, board: ReportLedger) -> list[Call]:
        """Give the calls for reports without data that no rank will add anything to, in order.

        Ranks that never make a report (they have ended, or are ten thousand reports behind) have no metrics in it.
        Those with data are called when they are committed.
        """
        if not self._waiting:
            return []
        behind = [at for rank, at in enumerate(board.entered) if rank not in board.finished]
        reached = min(behind, default=max(board.entered))
        calls = []
        for index in sorted(self._waiting):
            if index > reached and len(self._waiting) <= _MAX_WAITING:
                break
            if index not in board.reports:
                calls.append(self._call(self._waiting.pop(index), None))
        return calls

    def committed(self, report: LedgerEntry, location: Mapping[str, Any], *, current: bool) -> list[Call]:
        """Give the call for a report whose checkpoint is committed; ``current``: it is of the group that runs."""
        if not self._wanted:
            return []
        others = self._waiting.pop(report.index, {}) if current else {}
        return [self._call({**others, 0: report.metrics}, location)]

    def forget(self, index: int) -> None:
        """Forget a report that came to nothing."""
        self._waiting.pop(index, None)

    def _call(self, metrics: Mapping[int, Mapping[str, Any]], location: Mapping[str, Any] | None) -> Call:
        by_rank = [dict(metrics.get(rank, {})) for rank in range(self._size)]
        return Call(hook="after_report", arguments={"metrics": by_rank, "checkpoint": location})
