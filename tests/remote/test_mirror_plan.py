"""What a mirrored run decides, as a function of what lies at its two sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import Mirror
from holdfast.run.candidates import MirrorView
from holdfast.run.record import Record
from holdfast.writer.messages import MirrorLimits, limits_of
from holdfast.writer.uploads.mirror import await_upload, done_with
from holdfast.writer.uploads.queue import given_up, pause_s


def _record(step: int, attempt: int = 1, identity: str = "") -> Record:
    return Record(name=f"step_{step}", attempt=attempt, step=step, checkpoint_id=identity or f"{attempt}-{step}")


def test_what_is_newer_than_the_remote_waits_oldest_first() -> None:
    """Only what is newer than anything at the remote is uploaded: the rest was left out, or another life went on."""
    local = [_record(step) for step in (9, 3, 6, 7)]
    assert [one.step for one in await_upload(local, [])] == [3, 6, 7, 9]
    assert [one.step for one in await_upload(local, [_record(6), _record(1)])] == [7, 9]
    assert await_upload(local, [_record(2, attempt=2)]) == []
    assert [one.step for one in await_upload([_record(1, attempt=3)], [_record(9, attempt=2)])] == [1]


@given(st.integers(1, 12), st.integers(1, 6), st.integers(-1, 11))
def test_too_many_give_up_the_oldest(count: int, max_behind: int, flying: int) -> None:
    """Never the newest, never the one under way, and no more than needed."""
    waiting = [f"step_{number}" for number in range(count)]
    in_flight = waiting[flying] if 0 <= flying < count else None
    gone = given_up(waiting, MirrorLimits(max_behind=max_behind), () if in_flight is None else {in_flight})
    stay = [name for name in waiting if name not in gone]
    assert gone == [name for name in waiting if name in gone]
    assert waiting[-1] in stay
    assert {in_flight} - {None} <= {*stay}
    both = max_behind == 1 and in_flight not in (None, waiting[-1])  # the newest, and the one under way
    assert len(stay) == min(count, 2 if both else max_behind)


@pytest.mark.parametrize("rule", ["wait", "raise"])
def test_nothing_is_given_up_where_saves_wait(rule: str) -> None:
    """With "wait" and "raise" the trainer holds back, so that nothing is left out."""
    assert given_up(["a", "b", "c"], MirrorLimits(max_behind=1, when_behind=rule)) == []


def test_local_copies_go_only_when_asked() -> None:
    """delete_after_upload lets go of what the remote has, and of nothing else."""
    assert done_with({"a", "b"}, {"a", "z"}, MirrorLimits()) == []
    assert done_with({"a", "b"}, {"a", "z"}, MirrorLimits(delete_after_upload=True)) == ["a"]


def test_pauses_grow_and_are_bounded() -> None:
    """Each failure doubles the pause, by chance between half and all of it, up to a minute."""
    assert [pause_s(count, 1.0) for count in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 8.0]
    assert pause_s(1, 0.0) == 0.5
    assert pause_s(1000, 1.0) == 60.0


def test_limits_are_those_of_the_mirror() -> None:
    """What the user said reaches the writer, also through JSON."""
    mirror = Mirror("/scratch", max_behind=5, when_behind="wait", delete_after_upload=True, warn_after="90s")
    limits = limits_of(mirror)
    assert limits == MirrorLimits(max_behind=5, when_behind="wait", delete_after_upload=True, warn_after_s=90.0)
    assert MirrorLimits(**limits.to_json()) == limits


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
