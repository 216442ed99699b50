"""Decisions without side effects: whether to try again, with how many workers, and whether values are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from holdfast.run.life import REQUEUE_STATUS

__all__ = [
    "Cause",
    "FailurePolicy",
    "GiveUp",
    "Restart",
    "ScalingPolicy",
    "ended_by_preemption",
    "growth_pause_s",
    "is_worth_writing",
]

_SIGTERM = 15
_FREE_STARTS = 3
_MAX_DELAY_S = 30.0
_PAUSES, _MAX_PAUSE_S = 5.0, 60.0


class Cause(Enum):
    """Why a group of workers ended before its time."""

    FAILURE = "failure"
    PREEMPTION = "preemption"
    RESIZE = "resize"
    """More workers than before; no limit."""
    ROLLBACK = "rollback"
    """The guard of a training has found a bad step; its own ``max_rollbacks`` is the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start all workers again, after a pause if the last starts made no report."""

    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """End with an error; ``why`` names the limit that is reached."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """How often a run may fail; see `holdfast.FailureConfig`."""

    max_failures: int = 0
    max_preemptions: int = -1
    max_rollbacks: int = -1
    """-1: the guard that takes a run back has its own limit; 0: whoever has started the processes starts them again."""

    def decide(self, history: Sequence[Cause], *, idle_starts: int = 0) -> Restart | GiveUp:
        """Decide what follows the newest entry of ``history``.

        Args:
            history: why each group ended so far; not empty.
            idle_starts: how many starts in a row ended without a single report; from the fourth on the next
                waits (1, 2, 4 ... 30 s), for an unlimited number of failures must not become a busy loop.
        """
        newest = history[-1]
        count = sum(1 for cause in history if cause is newest)
        name, limit = {
            Cause.FAILURE: ("max_failures", self.max_failures),
            Cause.PREEMPTION: ("max_preemptions", self.max_preemptions),
            Cause.RESIZE: ("", -1),
            Cause.ROLLBACK: ("max_rollbacks", self.max_rollbacks),
        }[newest]
        if limit >= 0 and count > limit:
            return GiveUp(why=f"{newest.value} {count} with {name}={limit}")
        excess = idle_starts - _FREE_STARTS
        return Restart(delay_s=0.0 if excess <= 0 else min(_MAX_DELAY_S, 2.0 ** (excess - 1)))


def ended_by_preemption(exit_code: int | None, signal: int | None) -> bool:
    """Return whether a worker that ended by itself was preempted: SIGTERM, or exit status 85."""
    return exit_code == REQUEUE_STATUS or signal == _SIGTERM


def growth_pause_s(grow_after_s: float | None, growth_s: float) -> float:
    """Return how long a group runs before it is ended in order to grow.

    Args:
        grow_after_s: what was asked for; None: nodes that come one after another cost a sixth of the time at most.
        growth_s: how long it took to end the smaller group and to start this one; 0 if this one has not grown.
    """
    return min(_MAX_PAUSE_S, _PAUSES * growth_s) if grow_after_s is None else grow_after_s


def is_worth_writing(score: Any, kept: Iterable[Any], *, num_to_keep: int | None, order: str) -> bool:
    """Decide whether a checkpoint of `save_checkpoint` goes to disk.

    With ``num_to_keep`` on disk, only a checkpoint that is strictly better than the worst of them does.

    Args:
        score: of the new checkpoint, None if it has none.
        kept: scores of those on disk or on their way there.
        num_to_keep: None keeps all, 0 none.
        order: "max" or "min".
    """
    if num_to_keep is None:
        return True
    places = sorted((_place(other, order) for other in kept), reverse=True)
    if num_to_keep == 0:
        return False
    return len(places) < num_to_keep or _place(score, order) > places[num_to_keep - 1]


def _place(score: Any, order: str) -> tuple[int, float]:
    """Return a sort key; what is missing, NaN or no number is worse than every number in both orders."""
    if not isinstance(score, (int, float)) or score != score:  # noqa: PLR0124  NaN is what differs from itself
        return (0, 0.0)
    return (1, score if order == "max" else -score)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """Between two sizes, as many workers as there is room for.

    Attributes:
        least: fewer are not started.
        most: more are not started.
        settle_s: how long room for fewer than ``most`` has to be unchanged before it is taken: nodes come and go one
            after another.
    """

    least: int
    most: int
    settle_s: float = 0.0

    @property
    def is_elastic(self) -> bool:
        """Whether groups may differ in size."""
        return self.least < self.most

    def size(self, room: int, unchanged_s: float) -> int | None:
        """Choose the size of the group to start now; None: wait.

        Args:
            room: number of workers that fit now.
            unchanged_s: for how long that has been so.
        """
        if room >= self.most:
            return self.most
        return room if room >= self.least and unchanged_s >= self.settle_s else None
