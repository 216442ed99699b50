"""Where the time of a run went: each second is in one part, and what is lost is not useful."""

from __future__ import annotations

import math

import pytest
from test_costs import BEGIN, attempt, cost, saved, told

from holdfast.run.costs import attempt_rows, goodput, saves, stats
from holdfast.run.journal import JournalEvent


def began(number, time):
    return JournalEvent(what="began", time=BEGIN + time, attempt=number, step=1)


def parts(history, now=None):
    found = goodput(history, saves(history.events), now=now)
    names = ("useful_s", "again_s", "held_s", "slowed_s", "starting_s", "down_s")
    assert math.isclose(sum(found[name] for name in names), found["wall_s"], abs_tol=1e-6)
    return {name: round(value, 3) for name, value in found.items() if name != "ratio" and value}


def test_a_run_that_failed_once():
    """Trained after the checkpoint: done again. Until the first step: starting. Between the lives: down.

    The checkpoint is committed at 40 s. Its state is that of 39 s, and held the loop for another half; what slowed
    steps after that slowed those that are done again.
    """
    source = {"name": "step_10", "step": 10, "attempt": 1}
    history = told(
        attempts=[attempt(1, 0, 60, reason="RuntimeError: x"), attempt(2, 90, 200, source=source, reason="finished")],
        events=[
            began(1, 5), saved(1, 10, 40), cost(1, 10, 41, durable_s=1.0, held_s=0.5, lost_s=2.0),
            began(2, 93), saved(2, 20, 199), cost(2, 20, 199, durable_s=1.0, held_s=0.25, lost_s=0.25),
        ],
    )  # fmt: skip
    useful = (39 - 5) + (200 - 93) - 0.25
    expected = {"wall_s": 200, "again_s": 20.5, "held_s": 0.75, "starting_s": 8, "down_s": 30}
    assert parts(history) == {**expected, "useful_s": useful}


def test_a_life_that_was_killed():
    """It ends with its last sign; without a checkpoint of its own nothing of it was useful."""
    history = told(
        attempts=[attempt(1, 0), attempt(2, 100, 150, reason="finished")],
        events=[began(1, 10), began(2, 105)],
        rows=[{"attempt": 1, "step": 30, "time": BEGIN + 70}],
    )
    assert parts(history) == {"wall_s": 150, "again_s": 60, "starting_s": 15, "down_s": 30, "useful_s": 45}


def test_a_save_that_slowed_steps_that_count():
    """Those of a save that was written before the one that the next life went on from."""
    source = {"name": "step_20", "step": 20, "attempt": 1}
    history = told(
        attempts=[attempt(1, 0, 60, reason="RuntimeError: x"), attempt(2, 60, 70, source=source, reason="finished")],
        events=[
            began(1, 0), saved(1, 10, 20), cost(1, 10, 21, durable_s=4.0, held_s=0.5, lost_s=2.0),
            saved(1, 20, 40), cost(1, 20, 41, durable_s=4.0, held_s=1.0, lost_s=3.0), began(2, 60),
        ],
    )  # fmt: skip
    assert parts(history) == {"wall_s": 70, "again_s": 60 - 37, "held_s": 1.5, "slowed_s": 1.5, "useful_s": 44}


def snapshots(number, step, time, held_s):
    return JournalEvent(what="snapshots", time=BEGIN + time, attempt=number, step=step, held_s=held_s)


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_killed_life_whose_snapshot_was_saved(has_rows):
    """It counts to the step of the snapshot, not to the commit after its death; snapshots are held time."""
    source = {"name": "step_30", "step": 30, "attempt": 1}
    history = told(
        attempts=[attempt(1, 0, 75, reason="the trainer died"), attempt(2, 200, 210, source=source, reason="finished")],
        events=[
            began(1, 10), snapshots(1, 20, 40, 2.0), snapshots(1, 30, 70, 4.0),
            saved(1, 30, 190, why="the trainer died", durable_s=110.0), began(2, 201),
        ],
        rows=[{"attempt": 1, "step": step, "time": BEGIN + 39.9 + step} for step in range(30, 35) if has_rows],
    )  # fmt: skip
    expected = {"wall_s": 210, "again_s": 5, "held_s": 4, "starting_s": 11, "down_s": 125}
    assert parts(history) == {**expected, "useful_s": 210 - 5 - 4 - 11 - 125}


def test_snapshots_of_steps_that_are_done_again():
    """Their time is in that of these steps."""
    source = {"name": "step_10", "step": 10, "attempt": 1}
    history = told(
        attempts=[attempt(1, 0), attempt(2, 100, source=source)],
        events=[began(1, 0), saved(1, 10, 40, durable_s=0.0), snapshots(1, 20, 80, 8.0), began(2, 100)],
    )
    assert parts(history, now=BEGIN + 110) == {
        "wall_s": 110, "again_s": 40, "held_s": 4, "down_s": 20, "useful_s": 46,
    }  # fmt: skip


@pytest.mark.parametrize("reason", ["RuntimeError: x", "stopped"])
def test_a_life_that_goes_back_behind_the_one_before(reason):
    """Nothing of the life between counts, whichever way it ended, and the first one up to where the third begins."""
    first = {"name": "step_20", "step": 20, "attempt": 1}
    second = {"name": "step_10", "step": 10, "attempt": 1}
    history = told(
        attempts=[
            attempt(1, 0, 50, reason="RuntimeError: x"), attempt(2, 60, 100, source=first, reason=reason),
            attempt(3, 100, 120, source=second, reason="finished"),
        ],
        events=[
            began(1, 0), saved(1, 10, 20, durable_s=1.0), saved(1, 20, 40), began(2, 60), saved(2, 30, 99),
            began(3, 100), saved(3, 20, 119),
        ],
    )  # fmt: skip
    assert parts(history) == {"wall_s": 120, "again_s": (50 - 19) + 40, "down_s": 10, "useful_s": 19 + 20}


def test_a_life_in_order_whose_last_checkpoint_is_not_gone_on_from():
    """The next life has set that one aside: it is as after a failure."""
    source = {"name": "step_10", "step": 10, "attempt": 1}
    history = told(
        attempts=[attempt(1, 0, 60, reason="stopped"), attempt(2, 60, 80, source=source, reason="finished")],
        events=[began(1, 0), saved(1, 10, 20, durable_s=0.0), saved(1, 20, 59), began(2, 60)],
    )
    assert parts(history) == {"wall_s": 80, "again_s": 40, "useful_s": 40}


def test_a_life_that_died_before_it_trained_costs_the_others_nothing():
    """It notes no checkpoint that it goes on from; `holdfast run` has seen its end."""
    source = {"name": "step_10", "step": 10, "attempt": 1}
    died = JournalEvent(what="died", time=BEGIN + 70, attempt=2, why="exit status 1")
    lives = [attempt(1, 0, 60, reason="RuntimeError: x"), attempt(2, 65), attempt(3, 80, 90, source=source)]
    events = [began(1, 0), saved(1, 10, 40, durable_s=0.0), died, began(3, 82)]
    assert parts(told(attempts=lives[:2], events=events[:3])) == {
        "wall_s": 70, "down_s": 5, "starting_s": 5, "useful_s": 60,
    }  # fmt: skip
    assert parts(told(attempts=lives, events=events)) == {
        "wall_s": 90, "again_s": 20, "down_s": 15, "starting_s": 7, "useful_s": 48,
    }  # fmt: skip


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


def every_second(number, first, last):
    return [{"attempt": number, "step": step, "time": BEGIN + step} for step in range(first, last)]


def test_a_hang_is_not_useful():
    """A life that was killed, long after its last sign, was down from a few of its longest pauses on."""
    history = told(
        attempts=[attempt(1, 0, 300, reason="the trainer died")],
        events=[began(1, 2), saved(1, 3, 5)],
        rows=every_second(1, 3, 11),
    )
    assert parts(history) == {"wall_s": 300, "starting_s": 2, "useful_s": 11, "down_s": 287}
    stopped = told(attempts=[attempt(1, 0, 300, reason="stopped")], events=history.events, rows=history.rows)
    assert parts(stopped)["useful_s"] == 298
    assert (
        parts(told(attempts=[attempt(1, 0)], events=history.events, rows=history.rows), now=BEGIN + 60)["useful_s"]
        == 58
    )


def test_few_signs_tell_nothing_of_a_hang():
    """A script that reports nothing and saves once an hour is not called down."""
    history = told(attempts=[attempt(1, 0, 300, reason="RuntimeError: x")], events=[began(1, 0), saved(1, 1, 1)])
    assert parts(history) == {"wall_s": 300, "useful_s": 300}


def test_each_gap_is_charged_to_the_attempt_before_it():
    """Whichever checkpoint the next one went on from: the sum over the attempts is what the last line says."""
    source = {"name": "step_10", "step": 10, "attempt": 1}
    attempts = [
        attempt(1, 0, 60, reason="RuntimeError: x"), attempt(2, 100, 110, source=source, reason="RuntimeError: x"),
        attempt(3, 130, source=source), attempt(4, 145), attempt(5, 150, 200, source=source, reason="finished"),
    ]  # fmt: skip
    history = told(attempts=attempts, events=[began(1, 0), saved(1, 10, 50), began(3, 135), began(5, 150)])
    rows = attempt_rows(history, saves(history.events))
    assert [row["down_s"] for row in rows] == [40.0, 20.0, 10.0, 5.0, None]
    assert parts(history)["down_s"] == stats(history)["down_s"] == 75
