"""Two sides of a mirrored run as one list."""

from __future__ import annotations

from holdfast.run.candidates import MirrorView
from holdfast.run.record import Record


def _record(step: int, attempt: int = 1, identity: str = "") -> Record:
    return Record(name=f"step_{step}", attempt=attempt, step=step, checkpoint_id=identity or f"{attempt}-{step}")


def test_each_name_is_found_where_it_is() -> None:
    """One list, newest first by (attempt, step); what both sides have is said to be at both."""
    sides = MirrorView.join([_record(3), _record(2)], [_record(2), _record(1), _record(1, attempt=2, identity="x")])
    assert [(one.attempt, one.step) for one in sides.records] == [(2, 1), (1, 3), (1, 2)]
    assert sides.places == {"step_1": "remote", "step_2": "both", "step_3": "local"}


def test_the_newer_of_two_with_one_name_counts() -> None:
    """Different checkpoints under one name: the one of the later attempt is meant, wherever it is."""
    old, new = _record(5, attempt=1), _record(5, attempt=2)
    assert MirrorView.join([old], [new]).places == {"step_5": "remote"}
    assert MirrorView.join([new], [old]).places == {"step_5": "local"}
    assert MirrorView.join([new], [old]).records == (new,)
    assert MirrorView.join([], []).records == ()
