"""Decisions about failures and about dict checkpoints, as tables."""

from __future__ import annotations

import math

import pytest

from holdfast.trainers.function.control.plan import (
    Cause,
    FailurePolicy,
    GiveUp,
    Restart,
    ended_by_preemption,
    is_worth_writing,
)

F, P, R = Cause.FAILURE, Cause.PREEMPTION, Cause.ROLLBACK


@pytest.mark.parametrize(
    ("failures", "preemptions", "history", "outcome"),
    [
        (0, -1, [F], GiveUp(why="failure 1 with max_failures=0")),
        (1, -1, [F], Restart()),
        (1, -1, [F, F], GiveUp(why="failure 2 with max_failures=1")),
        (1, -1, [P, P, F], Restart()),
        (0, -1, [P, P, P], Restart()),
        (0, 1, [P, P], GiveUp(why="preemption 2 with max_preemptions=1")),
        (-1, 0, [F] * 99, Restart()),
        (-1, 0, [F, P], GiveUp(why="preemption 1 with max_preemptions=0")),
        (0, 0, [R] * 9, Restart()),  # which the guard itself bounds
    ],
)
def test_limits(failures: int, preemptions: int, history: list[Cause], outcome: Restart | GiveUp) -> None:
    """Failures and preemptions have budgets of their own; -1 is none."""
    policy = FailurePolicy(max_failures=failures, max_preemptions=preemptions)
    assert policy.decide(history) == outcome


@pytest.mark.parametrize(("idle", "delay"), [(0, 0), (3, 0), (4, 1), (5, 2), (6, 4), (9, 30), (99, 30)])
def test_delays(idle: int, delay: float) -> None:
    """Starts that come to nothing are tried at once three times, then ever more slowly."""
    assert FailurePolicy(max_failures=-1).decide([F], idle_starts=idle) == Restart(delay_s=delay)
    assert FailurePolicy().decide([R], idle_starts=idle) == Restart(delay_s=delay)
    assert isinstance(FailurePolicy(max_rollbacks=0).decide([R], idle_starts=idle), GiveUp), "torchrun starts it again"


def test_preemptions() -> None:
    """SIGTERM, or the exit status that asks to be started again."""
    assert ended_by_preemption(None, 15)
    assert ended_by_preemption(85, None)
    assert not ended_by_preemption(1, None)
    assert not ended_by_preemption(None, 9)
    assert not ended_by_preemption(None, None)


@pytest.mark.parametrize(
    ("score", "kept", "limit", "order", "written"),
    [
        (0.1, [0.5], None, "max", True),
        (0.9, [], 0, "max", False),
        (0.1, [0.5], 2, "max", True),
        (0.1, [0.5, 0.6], 2, "max", False),
        (0.5, [0.5, 0.6], 2, "max", False),
        (0.55, [0.5, 0.6], 2, "max", True),
        (0.55, [0.5, 0.6], 2, "min", True),
        (0.6, [0.5, 0.6], 2, "min", False),
        (math.nan, [0.5, 0.6], 2, "max", False),
        (math.nan, [math.nan, 0.6], 2, "min", False),
        (-math.inf, [math.nan, 0.6], 2, "max", True),
        (5, [None, 0.6], 2, "min", True),
        (0.55, [0.5, 0.6, 0.7], 2, "max", False),  # three are there, one is only kept for being resumed from
    ],
)
def test_dictionaries(score: float, kept: list[float | None], limit: int | None, order: str, written: bool) -> None:
    """Only what is strictly better than the worst kept is written; a missing score is below every number."""
    assert is_worth_writing(score, kept, num_to_keep=limit, order=order) is written
