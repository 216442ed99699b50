"""The controller's half of `report`: messages of workers, commits of complete reports, answers, and what follows.

What follows is retention, validation, and messages to workers and callbacks.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from holdfast._ranks import rank_list
from holdfast.errors import ConfigError, HoldfastError, ReportMismatchError
from holdfast.run.record import Record
from holdfast.writer.messages import IngestSource, SaveResult

from ..config import TIMESTAMP, without_marks
from ..transit import add_note, error_from_wire
from .actions import Action, Answer, Commit, LateMetrics, Note, Protect, Say, Send, StopValidation, StoreRows, Validate
from .checkpoints import WANTED, KnownCheckpoints, Start, UnwrittenValues, Validations, choose_start, status_of
from .plan import RunSpec, is_worth_writing
from .report_ledger import Ask, CallbackCalls, Entry, LedgerEntry, ReportLedger, Stage


class Reports:
    """Takes messages of workers about reports, commits what is complete and sends the outcome to the workers.

    Args:
        plan: of the run.
        out: where actions go.

    Attributes:
        known: the checkpoints of the run.
        ledger: reports of the group that runs.
        validations: those that wait or run.
        callbacks: the calls of callbacks about reports.
        undelivered: (rank, error) of background saves that failed when the rank took no message any more.
        attempt: number of the attempt that runs.
        size: number of its workers.
        just_saved: whether each commit of this group since the last look was an agreed save.
        agreed_failed: an agreed save of this group has failed since the last look.
        longest_s: how long the slowest save of this group took, from its first rank to the commit; None: no
            save yet by ranks that call `should_save`.
    """

    def __init__(self, plan: RunSpec, out: list[Action]) -> None:
        self._plan, self._out = plan, out
        self.known = KnownCheckpoints(first_number=1 if plan.strategy is not None else 0)
        self.size = plan.num_workers
        self.ledger = ReportLedger(plan.num_workers)
        self.validations = Validations(timeout_s=plan.limits.validation_s)
        self.callbacks = CallbackCalls(plan.num_workers, wanted=plan.has_callbacks)
        self.undelivered: list[tuple[int, BaseException]] = []
        self.attempt = 0
        self.just_saved: list[bool] = []
        self.agreed_failed = False
        self.longest_s: float | None = None
        self._under_way: dict[str, tuple[LedgerEntry, ReportLedger]] = {}
        self._wanted: set[str] = set()
        self._ranking: set[str] = set()  # validated; what retention deletes for their metrics is not known yet
        self._fields: dict[str, Any] = {}
        self._warned: set[str] = set()  # warnings that came before: each is printed once
        self._newest: str | None = None  # id of the newest checkpoint that this group had, or began with
        self._parents: dict[str, str | None] = {}  # of saves under way: all writers of a save have to name the same
        self._start_id = ""
        self._brought: dict[tuple[int, ...], int] = {}  # ranks that brought directories together -> first report
        self._answers: dict[tuple[int, int], Start] = {}
        self._asked: dict[tuple[int, int], int] = {}
        self._roots: dict[int, int] = {}  # a report that failed -> the one before it whose failure was the cause

    def begin(self, ledger: ReportLedger, *, run_id: str, attempt: int, start_id: str, parent: str | None) -> None:
        """Begin with the reports of a new group."""
        for report in self.ledger.reports.values():
            if report.directory is not None and report.stage is Stage.OPEN:
                self.known.failed(report.directory)  # its name is free: nobody will complete it
        self.ledger, self.undelivered, self.attempt, self._start_id = ledger, [], attempt, start_id
        self.size, self.just_saved, self.agreed_failed = len(ledger.entered), [], False
        self.longest_s = None
        self.callbacks.begin(self.size)
        self._newest, self._parents, self._brought = parent, {}, {}
        self._answers, self._asked, self._roots = {}, {}, {}
        self._fields = {
            "run_id": run_id,
            "attempt": attempt,
            "world_size": self.size,
            "versions": dict(self._plan.versions),
        }

    @property
    def busy(self) -> bool:
        """Whether commits are under way."""
        return bool(self._under_way)

    @property
    def pending_validation(self) -> tuple[str, ...]:
        """Names of checkpoints, committed or about to be, whose validation has not ended."""
        return tuple(sorted({*self._wanted, *self.validations.pending}))

    @property
    def unsettled(self) -> bool:
        """Whether a validation may still change what there is: it waits, runs, or its metrics rank anew just now."""
        return bool(self._ranking or self.pending_validation)

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
            self.callbacks.note(row["step"], rank, row["metrics"])

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
        self.callbacks.note(index, rank, metrics)
        if rank == 0 and kind != "values":
            self._out.append(StoreRows(rows=[_row(index, metrics, header.get("time"))]))
        if (failure := self.ledger.failed.get(index)) is not None:
            self.ledger.enter(rank, index)
            self.tell(rank, call, index, failure)
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
                    report.directory = self.known.allocate(report.name)
                self._go(report, rank, header["call"])
        except ConfigError as error:
            self.fail(report, error, ranks=report.entries.keys() - {rank})
            self.tell(rank, call, index, error)

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
        strategy, known = self._plan.strategy, self.known
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
        self._out.append(Answer(rank=rank, call=call, value={"go": self.job(report)}))

    def _part(self, rank: int, header: Mapping[str, Any], attachments: tuple[bytes, ...]) -> None:
        report = self.ledger.reports.get(header["index"])
        if "error" in header:
            self._part_failed(rank, header, error_from_wire(header["error"], attachments[0] if attachments else b""))
        elif report is None:
            return  # it failed by a message of another rank
        elif header["on"] == "sealed":
            report.sealed.add(rank)
        elif header["on"] == "staged":
            report.staged.add(rank)
            if header.get("unfinished"):
                report.left.add(rank)
        else:
            report.durable.add(rank)
            where = {key: header[key] for key in ("source", "location") if key in header}
            if where:
                report.entries[rank] = replace(report.entries[rank], **where)

    def _part_failed(self, rank: int, header: Mapping[str, Any], error: BaseException) -> None:
        """Fail a report that a rank cannot bring its part of; it may be the first of all to say something of it."""
        index, root = header["index"], header.get("root", header["index"])
        if root == index:
            add_note(error, f"holdfast: on rank {rank}, in report {index}")
        elif index not in self._roots:
            self._roots[index] = root
            self._out.append(
                Say(line=f"report {index} makes no checkpoint: rank {rank} raised the error of report {root} in it")
            )
        report = self.ledger.reports.get(index)
        if report is not None:
            self.fail(report, error, ranks=report.entries.keys() - {rank})  # the rank itself knows
        elif self.ledger.missing(index):
            self.ledger.failed.setdefault(index, error)

    def _memory(self, index: int, values: bytes) -> None:
        report = self.ledger.reports.get(index)
        if report is None or report.directory is None:
            return
        self.known.memory = UnwrittenValues(attempt=self.attempt, step=index, name=report.directory, values=values)
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
        """Commit what is complete, answer what can be answered, call callbacks for reports without data."""
        for report in self.ledger.committable():
            self.commit(report)
        self._out += self.callbacks.complete(self.ledger)
        for ask in list(self.ledger.asks):
            waits = ask.what == "all" and ask.mode == "validated" and self.unsettled
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
            + (f"; {uneven}" if (uneven := self.uneven) else "")
        )

    def salvage(self, dead: Iterable[int], wait_s: float, *, lost: Container[int]) -> bool:
        """Commit what is complete although ranks are dead; return True while parts may still come.

        Args:
            dead: ranks that say nothing more.
            wait_s: how long parts of theirs are waited for.
            lost: ranks whose node is lost too.
        """
        for report in self.ledger.committable():
            self.commit(report)
        sure, possible = self.ledger.salvageable(dead, lost)
        for report in sure:
            self.commit(report, wait_s=max(wait_s, 0.1))
        return bool(possible) or self.busy

    def next_deadline(self) -> float | None:
        """Return when there is something to do even if no message comes; None: never."""
        times = [ask.deadline for ask in self.ledger.asks if ask.deadline is not None]
        if (limit := self.ledger.next_timeout(self._plan.limits.report_s)) is not None:
            times.append(limit)
        return min(times, default=None)

    def _answer(self, ask: Ask) -> Answer:
        if ask.what == "all":
            return Answer(rank=ask.rank, call=ask.call, value={"checkpoints": self.described()})
        # The n-th question after the same report has the same answer on every rank, even if more is committed by then.
        place = self._asked.get((ask.rank, ask.upto), 0)
        self._asked[ask.rank, ask.upto] = place + 1
        newest = self._answers.get((ask.upto, place))
        known = self.known
        if newest is None or (newest.kept is not None and newest.kept.name not in known.kept):
            newest = self._answers[ask.upto, place] = choose_start(self._plan, known.newest(), known.memory)
        behind = min(self.ledger.entered)
        self._answers = {key: value for key, value in self._answers.items() if key[0] >= behind}
        self._asked = {key: count for key, count in self._asked.items() if key[1] >= behind}
        value = {"checkpoint": newest.location, "memory": newest.memory is not None}
        return Answer(rank=ask.rank, call=ask.call, value=value, memory=newest.memory)

    # -- commits -------------------------------------------------------------------------------------------------

    def job(self, report: LedgerEntry) -> dict[str, Any]:
        """Return directory, save id and manifest fields: what every writer of this checkpoint has to know."""
        save_id = f"{self._start_id}-{report.index:x}"
        fields = {
            **self._fields,
            "checkpoint_id": f"{self._fields['run_id']}-{save_id}",
            "parent": self._parents.setdefault(save_id, self._newest),
            "step": report.index,
            "epoch": epoch_of(report.metrics),
            "metrics": dict(report.metrics),
        }
        if report.validation:
            wanted = dict(report.validation) if isinstance(report.validation, Mapping) else WANTED
            fields["extra"] = {"validation": wanted}
        return {"directory": report.directory, "save_id": save_id, "manifest": fields}

    def commit(self, report: LedgerEntry, *, wait_s: float = 0.0) -> None:
        """Commit a report, or fail it if that is impossible.

        Args:
            report: no rank has to add anything to it any more.
            wait_s: how long parts of dead workers are waited for.
        """
        problem = self._problem(report)
        ranks = tuple(sorted(report.entries))
        sources: tuple[IngestSource, ...] = ()
        if problem is None:
            locations = (entry.location for entry in report.entries.values())
            place = next((location for location in locations if location is not None), None)
            try:
                sources = tuple(
                    IngestSource(rank=rank, **entry.source)
                    for rank in ranks
                    if (entry := report.entries[rank]).kind == "directory" and entry.source is not None
                )
                if report.directory is None:
                    wanted = report.name if place is None else place["name"]
                    report.directory = self.known.allocate(wanted, uploaded=place is not None)
            except ConfigError as error:
                problem = error
        if problem is not None or report.directory is None:
            self.fail(report, problem or ConfigError("no directory"))
            return
        job = self.job(report)
        report.stage = Stage.COMMITTING
        self._under_way[job["save_id"]] = (report, self.ledger)
        if report.validation:
            # Before the commit: a later commit may be on its way already and must not delete this checkpoint.
            self._wanted.add(report.directory)
            self._protect()
        if report.in_parts:
            self._out.append(Commit(index=report.index, **job, writers=ranks, wait_s=wait_s))
            return
        if ranks not in self._brought:
            self._brought[ranks] = report.index
            if self.uneven:
                self._out.append(Say(line=self.uneven))
        uploaded = len(sources) < len(ranks)
        self._out.append(Commit(index=report.index, **job, sources=sources, uploaded=uploaded))

    @property
    def uneven(self) -> str:
        """Say that other ranks bring directories than before; "" if they are always the same."""
        if len(self._brought) < 2:
            return ""
        who = "; ".join(f"{rank_list(ranks)} from report {index} on" for ranks, index in self._brought.items())
        return (
            f"the ranks that bring a directory changed ({who}): if one of them calls report more often than others, "
            "these checkpoints hold files of different steps"
        )

    def _problem(self, report: LedgerEntry) -> HoldfastError | None:
        problem = self.ledger.disagreement(report)
        if problem is not None:
            return ReportMismatchError(f"report {report.index}: {problem}")
        if report.validation and not self._plan.validates:
            return ConfigError(
                f"report {report.index} asks for a validation: give the trainer a function for it, as in "
                "TorchTrainer(..., validation=fn)"
            )
        return None

    def done(self, action: Commit, result: SaveResult | None, error: BaseException | None, now: float) -> None:
        """Take the outcome of a commit; it may belong to a group that is gone."""
        report, ledger = self._under_way.pop(action.save_id)
        self._parents.pop(action.save_id, None)
        if result is None:
            self.fail(report, error or HoldfastError("the commit failed"), ledger=ledger)
            return
        ledger.end(report)
        fields, name = action.manifest, result.name
        if ledger is self.ledger:
            self._newest = fields["checkpoint_id"]
            self.just_saved.append(report.agreed)
            if all(entry.asks for entry in report.entries.values()):
                self.longest_s = max(self.longest_s or 0.0, now - report.since)
        self.deleted(gone for gone, _ in result.deleted)
        self.known.committed(
            Record(
                name=name,
                attempt=fields["attempt"],
                step=report.index,
                epoch=fields["epoch"],
                metrics=fields["metrics"],
                checkpoint_id=fields["checkpoint_id"],
            )
        )
        self._out += [Say(line=f"{name}: {text}") for text in result.warnings if text not in self._warned]
        self._warned.update(result.warnings)
        location = self._plan.location(name)
        for rank in range(self.size) if ledger is self.ledger else ():
            entry = report.entries.get(rank)
            if entry is not None and entry.call is not None and not report.in_parts:
                self._out.append(Answer(rank=rank, call=entry.call, value={"checkpoint": location}))
            message = {"do": "committed", "index": report.index, "checkpoint": location}
            self._out.append(Send(rank=rank, header=message))
        if name in self._wanted:
            self._wanted.discard(name)
            self.validations.add(name, report.validation)
        told = {**location, "step": fields["step"], "metrics": fields["metrics"], "manifest": result.manifest}
        self._out += self.callbacks.committed(report, told, self.ledger if ledger is self.ledger else None)

    def fail(
        self,
        report: LedgerEntry,
        error: BaseException,
        *,
        ranks: Iterable[int] | None = None,
        ledger: ReportLedger | None = None,
    ) -> None:
        """End a report with an error: ranks that wait get it as their answer, the others at their next call.

        Args:
            report: the report.
            error: why.
            ranks: those that get it; default: all that have reported.
            ledger: where the report belongs if not to the group that runs.
        """
        owner = ledger or self.ledger
        owner.end(report, error)
        if owner is self.ledger:
            self.callbacks.forget(report.index)
        if report.directory is not None:
            self.known.failed(report.directory)
            self._wanted.discard(report.directory)
        if owner is not self.ledger:
            self._out.append(Say(line=f"report {report.index} of the attempt before was not saved: {error}"))
            return
        self.agreed_failed = self.agreed_failed or report.agreed
        for rank in sorted(report.entries if ranks is None else ranks):
            if rank in owner.finished:
                self.undelivered.append((rank, error))
            else:
                entry = report.entries[rank]  # the call of a state was answered when its save began
                self.tell(rank, None if entry.kind in ("state", "values") else entry.call, report.index, error)

    def tell(self, rank: int, call: int | None, index: int, error: BaseException) -> None:
        """Let a rank know of an error: as the answer to its call, or as trouble that its next call raises."""
        if call is not None:
            self._out.append(Answer(rank=rank, call=call, error=error))
        else:
            header = {"do": "trouble", "index": index, "root": self._roots.get(index, index)}
            self._out.append(Send(rank=rank, header=header, error=error))

    def deleted(self, names: Iterable[str]) -> None:
        """Forget checkpoints that retention removed."""
        for name in names:
            self.known.kept.pop(name, None)
            self.validations.forget(name)

    # -- validation ----------------------------------------------------------------------------------------------

    def advance_validations(self, now: float) -> None:
        """Stop a validation that has run for too long, begin the next."""
        running = self.validations.running
        if running is not None and self.validations.is_overdue(now):
            self._out.append(StopValidation(name=running.name))
        if (waiting := self.validations.start(now)) is not None:
            self._out.append(Validate(name=waiting.name, arguments=waiting.arguments))

    def resume_validations(self, wanted: Mapping[str, Any]) -> None:
        """Take up validations that an earlier driver did not run, by checkpoint."""
        for name, options in wanted.items():
            if self._plan.validates and name in self.known.kept:
                self.validations.add(name, options)
        if self.validations.pending:
            self._protect()

    def validated(self, value: Mapping[str, Any] | None, error: BaseException | None) -> None:
        """Take the outcome of the validation that ran."""
        done, metrics, problem = self.validations.end(value or {}, error)
        if problem is not None:
            self._out.append(Say(line=f"the validation of {done.name} failed: {problem}"))
        kept = self.known.kept
        if done.name in kept:
            kept[done.name] = replace(kept[done.name], metrics={**kept[done.name].metrics, **metrics})
            self._protect()  # before: the new ranking may delete this checkpoint
            self._ranking.add(done.name)
            self._out.append(LateMetrics(name=done.name, metrics=metrics))

    def ranked(self, name: str, deleted: Iterable[str]) -> None:
        """Take the outcome of late metrics: the checkpoints that retention removed for them."""
        self._ranking.discard(name)
        self.deleted(deleted)

    def _protect(self) -> None:
        self._out.append(Protect(names=self.pending_validation))

    def described(self) -> list[dict[str, Any]]:
        """Describe every checkpoint that exists, oldest first, for the wire."""
        pending = self.pending_validation
        return [
            {
                "checkpoint": self._plan.location(record.name),
                "metrics": without_marks(record.metrics),
                "status": status_of(record.name, record.metrics, pending).value,
            }
            for record in self.known.in_order()
        ]


def _row(index: int, metrics: Mapping[str, Any], at: float | None) -> dict[str, Any]:
    return {"step": index, "epoch": epoch_of(metrics), "time": at, "metrics": dict(metrics)}


def epoch_of(metrics: Mapping[str, Any]) -> float | None:
    """Return the metric "epoch" if it is a number, else None; it serves rules such as ``Keep(every="5ep")``."""
    value = metrics.get("epoch")
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value  # noqa: PLR0124
    return value if known else None
