"""Where the time of a run went: each second is in one part, and what is lost is not useful."""

from __future__ import annotations

import math

import pytest
from test_costs import BEGIN, attempt, cost, saved, told

from holdfast.run.costs import goodput, saves
from holdfast.run.journal import JournalEvent


def began(number, time):
    return JournalEvent(what="began", time=BEGIN + time, attempt=number, step=1)


def parts(history, now=None):
    found = goodput(history, saves(history.events), now=now)
    names = ("useful_s", "again_s", "held_s", "slowed_s", "starting_s", "down_s")
    assert math.isclose(sum(found[name] for name in names), found["wall_s"], abs_tol=1e-6)
    return {name: round(value, 3) for name, value in found.items() if name != "ratio" and value}


def test_a_run_that_failed_once():
    """Trained after the checkpoint: done again. Until the first step: starting. Between the lives: down."""
    source = {"name": "step_10", "step": 10, "attempt": 1}
    history = told(
        attempts=[attempt(1, 0, 60, reason="RuntimeError: x"), attempt(2, 90, 200, source=source, reason="finished")],
        events=[
            began(1, 5), saved(1, 10, 40), cost(1, 10, 41, durable_s=1.0, held_s=0.5, lost_s=2.0),
            began(2, 93), saved(2, 20, 199), cost(2, 20, 199, durable_s=1.0, held_s=0.25, lost_s=0.25),
        ],
    )  # fmt: skip
    useful = (40 - 5) + (200 - 93) - 2.25
    expected = {"wall_s": 200, "again_s": 20, "held_s": 0.75, "slowed_s": 1.5, "starting_s": 8, "down_s": 30}
    assert parts(history) == {**expected, "useful_s": useful}


def test_a_life_that_was_killed():
    """It ends with its last sign; without a checkpoint of its own nothing of it was useful."""
    history = told(
        attempts=[attempt(1, 0), attempt(2, 100, 150, reason="finished")],
        events=[began(1, 10), began(2, 105)],
        rows=[{"attempt": 1, "step": 30, "time": BEGIN + 70}],
    )
    assert parts(history) == {"wall_s": 150, "again_s": 60, "starting_s": 15, "down_s": 30, "useful_s": 45}


def test_a_life_that_never_trained():
    """It was starting as long as it is known to have lived."""
    history = told(
        attempts=[attempt(1, 0, 20, reason="ValueError: x"), attempt(2, 50), attempt(3, 60, 100, reason="finished")],
        events=[began(3, 61)],
    )
    assert parts(history) == {"wall_s": 100, "starting_s": 21, "down_s": 40, "useful_s": 39}


def test_a_run_that_is_trained_now():
    """Its last life goes on until now; a stop in order loses nothing, whatever came after its last save."""
    source = {"name": "step_10", "step": 10, "attempt": 1}
    history = told(
        attempts=[attempt(1, 0, 60, reason="stopped"), attempt(2, 60, source=source)],
        events=[began(1, 0), saved(1, 10, 58), began(2, 60)],
    )
    assert parts(history, now=BEGIN + 80) == {"wall_s": 80, "useful_s": 80}
    assert parts(history)["wall_s"] == 60


def test_workers_have_clocks_of_their_own():
    """The function trainer measures the phases of a start."""
    lives = [attempt(1, 0, 100, reason="finished", seconds={"find": 0.5, "start": 2.5, "load": 1.0, "stop": 9.0})]
    assert parts(told(attempts=lives))["starting_s"] == 4


@pytest.mark.parametrize("ended", [None, 0])
def test_nothing_yet(ended):
    """No start, or one that has not lived: no shares of nothing."""
    assert goodput(told(), []) is None
    assert goodput(told(attempts=[attempt(1, 0, ended)]), [])["ratio"] == 0.0
