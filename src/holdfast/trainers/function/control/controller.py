"""The controller of a run: a state machine that takes events in and gives actions out, and does nothing else.

It reads no clock, starts no process and touches no storage, so every situation can be tested one step at a time.
`reports` beside it handles reports and commits; `plan` decides about failures.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from holdfast._ranks import rank_list
from holdfast.checkpointer.pending_saves import TRANSIENT_ERRORS
from holdfast.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HoldfastError,
    IncompleteCheckpointError,
    RunBusyError,
    TrainingError,
)
from holdfast.writer.messages import RunOpened

from ..engine import Capacity, Draining, Dying, Exited, Placed, Received, Started, Unable
from ..transit import error_from_wire
from . import actions
from .actions import RunState, check_transition
from .checkpoints import RunContents, Start, choose_start
from .plan import Cause, GiveUp, Room, RunSpec
from .report_ledger import ReportLedger
from .reports import Reports
from .worker_group import (
    Clock,
    Ending,
    Handover,
    Teardown,
    WorkerGroup,
    find_trouble,
    first_line,
    gather_s,
    next_check,
    training_failed,
)

_BEAT_S = 5.0  # workers whose parts are being stored say so at least this often
_AGAIN_S = 2.0  # between two tries to register an attempt
_HANDOVERS = 3  # agreed saves that are tried for one move
_MOST_PAST = 100


class Controller:
    """Decides what happens in a run of workers.

    Args:
        plan: what was asked for.

    Attributes:
        state: where the run is.
        reports: those of the group that runs, and the checkpoints of the run.
        attempt: number of the attempt that runs.
        restarts: how often the workers were started again.
        first: what the first group started from.
        returned: what train_func returned on rank 0, packed; None if it has not, or returned None.
    """

    def __init__(self, plan: RunSpec) -> None:
        self._plan, self._limits = plan, plan.limits
        self._out: list[actions.Action] = []
        self.state = RunState.INITIALIZING
        self.reports = Reports(plan, self._out)
        self.attempt = self.restarts = 0
        self._run_id = self._start_id = ""
        self.returned: bytes | None = None
        self._past: list[str] = []  # start ids of attempts that have ended, the newest last
        self._group: WorkerGroup | None = None
        self._teardown: Teardown | None = None
        self._stop: str | None = None
        self._history: list[Cause] = []
        self._idle_starts = 0
        self._clock = Clock()
        self._suspect: tuple[str, WorkerGroup] | None = None
        self.first = self._start = Start()
        self._answer_until: float | None = None  # when the run itself has to have answered
        self._again: tuple[float, actions.NextAttempt] | None = None  # an attempt that no disk or store took yet
        self._is_wait_said = False
        self._waiting = False  # for the time of the next start, and for room
        self._room = Room(plan)
        self._not_before = 0.0
        self._handover: Handover | None = None
        self._growing_since: float | None = None
        self._last_sign = 0.0
        self._ending: Ending | None = None
        self._rows_lost = False
        self._now = 0.0

    def start(self, now: float) -> list[actions.Action]:
        """Begin; return the first actions."""
        self._now = now
        self._clock.begin(now)
        self._ask(actions.OpenRun())
        out, self._out[:] = list(self._out), []
        return out

    def handle(self, event: actions.Input, now: float) -> list[actions.Action]:
        """Take an event; return the actions that follow from it."""
        if self.state.is_end:
            return []
        self._now = now
        if isinstance(event, actions.ActionResult):
            self._on_outcome(event)
        elif isinstance(event, actions.StopRequested):
            self._on_stop(event.why)
        elif isinstance(event, Capacity):
            self._room.update(event, now)
        elif isinstance(event, Draining):
            if self._group is not None and self._teardown is None:
                wait_s = gather_s(event.left_s, self.reports.longest_s)
                self._hand_over(self._group, Cause.PREEMPTION, event.detail, wait_s=wait_s)
        elif isinstance(event, Unable):
            self._fatal(event.error)
        elif isinstance(event, (Placed, Started, Received, Dying, Exited)):
            self._on_worker(event)
        if not self.state.is_end:
            self._advance()
        out, self._out[:] = list(self._out), []
        return out

    def deadline(self) -> float | None:
        """Return when a `Tick` is due if nothing else happens; None: never."""
        times = [self.reports.validations.deadline, self._answer_until, self._again and self._again[0]]
        if self._teardown is not None:
            times.append(self._teardown.deadline(self._now))
        elif self._group is not None:
            times.append(next_check(self._group, self.reports, self._limits, self._last_sign))
            times.append(self._ending.deadline if self._ending is not None else None)
            times.append(self._growth(self._group))
            if self._handover is not None and self._group.running_since is not None and not self._handover.is_asked:
                times.append(self._handover.due)
        elif self._waiting:
            room = self._room.deadline()
            times.append(self._not_before if room is None or self._now < self._not_before else room)
        return min((time for time in times if time is not None), default=None)

    # -- outcomes ------------------------------------------------------------------------------------------------

    def _on_outcome(self, outcome: actions.ActionResult) -> None:
        action, value, error = outcome.action, outcome.value, outcome.error
        if isinstance(error, RunBusyError) and not isinstance(action, actions.OpenRun):
            self._fatal(error)  # the lease is lost: another process writes to the run now
        if isinstance(action, actions.Commit):
            self._last_sign = self._now  # workers may have waited for this
            self.reports.done(action, value, error, self._now)
        elif isinstance(action, actions.Validate):
            self.reports.validated(value, error)
        elif isinstance(action, actions.LateMetrics):
            self.reports.ranked(action.name, value or ())
            if error is not None:
                self._say(f"the metrics of {action.name} could not be stored: {first_line(error)}")
        elif isinstance(action, actions.NextAttempt) and self._may_ask_again(error):
            self._again = self._now + _AGAIN_S, action
            if not self._is_wait_said:
                self._say(f"the next attempt waits until it can be noted: {first_line(error)}")
            self._is_wait_said = True
        elif isinstance(action, (actions.OpenRun, actions.FindStart, actions.NextAttempt)):
            self._answer_until, self._is_wait_said = None, False
            if error is not None:
                self._end(RunState.ERRORED, first_line(error), error)
            elif isinstance(action, actions.OpenRun):
                self._opened(value)
            elif isinstance(action, actions.FindStart):
                self._found(value)
            else:
                self._registered(value)
        elif error is not None and isinstance(action, actions.StartGroup):
            self._end(RunState.ERRORED, first_line(error), error)  # whatever was started ends with the engine
        elif error is not None and isinstance(action, actions.StoreRows):
            if not self._rows_lost:
                self._say(f"metrics could not be stored (said once): {first_line(error)}")
            self._rows_lost = True
        elif error is not None:
            self._say(f"{type(action).__name__} failed: {first_line(error)}")

    def _opened(self, opened: RunOpened) -> None:
        self._run_id, self._start_id, self.attempt = opened.run_id, opened.start_id, opened.attempt
        noted = opened.notes.get("number")
        if isinstance(noted, int):
            self.reports.known.number = max(self.reports.known.number, noted)
        self._ask(actions.FindStart())

    def _registered(self, attempt: dict[str, Any]) -> None:
        self.attempt, self._start_id = attempt["attempt"], attempt["start_id"]
        self._ask(actions.FindStart())

    def _found(self, contents: RunContents) -> None:
        self.reports.known.refresh(contents.kept, taken=contents.taken, set_aside=contents.set_aside)
        self.reports.resume_validations(contents.unvalidated)
        self._past = [start for start in contents.starts if start != self._start_id][-_MOST_PAST:]
        if self._suspect is not None:
            (suspect, group), self._suspect = self._suspect, None
            self._decide(group, free=any(name == suspect for name, _ in contents.skipped))
            return
        self._start = choose_start(self._plan, contents.start, self.reports.known.memory)
        if self._start.resumed is not None:
            self._out.append(self._start.resumed)
        if not self.restarts:
            self.first = self._start
        self._clock.end("find", self._now)
        self._waiting = True
        self._room.wait(self._now)

    # -- workers -------------------------------------------------------------------------------------------------

    def _seek_room(self) -> None:
        """Start the group if there is room for it; say what is missing, and give up after ``place_s``."""
        size = self._room.size(self._now)
        if size is not None:
            self._start_group(size)
        elif (error := self._room.error(self._now)) is not None:
            self._end(RunState.ERRORED, first_line(error), error)
        elif (line := self._room.words(self._now)) is not None:
            self._say(line)

    def _start_group(self, size: int) -> None:
        self._waiting = False
        if self.restarts:
            workers = f"{size} worker{'s' if size > 1 else ''}"
            self._say(f"starting {workers} again from {self._start.words} (attempt {self.attempt})")
        self._group = WorkerGroup(size, self._now)
        ledger = ReportLedger(size, self._start.step + 1)
        parent = self._start.kept.checkpoint_id if self._start.kept is not None else None
        self.reports.begin(ledger, run_id=self._run_id, attempt=self.attempt, start_id=self._start_id, parent=parent)
        self._last_sign, self._ending, self._handover = self._now, None, None
        self._become(RunState.SCHEDULING)
        self._out.append(actions.StartGroup(attempt=self.attempt, num_workers=size))

    def _on_worker(self, event: Placed | Started | Received | Dying | Exited) -> None:
        group, rank = self._group, event.rank
        if group is None:
            return
        if isinstance(event, Dying):
            group.note_dying(rank)
            return
        if isinstance(event, Exited):
            group.exited[rank] = event
            ours = self._teardown is not None and self._teardown.kill_until is not None
            if not ours and rank not in group.finished and rank not in group.failures:
                group.die(event)
                self._fail(rank, group.failures[rank])
            return
        group.heard[rank] = self._last_sign = self._now
        if isinstance(event, Placed):
            group.placed[rank] = event
            return
        if isinstance(event, Started):
            group.started.add(rank)
            self._out.append(
                actions.Begin(rank=rank, header=self._begin_message(group, rank), memory=self._start.memory)
            )
            return
        header, attachments = event.message.header, event.message.attachments
        on = header["on"]
        if on == "running":
            group.running.add(rank)
            if group.all_running and self.state is RunState.SCHEDULING:
                self._clock.end("start", self._now)
                self._room.satisfied()
                group.running_since = self._now
                if self._growing_since is not None:
                    group.growth_s, self._growing_since = self._now - self._growing_since, None
                self._become(RunState.RUNNING)
        elif on == "finished":
            group.finished.add(rank)
            if rank == 0:
                self.returned = attachments[0] if attachments else None
            if header.get("left"):
                group.left.add(rank)
            self.reports.ledger.finished.add(rank)
        elif on == "leaving":
            group.note_dying(rank)
            if header.get("rolled_back"):
                group.rolling_back.add(rank)
                group.note_dying(0)  # whose guard has called for it: how it ends is about to be known
        elif on == "failed":
            error = error_from_wire(header["error"], attachments[0] if attachments else b"")
            self._fail(rank, error, settle_s=self._limits.settle_s)
        elif on == "storing":
            pass  # a sign of life
        elif on == "at":
            if self._handover is not None:
                self._handover.at(rank, header["calls"], self._out)
        else:
            self._take(rank, header, attachments)

    def _begin_message(self, group: WorkerGroup, rank: int) -> dict[str, Any]:
        """Return the first message to a worker."""
        plan, start, placed = self._plan, self._start, group.placed.get(rank)  # None: it is on the driver's machine
        return {
            "do": "begin",
            "rank": rank,
            "world_size": group.size,
            "local_rank": rank if placed is None else placed.local_rank,
            "local_world_size": group.size if placed is None else placed.local_size,
            "node_rank": 0 if placed is None else placed.node_rank,
            "apart": placed is not None,  # the driver cannot read what only this node has
            "first_index": start.step + 1,
            "run_name": plan.run_name,
            "local_dir": plan.local_dir,
            "run_root": plan.location(""),
            "attempt": self.attempt,
            "start_id": self._start_id,
            "past": list(self._past),
            "strategy": None if plan.strategy is None else dict(plan.strategy),
            "score": None if plan.score is None else dict(plan.score),
            "report_timeout_s": plan.limits.report_s,
            "beat_s": None if plan.limits.hang_s is None else min(plan.limits.hang_s / 4, _BEAT_S),
            "all_metrics": plan.has_callbacks,
            "checkpoint": None if start.location is None else dict(start.location),
        }

    def _take(self, rank: int, header: dict[str, Any], attachments: tuple[bytes, ...]) -> None:
        if self._teardown is not None and header["on"] == "report" and header["index"] > self._teardown.upto:
            return
        before = self.reports.ledger.any_report
        if not self.reports.take(rank, header, attachments, self._now):
            self._say(f"rank {rank} sent a message that this version does not know: {header['on']}")
        elif not before and self.reports.ledger.any_report:
            self._clock.end("load", self._now)
            self._out.append(actions.Details(details={"seconds": dict(self._clock.seconds)}))
            self._idle_starts = 0

    # -- moves -----------------------------------------------------------------------------------------------------

    def _hand_over(
        self, group: WorkerGroup, cause: Cause, why: str, *, tries: int = _HANDOVERS, wait_s: float = 0.0
    ) -> None:
        """Have all ranks save at the same step, after ``wait_s`` at most; then end the group."""
        if group.finished:
            return
        due = self._now + wait_s
        if (handover := self._handover) is not None:
            if cause is Cause.PREEMPTION:  # one restart serves both, at the sooner time
                handover.cause, handover.due = cause, min(handover.due, due)
            return
        self._say(f"{why}: the workers save and are started again")
        self._handover = Handover(cause=cause, why=why, size=group.size, tries=tries, due=due)

    def _growth(self, group: WorkerGroup) -> float | None:
        """Return when the group should be ended in order to grow; None: it should not."""
        if group.running_since is None or self._handover is not None or self._teardown is not None or group.finished:
            return None
        return self._room.growth(group.size, group.running_since, group.growth_s)

    def _advance_moves(self, group: WorkerGroup) -> None:
        due = self._growth(group)
        if due is not None and self._now >= due:
            self._hand_over(
                group, Cause.RESIZE, f"there is room for {self._room.num_workers} workers, {group.size} run"
            )
        saved, self.reports.just_saved = self.reports.just_saved, []
        handover = self._handover
        failed, self.reports.agreed_failed = self.reports.agreed_failed, False
        if handover is not None and failed and not saved:
            self._handover = None  # a later move may be agreed on anew
            if handover.cause is Cause.PREEMPTION and handover.tries > 1:
                self._hand_over(group, handover.cause, f"{handover.why}; the save was lost", tries=handover.tries - 1)
        elif handover is not None and any(handover.is_served(agreed=agreed) for agreed in saved):
            group.moved = (handover.cause, handover.why)
            self._growing_since = self._now if handover.cause is Cause.RESIZE else None
            self._clock.begin(self._now)
            self._tear_down()
            return
        if self._handover is not None and group.finished and not self._handover.is_asked:
            self._say(f"{self._handover.why}: {rank_list(sorted(group.finished))} finished meanwhile, the others go on")
            self._handover = None  # a finished rank would never answer
        if self._handover is not None and group.running_since is not None and self._now >= self._handover.due:
            self._handover.begin(self._out)

    # -- failures ------------------------------------------------------------------------------------------------

    def _fail(self, rank: int, error: BaseException, *, settle_s: float = 0.0) -> None:
        if self._group is None:
            return
        self._group.fail(rank, error)
        if self._teardown is None:
            self._clock.begin(self._now)
            self._tear_down(settle_s=settle_s)

    def _fatal(self, error: BaseException) -> None:
        if self._group is None:
            self._end(RunState.ERRORED, first_line(error), error)
            return
        self._tear_down()
        if self._teardown is not None and self._teardown.fatal is None:
            self._teardown.fatal = error

    def _on_stop(self, why: str) -> None:
        again, self._stop = self._stop is not None, why
        if self._group is None:
            self._end(RunState.ABORTED, why)
            return
        self._tear_down()
        if again and self._teardown is not None:  # a second signal ends the run without waiting
            self._teardown.kill_until = self._now + self._limits.stop_s
            self._out.append(actions.KillGroup())

    def _tear_down(self, *, settle_s: float = 0.0) -> None:
        if self._teardown is None:
            upto = max(self.reports.ledger.entered)
            now, limits = self._now, self._limits
            self._teardown = Teardown(settle_until=now + settle_s, drain_until=now + limits.drain_s, upto=upto)
            if self._stop is None and self.state in (RunState.SCHEDULING, RunState.RUNNING):
                self._become(RunState.RESTARTING)

    def _decide(self, group: WorkerGroup, *, free: bool = False) -> None:
        """Ask the policy what follows the end of the group; ``free``: its cause has been removed."""
        cause, failures = group.cause, {str(rank): first_line(error) for rank, error in group.causes.items()}
        reason, ended = group.summary(), group.ended_before(self.reports.ledger.entered)
        ended_how = "told to go" if group.preempted else "goes back" if group.rolled_back else "failed"
        ended_how = "moves" if group.moved is not None else ended_how
        self._say(f"{ended_how}: {reason}{ended and f' ({ended})'}")
        details = {
            "failures": failures, "cause": cause.value, "seconds": dict(self._clock.seconds),
            "last_step": max(self.reports.ledger.entered),
        }  # fmt: skip
        if self._plan.has_callbacks:
            self._out.append(actions.Call(hook="after_exception", arguments={"worker_exceptions": dict(group.causes)}))
        self._idle_starts += not self.reports.ledger.any_report
        self._group = None
        if not free:
            self._history.append(cause)
            decision = self._plan.policy.decide(self._history, idle_starts=self._idle_starts)
            if isinstance(decision, GiveUp):
                newest = self.reports.known.newest()
                name = None if newest is None else newest.name
                error = training_failed(group, decision.why, self._plan.uri, name, ended)
                self._end(RunState.ERRORED, f"training failed: {decision.why}", error, details)
                return
            self._not_before = self._now + decision.delay_s
            if decision.delay_s:
                self._say(f"the last {self._idle_starts} starts came to nothing: waiting {decision.delay_s:g} s")
        self.restarts += 1
        self._clock = Clock(since=self._now)
        self._ask(actions.NextAttempt(reason=reason, details=details))

    # -- after each event and when time has passed -----------------------------------------------------------------

    def _advance(self) -> None:
        if self._again is not None and self._now >= self._again[0]:
            self._out.append(self._again[1])
            self._again = None
        if self._answer_until is not None and self._now >= self._answer_until:
            text = f"{self._plan.uri} did not answer within {self._limits.start_s:g} s: it is stuck or very slow"
            self._end(RunState.ERRORED, text, TrainingError(text))
            return
        if self._waiting and self._now >= self._not_before:
            self._seek_room()
        if self._group is not None and self._teardown is None:
            self.reports.advance(self._now)
            self._advance_moves(self._group)
        if self._group is not None and self._teardown is None:
            found = find_trouble(self._now, self._group, self.reports, self._limits, self._last_sign)
            if found is not None:
                ranks, error = found
                for rank in ranks:
                    self._fail(rank, error)
        if self._teardown is not None and self._group is not None:
            self._advance_teardown(self._group, self._teardown)
        elif self._group is not None and self._group.all_finished:
            self._advance_end(self._group)
        if self.state is not RunState.INITIALIZING and not self.state.is_end and self._stop is None:
            self.reports.advance_validations(self._now)

    def _advance_teardown(self, group: WorkerGroup, teardown: Teardown) -> None:
        if not teardown.step(self._now, group, self.reports, self._limits, self._out):
            return
        self._teardown = None
        self._out += self.reports.callbacks.complete(self.reports.ledger, ordered=False)
        self._clock.end("stop", self._now)
        if self._stop is not None:
            self._end(RunState.ABORTED, self._stop)
        elif teardown.fatal is not None:
            self._end(RunState.ERRORED, first_line(teardown.fatal), teardown.fatal)
        elif (name := self._damaged(group)) is not None:
            self._suspect, self._group = (name, group), None
            self._ask(actions.FindStart(deep=(name,)))
        else:
            self._decide(group, free=group.unplaced)

    def _damaged(self, group: WorkerGroup) -> str | None:
        """Return the checkpoint that this group started from if it failed on damaged bytes before its first report."""
        start = self._start
        if start.kept is None or self.reports.ledger.any_report:
            return None
        broken = (CorruptCheckpointError, IncompleteCheckpointError, CheckpointNotFoundError)
        return start.kept.name if any(isinstance(error, broken) for error in group.failures.values()) else None

    def _advance_end(self, group: WorkerGroup) -> None:
        if self._ending is None:
            self._ending = Ending.begin(self._now, self._limits)
        outcome = self._ending.step(self._now, group, self.reports, self._limits, self._out)
        if isinstance(outcome, BaseException):
            self._fatal(outcome)
            self._advance()
        elif outcome:
            if (odd := group.odd_ends(self.reports.ledger.entered)) is not None:
                self._say(odd)
            self._end(RunState.FINISHED, "finished")

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(
        self, state: RunState, reason: str, error: BaseException | None = None, details: dict[str, Any] | None = None
    ) -> None:
        self._become(state)
        self._group = self._teardown = None
        running = self.reports.validations.running
        if running is not None:
            self._out.append(actions.StopValidation(name=running.name))
        self._out.append(actions.Note(key="number", value=self.reports.known.number))
        seconds = {"seconds": dict(self._clock.seconds)}
        self._out.append(actions.End(state=state, reason=reason, error=error, details={**seconds, **(details or {})}))

    def _ask(self, action: actions.OpenRun | actions.FindStart | actions.NextAttempt) -> None:
        self._answer_until = self._now + self._limits.start_s
        self._out.append(action)

    def _may_ask_again(self, error: BaseException | None) -> TypeGuard[HoldfastError]:
        """Tell whether an attempt that was refused is tried again: what ended the one before may be what refuses it."""
        until = self._answer_until or 0.0
        return isinstance(error, TRANSIENT_ERRORS) and self._now + _AGAIN_S < until

    def _become(self, state: RunState) -> None:
        self.state = check_transition(self.state, state)

    def _say(self, line: str) -> None:
        self._out.append(actions.Say(line=line))
