"""The controller's half of `report`: messages of workers about their reports, and the answers."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from holdfast._ranks import rank_list
from holdfast.errors import ConfigError, ReportMismatchError

from ..transit import error_from_wire
from ..types import TIMESTAMP
from .actions import Action, Answer, Note, StoreRows
from .commits import Commits, UnwrittenValues, epoch_of
from .plan import RunSpec, is_worth_writing
from .report_ledger import Ask, Entry, LedgerEntry, ReportLedger
from .starts import Start, choose_start

__all__ = ["Reports"]


class Reports:
    """Takes messages of workers about reports, and puts out the actions that follow.

    Args:
        plan: of the run.
        commits: what commits them.
        out: where actions go.

    Attributes:
        ledger: reports of the group that runs.
    """

    def __init__(self, plan: RunSpec, commits: Commits, out: list[Action]) -> None:
        self._plan, self._commits, self._out = plan, commits, out
        self.ledger = commits.ledger
        self._answers: dict[tuple[int, int], Start] = {}
        self._asked: dict[tuple[int, int], int] = {}

    def begin(self, ledger: ReportLedger) -> None:
        """Begin with the reports of a new group."""
        self.ledger, self._answers, self._asked = ledger, {}, {}

    # -- what workers say ----------------------------------------------------------------------------------------

    def take(self, rank: int, header: Mapping[str, Any], attachments: tuple[bytes, ...], now: float) -> bool:
        """Take a message; return False if it is not about reports."""
        on = header["on"]
        if on == "rows":
            self.ledger.enter(rank, header["first"] + len(header["rows"]) - 1)
            self._rows(rank, header["first"], header["rows"])
        elif on == "count":
            self.ledger.enter(rank, header["upto"])
        elif on == "report":
            self._report(rank, header, now)
        elif on in ("part", "sealed", "staged"):
            self._part(rank, header, attachments)
        elif on == "memory":
            self._memory(header["index"], attachments[0])
        elif on == "ask":
            self._ask(rank, header, now)
        else:
            return False
        return True

    def _rows(self, rank: int, first: int, given: Iterable[Mapping[str, Any]]) -> None:
        rows = [_row(first + place, row["metrics"], row["time"]) for place, row in enumerate(given)]
        if rank == 0:
            self._out.append(StoreRows(rows=rows))
            self.ledger.measure({row["step"]: row["metrics"] for row in rows})
        for row in rows:
            self._commits.callbacks.note(row["step"], rank, row["metrics"])

    def _report(self, rank: int, header: Mapping[str, Any], now: float) -> None:
        index, kind, call = header["index"], header["kind"], header.get("call")
        entry = Entry(
            rank=rank,
            kind=kind,
            call=call,
            source=header.get("source"),
            location=header.get("location"),
            coming=bool(header.get("coming")),
            asks=bool(header.get("asks")),
        )
        metrics = header.get("metrics") or {}
        self._commits.callbacks.note(index, rank, metrics)
        if rank == 0 and kind != "values":
            self._out.append(StoreRows(rows=[_row(index, metrics, header.get("time"))]))
        if (failure := self.ledger.failed.get(index)) is not None:
            self.ledger.enter(rank, index)
            self._commits.tell(rank, call, index, failure)
            return
        report = self.ledger.bring(index, entry, now)
        if rank == 0:
            report.metrics = metrics
        if header.get("unfinished"):
            report.left.add(rank)
        report.agreed = report.agreed or bool(header.get("agreed"))
        report.validation = report.validation or header.get("validation") or False
        try:
            self._name(report, header.get("name"))
            if kind == "values":
                self._values(report, header)
            elif kind == "state":
                if report.directory is None:
                    report.directory = self._commits.known.allocate(report.name)
                self._go(report, rank, header["call"])
        except ConfigError as error:
            self._commits.fail(report, error, ranks=report.entries.keys() - {rank})
            self._commits.tell(rank, call, index, error)

    def _name(self, report: LedgerEntry, name: str | None) -> None:
        if name is None or name == report.name:
            return
        if report.name is not None or report.directory is not None:
            other = repr(report.name) if report.name is not None else "none"
            raise ConfigError(
                f"checkpoint_dir_name={name!r} in report {report.index}: another rank gave {other}; every rank must "
                "give the same"
            )
        report.name = name

    def _values(self, report: LedgerEntry, header: Mapping[str, Any]) -> None:
        """Decide about a checkpoint of `save_checkpoint` and answer."""
        strategy, known = self._plan.strategy, self._commits.known
        score, call = header.get("score"), header["call"]
        if strategy is not None:
            report.metrics = {**report.metrics, strategy["attribute"]: score}
            kept = known.scores(strategy["attribute"])
            limit, order = strategy["num_to_keep"], strategy["order"]
            if strategy["attribute"] == TIMESTAMP and order == "max":
                score = math.inf  # the newest is the best, also after a clock went back
            if not is_worth_writing(score, kept, num_to_keep=limit, order=order):
                report.directory = known.skip()
                self._out.append(Note(key="number", value=known.number))
                self._out.append(Answer(rank=0, call=call, value={"memory": True}))
                return
        report.directory = known.allocate(report.name, score=score)
        self._go(report, 0, call)

    def _go(self, report: LedgerEntry, rank: int, call: int) -> None:
        self._out.append(Answer(rank=rank, call=call, value={"go": self._commits.job(report)}))

    def _part(self, rank: int, header: Mapping[str, Any], attachments: tuple[bytes, ...]) -> None:
        report = self.ledger.reports.get(header["index"])
        if report is None:
            return  # it failed by a message of another rank
        if header["on"] == "sealed":
            report.sealed.add(rank)
        elif header["on"] == "staged":
            report.staged.add(rank)
            if header.get("unfinished"):
                report.left.add(rank)
        elif "error" in header:
            error = error_from_wire(header["error"], attachments[0] if attachments else b"")
            self._commits.fail(report, error, ranks=report.entries.keys() - {rank})  # the rank itself knows
        else:
            entry = report.entries[rank]
            source, location = header.get("source", entry.source), header.get("location", entry.location)
            report.entries[rank] = replace(entry, source=source, location=location)
            report.durable.add(rank)

    def _memory(self, index: int, values: bytes) -> None:
        report = self.ledger.reports.get(index)
        if report is None or report.directory is None:
            return
        self._commits.known.memory = UnwrittenValues(
            attempt=self._commits.attempt, step=index, name=report.directory, values=values
        )
        self.ledger.end(report)

    def _ask(self, rank: int, header: Mapping[str, Any], now: float) -> None:
        timeout_s = header.get("timeout_s")
        self.ledger.asks.append(
            Ask(
                rank=rank,
                call=header["call"],
                upto=header.get("upto", 0),
                what=header["what"],
                mode=header.get("mode", "committed"),
                since=now,
                deadline=None if timeout_s is None else now + timeout_s,
            )
        )

    # -- answers and deadlines ---------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Answer what can be answered; call callbacks for reports without data."""
        self._out += self._commits.callbacks.complete(self.ledger)
        for ask in list(self.ledger.asks):
            waits = ask.what == "all" and ask.mode == "validated" and self._commits.unsettled
            late = ask.deadline is not None and now >= ask.deadline
            if late or (not waits and self.ledger.is_settled(ask)):
                self.ledger.asks.remove(ask)
                self._out.append(self._answer(ask))

    def mismatch(self, now: float) -> tuple[list[int], ReportMismatchError] | None:
        """Return ranks that miss a report of others, and the error, once these have waited ``report_s``; else None."""
        limit = self._plan.limits.report_s
        found = self.ledger.overdue(now, limit)
        if found is None:
            return None
        index, ranks = found
        ended = all(rank in self.ledger.finished for rank in ranks)
        counts = ", ".join(f"rank {rank}: {entered}" for rank, entered in enumerate(self.ledger.entered))
        why = "ended without it" if ended else f"did not come to it within {limit:g} s (HOLDFAST_REPORT_TIMEOUT_S)"
        return ranks, ReportMismatchError(
            f"report {index} was not called by {rank_list(ranks)}: {'they' if len(ranks) > 1 else 'it'} {why} (last "
            f"report of {counts}); every rank must call report equally often, those without a checkpoint too"
            + (f"; {uneven}" if (uneven := self._commits.uneven) else "")
        )

    def salvage(self, dead: Iterable[int], wait_s: float, *, lost: Container[int]) -> bool:
        """Commit what is complete although ranks are dead; return True while parts may still come.

        Args:
            dead: ranks that say nothing more.
            wait_s: how long parts of theirs are waited for.
            lost: ranks whose node is lost too.
        """
        for report in self.ledger.committable():
            self._commits.commit(report)
        sure, possible = self.ledger.salvageable(dead, lost)
        for report in sure:
            self._commits.commit(report, wait_s=max(wait_s, 0.1))
        return bool(possible) or self._commits.busy

    def next_deadline(self) -> float | None:
        """Return when there is something to do even if no message comes; None: never."""
        times = [ask.deadline for ask in self.ledger.asks if ask.deadline is not None]
        if (limit := self.ledger.next_timeout(self._plan.limits.report_s)) is not None:
            times.append(limit)
        return min(times, default=None)

    def _answer(self, ask: Ask) -> Answer:
        if ask.what == "all":
            return Answer(rank=ask.rank, call=ask.call, value={"checkpoints": self._commits.described()})
        # The n-th question after the same report has the same answer on every rank, even if more is committed by then.
        place = self._asked.get((ask.rank, ask.upto), 0)
        self._asked[ask.rank, ask.upto] = place + 1
        newest = self._answers.get((ask.upto, place))
        known = self._commits.known
        if newest is None or (newest.kept is not None and newest.kept.name not in known.kept):
            newest = self._answers[ask.upto, place] = choose_start(self._plan, known.newest(), known.memory)
        behind = min(self.ledger.entered)
        self._answers = {key: value for key, value in self._answers.items() if key[0] >= behind}
        self._asked = {key: count for key, count in self._asked.items() if key[1] >= behind}
        value = {"checkpoint": newest.location, "memory": newest.memory is not None}
        return Answer(rank=ask.rank, call=ask.call, value=value, memory=newest.memory)


def _row(index: int, metrics: Mapping[str, Any], at: float | None) -> dict[str, Any]:
    return {"step": index, "epoch": epoch_of(metrics), "time": at, "metrics": dict(metrics)}
