"""How often a run saves with ``every="auto"``, and keeps snapshots with ``rescue="auto"``: as often as loses least.

`AutoInterval` decides, from costs and failures (`Lives`) alone; `follow_costs` tells it what the saves of a run cost.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from holdfast._log import get_logger
from holdfast._units import format_duration
from holdfast.errors import HoldfastError
from holdfast.run.costs import Save, saves
from holdfast.run.index import RunIndex
from holdfast.run.record import timestamp

from .console import ResumeBlock

if TYPE_CHECKING:
    from holdfast.run.reports import RunHistory

    from .boundaries import StepBoundary
    from .run_session import RunSession
    from .save_policy import Schedule

_LOG = get_logger("checkpointer")
PRIOR_S = 4 * 3600.0
"""Most time between failures that is assumed until the first of them."""
FIRST_S = 10.0
"""After which a run saves first, to learn what that costs."""
MOST_S = 1800.0
_SOONEST_S = 1.0  # also where a save costs nothing that can be measured: the storage is not there for us alone
_LEAST_COSTS = 20.0  # saves take a twentieth of the time at most
_BREATH = 1.2  # a save begins when the one before has long been written
_RECENT = 8  # saves whose cost counts: the state grows, disks slow down
_MOVED = 4 / 3
_NO_FAILURE = ("finished", "stopped", "closed")  # these lives have saved their last step


@dataclass(frozen=True, slots=True)
class Lives:
    """The lives of a run before this one.

    Attributes:
        seconds: that they have lasted, as far as is known.
        failures: how many of them ended without having saved their last step.
        rescued: of how many of these the newest snapshot was saved: next to nothing was trained again.
    """

    seconds: float = 0.0
    failures: int = 0
    rescued: int = 0

    @classmethod
    def of(cls, history: RunHistory, *, before: int) -> Lives:
        """Count the attempts with lower numbers than ``before``. A life that was killed ends with its last sign."""
        signs: dict[int, float] = {}
        times = [(event.attempt, event.time) for event in history.events]
        times += [(row["attempt"], row["time"]) for row in history.rows if isinstance(row.get("time"), (int, float))]
        for number, moment in times:
            signs[number] = max(signs.get(number, 0.0), moment)
        with_snapshot = {event.attempt for event in history.events if event.what == "saved" and event.why}
        seconds, failed = 0.0, set()
        for number, attempt in history.attempts.items():
            begun, ended = timestamp(attempt.started), timestamp(attempt.ended or "") or signs.get(number, 0.0)
            if number < before and begun:
                seconds += max(0.0, ended - begun)
                if attempt.reason not in _NO_FAILURE:
                    failed.add(number)
        return cls(seconds, len(failed), len(failed & with_snapshot))


def best_interval_s(cost_s: float, between_failures_s: float, *, durable_s: float) -> float:
    """Return how many seconds lie between saves, so that least time is lost.

    A save costs training some seconds, and a failure costs what was trained since the newest save, half an interval on
    average. With a failure every M seconds the sum of both is least with about sqrt(2 * cost * M) seconds between
    saves: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM
    17(9), 1974. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006, adds terms that matter where a save costs a large part of M; the bounds
    below hold before that. The loss is flat around its minimum: with an interval half or twice as long it is a quarter
    more.

    Args:
        cost_s: of training, that a save costs.
        between_failures_s: mean time between failures.
        durable_s: from the start of a save to its end; saves never wait for the storage.

    Returns:
        Half an hour at most, whatever a save seems to cost: that bounds what a failure loses, and one long evaluation
        among the steps of a save must not put the next one off for hours. Only where a save is not durable within that
        time the next one comes later.
    """
    best = max(_LEAST_COSTS * cost_s, math.sqrt(2 * cost_s * between_failures_s))
    return max(_SOONEST_S, _BREATH * durable_s, min(MOST_S, best))


class AutoInterval:
    """How often a run with ``every="auto"`` saves, or one with ``rescue="auto"`` keeps its state in memory.

    It follows what that costs, and how often a failure loses work: one whose snapshot was saved counts for snapshots
    alone. It knows no clock.

    Args:
        lives: before this one.
        known: saves of those.
        now: monotonic seconds at the start of this life.
        what: "save" or "snapshot".
    """

    def __init__(
        self, lives: Lives = Lives(), known: Sequence[Save] = (), *, now: float,
        what: Literal["save", "snapshot"] = "save",
    ) -> None:  # fmt: skip
        self._lives, self._begun, self._what = lives, now, what
        self._costs: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        for save in known:
            if save.lost_s is not None and save.durable_s is not None:
                self._costs.append((save.lost_s, save.durable_s))
        self._said: float | None = None

    def paid(self, cost_s: float, durable_s: float) -> None:
        """Take in what a save has cost, in seconds: training time lost, and time until it was durable."""
        self._costs.append((max(0.0, cost_s), durable_s))

    def seconds(self, now: float) -> float:
        """Return the seconds between saves."""
        if not self._costs:
            # Lives that end before their first save would never learn: each failure halves the time until then.
            # A snapshot is one copy of memory: the first one comes at once.
            return max(_SOONEST_S, FIRST_S * 0.5**self._failures) if self._what == "save" else _SOONEST_S
        return self._best_s(self._between_failures_s(now))

    def _best_s(self, between_failures_s: float) -> float:
        cost_s, durable_s = (statistics.median(column) for column in zip(*self._costs, strict=True))
        return best_interval_s(cost_s, between_failures_s, durable_s=durable_s)

    def news(self, now: float) -> str | None:
        """Return a line for people when an interval first applies, and when it has moved by a third; else None."""
        if not self._costs:
            return None
        between_s = self._between_failures_s(now)
        seconds = self._best_s(between_s if self._failures else PRIOR_S)
        if self._said is not None and self._said / _MOVED < seconds < self._said * _MOVED:
            return None
        self._said = seconds
        what, applies = self._what, f"{self._what}s every {format_duration(self._best_s(between_s))}"
        cost = f"a {what} costs {format_duration(statistics.median(cost_s for cost_s, _ in self._costs))}"
        if self._failures:
            return f"{applies} from now on: {cost}, a failure every {format_duration(between_s)}"
        without = " without a snapshot" if self._lives.failures else ""
        last = f"every {format_duration(seconds)} in the end"
        return f"{applies} now, ever more rarely while nothing fails{without} ({last}): {cost}"

    @property
    def _failures(self) -> int:
        return self._lives.failures - (self._lives.rescued if self._what == "save" else 0)

    def _between_failures_s(self, now: float) -> float:
        # One failure says more than a guess: what is wrong with it moves the interval by its root, and that is bounded.
        # Until there were three, runs that failed every 30 s were useful for 0.39 of their time. Without any, what has
        # lived for so long lives as long again: what fails young, as most new scripts do, loses little. With four hours
        # assumed from the start, a run that was killed after a minute had saved once, at its beginning.
        lived_s = self._lives.seconds + now - self._begun
        return lived_s / self._failures if self._failures else min(PRIOR_S, 2 * lived_s)


def follow_costs(session: RunSession, boundary: StepBoundary, schedule: Schedule | None, *, rescue: bool) -> None:
    """Save, and keep snapshots, as often as loses least, by what they cost and how often the run fails; on rank 0.

    Args:
        session: the run.
        boundary: tells what snapshots cost.
        schedule: of saves, for ``every="auto"``.
        rescue: whether the interval of snapshots is found as well.
    """
    snapshots = boundary.policy.snapshots if rescue else None
    if schedule is None and snapshots is None:
        return
    begun, attempt = time.monotonic(), session.opened.attempt
    try:
        history = RunIndex.load(session.root).read_history()
    except HoldfastError as error:
        _LOG.warning("what earlier saves of the run have cost cannot be read, 'auto' begins anew: %s", error)
        lives, known = Lives(), []
    else:
        lives, known = Lives.of(history, before=attempt), saves(history.events)

    def adjust(auto: AutoInterval, schedule: Schedule) -> float:
        now = time.monotonic()
        seconds = auto.seconds(now)
        schedule.adjust(seconds)
        if (news := auto.news(now)) is not None:
            ResumeBlock(headline=news).show()
        return seconds

    if schedule is not None:
        auto = AutoInterval(lives, known, now=begun)

        def paid(cost_s: float, durable_s: float) -> None:
            far = session.remote_watch
            auto.paid(cost_s, durable_s + (0.0 if far is None else far.upload_s))
            session.extra["every_s"] = round(adjust(auto, schedule), 3)

        session.extra["every_s"] = round(adjust(auto, schedule), 3)
        session.paid = paid
    if snapshots is not None:
        of_snapshots = AutoInterval(lives, now=begun, what="snapshot")

        def snapshot_paid(cost_s: float) -> None:
            of_snapshots.paid(cost_s, 0.0)
            adjust(of_snapshots, snapshots)

        adjust(of_snapshots, snapshots)
        boundary.snapshot_paid = snapshot_paid
