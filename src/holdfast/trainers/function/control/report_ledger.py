"""Which rank has reported what: pure bookkeeping of the reports of a group of workers.

Reports are numbered; every rank enters each number once and in order, most of them with metrics alone. A report with
data is complete when all ranks have entered it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from holdfast._ranks import rank_list

from .actions import Call

_MAX_WAITING = 10_000


class Stage(Enum):
    """How far a report with data has come."""

    OPEN = "open"
    COMMITTING = "committing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The data of a rank in a report.

    Attributes:
        kind: "directory", "uploaded", "state" or "values".
        call: number of the call that waits for the commit; None: no call waits.
        source: a directory: its "path", and whether it is "owned": taken over, so that it may be moved.
        location: where an uploaded checkpoint lies.
        coming: the directory is not there yet, or not uploaded: the message "part" of its rank says when it is.
        asks: its train_func calls `should_save`.
    """

    rank: int
    kind: str
    call: int | None = None
    source: Mapping[str, Any] | None = None
    location: Mapping[str, Any] | None = None
    coming: bool = False
    asks: bool = False


@dataclass(slots=True, kw_only=True)
class LedgerEntry:
    """A report with data of at least one rank.

    Attributes:
        index: its number.
        since: when the first rank brought data.
        entries: by rank.
        metrics: of rank 0.
        time: when rank 0 reported, by its clock.
        name: directory name that the user chose.
        directory: the directory it is committed in, once that is settled.
        validation: False, True, or arguments of the validation.
        sealed: ranks whose writer has all of their part.
        staged: ranks whose part goes by a disk of their node.
        left: ranks whose node finishes what they have handed over if they die.
        durable: ranks whose part is stored, or whose directory has come.
        agreed: this is the save that all ranks agreed on before they move.
    """

    index: int
    since: float
    entries: dict[int, Entry] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    time: float | None = None
    name: str | None = None
    directory: str | None = None
    validation: Any = False
    sealed: set[int] = field(default_factory=set)
    staged: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    durable: set[int] = field(default_factory=set)
    stage: Stage = Stage.OPEN
    agreed: bool = False

    @property
    def kind(self) -> str:
        """Kind of its entries; `ReportLedger.disagreement` checks that they agree."""
        return next(iter(self.entries.values())).kind

    @property
    def in_parts(self) -> bool:
        """Whether the workers' own writers store it."""
        return self.kind in ("state", "values")

    @property
    def coming(self) -> set[int]:
        """Ranks whose directory is still on its way."""
        return {rank for rank, entry in self.entries.items() if entry.coming} - self.durable

    @property
    def is_durable(self) -> bool:
        """Whether every part is stored."""
        return self.durable >= self.entries.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question of a rank, answered when the reports before it have ended.

    Attributes:
        upto: number of reports this rank had entered.
        what: "checkpoint" or "all".
        mode: "committed" or "validated".
        since: when it came.
        deadline: when it is answered with what is known then.
    """

    rank: int
    call: int
    upto: int
    what: str
    mode: str = "committed"
    since: float = 0.0
    deadline: float | None = None


class ReportLedger:
    """Reports of one group of workers.

    Args:
        world_size: number of ranks.
        first_index: number of the first report of this group.

    Attributes:
        entered: the highest report that each rank has entered.
        finished: ranks whose train_func has ended.
        reports: reports with data that have not ended, by number.
        failed: errors of reports that some ranks have not entered yet: the rest must not become a checkpoint.
        asks: questions that wait.
    """

    def __init__(self, world_size: int, first_index: int = 1) -> None:
        self.first_index = first_index
        self.entered = [first_index - 1] * world_size
        self.finished: set[int] = set()
        self.reports: dict[int, LedgerEntry] = {}
        self.failed: dict[int, BaseException] = {}
        self.asks: list[Ask] = []
        self._metrics: dict[int, Mapping[str, Any]] = {}  # of reports to which rank 0 brought no data, others may

    @property
    def any_report(self) -> bool:
        """Whether any rank has reported anything."""
        return max(self.entered) >= self.first_index

    @property
    def uploading(self) -> dict[int, int]:
        """The first report of each rank whose upload by a function of the user goes on in the background."""
        found: dict[int, int] = {}
        for index, report in sorted(self.reports.items()):
            for rank in sorted(report.coming):
                if report.entries[rank].kind == "uploaded":
                    found.setdefault(rank, index)
        return found

    def enter(self, rank: int, upto: int) -> None:
        """Note that ``rank`` has entered all reports up to ``upto``."""
        self.entered[rank] = max(self.entered[rank], upto)

    def bring(self, index: int, entry: Entry, now: float) -> LedgerEntry:
        """Note that a rank has entered report ``index`` with data."""
        self.enter(entry.rank, index)
        if (report := self.reports.get(index)) is None:
            report = self.reports[index] = LedgerEntry(index=index, since=now, metrics=self._metrics.pop(index, {}))
        report.entries[entry.rank] = entry
        return report

    def measure(self, metrics: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the metrics of rank 0 for reports, by number, to which it brings no data: another rank may."""
        behind = min((at for rank, at in enumerate(self.entered) if rank not in self.finished), default=math.inf)
        for index, told in metrics.items():
            if (report := self.reports.get(index)) is not None:
                report.metrics = told
            elif index > behind:
                self._metrics[index] = told
        while self._metrics and ((oldest := next(iter(self._metrics))) <= behind or len(self._metrics) > _MAX_WAITING):
            del self._metrics[oldest]

    def end(self, report: LedgerEntry, error: BaseException | None = None) -> None:
        """Forget a report: it is committed, or has failed with ``error``."""
        report.stage = Stage.ENDED
        self.reports.pop(report.index, None)
        if error is not None and self.missing(report.index):
            self.failed[report.index] = error

    # -- who is missing ------------------------------------------------------------------------------------------

    def missing(self, index: int) -> list[int]:
        """Ranks that have not entered report ``index``."""
        return [rank for rank, entered in enumerate(self.entered) if entered < index]

    def waits_for_ranks(self, report: LedgerEntry) -> bool:
        """Whether the report cannot be committed yet because ranks are missing.

        What `save_checkpoint` saves belongs to rank 0 alone.
        """
        return report.kind != "values" and bool(self.missing(report.index))

    def overdue(self, now: float, timeout_s: float) -> tuple[int, list[int]] | None:
        """Return a report that ranks have not entered in time or will never enter, with those ranks; else None."""
        for index, since, missing, gone in self._waiting():
            if gone or now - since >= timeout_s:
                return index, gone or missing
        return None

    def next_timeout(self, timeout_s: float) -> float | None:
        """Return when `overdue` may have a new result."""
        return min((since + timeout_s for _, since, _, _ in self._waiting()), default=None)

    def _waiting(self) -> Iterator[tuple[int, float, list[int], list[int]]]:
        """Yield where ranks wait for others: report, since when, for which ranks, and which of these have finished."""
        for index, report in sorted(self.reports.items()):
            if report.stage is Stage.OPEN and self.waits_for_ranks(report):
                missing = self.missing(index)
                yield index, report.since, missing, [rank for rank in missing if rank in self.finished]
        for ask in self.asks:
            # A rank that has finished makes no more reports: nobody has to wait for it.
            missing = [rank for rank in self.missing(ask.upto) if rank not in self.finished]
            if missing:
                yield ask.upto, ask.since, missing, []

    # -- what can be done ----------------------------------------------------------------------------------------

    def disagreement(self, report: LedgerEntry) -> str | None:
        """Return why a complete report cannot be committed, because its ranks differ; None if they agree."""
        kinds = sorted({entry.kind for entry in report.entries.values()})
        if len(kinds) > 1 and kinds != ["directory", "uploaded"]:
            found = ", ".join(f"rank {rank}: {report.entries[rank].kind}" for rank in sorted(report.entries))
            return f"ranks reported different kinds of checkpoints ({found}); all must report the same kind"
        absent = [rank for rank in range(len(self.entered)) if rank not in report.entries]
        if kinds == ["state"] and absent:
            return (
                f"{rank_list(absent)} called it without state=; the ranks share the work of storing a state, so all of "
                "them must pass it"
            )
        places = {str(entry.location) for entry in report.entries.values() if entry.location is not None}
        if len(places) > 1:
            return f"ranks named different places: {', '.join(sorted(places))}; a checkpoint lies in one place"
        return None

    def committable(self) -> list[LedgerEntry]:
        """Return the reports that can be committed now, or never, in order."""
        return [
            report
            for _, report in sorted(self.reports.items())
            if report.stage is Stage.OPEN
            and not self.waits_for_ranks(report)
            and (
                (not report.coming and (report.is_durable or not report.in_parts))
                or self.disagreement(report) is not None  # for which nothing has to be waited for
            )
        ]

    def salvageable(self, dead: Iterable[int], lost: Container[int]) -> tuple[list[LedgerEntry], list[LedgerEntry]]:
        """Find reports that can still be committed after ranks have died.

        Args:
            dead: those ranks.
            lost: ranks whose node is lost too: it finishes nothing.

        Returns:
            Reports whose missing parts are left to writers that outlive their workers, and those that living workers,
            or the nodes of dead ones, may still seal or upload.
        """
        ended = set(dead)
        sure: list[LedgerEntry] = []
        possible: list[LedgerEntry] = []
        for _, report in sorted(self.reports.items()):
            if report.stage is not Stage.OPEN or not (report.in_parts or report.coming) or self.waits_for_ranks(report):
                continue
            if self.disagreement(report):
                continue
            gone = {rank for rank in ended if rank not in report.left or rank in lost}
            if report.coming:
                possible += [report] if gone.isdisjoint(report.coming) else []
            elif report.sealed | report.durable >= report.entries.keys():
                sure.append(report)
            elif gone.isdisjoint(report.entries.keys() - report.sealed - report.durable):
                possible.append(report)
        return sure, possible

    def is_settled(self, ask: Ask) -> bool:
        """Whether all reports that ``ask`` has to wait for have ended, so that every rank gets the same answer."""
        if any(rank not in self.finished for rank in self.missing(ask.upto)):
            return False
        for index, report in self.reports.items():
            # A rank that reported a directory with SYNC, or values, has waited for the commit itself.
            waits = ask.what == "all" or any(
                entry.call is not None and entry.kind != "state" for entry in report.entries.values()
            )
            if index <= ask.upto and waits:
                return False
        return True


class CallbackCalls:
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
        """Take the metrics of a rank for report ``index``."""
        if self._wanted:
            self._waiting.setdefault(index, {})[rank] = metrics

    def complete(self, ledger: ReportLedger, *, before: int | None = None, ordered: bool = True) -> list[Call]:
        """Return the calls for reports without data that no rank will add to, in order.

        Ranks that never make a report (they have ended, or are ten thousand reports behind) have no metrics in it.
        Calls for reports with data follow their commits, and those for the reports after them come later still: who
        passes them on (to Ray Tune, to a tracker) takes the last one for the newest.

        Args:
            ledger: of the group.
            before: only those for reports before this one; None: for all.
            ordered: wait for the commits of earlier reports; False: they are not waited for any more.
        """
        if not self._waiting:
            return []
        behind = [at for rank, at in enumerate(ledger.entered) if rank not in ledger.finished]
        reached = min(behind, default=max(ledger.entered))
        if ordered:
            reached = min([reached, *ledger.reports])
        if before is not None:
            reached = min(reached, before - 1)
        calls = []
        for index in sorted(self._waiting):
            if index > reached and len(self._waiting) <= _MAX_WAITING:
                break
            if index not in ledger.reports:
                calls.append(self._call(self._waiting.pop(index), None))
        return calls

    def committed(self, report: LedgerEntry, location: Mapping[str, Any], ledger: ReportLedger | None) -> list[Call]:
        """Return the call for a report whose checkpoint is committed, after those for reports before it.

        Args:
            report: has left the ledger.
            location: of the checkpoint.
            ledger: of the group that runs; None: the report is of an earlier one.
        """
        if not self._wanted:
            return []
        others = self._waiting.pop(report.index, {}) if ledger is not None else {}
        before = [] if ledger is None else self.complete(ledger, before=report.index)
        return [*before, self._call({**others, 0: report.metrics}, location)]

    def forget(self, index: int) -> None:
        """Forget a report that failed."""
        self._waiting.pop(index, None)

    def _call(self, metrics: Mapping[int, Mapping[str, Any]], location: Mapping[str, Any] | None) -> Call:
        by_rank = [dict(metrics.get(rank, {})) for rank in range(self._size)]
        return Call(hook="after_report", arguments={"metrics": by_rank, "checkpoint": location})
