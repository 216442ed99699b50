"""What every process has to decide alike in the middle of training: how late it is, when to stop, what has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from holdfast.checkpointer.rank_group import RankGroup, agreed
from holdfast.checkpointer.signals import StopSignals
from holdfast.errors import HoldfastError
from holdfast.run.life import GUARD_STATUS, REQUEUE_STATUS

from ..time import Every, TimeUnit, When
from .ranks import Ranks

if TYPE_CHECKING:
    from ..saving.guard import TrainerGuard
    from ..saving.saver_group import SaverGroup
    from ..state import State

__all__ = ["DistributedStopPolicy", "StopPolicy", "make_pace"]

_PAUSE_S = 2.0


def make_pace(signals: StopSignals, state: State, group: SaverGroup, evals: Sequence[When]) -> StopPolicy:
    """Return what decides in a training; with several ranks they all call this, and what they save to is open."""
    if state.ranks.world_size == 1:
        return StopPolicy(signals, group.guard)
    every = [pace for pace in (*evals, *(saver.every for saver in group.savers)) if isinstance(pace, Every)]
    times = [*(pace.interval for pace in every), state.max_duration]
    seconds = [time.value for time in times if time is not None and time.unit is TimeUnit.SECOND]
    return DistributedStopPolicy(
        signals, state.ranks, group.team(), intervals_s=seconds, settle=group.settle_ended, guard=group.guard
    )


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
        team: their writers.
        intervals_s: everything that is due by the clock, in seconds.
        settle: takes in what has ended in the background; raises what failed.
        guard: looks for bad batches, on rank 0; None without one.
    """

    def __init__(
        self, signals: StopSignals, ranks: Ranks, team: RankGroup, *, intervals_s: Sequence[float],
        settle: Callable[[], None], guard: TrainerGuard | None = None,
    ) -> None:  # fmt: skip
        super().__init__(signals, guard)
        self._ranks, self._team, self._settle = ranks, team, settle
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
        board = self._team.board
        board.calls(self._moment)
        if self._signals.received is not None:
            self._want("stop")
        elif self._ranks.leads and time.monotonic() - self._met > self._pause_s:
            self._want("settle")
        kind = agreed(self._team, self._moment)
        if kind == "rollback" and self._guard is not None:
            self._leave()  # whoever has left before
        if (trouble := self._team.trouble()) is not None:
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
            self._team.client.tell_ranks("want", kind=kind)

    def _meet(self) -> float:
        def give() -> float:
            self._settle()
            return self._owed

        owed = float(self._ranks.agree("moment", give))
        self._owed, self._met = 0.0, time.monotonic()
        return owed

    def explain(self, error: BaseException) -> HoldfastError | None:
        """Return the reason behind an error of a collective: which rank is gone, and why."""
        return self._team.explain(error)
