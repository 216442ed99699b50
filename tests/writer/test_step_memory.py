"""What a killed trainer leaves in the memory that its writer has too."""

from __future__ import annotations

import math
import os

import pytest

from holdfast.writer.arena import StepMemory, rows_left, steps_done

ROWS = [
    (1, 0, 10.0, {"loss": 0.5}),
    (2, 0, 11.0, {"loss": 0.25, "lr": 3}),
    (3, 1, 12.0, {"loss": math.inf, "lr": -3}),
    (4, 1, 13.0, {"note": "ä\n", "none": None, "nested": {"a": [1, True]}}),
    (5, 1, 14.0, {"big": 1 << 80}),
    (6, 1, 15.0, {"loss": 0.125, "lr": 4}),
]


def as_rows(rows):
    return [{"step": s, "epoch": e, "time": t, "metrics": metrics} for s, e, t, metrics in rows]


@pytest.fixture
def memory():
    made = StepMemory()
    yield made
    made.close()


def test_rows_come_back_as_they_were(memory):
    """Numbers keep their kind, whatever the row before held; other values go as JSON; the step stands apart."""
    memory.note_step(17)
    assert all(memory.add_row(*row) for row in ROWS)
    view = memory.arena.view
    assert steps_done(view) == 17
    assert rows_left(view) == as_rows(ROWS)
    assert type(rows_left(view)[1]["metrics"]["lr"]) is int


def test_what_was_sent_is_gone(memory):
    """After `clear_rows` only later rows are left, and their names are there again."""
    memory.add_row(*ROWS[1])
    memory.clear_rows()
    assert rows_left(memory.arena.view) == []
    memory.add_row(*ROWS[2])
    assert rows_left(memory.arena.view) == as_rows(ROWS[2:3])


def test_a_full_memory_says_so(memory):
    """A row without room is refused, and those before it stay; after clearing there is room again."""
    while memory.add_row(1, 0, 1.0, {"text": "x" * 5000}):
        pass
    known = rows_left(memory.arena.view)
    assert len(known) > 10
    memory.clear_rows()
    assert memory.add_row(*ROWS[0])
    assert not memory.add_row(1, 0, 1.0, {"text": "x" * 500_000})
    assert rows_left(memory.arena.view) == as_rows(ROWS[:1])


def test_damage_makes_no_rows(memory):
    """Bytes that are no record give no row and no error, whatever length they claim."""
    memory.add_row(*ROWS[0])
    view = memory.arena.view
    view[8:16] = b"\xff" * 8
    view[80:] = os.urandom(len(view) - 80)
    assert rows_left(view)[:1] == as_rows(ROWS[:1])
    view[16:] = os.urandom(len(view) - 16)
    rows_left(view)


def test_a_forked_child_leaves_nothing(memory):
    """A forked child does not have the memory: its calls do nothing."""
    memory.add_row(*ROWS[0])
    child = os.fork()
    if child == 0:
        memory.note_step(99)
        os._exit(not (memory.add_row(*ROWS[1]) and memory.clear_rows() is None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rows_left(memory.arena.view) == as_rows(ROWS[:1])
    assert steps_done(memory.arena.view) == 0
