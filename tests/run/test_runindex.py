"""Attempts and reports of a run: what a history says after kills, resumes, branches, merges and damage."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import StorageError
from holdfast.run import reports as history_module
from holdfast.run.index import RUN_FILE, RunIndex
from holdfast.run.reports import REPORTS, Attempt, live_rows, read_history
from holdfast.storage import MemoryStorage


def begin(storage, start_id: str) -> RunIndex:
    index = RunIndex.load(storage)
    index.register_attempt(start_id, host="here", pid=1)
    return index


def rows(*steps: int, **metrics: float) -> list[dict]:
    return [{"step": step, "epoch": 0, "time": float(step), "metrics": {"m": step, **metrics}} for step in steps]


def steps(index: RunIndex) -> list[tuple[int, int]]:
    return [(row["attempt"], row["step"]) for row in index.history()]


def test_history_drops_what_a_resume_made_void(tmp_path) -> None:
    """Rows after the resume step belong to a life that was lost; those up to it stay."""
    storage = MemoryStorage(tmp_path.name)
    one = begin(storage, "aaaa")
    one.report(rows(1, 2, 3, 4, 5))
    two = begin(storage, "bbbb")
    two.resumed("step_3", step=3, attempt=1)
    two.report(rows(4, 5, 6))
    assert steps(RunIndex.load(storage)) == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]


@pytest.mark.parametrize("reported", [None, 7])
def test_a_new_attempt_is_numbered_above_those_that_have_reported(tmp_path, reported: int | None) -> None:
    """Where the index is lost the names of the report segments still say which numbers were used."""
    storage = MemoryStorage(tmp_path.name)
    for start_id in ("aaaa", "bbbb", "cccc"):
        begin(storage, start_id).report(rows(1))
    storage.delete(RUN_FILE)
    attempt = RunIndex.load(storage).register_attempt("dddd", host="here", pid=1, reported=reported)
    assert attempt.attempt == (4 if reported is None else 8)


def test_history_follows_parents_past_a_branch(tmp_path) -> None:
    """A third attempt that goes back before the second's start forgets the second altogether."""
    storage = MemoryStorage(tmp_path.name)
    begin(storage, "aaaa").report(rows(1, 2, 3, 4))
    two = begin(storage, "bbbb")
    two.resumed("step_4", step=4, attempt=1)
    two.report(rows(5, 6))
    three = begin(storage, "cccc")
    three.resumed("step_2", step=2, attempt=1)
    three.report(rows(3))
    assert steps(three) == [(1, 1), (1, 2), (3, 3)]


def test_an_attempt_that_did_nothing_changes_nothing(tmp_path) -> None:
    """A start that died before it resumed or reported does not wipe the history; a fresh start that reports does."""
    storage = MemoryStorage(tmp_path.name)
    begin(storage, "aaaa").report(rows(1, 2))
    index = begin(storage, "bbbb")
    assert steps(index) == [(1, 1), (1, 2)]
    index.report(rows(1))
    assert steps(index) == [(2, 1)]


def test_rows_of_one_step_merge(tmp_path) -> None:
    """Metrics that come later for a step join its row; None never overwrites; NaN survives the disk."""
    index = begin(MemoryStorage(tmp_path.name), "aaaa")
    index.report([{"step": 1, "epoch": 2, "metrics": {"loss": math.nan, "a": 1}, "checkpoint": "c"}])
    index.report([{"step": 1, "epoch": None, "metrics": {"val": math.inf, "a": 2}, "checkpoint": None}])
    (row,) = index.history()
    assert str(row["metrics"]) == "{'loss': nan, 'a': 2, 'val': inf}"
    assert (row["epoch"], row["checkpoint"]) == (2, "c")


def test_history_survives_the_loss_of_run_json(tmp_path) -> None:
    """Attempts, their resume points and the run id are in the report segments as well."""
    storage = MemoryStorage(tmp_path.name)
    begin(storage, "aaaa").report(rows(1, 2, 3))
    two = begin(storage, "bbbb")
    two.resumed("step_1", step=1, attempt=1)
    two.report(rows(2))
    run_id = two.run_id
    storage.put(RUN_FILE, b"damaged")
    lost = RunIndex.load(storage)
    assert lost.damage is not None
    lost.rebuild_attempts()
    assert lost.run_id == run_id
    assert [(one.attempt, one.start_id) for one in lost.attempts] == [(1, "aaaa"), (2, "bbbb")]
    assert steps(lost) == [(1, 1), (2, 2)]


def test_segments_stay_few_and_lose_nothing(tmp_path, monkeypatch) -> None:
    """Thousands of flushes end in few objects that hold every row once, in order."""
    monkeypatch.setattr(history_module, "SEGMENT_BYTES", 400)
    storage = MemoryStorage(tmp_path.name)
    index = begin(storage, "aaaa")
    for step in range(3000):
        index.report(rows(step))
    assert [row["step"] for row in index.history()] == list(range(3000))
    assert len(list(storage.list(REPORTS))) < 50


def test_a_crash_between_merge_and_cleaning_counts_no_row_twice(tmp_path, monkeypatch) -> None:
    """Parts that a merged segment covers are not read again."""
    monkeypatch.setattr(history_module, "SEGMENT_BYTES", 1)
    storage = MemoryStorage(tmp_path.name)
    monkeypatch.setattr(storage, "delete", lambda path: None)
    index = begin(storage, "aaaa")
    for step in range(40):
        index.report(rows(step))
    assert [row["step"] for row in read_history(storage).rows] == list(range(40))


def test_a_crash_before_a_merge_is_stored_loses_no_row(tmp_path, monkeypatch) -> None:
    """The parts go when the merged segment is there, and not before."""
    monkeypatch.setattr(history_module, "SEGMENT_BYTES", 1)
    storage = MemoryStorage(tmp_path.name)
    index, put = begin(storage, "aaaa"), storage.put

    def refusing(path, data, **conditions):
        if path.count("-") == 3:  # a merged segment has two numbers
            raise StorageError("no answer")
        return put(path, data, **conditions)

    monkeypatch.setattr(storage, "put", refusing)
    reported = 0
    with pytest.raises(StorageError, match="no answer"):
        for step in range(100):
            reported = step
            index.report(rows(step))
    assert reported > 3
    assert [row["step"] for row in read_history(storage).rows] == list(range(reported + 1))


def test_damaged_lines_cost_only_themselves(tmp_path, caplog) -> None:
    """A torn or foreign line is left out and said; the others are read."""
    storage = MemoryStorage(tmp_path.name)
    index = begin(storage, "aaaa")
    index.report(rows(1, 2, 3))
    (info,) = storage.list(REPORTS)
    lines = storage.read(info.path).splitlines()
    lines[2] = lines[2][:7]
    storage.put(info.path, b"\n".join([*lines, b"[1]", b"\xff"]))
    assert steps(index) == [(1, 1), (1, 3)]
    assert "3 damaged lines" in caplog.text


def test_every_start_is_listed_with_how_it_ended(tmp_path) -> None:
    """run.json tells each attempt: who, when, from where, how it ended."""
    storage = MemoryStorage(tmp_path.name)
    begin(storage, "aaaa").end_attempt("killed")
    begin(storage, "bbbb").resumed("step_9", step=9, attempt=1)
    one, two = RunIndex.load(storage).attempts
    assert (one.attempt, one.reason, one.resumed_from, one.host) == (1, "killed", None, "here")
    assert one.ended is not None
    assert (two.attempt, two.ended, dict(two.resumed_from)) == (2, None, {"name": "step_9", "step": 9, "attempt": 1})


def test_details_and_notes_are_kept(tmp_path) -> None:
    """Both are in run.json; the end of an attempt adds to its details, and None forgets a note."""
    storage = MemoryStorage(tmp_path.name)
    index = begin(storage, "aaaa")
    index.describe_attempt({"find": 1})
    index.end_attempt("died", {"why": "x"})
    index.note("config", {"workers": 2})
    index.note("gone", 1)
    index.note("gone", None)
    again = RunIndex.load(storage)
    assert again.attempts[0].details == {"find": 1, "why": "x"}
    assert again.notes == {"config": {"workers": 2}}


def test_a_rejoined_attempt_loses_no_rows(tmp_path) -> None:
    """Each writer of one attempt has segments of its own, however many there were; the attempt keeps its start id."""
    storage = MemoryStorage(tmp_path.name)
    index = begin(storage, "aaaa")
    index.report(rows(1))
    for step in (2, 3, 4):
        index = RunIndex.load(storage)
        index.rejoin(index.attempts[0], index.run_id)
        index.report(rows(step))
    assert steps(index) == [(1, 1), (1, 2), (1, 3), (1, 4)]
    index.rebuild_attempts()
    assert [one.start_id for one in index.attempts] == ["aaaa"]


def test_an_index_without_notes_is_read(tmp_path) -> None:
    """One of an earlier version has neither notes nor details; malformed details are damage."""
    storage = MemoryStorage(tmp_path.name)
    begin(storage, "aaaa")
    body = json.loads(storage.read(RUN_FILE))
    del body["notes"], body["attempts"][0]["details"]
    storage.put(RUN_FILE, json.dumps(body).encode())
    index = RunIndex.load(storage)
    assert (index.damage, index.notes, index.attempts[0].details) == (None, {}, None)
    body["attempts"][0]["details"] = [1]
    storage.put(RUN_FILE, json.dumps(body).encode())
    assert RunIndex.load(storage).damage is not None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 10), st.integers(0, 4)), min_size=1, max_size=6))
def test_history_is_that_of_a_run_never_interrupted(lives: list[tuple[int, int, int]]) -> None:
    """Whatever was resumed from whatever, the history reads like the one straight line that led to the end."""
    written, attempts, lines = [], {}, {}
    for number, (length, back, parent) in enumerate(lives, start=1):
        source = attempts.get(min(parent, number - 1))
        line: list[int] = []
        resumed = None
        if source is not None and lines[source.attempt]:
            at = lines[source.attempt][min(back, len(lines[source.attempt]) - 1)]
            # The attempt that saved the step is the one that first reported it on that line.
            owner = max(r["attempt"] for r in written if r["step"] == at and r["attempt"] in path(attempts, source, at))
            resumed = {"name": f"s{at}", "step": at, "attempt": owner}
            line = [step for step in lines[source.attempt] if step <= at]
        attempts[number] = Attempt(attempt=number, start_id=f"{number:04d}", resumed_from=resumed)
        begun = line[-1] if line else 0
        fresh = list(range(begun + 1, begun + 1 + length))
        lines[number] = line + fresh
        written += [{"attempt": number, "step": step, "metrics": {}} for step in fresh]
    assert [row["step"] for row in live_rows(written, attempts)] == lines[len(lives)]


def test_rows_that_came_out_of_order() -> None:
    """A writer that is started again gets what it was told before beside what is new."""
    attempts = {1: Attempt(attempt=1, start_id="aaaa")}
    rows = [{"attempt": 1, "step": step, "metrics": {}} for step in (1, 2, 5, 3, None, 6, 4)]
    assert [row["step"] for row in live_rows(rows, attempts)] == [1, 2, 3, None, 4, 5, 6]


def path(attempts: dict[int, Attempt], source: Attempt, at: int) -> set[int]:
    """The attempts on the line of ``source`` up to step ``at``."""
    found = set()
    limit = math.inf
    while True:
        if at <= limit:
            found.add(source.attempt)
        if source.resumed_from is None:
            return found
        limit = min(limit, source.resumed_from["step"])
        if at > limit:
            return found
        source = attempts[source.resumed_from["attempt"]]
