"""How training is left: when to stop, what has failed, how late it is, and what the guard of a `Trainer` finds.

What every process has to decide alike in the middle of training is decided by a `StopPolicy`; `TrainerGuard` is the
guard of `Checkpointer`, given what the trainer logs and the names it saves under.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.checkpointer.boundaries import decide_at_stop, leave_for_alarm
from holdfast.checkpointer.guard import GuardWatch, Judge
from holdfast.checkpointer.pending_saves import PendingSaves
from holdfast.checkpointer.rank_group import RankGroup, agreed
from holdfast.checkpointer.run_session import RunSession
from holdfast.checkpointer.signals import StopSignals
from holdfast.config import Guard
from holdfast.errors import HoldfastError
from holdfast.run.life import GUARD_STATUS, REQUEUE_STATUS
from holdfast.run.record import metric_value
from holdfast.run.rollbacks import read_rollbacks

from .data import counts_tokens
from .parallel import Ranks
from .state import State
from .time import Every, Time, TimeUnit, When

if TYPE_CHECKING:
    from .saving.saver_group import SaverGroup

_PAUSE_S = 2.0
_LOSS = "loss/train/total"  # what `Guard(metric="loss")` means here


def make_pace(signals: StopSignals, state: State, group: SaverGroup, evals: Sequence[When]) -> StopPolicy:
    """Return what decides in a training; with several ranks they all call this, and what they save to is open."""
    if state.ranks.world_size == 1:
        return StopPolicy(signals, group.guard)
    times = [*_intervals(group, evals), state.max_duration]
    seconds = [time.value for time in times if time is not None and time.unit is TimeUnit.SECOND]
    return DistributedStopPolicy(
        signals, state.ranks, group.rank_group(), intervals_s=seconds, settle=group.settle_ended, guard=group.guard
    )


def uncounted(state: State, group: SaverGroup, evals: Sequence[When]) -> str:
    """Return what to say of intervals in tokens if the batch that was trained has none; "" if it does not matter."""
    idle = sorted({str(time) for time in _intervals(group, evals) if time.unit is TimeUnit.TOKEN})
    if not idle or counts_tokens(state.batch, state.train_spec):
        return ""
    return (
        f"an interval of {' and '.join(idle)} never comes due: the batches have no tokens that are counted (the "
        'entries of "input_ids" in a dictionary), so the end alone is saved or evaluated. Give DataSpec(loader, '
        "get_num_tokens_in_batch=...) as train_dataloader, or an interval in batches"
    )


def _intervals(group: SaverGroup, evals: Sequence[When]) -> list[Time]:
    every = (*evals, *(saver.every for saver in group.savers))
    return [pace.interval for pace in every if isinstance(pace, Every)]


class StopPolicy:
    """Decides for one process alone.

    Args:
        signals: those that ask training to stop.
        guard: looks for bad batches; None without one.
    """

    def __init__(self, signals: StopSignals, guard: TrainerGuard | None = None) -> None:
        self._signals, self._guard = signals, guard
        self._last = time.perf_counter()
        if guard is not None:
            guard.bad = self._go_back

    def logged(self) -> None:
        """The metrics of a batch are logged: training is left if the guard has found a bad one.

        Raises:
            SystemExit: it has.
            TrainingError: it has, and the run must not go on.
        """
        if self._guard is not None:
            self._guard.stepped()

    def _go_back(self) -> None:
        """Leave training for a bad batch, at once."""
        self._leave()

    def _leave(self) -> NoReturn:
        assert self._guard is not None
        # After a signal its own status: whoever sent it waits for that, and the next start goes back all the same.
        self._guard.leave(GUARD_STATUS if self._signals.received is None else REQUEUE_STATUS)

    @property
    def stopping(self) -> bool:
        """Whether training has to be left after the current batch."""
        return self._signals.received is not None

    def begin(self) -> None:
        """Start the clock: what comes from now on counts, between batches too."""
        self._last = time.perf_counter()

    def lap(self) -> float:
        """A batch is trained: return how many seconds to count for it, and for what came before it."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        return took

    def look(self) -> None:
        """Two batches of an evaluation lie before and behind us: a moment to learn that we have to stop."""

    def explain(self, error: BaseException) -> HoldfastError | None:
        """Return the reason behind an error of training that another rank has caused."""
        return None


class DistributedStopPolicy(StopPolicy):
    """Decides with the other ranks, without a collective: rank 0's writer proposes a moment (`holdfast.writer`).

    Every batch, of training and of an evaluation that is split, is a moment; all ranks count them alike. At a moment
    that they have agreed on they meet: the clock of rank 0 becomes that of all, and what has failed in the background
    ends training on all of them.

    Args:
        signals: those that ask training to stop, on any rank.
        ranks: the processes that train.
        rank_group: their writers.
        intervals_s: everything that is due by the clock, in seconds.
        settle: takes in what has ended in the background; raises what failed.
        guard: looks for bad batches, on rank 0; None without one.
    """

    def __init__(
        self, signals: StopSignals, ranks: Ranks, rank_group: RankGroup, *, intervals_s: Sequence[float],
        settle: Callable[[], None], guard: TrainerGuard | None = None,
    ) -> None:  # fmt: skip
        super().__init__(signals, guard)
        self._ranks, self._rank_group, self._settle = ranks, rank_group, settle
        self._pause_s = min(_PAUSE_S, *(interval_s / 10 for interval_s in intervals_s), _PAUSE_S)
        self._moment = 0
        self._owed = 0.0  # seconds that have passed here and are not counted yet
        self._met = time.monotonic()
        self._told: set[str] = set()
        self._stopping = False

    @property
    def stopping(self) -> bool:
        """Whether all ranks leave after the current batch: a signal alone does not count before they have agreed."""
        return self._stopping

    def lap(self) -> float:
        """See `StopPolicy`. The clock moves when ranks meet, every few seconds, so that all of them read the same."""
        self._owed += super().lap()
        return self._pass()

    def look(self) -> None:
        """See `StopPolicy`."""
        if not self._stopping:
            counted = self._pass()  # first: at a meeting it takes what is owed away
            self._owed += counted

    def _pass(self) -> float:
        """One moment has come; return how many seconds to count, if ranks meet at it."""
        self._moment += 1
        mailbox = self._rank_group.mailbox
        mailbox.calls(self._moment)
        if self._signals.received is not None:
            self._want("stop")
        elif self._ranks.leads and time.monotonic() - self._met > self._pause_s:
            self._want("settle")
        kind = agreed(self._rank_group, self._moment)
        if kind == "rollback" and self._guard is not None:
            self._leave()  # whoever has left before
        if (trouble := self._rank_group.trouble()) is not None:
            raise trouble
        if kind is None:
            return 0.0
        self._told.clear()
        self._stopping = self._stopping or kind == "stop"
        return self._meet()

    def _go_back(self) -> None:
        """Ask for a moment at which all ranks leave."""
        self._want("rollback")

    def _want(self, kind: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._rank_group.client.tell_ranks("want", kind=kind)

    def _meet(self) -> float:
        def give() -> float:
            self._settle()
            return self._owed

        owed = float(self._ranks.agree("moment", give))
        self._owed, self._met = 0.0, time.monotonic()
        return owed

    def explain(self, error: BaseException) -> HoldfastError | None:
        """Return the reason behind an error of a collective: which rank is gone, and why."""
        return self._rank_group.explain(error)


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
        decide_at_stop(watch, note=partial(setattr, self, "left_for"))

    def judge_rest(self) -> None:
        """Training is done: leave, as `leave` does, if one of the last values is bad; all ranks call it."""

        def is_bad() -> bool:
            return self._watch is not None and self._watch.look(waits=True) is not None

        if self._state.ranks.lead("judged", is_bad):
            self.leave()
        if self._watch is not None:
            self._watch.ended()
