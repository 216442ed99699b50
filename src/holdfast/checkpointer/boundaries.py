"""What a run does at the boundary of a step and at its end: save, stop, try again when the storage was full.

The boundary of a step is ``ck.step()`` itself, except in the body of a loop over ``ck.batches``: there it is where the
loop asks for its next batch, ends its epoch, or leaves, so that what the body does after ``ck.step()`` belongs to it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from holdfast._log import get_logger
from holdfast._units import format_bytes
from holdfast.config import VERIFY_VARIABLE
from holdfast.errors import StorageError
from holdfast.run.life import GUARD_STATUS, RolledBack
from holdfast.state.save.snapshot import Snapshotter

from .console import show_rollback
from .metrics import MetricLog
from .options import CheckpointerOptions
from .pending_saves import RunSave, passing_error, state_of
from .progress import RESERVED, Progress
from .run_session import RunSession
from .save_policy import SavePolicy

if TYPE_CHECKING:
    from .guard import GuardWatch

__all__ = ["StepBoundary", "Watcher", "decide_at_stop", "leave_for_alarm", "watcher"]

_LOG = get_logger("checkpointer")
_FULL_RETRY_S = 5.0
_SLOW_DISK = 200e6  # bytes/s, for the time of a save before the first measured save
_MAX_OPEN = 256  # steps in one body before each further one is a boundary: the loop may ask for no more batches
_SOON = 100  # steps, after which it is said that no interval can come due


class StepBoundary:
    """Carries out what `SavePolicy` decides.

    Args:
        session: takes saves and follows them.
        snapshotter: copies the state.
        log: metrics of the run.
        policy: decides.
        progress: the counters.
        options: arguments of the run.
        state: the full state.

    Attributes:
        held_s: time saves have held the loop since this was set to 0.
        policy: decides.
        log: metrics of the run.
        watcher: called at every boundary while a resume is verified.
        snapshots: when the state is kept in memory, for the case that this process dies.
        rescues_later: the writer is to be left alone: the writers of all ranks rescue what they hold.
        guard: watches a metric; None without one, and on ranks whose metrics do not count.
        left_for: what the guard has found, once the body is left for it; else "".
        saves_at: steps that are saved because the next one was bad in an earlier life: little is lost if it is again.
    """

    def __init__(
        self,
        session: RunSession,
        snapshotter: Snapshotter,
        log: MetricLog,
        policy: SavePolicy,
        progress: Progress,
        options: CheckpointerOptions,
        state: Callable[[], Mapping[Any, Any]],
    ) -> None:
        self._session, self._snapshotter, self._state = session, snapshotter, state
        self.log, self.policy, self._progress, self._options = log, policy, progress, options
        self.held_s = 0.0
        self._open = False  # a step was made in a body, and its boundary is still to come
        self._num_open = 0  # steps in this body
        self._said_long = False  # that a body had too many of them
        self._said_elsewhere = False  # that another thread has asked for a save
        self._said_saved = False  # that `save_now` has found nothing to do
        self._per_body = 1  # steps in the last body that had any
        self._step_s = 0.0
        self._wanted = False  # a save was asked for; it is made at the boundary
        self._early = False  # it was asked for in a body whose step is still to come: that step is saved
        self.watcher: Watcher | None = None
        self.snapshot_paid: Callable[[float], object] = lambda cost_s: None
        self.rescues_later = False
        self._waited_for_remote = False  # at the end, which is done once
        self._stopped = False  # for a signal or the deadline, with everything saved
        self.guard: GuardWatch | None = None
        self.saves_at: frozenset[int] = frozenset()
        self.left_for = ""
        self._told_ranks = False

    # -- boundaries

    def stepped(self, step_s: float) -> None:
        """Take in a step that was just made: act on it, or leave that to the end of its body.

        Args:
            step_s: how long the step took.
        """
        if self._snapshotter.copies is not None:  # a device waits for those still under way; costs the CPU nothing
            self._snapshotter.copies.stepped()
        self._step_s = step_s
        if self._progress.num_steps == _SOON and self._session.leads and (intervals := self.policy.never_due):
            _LOG.warning(
                "every=%s never comes due in this loop, which does not count it: epochs are counted by ck.epochs(n) "
                "and by passes over ck.batches(loader), samples by ck.batches(loader) alone. Take the batches from "
                "ck.batches(loader), or give steps or a time, as in every='10min'; as it is, only the end of the run "
                "is saved by itself",
                intervals,
            )  # fmt: skip
        if self._progress.in_body and self._num_open < _MAX_OPEN:
            self._open = True
            self._num_open += 1
            return
        if self._num_open == _MAX_OPEN:
            self._num_open += 1
            if not self._said_long:
                self._said_long = True
                _LOG.warning(
                    "%d steps were made since ck.batches() was last asked for a batch: until it is asked again each "
                    "step counts as the end of its body, and code after ck.step() belongs to the next step", _MAX_OPEN,
                )  # fmt: skip
        self._bound()

    def body_ended(self) -> None:
        """Act on the last step, if its body has just ended."""
        if self.guard is not None and self.guard.alarm is not None:
            self._go_back()
        if 0 < self._num_open <= _MAX_OPEN:
            self._per_body = self._num_open
        self._num_open = 0
        if self._open or (self._wanted and not (self._early and self._progress.in_body)):
            self._bound()

    def _bound(self) -> None:
        """Do what the step that is over calls for: stop, save, try again, keep a snapshot."""
        is_new, is_wanted = self._open or not self._wanted, self._wanted
        self._open = self._wanted = self._early = False  # a stop saves, and comes here again
        now, session = time.monotonic(), self._session
        if self.guard is not None and self.guard.look() is not None:
            self._go_back()
        if not session.has_begun and not session.life.gives_back():
            self._warm_up()
        call = self.policy.call(now, step_s=self._step_s, save_s=self.save_s)
        if call == "rollback":
            self._leave()
        if call == "stop":
            self.stop()
        if call == "settle":
            session.settle()
        else:
            session.glance()
        if session.saves.wants_retry:
            self._save_when_space()
        elif call == "save" or (session.saves.wants_another and session.rank_group is None):
            self.save()  # ranks take in a failure at a save alone, all at the same step
        if is_wanted or self._progress.step in self.saves_at:
            self.save(force=True)
        if self.policy.keeps(now):
            self._keep_snapshot()
        if is_new:
            self.watch()

    def _keep_snapshot(self) -> None:
        """Keep the state of this step in memory, unless the step is saved."""
        progress = self._progress
        if self._session.saves.last_step == progress.step:
            return
        if (guard := self.guard) is not None:
            if guard.look(waits=True) is not None:  # the metrics of the snapshot are waited for anyway
                self._go_back()
                return
            guard.protect()
        begun = time.perf_counter()
        self.log.flush(progress.step)  # else a rescued step would come without the metrics before it
        with self._session.life.waits():
            self._warm_up()
            kept = self._session.keep_state(self._state, self._snapshotter, self._current())
        cost_s = time.perf_counter() - begun
        self.held_s += cost_s
        if kept:
            self.snapshot_paid(cost_s)
        else:
            self.policy.snapshots = None
            if self._snapshotter.shortage is None:  # else it has said so
                _LOG.warning("rescue= is left out from here on: the state does not fit into max_staging_bytes")

    def watch(self) -> None:
        """Call the watcher, if there is one, at the end of a step."""
        if self.watcher is not None:
            self.watcher.boundary(self._progress.step, self._state, lambda: self.save(force=True))

    def _want_save(self, metrics: Mapping[str, Any]) -> None:
        """Save the current step: now, or at its boundary if that is still to come."""
        if self._open or self._progress.after_pass:
            self._wanted = True
        elif self._progress.is_elsewhere:
            self._want_from_elsewhere(metrics)
        elif not metrics and self._before_step:
            # The weights may be those of the step that ck.step() has yet to count: it is saved, when it is over.
            self._wanted = self._early = True
        else:
            if self._before_step:
                self._progress.remind_of_order()
            self.save(force=True)

    def _want_from_elsewhere(self, metrics: Mapping[str, Any]) -> None:
        """Another thread than the loop's asks: the loop may be in the middle of its next step, which nobody saves."""
        if not metrics:
            self._wanted = self._early = True
        elif not self._said_elsewhere:
            self._said_elsewhere = True
            _LOG.warning(
                "ck.report() or ck.save() with metrics in another thread than that of the steps: the metrics of step "
                "%d are recorded, and it is not saved for them, for the next step may be under way. Call it in the "
                "loop after ck.step(), or evaluate a checkpoint (ck.latest(), holdfast.follow)", self._progress.step,
            )  # fmt: skip

    @property
    def _before_step(self) -> bool:
        return self._progress.in_body and not self._open and not self._num_open

    def _warm_up(self) -> None:
        # Optimizer state exists from the first step on: now the arena's size is known, and its pages are faulted in
        # the background, long before the first save is due.
        session = self._session
        if not session.has_begun and self._progress.num_steps:
            session.began(self._progress.step)
            self._snapshotter.prepare(self._state(), session.client)

    @property
    def save_s(self) -> float:
        """Seconds the last save took until it was durable, at the remote too; a careful guess before the first save."""
        session = self._session
        if session.stats.seconds_to_durable:
            upload_s = 0.0 if session.remote_watch is None else session.remote_watch.upload_s
            return session.stats.seconds_to_durable[-1] + upload_s
        layout = self._snapshotter.layout
        return 0.0 if layout is None else layout.tensor_bytes / _SLOW_DISK

    def save(self, *, force: bool = False, again: bool = False) -> None:
        """Save the current step, unless it is saved already.

        Args:
            force: wait for a busy writer, also with ``when_busy="skip"``.
            again: save it also if it is saved.
        """
        if self.guard is not None and self.guard.look() is not None:
            self._go_back()
        begun = time.perf_counter()
        session, progress, step = self._session, self._progress, self._progress.step

        def announce(name: str) -> None:
            self.log.flush(step, name=name)
            if self.guard is not None:
                self.guard.saving(step, name)

        with session.life.waits():
            self._warm_up()
            if session.saves.last_step == step and not again:
                self.log.flush(step)
            elif force or self._options.when_busy != "skip" or not self._skips(step):
                session.save_state(self._state, self._snapshotter, self._current(), announce=announce)
                progress.ledger.saved()
            # A save that is skipped because the writer is busy counts too: the next multiple is the next chance.
            self.policy.saved()
        self.held_s += time.perf_counter() - begun  # the time a save holds is not the time of a step

    def _current(self) -> RunSave:
        step = self._progress.step
        return RunSave(step=step, epoch=self._progress.epoch, metrics=self.log.of_step(step))

    def _skips(self, step: int) -> bool:
        """``when_busy="skip"``: tell whether a save is left out because the one before is still being written."""
        session, rank_group = self._session, self._session.rank_group
        if not session.saves.busy if rank_group is None else rank_group.may_save(step):  # the same answer on all ranks
            return False
        session.stats.skipped += 1
        session.journal("skipped", step=step)
        _LOG.info(
            "step %d: the save of step %d is still being written; this one is skipped", step, session.saves.last_step
        )
        return True

    def save_now(self, metrics: dict[str, Any]) -> None:
        """Save the current step with these metrics, or bind them to the save that it has."""
        session, progress = self._session, self._progress
        step = progress.step
        if metrics:
            self.log.add(step, progress.epoch, metrics)
        if session.saves.last_step != step or (self._before_step and not metrics):
            self._want_save(metrics)
        elif metrics:
            self.log.bind(metrics)
        elif session.leads and not (self._said_saved or (progress.used_epochs and progress.after_pass)):
            # The end of the body of an epoch comes again after a resume: nothing is to be said there.
            self._said_saved = True
            _LOG.warning(
                "step %d is saved already (%s), so ck.save() saves nothing: what was changed since then is saved with "
                "the next step, or, by a process alone, where the run is left. To have it sooner, make the change "
                "before the step is saved (before ck.step(), or in the body over ck.batches()), or keep it beside the "
                "run: holdfast.save(path, state)",
                step, session.saves.last_name,
            )  # fmt: skip

    def report(self, metrics: dict[str, Any]) -> None:
        """Record metrics; save the step if it is ranked by one of them and has no checkpoint."""
        session, progress, keep = self._session, self._progress, self._options.keep
        self.log.add(progress.step, progress.epoch, metrics)
        ranked = keep is not None and keep.best is not None and keep.metric in metrics
        if session.saves.last_step != progress.step and ranked:
            self._want_save(metrics)
        elif session.saves.last_step == progress.step:
            self.log.bind(metrics)
        if not self._wanted:
            self.log.flush(progress.step)

    def wait(self, *, remote: bool = False) -> None:
        """Wait until everything so far is durable; with ``remote`` also at the remote of a mirrored run.

        A save that is due is made first: the caller wants it now, not at the end of the body. The exception is a body
        in which more steps are to come, as in the body before: only whole batches are saved, and a rank may wait alone,
        while a save must be of the same step on all ranks.
        """
        self._early = False
        is_over = not self._progress.in_body or self._num_open >= self._per_body
        if (self._wanted or (self._open and is_over)) and not self._progress.is_elsewhere:
            self._bound()
        session = self._session
        self.log.flush(self._progress.step)
        with session.life.waits():
            session.finish()
            if remote:
                self._wait_for_remote()

    def _wait_for_remote(self) -> None:
        if (far := self._session.remote_watch) is not None:
            far.finish(self._options.timeout_s, self._session.saves.last_step)

    def epoch_done(self, epochs: int) -> None:
        """Act at the end of an epoch: save if it is due, stop if a signal came after the last step."""
        due = self.policy.epoch_due(epochs)
        self.body_ended()
        if due and self._session.saves.last_step != self._progress.step:
            self.save()
        self.watch()
        if self._progress.num_steps and self.policy.poll(step_s=self._step_s, save_s=self.save_s):
            self.stop()

    def stop(self) -> None:
        """Save the current step, wait until it is safe, and leave the body."""
        self.policy.stopping = True
        guard = self.guard
        if guard is not None and guard.look(waits=True) is not None:
            if self._session.rank_group is None:
                self._leave()
            decide_at_stop(guard, note=partial(setattr, self, "left_for"))
        self.save(force=True)
        self._session.life.leaves()
        self.wait()
        self._stopped = True
        raise SystemExit(self._options.exit_code)

    # -- the guard

    def judge_rest(self, *, alone: bool) -> None:
        """Wait for the last values of the metric, where a body has ended, and leave if one is bad.

        Args:
            alone: do nothing where ranks save together, which have to make the final save first.
        """
        if self.guard is None or alone != (self._session.rank_group is None):
            return
        if self.guard.look(waits=True) is not None:
            self._leave()

    def _go_back(self) -> None:
        """Leave the body for a bad step: at once, or at a step that all ranks agree on."""
        rank_group = self._session.rank_group
        if rank_group is None:
            self._leave()
        elif not self._told_ranks:
            self._told_ranks = True
            rank_group.client.tell_ranks("want", kind="rollback")

    def _leave(self) -> None:
        """Leave the body, so that the next start goes on from before the bad step; nothing is saved.

        Raises:
            SystemExit: with the status of a rollback, or of a stop that was asked for.
            TrainingError: the run must not go on.
        """
        # After a signal its own status: whoever sent it waits for that, and the next start goes back all the same.
        status = self._options.exit_code if self.policy.stop_wished else GUARD_STATUS
        self.left_for = "a bad step, found by the guard of rank 0"
        anew = self._options.resume == "never"
        leave_for_alarm(self._session, self.guard, status, note=partial(setattr, self, "left_for"), anew=anew)

    def _save_when_space(self) -> None:
        """``on_full="wait"``: hold training and try again until there is space or the time is up."""
        session = self._session
        until = time.monotonic() + self._options.timeout_s
        tries = int(self._options.timeout_s / _FULL_RETRY_S)  # counted, where all ranks have to try equally often
        while session.saves.wants_retry:
            self.save(force=True)
            session.settle()
            if not session.saves.wants_retry:
                return
            if self.policy.must_end(tries):
                self.stop()
            tries -= 1
            if tries < 1 or (session.rank_group is None and time.monotonic() + _FULL_RETRY_S > until):
                session.saves.on_full = "raise"
            time.sleep(_FULL_RETRY_S)

    # -- the end

    def close(self) -> None:
        """Give the memory of the copies back; idempotent."""
        self._snapshotter.close()

    def end(self) -> None:
        """Leave the body in order: the final step is saved, everything is durable, errors raise."""
        session, step = self._session, self._progress.step
        with session.life.waits():
            session.settle()
        has_changed = self._has_changed()
        is_new = step > 0 and (session.saves.last_step != step or has_changed)
        if is_new:
            self.save(force=True, again=has_changed)
        session.life.leaves()  # no device is waited for any more
        if is_new:
            session.settle()
            if session.saves.wants_retry:
                self._save_when_space()
        self.wait()
        if session.rank_group is not None and not self.policy.stop_asked:
            self.judge_rest(alone=False)
        if self.guard is not None:
            self.guard.ended()
        if step > 0 and session.saves.last_step != step:
            error = session.saves.lost.error
            lost = f"the final step {step} was NOT saved, {state_of(error)} ({error}); {self._newest_safe()}"
            raise passing_error(error, lost)
        self._say_lost()
        self._waited_for_remote = True
        self._wait_for_remote()
        finished = None if self.policy.stop_asked else {"step": step, "epoch": self._progress.epoch}
        session.end("stopped" if finished is None else "finished", details=self._last_details(), finished=finished)

    def _has_changed(self) -> bool:
        """Tell whether the last step is saved, and the rest of the body has changed the state.

        Not where the run is to stop: it goes on from that step, and what comes after it is done by the next life.
        """
        session, step = self._session, self._progress.step
        if step <= 0 or session.saves.last_step != step or self.policy.stop_asked:
            return False
        try:
            with session.life.waits():
                changed = ", ".join(self._snapshotter.changed(self._state(), apart_from=RESERVED))
        except Exception as error:  # noqa: BLE001 - the step is saved; the body may have closed what the state is of
            if session.leads:
                # Of several ranks a change is in no checkpoint anyway, and many scripts end their process group here.
                say = _LOG.warning if session.rank_group is None else _LOG.info
                say(
                    "step %d is saved (%s), and the state cannot be looked at any more (%s: %s): what the rest of the "
                    "body has changed is in no checkpoint", step, session.saves.last_name, type(error).__name__, error,
                )  # fmt: skip
            return False
        if changed and session.rank_group is None:
            _LOG.info("%s changed after step %d was saved: it is saved again", changed, step)
        elif changed and session.leads:
            _LOG.warning(
                "%s changed after step %d was saved (%s), and several ranks save a step once: the change is in no "
                "checkpoint. Make it before the step is saved (in the body over ck.batches() or ck.epochs()), or keep "
                "it beside the run: holdfast.save(path, state)", changed, step, session.saves.last_name,
            )  # fmt: skip
        return bool(changed) and session.rank_group is None

    def end_after(self, reason: str, *, is_silent: bool = False) -> None:
        """Leave the body after an error (or a stop): what is under way finishes; the error of the body is raised.

        Args:
            reason: why it was left.
            is_silent: nobody else will say that steps were lost.
        """
        session = self._session
        session.life.leaves()
        rescued: str | None = None

        def flush() -> None:
            self.log.flush(self._progress.step)

        def rescue() -> None:
            nonlocal rescued
            if self.policy.snapshots is not None and not self._stopped and not self.left_for:
                rescued = session.answer(session.client.rescue(reason))
                self.rescues_later = session.rank_group is not None
                if rescued is not None:
                    _LOG.warning("the body raised; the state of the last snapshot is saved as %s", rescued)

        def say_left() -> None:
            if is_silent and rescued is None and not self.rescues_later and not self._stopped:
                self.say_left(reason)

        def end() -> None:
            why = f"the guard: {self.left_for}" if self.left_for else reason
            # Not for a stop that failed: ranks that hear of the death of another one stop, and cannot save.
            stopped = self._stopped or (self.policy.stopping and self.left_for)
            session.end("stopped" if stopped else why, details=self._last_details())

        def wait_for_remote() -> None:
            if not self._waited_for_remote:
                self._wait_for_remote()

        # Each on its own: a failed save must not keep the reports from the disk.
        for act in (flush, session.finish, rescue, say_left, self._say_lost, wait_for_remote, end):
            try:
                act()
            except Exception as late:  # noqa: BLE001 - recorded: raising would hide the error of the body
                _LOG.error("while the run was ending with an error, this failed too: %s", late)

    def say_left(self, how: str) -> None:
        """Say which steps are in no checkpoint, where the body was not left in order."""
        step, safe = self._progress.step, max(0, self._session.stats.last_durable_step)
        if self._session.leads and step > safe:
            steps = f"steps {safe + 1} to {step} are" if step > safe + 1 else f"step {step} is"
            _LOG.warning("the run was left (%s): %s in no checkpoint", how, steps)

    def _last_details(self) -> dict[str, Any]:
        why = self.policy.stopped_by.removeprefix("the ")
        return {"last_step": self._progress.step, **({"stop": why} if why else {})}

    def _say_lost(self) -> None:
        """Log how many saves were lost because the storage was full or did not answer."""
        if lost := self._session.saves.lost.total:
            _LOG.warning(
                "%d save(s) of this run were lost, the storage was full or did not answer; %s", lost,
                self._newest_safe(),
            )  # fmt: skip

    def _newest_safe(self) -> str:
        storage, step = self._session.storage, self._session.stats.last_durable_step
        free = storage.free_bytes()
        room = "" if free is None else f"; {format_bytes(free)} are free at {storage.uri}"
        with contextlib.suppress(StorageError):
            from holdfast.run.trash import Trash  # not above: of this error only

            if trash := Trash(self._session.root).in_words():
                room += f"; {trash}"
        return ("no checkpoint was written" if step < 0 else f"the newest checkpoint is that of step {step}") + room


def decide_at_stop(guard: GuardWatch, *, note: Callable[[str], None]) -> None:
    """Decide on a bad step where all ranks save once more and stop: the next start goes back behind that save.

    Args:
        guard: has found it.
        note: told why, and then "": if deciding raises, nothing is rescued.
    """
    note("" if guard.alarm is None else guard.alarm.why)
    guard.decide()
    note("")


def leave_for_alarm(
    session: RunSession, guard: GuardWatch | None, status: int, *, note: Callable[[str], None], anew: bool = False
) -> NoReturn:
    """Leave a training for a bad step, so that the next start goes on from before that; nothing is saved.

    Args:
        session: the run.
        guard: has found it; None on ranks above 0.
        status: that this process ends with.
        note: told why, first what was found and then what follows: deciding that may raise.
        anew: the same command begins at step 0 again.

    Raises:
        SystemExit: with this status.
        TrainingError: the run must not go on.
    """
    if guard is not None and guard.alarm is not None:
        step = guard.alarm.step
        note(guard.alarm.why)
        found = guard.decide().in_words()
        note(found)
        show_rollback(step, found, session.root, status, anew=anew)
    if status == GUARD_STATUS:
        session.life.end("rolled back")
    raise RolledBack if status == GUARD_STATUS else SystemExit(status)


_HOME = "holdfast.verify.witness"


class Watcher(Protocol):
    """Follows one `Checkpointer` through one life."""

    def arguments(self, path: Any, **options: Any) -> tuple[Any, ...]:
        """Return the path and the options to use instead of those given, in their order."""
        ...

    def entered(self, step: int, resumed: int | None, state: Callable[[], Mapping[Any, Any]]) -> None:
        """Take note of the state a life begins with.

        Args:
            step: the counter.
            resumed: step of the checkpoint that was resumed, None for a fresh start.
            state: returns the full state, as it would be saved.
        """
        ...

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take note of the metrics of a step that was counted just now."""
        ...

    def boundary(self, step: int, state: Callable[[], Mapping[Any, Any]], save: Callable[[], object]) -> None:
        """Take note of the state at the boundary of a step, save it if that is planned, and stop there if asked to.

        Args:
            step: the step that is over. It may come more than once, at the end of an epoch and of the body too.
            state: returns the full state, as a save at this very moment would take it.
            save: saves the step now, unless it is saved.
        """
        ...

    def reported(self, step: int, metrics: Mapping[str, Any], state: Callable[[], Mapping[Any, Any]]) -> None:
        """Take note of metrics that were reported just now, and stop there if asked to."""
        ...

    def mismatched(self, text: str) -> None:
        """Take note of what the ledger of batches says of the batch that comes now; the step is made all the same."""
        ...

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the same batches, each noted as it is drawn."""
        ...


def watcher(path: Any) -> Watcher | None:
    """Return what the `Checkpointer` on ``path`` reports to; None unless its resume is being verified."""
    plan = os.environ.get(VERIFY_VARIABLE)
    if not plan:
        return None
    return cast("Watcher | None", importlib.import_module(_HOME).witness(plan, path))
