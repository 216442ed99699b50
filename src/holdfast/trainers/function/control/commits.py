"""From complete reports to committed checkpoints, and what follows: retention, validation, messages to workers.

`KnownCheckpoints` has those of the run: which exist, the name of the next, which is the newest. `Validations` is the
queue of checkpoints that are validated in the background, one at a time.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast._ranks import rank_list
from holdfast.errors import ConfigError, HoldfastError, ReportMismatchError
from holdfast.run.names import LATEST, RUN_NAMES, is_checkpoint_name
from holdfast.run.record import Record, metric_value
from holdfast.storage.base import check_path
from holdfast.writer.messages import IngestSource, SaveResult

from ..types import VALIDATED, ReportedCheckpointStatus, without_marks
from .actions import Action, Answer, Commit, LateMetrics, Protect, Say, Send, StopValidation, Validate
from .plan import RunSpec
from .report_ledger import CallbackCalls, LedgerEntry, ReportLedger, Stage

__all__ = ["WANTED", "Commits", "KnownCheckpoints", "UnwrittenValues", "Validations", "epoch_of", "status_of"]

WANTED = "wanted"
"""``manifest.extra["validation"]`` of a checkpoint that is to be validated, when the report gave no arguments."""
_OUTCOMES = {
    True: ReportedCheckpointStatus.VALIDATED,
    "failed": ReportedCheckpointStatus.VALIDATION_FAILED,
    "timeout": ReportedCheckpointStatus.VALIDATION_TIMEOUT,
}
_NUMBERED = re.compile(r"checkpoint_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A checkpoint whose validation waits or runs."""

    name: str
    timeout_s: float
    arguments: Mapping[str, Any]


class Validations:
    """First come, first served, one at a time.

    Attributes:
        running: the validation that runs.
        deadline: when it has run for too long.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: deque[Waiting] = deque()
        self.running: Waiting | None = None
        self.deadline: float | None = None
        self.expired = False

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self.running is None and not self._queue

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of checkpoints whose validation runs or waits."""
        running = (self.running.name,) if self.running is not None else ()
        return (*running, *(waiting.name for waiting in self._queue))

    def add(self, name: str, wanted: Any) -> None:
        """Queue a checkpoint.

        Args:
            name: of the checkpoint.
            wanted: True or `WANTED`, or {"timeout_s", "fn_kwargs"}.
        """
        if name in self.pending:
            return
        options = dict(wanted) if isinstance(wanted, Mapping) else {}
        timeout_s = options.get("timeout_s")
        self._queue.append(
            Waiting(
                name=name,
                timeout_s=self._timeout_s if timeout_s is None else float(timeout_s),
                arguments=dict(options.get("fn_kwargs") or {}),
            )
        )

    def forget(self, name: str) -> None:
        """Drop a validation that waits: its checkpoint is gone."""
        self._queue = deque(waiting for waiting in self._queue if waiting.name != name)

    def start(self, now: float) -> Waiting | None:
        """Begin the next validation if none runs; return it, or None."""
        if self.running is not None or not self._queue:
            return None
        self.running = self._queue.popleft()
        self.deadline, self.expired = now + self.running.timeout_s, False
        return self.running

    def is_overdue(self, now: float) -> bool:
        """Whether the running validation has to be stopped; True once."""
        if self.deadline is None or now < self.deadline:
            return False
        self.deadline, self.expired = None, True
        return True

    def end(self, value: Mapping[str, Any], error: BaseException | None) -> tuple[Waiting, dict[str, Any], str | None]:
        """End the running validation, and say what its checkpoint gets.

        Returns:
            What ran, its late metrics, and what went wrong in one line.
        """
        done = self.running
        if done is None:
            raise RuntimeError("no validation runs")
        self.running = self.deadline = None
        if self.expired:
            return done, {VALIDATED: "timeout"}, f"stopped after {done.timeout_s:g} s (timeout_s)"
        if error is not None:
            return done, {VALIDATED: "failed"}, f"{type(error).__name__}: {error}".partition("\n")[0]
        return done, {**value, VALIDATED: True}, None


def status_of(name: str, metrics: Mapping[str, Any], pending: tuple[str, ...]) -> ReportedCheckpointStatus:
    """Return how far a committed checkpoint has come."""
    if name in pending:
        return ReportedCheckpointStatus.PENDING_VALIDATION
    mark = metrics.get(VALIDATED)
    known = isinstance(mark, (bool, str))  # a metric of a user may have this name
    return _OUTCOMES.get(mark, ReportedCheckpointStatus.COMMITTED) if known else ReportedCheckpointStatus.COMMITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwrittenValues:
    """The newest values of `save_checkpoint` that were not written."""

    attempt: int
    step: int
    name: str
    values: bytes

    @property
    def order(self) -> tuple[int, int]:
        """The highest is the newest."""
        return (self.attempt, self.step)


class KnownCheckpoints:
    """Names and order of checkpoints.

    Args:
        first_number: number of the first directory of a run.

    Attributes:
        kept: committed checkpoints by name.
        memory: what is kept in memory only.
        number: the highest number a checkpoint of this run ever had; below ``first_number`` if none had.
    """

    def __init__(self, first_number: int = 0) -> None:
        self.kept: dict[str, Record] = {}
        self.memory: UnwrittenValues | None = None
        self.number = first_number - 1
        self._taken: set[str] = set()
        self._set_aside: frozenset[str] = frozenset()
        self._pending: dict[str, Any] = {}

    def refresh(self, kept: Iterable[Record], *, taken: Iterable[str] = (), set_aside: Iterable[str] = ()) -> None:
        """Take over what was found under the run: checkpoints, all names, and names of damaged checkpoints."""
        self.kept = {record.name: record for record in kept}
        self._set_aside = frozenset(set_aside)
        self._taken = {*taken, *self.kept, *self._set_aside}
        numbers = (int(match[1]) for name in self._taken if (match := _NUMBERED.fullmatch(name)))
        self.number = max(self.number, *numbers, -1)

    def allocate(self, name: str | None = None, *, score: Any = None, uploaded: bool = False) -> str:
        """Return the directory of a new checkpoint, and reserve it.

        Args:
            name: what the user chose; None numbers it. The name of a checkpoint that was set aside gets a number added.
            score: of a dict checkpoint on its way to the disk.
            uploaded: the directory is there already.

        Raises:
            ConfigError: the name is taken, or not allowed.
        """
        if name is None:
            self.number += 1
            name = f"checkpoint_{self.number:06d}"
        elif name in self._set_aside and not uploaded:
            others = (f"{name}-{number}" for number in itertools.count(2))
            name = next(other for other in others if other not in self._taken and other not in self._pending)
        else:
            self._check(name, uploaded=uploaded)
        self._pending[name] = score
        return name

    def skip(self) -> str:
        """Return the name of a checkpoint that is not written: it takes a number all the same."""
        self.number += 1
        return f"checkpoint_{self.number:06d}"

    def _check(self, name: str, *, uploaded: bool) -> None:
        if not is_checkpoint_name(check_path(name)):
            raise ConfigError(
                f"checkpoint_dir_name={name!r}: it becomes the name of a directory of the run; give a plain name "
                f"that does not begin with a dot and is none of {', '.join((*RUN_NAMES, LATEST))}"
            )
        if name in self.kept or name in self._pending or (name in self._taken and not uploaded):
            raise ConfigError(
                f"checkpoint_dir_name={name!r} is taken in this run: every checkpoint needs a name of its own; put the "
                "epoch or step into it, or leave it out to have them numbered"
            )

    def committed(self, record: Record) -> None:
        """Enter a checkpoint."""
        self._pending.pop(record.name, None)
        self._taken.add(record.name)
        self.kept[record.name] = record

    def failed(self, name: str) -> None:
        """Note that a checkpoint was not saved: its name is free again."""
        self._pending.pop(name, None)

    def newest(self) -> Record | None:
        """Return the newest committed checkpoint; None if there is none."""
        return max(self.kept.values(), key=lambda record: record.order, default=None)

    def in_order(self) -> list[Record]:
        """Return all committed checkpoints, oldest first."""
        return sorted(self.kept.values(), key=lambda record: record.order)

    def scores(self, attribute: str) -> list[Any]:
        """Return the scores of checkpoints on the disk and on their way to it."""
        return [*(metric_value(record.metrics, attribute) for record in self.kept.values()), *self._pending.values()]


class Commits:
    """Commits complete reports and sends the outcome to the workers.

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

    def begin(self, ledger: ReportLedger, *, run_id: str, attempt: int, start_id: str, parent: str | None) -> None:
        """Begin with the reports of a new group."""
        self.ledger, self.undelivered, self.attempt, self._start_id = ledger, [], attempt, start_id
        self.size, self.just_saved, self.agreed_failed = len(ledger.entered), [], False
        self.longest_s = None
        self.callbacks.begin(self.size)
        self._newest, self._parents, self._brought = parent, {}, {}
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

    def advance(self) -> None:
        """Commit what is complete."""
        for report in self.ledger.committable():
            self.commit(report)

    def advance_validations(self, now: float) -> None:
        """Stop a validation that has run for too long, begin the next."""
        running = self.validations.running
        if running is not None and self.validations.is_overdue(now):
            self._out.append(StopValidation(name=running.name))
        if (waiting := self.validations.start(now)) is not None:
            self._out.append(Validate(name=waiting.name, arguments=waiting.arguments))

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
        if problem is None and report.directory is None:
            locations = (entry.location for entry in report.entries.values())
            place = next((location for location in locations if location is not None), None)
            try:
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
        ranks = tuple(sorted(report.entries))
        if report.in_parts:
            self._out.append(Commit(index=report.index, **job, writers=ranks, wait_s=wait_s))
            return
        if ranks not in self._brought:
            self._brought[ranks] = report.index
            if self.uneven:
                self._out.append(Say(line=self.uneven))
        sources = tuple(
            IngestSource(rank=rank, **entry.source)
            for rank in ranks
            if (entry := report.entries[rank]).kind == "directory" and entry.source is not None
        )
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
        self._out += self.callbacks.committed(report, told, current=ledger is self.ledger)

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
                self.tell(rank, None if report.in_parts else report.entries[rank].call, report.index, error)

    def tell(self, rank: int, call: int | None, index: int, error: BaseException) -> None:
        """Let a rank know of an error: as the answer to its call, or as trouble that its next call raises."""
        if call is not None:
            self._out.append(Answer(rank=rank, call=call, error=error))
        else:
            self._out.append(Send(rank=rank, header={"do": "trouble", "index": index}, error=error))

    def deleted(self, names: Iterable[str]) -> None:
        """Forget checkpoints that retention removed."""
        for name in names:
            self.known.kept.pop(name, None)
            self.validations.forget(name)

    # -- validation ----------------------------------------------------------------------------------------------

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


def epoch_of(metrics: Mapping[str, Any]) -> float | None:
    """Return the metric "epoch" if it is a number, else None; it serves rules such as ``Keep(every="5ep")``."""
    value = metrics.get("epoch")
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value  # noqa: PLR0124
    return value if known else None
