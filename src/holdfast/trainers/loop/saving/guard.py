"""The guard of a `Trainer`: that of `Checkpointer`, given what the trainer logs and the names it saves under."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from holdfast.checkpointer.boundaries import leave_for_alarm
from holdfast.checkpointer.guard import GuardWatch, Judge
from holdfast.checkpointer.pending_saves import PendingSaves
from holdfast.checkpointer.run_session import RunSession
from holdfast.config import Guard
from holdfast.run.life import GUARD_STATUS
from holdfast.run.metrics import metric_value
from holdfast.run.rollbacks import read_rollbacks

from ..state import State

__all__ = ["TrainerGuard"]

_LOSS = "loss/train/total"  # what `Guard(metric="loss")` means here


class TrainerGuard:
    """Watches a metric in all trainings of a trainer, and ends one that has to go back. All ranks have one.

    Args:
        guard: what is watched, and what follows.
        state: of the trainer.

    Attributes:
        options: the guard, its metric called as the trainer logs it.
        left_for: what was found, once training is left for it; else "".
        saves_at: batches that are saved because the next one was bad in an earlier life: little is lost if it is again.
        bad: called when a batch is bad; the trainer decides how it is left.
        protected: names that retention has to keep, whatever its rules; read on any thread.
    """

    def __init__(self, guard: Guard, state: State) -> None:
        self.options = replace(guard, metric=_LOSS) if guard.metric == "loss" else guard
        state.dataset_state.judge = Judge(self.options)
        self._state = state
        self._session: RunSession | None = None
        self._watch: GuardWatch | None = None
        self._value: tuple[int, Any] = (-1, None)  # batch and value of the metric
        self.left_for = ""
        self.saves_at: frozenset[int] = frozenset()
        self.bad: Callable[[], object] = self.leave
        self.protected: frozenset[str] = frozenset()

    def begin(
        self, session: RunSession, saves: PendingSaves, *, name: str | None, before: tuple[int, str] | None
    ) -> None:
        """Watch a training that begins now.

        Args:
            session: the run that a later life goes on from.
            saves: into it.
            name: of the checkpoint that training goes on from, if that is in the run.
            before: batch and name of the sound checkpoint of the run before that.
        """
        step, judge = self._state.timestamp.count("batch"), self._state.dataset_state.judge
        rollbacks = read_rollbacks(session.opened.notes)
        self._session, self.left_for = session, ""
        if self.options.skip == "bad":
            again = (rollback.step - 1 for rollback in rollbacks if not rollback.left_out)
            self.saves_at = frozenset(batch for batch in again if batch > step)
        if not session.leads or judge is None:
            return
        if name is not None:
            session.stats.last_durable_step = step
        self._watch = GuardWatch(
            self.options, judge, session, rollbacks, step=step, name=name, before=before, saves=saves
        )
        self._protect(self._watch)

    @property
    def watched(self) -> str | None:
        """The metric that makes a checkpoint unfit to go on from where it is not finite; None if none does."""
        return None if self.options.action == "warn" else self.options.metric

    # -- while it trains

    def take(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take what is logged at a batch.

        Raises:
            ConfigError: the metric is not a number.
        """
        if self._watch is not None:
            if (value := metric_value(metrics, self.options.metric)) is not None:
                self._value = step, value
            self._watch.take(step, metrics, self._state.dataset_state.place)

    def stepped(self) -> None:
        """A batch is trained and its losses are logged: look at what has arrived, and let training be left for it."""
        if self._watch is not None:
            self._watch.stepped(self._state.timestamp.count("batch"), self._state.dataset_state.place)
            self.check()

    def check(self, *, waits: bool = False) -> None:
        """Let training be left if a batch was bad.

        Args:
            waits: for values that have not arrived yet: before a state is copied.
        """
        if self._watch is not None and self._watch.look(waits=waits) is not None:
            self.bad()

    def keeping(self) -> bool:
        """A state is about to be copied, and is written only if this process dies; False: it must not be kept."""
        if self._watch is not None:
            self.check(waits=True)
            if self._watch.alarm is not None:
                return False  # all ranks leave at a moment that is about to come
            self._protect(self._watch)
        return True

    def saving(self, name: str) -> None:
        """Have retention keep what may be needed yet, before a checkpoint of this name can push it out."""
        if self._watch is not None:
            self._watch.saving(self._state.timestamp.count("batch"), name)
            self.protected = self._watch.protected

    def _protect(self, watch: GuardWatch) -> None:
        watch.protect()
        self.protected = watch.protected

    def value_at(self, batch: int) -> dict[str, float]:
        """Return the metric as it was logged at this batch, for its checkpoint; {} if it was not."""
        at, value = self._value
        return {self.options.metric: float(value)} if at == batch else {}

    # -- how it is left

    def leave(self, status: int = GUARD_STATUS) -> NoReturn:
        """Leave training, so that the next start goes on from before the bad batch; nothing is saved.

        Args:
            status: that this process ends with.

        Raises:
            SystemExit: with this status.
            TrainingError: the run must not go on.
        """
        assert self._session is not None
        self.left_for = "a bad batch, found by the guard of rank 0"
        leave_for_alarm(self._session, self._watch, status, note=partial(setattr, self, "left_for"))

    def stop(self, status: int) -> None:
        """Training is left because it was asked to stop. Raises like `leave`, where no other rank is about to save."""
        watch = self._watch
        if watch is None or watch.look(waits=True) is None:
            return
        if self._state.ranks.world_size == 1:
            self.leave(status)
        self.left_for = watch.alarm.why if watch.alarm is not None else ""  # if that raises, nothing is rescued
        watch.decide()  # all ranks save this batch, and the next start goes back behind it
        self.left_for = ""

    def judge_rest(self) -> None:
        """Training is done: leave, as `leave` does, if one of the last values is bad; all ranks call it."""

        def is_bad() -> bool:
            return self._watch is not None and self._watch.look(waits=True) is not None

        if self._state.ranks.lead("judged", is_bad):
            self.leave()
        if self._watch is not None:
            self._watch.ended()
