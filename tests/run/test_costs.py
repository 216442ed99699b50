"""Sums over the journal: what saves cost, what the end of an attempt cost, what was deleted and why."""

from __future__ import annotations

from holdfast.run.costs import attempt_rows, deletions, saves, stats, summary
from holdfast.run.journal import JournalEvent
from holdfast.run.record import Record
from holdfast.run.reports import Attempt, RunHistory


def attempt(number, started, ended=None, *, source=None, reason=None, **details):
    def moment(seconds):
        return None if seconds is None else f"2026-01-01T00:{seconds // 60:02d}:{seconds % 60:02d}Z"

    return Attempt(
        attempt=number, start_id=f"{number:08d}", started=moment(started), ended=moment(ended), reason=reason,
        resumed_from=source, details=details or None,
    )  # fmt: skip


BEGIN = 1767225600.0  # 2026-01-01


def told(*, events=(), attempts=(), rows=()):
    return RunHistory(
        rows=list(rows), attempts={one.attempt: one for one in attempts}, run_id="r", notes={}, events=list(events)
    )


def saved(attempt, step, time, **more):
    fields = {"bytes": 100, "reused": 40, "kind": "state", "durable_s": 0.5, **more}
    return JournalEvent(what="saved", time=BEGIN + time, attempt=attempt, name=f"step_{step}", step=step, **fields)


def cost(attempt, step, time, **more):
    return JournalEvent(what="cost", time=BEGIN + time, attempt=attempt, name=f"step_{step}", step=step, **more)


def test_writer_and_trainer_tell_of_one_save():
    """What the trainer measured goes before what the writer did, in whichever order they are told."""
    events = [saved(1, 5, 10), cost(1, 5, 11, durable_s=0.9, held_s=0.1, lost_s=0.2)]
    for order in (events, events[::-1]):
        (one,) = saves(order)
        assert (one.step, one.size, one.reused, one.durable_s, one.held_s, one.lost_s) == (5, 100, 40, 0.9, 0.1, 0.2)
    (alone,) = saves(events[:1])
    assert (alone.durable_s, alone.held_s) == (0.5, None)


def test_checkpoints_of_before_there_was_a_journal_count():
    """Their manifests tell size and time; times that nobody measured are left out of the figures."""
    found = saves([], [Record(name="step_7", attempt=1, step=7, created=3.0, size=10, reused=2)])
    assert [(one.step, one.size, one.durable_s) for one in found] == [(7, 10, None)]
    assert stats(told(), [])["durable_s"]["count"] == 0


def test_what_the_end_of_an_attempt_cost():
    """Steps and seconds after the checkpoint that the next attempt went on from, and the time until it began.

    It was committed at 50 s and had begun half a second before: the steps made since then are not in it.
    """
    source = {"name": "step_10", "step": 10, "attempt": 1}
    attempts = [
        attempt(1, 0, 60, reason="RuntimeError: x", last_step=14),
        attempt(2, 100, 200, source=source, reason="finished", last_step=20),
    ]
    first, second = attempt_rows(told(attempts=attempts), saves([saved(1, 10, 50)]))
    assert (first["lost_steps"], first["lost_s"], first["down_s"]) == (4, 10.5, 40.0)
    assert (second["lost_steps"], second["lost_s"], second["down_s"]) == (0, None, None)
    sums = stats(told(attempts=attempts, events=[saved(1, 10, 50)]))
    assert (sums["failures"], sums["lost_steps"], sums["failure_s"], sums["down_s"]) == (1, 4, 10.5, 40.0)


def test_an_attempt_without_a_word():
    """Killed with its writer: the last that was heard of it counts as its end, its last report as its last step."""
    source = {"name": "step_10", "step": 10, "attempt": 1}
    rows = [{"attempt": 1, "step": 13, "time": BEGIN + 55}]
    first, _ = attempt_rows(
        told(attempts=[attempt(1, 0), attempt(2, 100, source=source)], rows=rows), saves([saved(1, 10, 50)])
    )
    assert (first["last_step"], first["lost_steps"], first["lost_s"], first["down_s"]) == (13, 4, 5.5, 45.0)


def test_deletions_by_rule():
    """Each checkpoint counts once, under the rule that deleted it; of a mirrored run one side alone."""
    events = [
        JournalEvent(what="deleted", time=1.0, attempt=1, name="a", why="not among last 2"),
        JournalEvent(what="deleted", time=2.0, attempt=1, name="b", why="not among last 2"),
        JournalEvent(what="deleted", time=3.0, attempt=1, name="c", why="holdfast rm"),
        JournalEvent(what="deleted", time=4.0, attempt=1, name="d", why="uploaded to s3://x", kind="local"),
        JournalEvent(what="deleted", time=5.0, attempt=1, name="d", why="not among last 9", kind="remote"),
    ]
    here = stats(told(events=events))["deleted_by"]
    assert here == {"not among last 2": 2, "holdfast rm": 1, "uploaded to s3://x": 1}
    assert deletions(events, is_remote=True)[1, "d"].why == "not among last 9"


def test_lost_and_skipped():
    """Repeated failures are counted as often as they happened."""
    events = [
        JournalEvent(what="lost", time=1.0, attempt=1, name="a", why="StorageFullError: x", times=7),
        JournalEvent(what="lost", time=2.0, attempt=1, name="b", why="StorageError: y"),
        JournalEvent(what="skipped", time=3.0, attempt=1, step=4, times=3),
    ]
    sums = stats(told(events=events))
    assert (sums["lost_saves"], sums["skipped_saves"]) == (8, 3)
    assert sums["lost_why"] == {"StorageFullError: x": 7, "StorageError: y": 1}


def test_a_summary():
    """Percentiles are values that occurred."""
    assert summary([]) == {"count": 0, "sum": 0.0, "mean": None, "p50": None, "p95": None, "max": None}
    assert summary([float(n) for n in range(1, 101)]) == {
        "count": 100, "sum": 5050.0, "mean": 50.5, "p50": 50.0, "p95": 95.0, "max": 100.0,
    }  # fmt: skip
    assert summary([3.0])["p95"] == 3.0
