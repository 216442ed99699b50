"""How often a run with ``every="auto"`` saves: the interval that loses least time.

A save costs training some seconds, and a failure costs what was trained since the newest save, half an interval on
average. With a failure every M seconds the sum of both is least with about sqrt(2 * cost * M) seconds between saves:
J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974.
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22(3), 2006, adds terms that matter where a save costs a large part of M; the bounds below hold before that.
The loss is flat around its minimum: with an interval half or twice as long it is a quarter more.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast._units import format_duration
from holdfast.run.costs import Save, saves
from holdfast.run.record import timestamp
from holdfast.run.reports import RunHistory

__all__ = ["FIRST_S", "MOST_S", "PRIOR_S", "AutoInterval", "Lives", "best_interval_s"]

PRIOR_S = 4 * 3600.0
"""Assumed time between failures until `_KNOWN` of them have happened."""
FIRST_S = 60.0
"""After which a run saves first, to learn what that costs."""
MOST_S = 1800.0
_SOONEST_S = 1.0  # also where a save costs nothing that can be measured: the storage is not there for us alone
_LEAST_COSTS = 20.0  # saves take a twentieth of the time at most
_BREATH = 1.2  # a save begins when the one before has long been written
_KNOWN = 3
_RECENT = 8  # saves whose cost counts: the state grows, disks slow down
_MOVED = 4 / 3
_NO_FAILURE = ("finished", "stopped", "closed")  # these lives have saved their last step


@dataclass(frozen=True, slots=True)
class Lives:
    """The lives of a run before this one.

    Attributes:
        seconds: that they have lasted, as far as is known.
        failures: how many of them ended without having saved their last step.
    """

    seconds: float = 0.0
    failures: int = 0

    @classmethod
    def of(cls, history: RunHistory, *, before: int) -> Lives:
        """Count the attempts with lower numbers than ``before``. A life that was killed ends with its last sign."""
        signs: dict[int, float] = {}
        times = [(event.attempt, event.time) for event in history.events]
        times += [(row["attempt"], row["time"]) for row in history.rows if isinstance(row.get("time"), (int, float))]
        for number, moment in times:
            signs[number] = max(signs.get(number, 0.0), moment)
        seconds, failures = 0.0, 0
        for number, attempt in history.attempts.items():
            begun, ended = timestamp(attempt.started), timestamp(attempt.ended or "") or signs.get(number, 0.0)
            if number < before and begun:
                seconds += max(0.0, ended - begun)
                failures += attempt.reason not in _NO_FAILURE
        return cls(seconds, failures)


def best_interval_s(cost_s: float, between_failures_s: float, *, durable_s: float) -> float:
    """Return how many seconds lie between saves.

    Args:
        cost_s: of training, that a save costs.
        between_failures_s: mean time between failures.
        durable_s: from the start of a save to its end; saves never wait for the storage.
    """
    least = max(_SOONEST_S, _LEAST_COSTS * cost_s, _BREATH * durable_s)
    return max(least, min(MOST_S, math.sqrt(2 * cost_s * between_failures_s)))


class AutoInterval:
    """Follows what saves cost and how often the run fails; knows no clock.

    Args:
        lives: before this one.
        known: saves of those.
        now: monotonic seconds at the start of this life.
    """

    def __init__(self, lives: Lives = Lives(), known: Sequence[Save] = (), *, now: float) -> None:
        self._lives, self._begun = lives, now
        self._costs: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        for save in known:
            if save.lost_s is not None and save.durable_s is not None:
                self._costs.append((save.lost_s, save.durable_s))
        self._said: float | None = None

    @classmethod
    def of(cls, history: RunHistory, *, attempt: int, now: float) -> AutoInterval:
        """Begin with what the run knows of its lives before ``attempt``."""
        return cls(Lives.of(history, before=attempt), saves(history.events), now=now)

    def paid(self, cost_s: float, durable_s: float) -> None:
        """Take in what a save has cost, in seconds: training time lost, and time until it was durable."""
        self._costs.append((max(0.0, cost_s), durable_s))

    def seconds(self, now: float) -> float:
        """Return the seconds between saves."""
        if not self._costs:
            # Lives that end before their first save would never learn: each failure halves the time until then.
            return max(_SOONEST_S, FIRST_S * 0.5**self._lives.failures)
        cost_s, durable_s = (statistics.median(column) for column in zip(*self._costs, strict=True))
        return best_interval_s(cost_s, self._between_failures_s(now), durable_s=durable_s)

    def news(self, now: float) -> str | None:
        """Return a line for people when an interval first applies, and when it has moved by a third; else None."""
        if not self._costs:
            return None
        seconds = self.seconds(now)
        if self._said is not None and self._said / _MOVED < seconds < self._said * _MOVED:
            return None
        self._said = seconds
        cost = format_duration(statistics.median(cost_s for cost_s, _ in self._costs))
        failures = f"a failure every {format_duration(self._between_failures_s(now))}"
        assumed = "" if self._lives.failures >= _KNOWN else f", assumed until there were {_KNOWN}"
        return f"saves every {format_duration(seconds)} from now on: a save costs {cost}, {failures}{assumed}"

    def _between_failures_s(self, now: float) -> float:
        lives = self._lives
        return PRIOR_S if lives.failures < _KNOWN else (lives.seconds + now - self._begun) / lives.failures
