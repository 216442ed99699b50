"""What a run does at the boundary of a step and at its end: save, stop, try again when the storage was full.

The boundary of a step is ``ck.step()`` itself, except in the body of a loop over ``ck.batches``: there it is where the
loop asks for its next batch, ends its epoch, or leaves, so that what the body does after ``ck.step()`` belongs to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast._log import get_logger
from holdfast.writer.client import WriterClient

from .metrics import MetricLog
from .options import CheckpointerOptions
from .progress import Progress
from .save_policy import SavePolicy
from .saver import RunSaver
from .verification import Watcher

__all__ = ["StepBoundary"]

_LOG = get_logger("checkpointer")
_FULL_RETRY_S = 5.0
_MAX_OPEN = 256  # steps in one body before each further one is a boundary: the loop may ask for no more batches


class StepBoundary:
    """Carries out what `SavePolicy` decides.

    Args:
        saver: starts saves and follows them.
        log: metrics of the run.
        pace: decides.
        progress: the counters.
        options: arguments of the run.
        state: the full state.

    Attributes:
        held_s: time saves have held the loop since this was set to 0.
        pace: decides.
        log: metrics of the run.
        watcher: is told of every boundary while a resume is verified.
    """

    def __init__(
        self,
        saver: RunSaver,
        log: MetricLog,
        pace: SavePolicy,
        progress: Progress,
        options: CheckpointerOptions,
        state: Callable[[], Mapping[Any, Any]],
    ) -> None:
        self._saver, self.log, self.pace, self._progress, self._options = saver, log, pace, progress, options
        self._state = state
        self._warm = False
        self.held_s = 0.0
        self._open = False  # a step was made in a body, and its boundary is still to come
        self._num_open = 0  # steps in this body
        self._said_long = False  # that a body had too many of them
        self._per_body = 1  # steps in the last body that had any
        self._step_s = 0.0
        self._wanted = False  # a save was asked for; it is made at the boundary
        self._early = False  # it was asked for in a body whose step is still to come: that step is the one to save
        self.watcher: Watcher | None = None

    # -- boundaries

    def stepped(self, step_s: float) -> None:
        """Take in a step that was just made: act on it, or leave that to the end of its body.

        Args:
            step_s: how long the step took.
        """
        self._step_s = step_s
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

    def boundary(self) -> None:
        """Act on the last step, if its body has just ended."""
        if 0 < self._num_open <= _MAX_OPEN:
            self._per_body = self._num_open
        self._num_open = 0
        if self._open or (self._wanted and not (self._early and self._progress.in_body)):
            self._bound()

    def _bound(self) -> None:
        is_new, self._open, self._early = self._open or not self._wanted, False, False
        now, saver = time.monotonic(), self._saver
        if self.pace.stepped(now, step_s=self._step_s, save_s=saver.save_s) or self.wants_attention:
            self.attend(now, self._step_s)
        elif saver.unsettled:
            saver.glance()
        if self._wanted:
            self._wanted = False
            self.save(force=True)
        if is_new:
            self.watch()

    def watch(self) -> None:
        """Tell the watcher, if there is one, that a step is over."""
        if self.watcher is not None:
            self.watcher.boundary(self._progress.step, self._state, lambda: self.save(force=True))

    def _want_save(self, metrics: Mapping[str, Any]) -> None:
        """Save the current step: now, or at its boundary if there is still one to come."""
        if self._open or self._progress.after_pass:
            self._wanted = True
        elif not metrics and self._before_step:
            # The weights may be those of the step that ck.step() has yet to count: it is saved, when it is over.
            self._wanted = self._early = True
        else:
            if self._before_step:
                self._progress.remind_of_order()
            self.save(force=True)

    @property
    def _before_step(self) -> bool:
        return self._progress.in_body and not self._open and not self._num_open

    def attend(self, now: float, step_s: float) -> None:
        """Do what the current step calls for: stop, save, retry, or warm up."""
        saver = self._saver
        if not self._warm:
            # Optimizer state exists from the first step on: now the arena's size is known, and its pages are
            # faulted in the background, long before the first save is due.
            self._warm = True
            saver.snapshotter.prepare(self._state(), saver.client)
        call = self.pace.call(now, step_s=step_s, save_s=saver.save_s)
        if call == "stop":
            self.stop()
        if call == "settle":
            saver.settle(wait_for_it=True)
        elif saver.unsettled:
            saver.glance()
        if saver.wants_retry:
            self._save_when_space()
        elif call == "save":
            self.save()

    @property
    def wants_attention(self) -> bool:
        """True before the first step was attended to, and while a save waits for space."""
        return not self._warm or self._saver.wants_retry

    def save(self, *, force: bool = False) -> None:
        """Save the current step, unless it is."""
        begun = time.perf_counter()
        saver, progress = self._saver, self._progress
        saved = saver.last_step == progress.step or saver.save(
            step=progress.step, epoch=progress.epoch, metrics=self.log.of_step(progress.step), force=force,
            announce=lambda name: self.log.flush(progress, saver, name=name),
        )  # fmt: skip
        # One that is left out because the writer is busy is over as well: the next multiple is the next chance.
        self.pace.saved()
        if saved:
            self.log.flush(progress, saver)  # nothing, unless the step was saved before
        self.held_s += time.perf_counter() - begun  # the time a save holds is not the time of a step

    def save_now(self, metrics: dict[str, Any]) -> None:
        """Save the current step with these metrics, or bind them to the save that it has."""
        saver, step = self._saver, self._progress.step
        if metrics:
            self.log.add(step, self._progress.epoch, metrics)
        if saver.last_step != step:
            self._want_save(metrics)
        elif metrics:
            self.log.bind(saver, metrics)

    def report(self, metrics: dict[str, Any]) -> None:
        """Record metrics; save the step if it is ranked by one of them and has no checkpoint."""
        saver, progress, keep = self._saver, self._progress, self._options.keep
        self.log.add(progress.step, progress.epoch, metrics)
        ranked = keep is not None and keep.best is not None and keep.metric in metrics
        if saver.last_step != progress.step and ranked:
            self._want_save(metrics)
        elif saver.last_step == progress.step:
            self.log.bind(saver, metrics)
        if not self._wanted:
            self.log.flush(progress, saver)

    def wait(self, *, remote: bool = False) -> None:
        """Wait until everything so far is durable; with ``remote`` also at the remote of a mirrored run.

        A save that is due is made first: whoever waits for it wants it now, and not at the end of the body. Unless
        more steps are to come in this body, as in the one before: only whole batches are saved, and of several ranks
        one may wait alone, where a save must be of the same step on all.
        """
        self._early = False
        is_over = not self._progress.in_body or self._num_open >= self._per_body
        if self._wanted or (self._open and is_over):
            self._bound()
        saver = self._saver
        self.log.flush(self._progress, saver)
        saver.finish()
        if remote and saver.remote is not None:
            saver.remote.finish(self._options.timeout_s, saver.last_step)

    def epoch_done(self, epochs: int) -> None:
        """Act at the end of an epoch: save if it is due, stop if a signal came after the last step."""
        due = self.pace.epoch_due(epochs)
        self.boundary()
        if due and self._saver.last_step != self._progress.step:
            self.save()
        self.watch()
        if self._progress.num_steps and self.pace.poll(step_s=self._step_s, save_s=self._saver.save_s):
            self.stop()

    def stop(self) -> None:
        """Save the current step, wait until it is safe, and leave the body."""
        self.pace.stopping = True
        self.save(force=True)
        self.wait()
        raise SystemExit(self._options.exit_code)

    def _save_when_space(self) -> None:
        """``on_full="wait"``: hold training and try again until there is space or the time is up."""
        saver = self._saver
        until = time.monotonic() + self._options.timeout_s
        tries = int(self._options.timeout_s / _FULL_RETRY_S)  # counted, where all ranks have to try equally often
        while saver.wants_retry:
            self.save(force=True)
            saver.settle(wait_for_it=True)
            if not saver.wants_retry:
                return
            if self.pace.must_end(tries):
                self.stop()
            tries -= 1
            if tries < 1 or (saver.team is None and time.monotonic() + _FULL_RETRY_S > until):
                saver.on_full = "raise"
            time.sleep(_FULL_RETRY_S)

    # -- the end

    def end(self, client: WriterClient) -> None:
        """Leave the body in order: the final step is saved, everything is durable, errors raise."""
        saver, step = self._saver, self._progress.step
        saver.settle(wait_for_it=True)
        if step > 0 and saver.last_step != step:
            self.save(force=True)
            saver.settle(wait_for_it=True)
            if saver.wants_retry:
                self._save_when_space()
        self.wait()
        saver.say_lost()
        if step > 0 and saver.last_step != step:
            raise saver.final_is_missing(step)
        if saver.remote is not None:
            saver.remote.finish(self._options.timeout_s, saver.last_step)
        stopped = self.pace.stop_asked
        if not saver.leads:
            return
        if not stopped:
            saver.on_the_side(client.run_op("finished", info={"step": step, "epoch": self._progress.epoch}))
        details = {"last_step": step, **self.pace.stop_details()}
        saver.on_the_side(client.run_op("close_run", reason="stopped" if stopped else "finished", details=details))
        saver.finish()

    def end_after(self, reason: str, client: WriterClient) -> None:
        """Leave the body after an error (or a stop): what is under way finishes; the body's error is the one to see."""
        saver = self._saver

        def close() -> None:
            if not saver.leads:
                return
            details = {"last_step": self._progress.step, **self.pace.stop_details()}
            why = "stopped" if self.pace.stopping else reason
            saver.on_the_side(client.run_op("close_run", reason=why, details=details))

        def flush() -> None:
            self.log.flush(self._progress, saver)

        # Each on its own: a failed save must not keep the reports from the disk.
        def upload() -> None:
            if saver.remote is not None:
                saver.remote.finish(self._options.timeout_s, saver.last_step)

        for act in (flush, saver.finish, saver.say_lost, upload, close, saver.finish):
            try:
                act()
            except Exception as late:  # noqa: BLE001 - recorded: raising would hide the error of the body
                self.log.complain(late)
