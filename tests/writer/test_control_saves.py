"""Saves that all ranks make together, as a pure object."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import StorageError
from holdfast.writer.ranks.agreement import (
    CommitSave,
    JointSaves,
    JointUploads,
    SaveOutcome,
    SaveVerdict,
    named_error,
)


def saves(world_size: int = 3) -> JointSaves:
    return JointSaves(world_size, timeout_s=10.0)


def begin(one: JointSaves, *ranks: int, save: str = "s-1", step: int = 4, now: float = 0.0) -> list[Any]:
    return [action for rank in ranks for action in one.begun(rank, save, f"step_{step}", step, now)]


def message(actions: list[Any]) -> str:
    (outcome,) = actions
    assert isinstance(outcome, SaveOutcome)
    assert outcome.error is not None
    return outcome.error["message"]


def test_a_save_is_committed_when_the_last_part_is_stored() -> None:
    """Not before; then all hear the outcome, and whoever asks late hears it too."""
    one = saves()
    assert begin(one, 0, 1, 2) == []
    assert one.stored(0, "s-1") == one.stored(2, "s-1") == []
    assert one.busy
    assert one.stored(1, "s-1") == [CommitSave(save="s-1")]
    told = one.committed("s-1", value={"deleted": []}, error=None)
    assert told == [SaveOutcome(save="s-1", value={"deleted": []})]
    assert not one.busy
    assert one.stored(1, "s-1") == [SaveOutcome(save="s-1", value={"deleted": []}, ranks=(1,))]


def test_a_failure_that_comes_after_the_last_part_does_not_take_the_commit_back() -> None:
    """A rank says late that it could not store what it has stored: the commit decides."""
    one = saves(2)
    begin(one, 0, 1)
    one.stored(0, "s-1")
    assert one.stored(1, "s-1") == [CommitSave(save="s-1")]
    assert one.failed(1, "s-1", named_error("StorageError", "full")) == []
    assert one.committed("s-1", value={}, error=None) == [SaveOutcome(save="s-1", value={})]


def test_the_first_failure_is_everybodys() -> None:
    """It names the rank, keeps the kind of error, and each writer takes its part away."""
    one = saves()
    begin(one, 0, 1)
    (told,) = one.failed(1, "s-1", named_error("StorageFullError", "no space"))
    assert told.error == named_error("StorageFullError", "rank 1: no space")
    assert told.discard
    assert one.begun(2, "s-1", "step_4", 4, 1.0) == [
        SaveOutcome(save="s-1", error=told.error, discard=True, ranks=(2,))
    ], "who comes later hears it at once"
    assert "rank 0: first" in message(one.failed(0, "s-2", named_error("HoldfastError", "first")))


def test_time_runs_from_the_first_rank_and_the_error_says_who_is_missing() -> None:
    """Ranks that never came and ranks that still write are told apart, a stopped process is pointed out."""
    one = saves(4)
    begin(one, 0, 1, now=5.0)
    one.stored(0, "s-1")
    one.stopped(3, on=True)
    assert one.deadline == 15.0
    assert one.expire(14.9) == []
    text = message(one.expire(15.0))
    assert "ranks 2, 3 did not come to it (the process of rank 3 is stopped, as by SIGSTOP)" in text
    assert "the part of rank 1 is not durable yet" in text
    assert "step 4" in text
    assert "ranks='this'" in text


def test_a_rank_that_goes_on_without_a_save_is_named_long_before_time_is_up() -> None:
    """Once for each save: not a rank that is as far as the first one or behind, nor one that begins it in time."""
    one = saves(3)
    begin(one, 0)
    assert one.at(1, 9) == []  # of its steps at that moment nothing is known yet
    assert one.at(0, 4) == []
    assert one.at(1, 4) == one.at(1, 4) == one.at(2, 3) == one.at(2, 5) == []
    begin(one, 2)
    assert one.at(2, 6) == one.at(1, 5) == []
    (said,) = one.at(1, 6)
    assert "rank 1 has gone on without 'step_4' (step 4), which rank 0 saves" in said
    assert "to call ck.report() too" in said
    assert one.at(1, 7) == one.at(0, 9) == []
    assert begin(one, 1) == []  # it was only said


def test_a_dead_trainer_fails_what_it_has_not_begun_at_once() -> None:
    """What it has begun its writer finishes: a rank that dies after its share was sealed does not matter."""
    one = saves(2)
    begin(one, 0, 1)
    assert one.left(1, "its trainer process has died (killed by SIGKILL)") == []
    one.stored(0, "s-1")
    assert one.stored(1, "s-1") == [CommitSave(save="s-1")]
    assert "rank 1: its trainer process has died (killed by SIGKILL)" in message(begin(one, 0, save="s-2"))


def test_a_dead_writer_fails_what_it_has_not_stored() -> None:
    """Parts that are stored still count."""
    one = saves(2)
    begin(one, 0, 1)
    begin(one, 0, 1, save="s-2")
    one.stored(1, "s-1")
    told = one.lost(1, "its writer process has died")
    assert [action.save for action in told] == ["s-2"]
    assert one.stored(0, "s-1") == [CommitSave(save="s-1")]


def test_nothing_fails_a_save_that_is_being_committed() -> None:
    """The commit alone says how it ends: not a late error of a rank, a death, or the time that is up."""
    one = saves(2)
    begin(one, 0, 1)
    one.stored(0, "s-1")
    assert one.stored(1, "s-1") == [CommitSave(save="s-1")]
    assert one.failed(0, "s-1", named_error("StorageError", "late")) == []
    assert one.expire(1e9) == []
    assert one.lost(1, "its writer process has died") == []
    assert one.left(0, "its trainer process has died") == []
    assert one.committed("s-1", value={"deleted": []}, error=None) == [SaveOutcome(save="s-1", value={"deleted": []})]


def test_ranks_that_do_not_save_the_same_are_told() -> None:
    """The n-th save of every rank has to be the same one."""
    one = saves(2)
    begin(one, 0, step=4)
    text = message(begin(one, 1, step=5))
    assert "rank 1 saves 'step_5' (step 5) where rank 0 saves 'step_4' (step 4)" in text
    assert "ck.batches(loader) deals out equally many" in text


def test_who_stops_elsewhere_because_a_rank_died_hears_of_that() -> None:
    """Rank 0 had begun a save that was to come for the others; they save where they are when they hear of its end."""
    one = saves(3)
    begin(one, 0, step=96)
    one.left(0, "its trainer process has died")
    text = message(begin(one, 2, step=12))
    assert text.startswith("'step_96' (step 96) was not saved: rank 0: its trainer process has died")


def test_whether_to_save_is_decided_once_for_all() -> None:
    """The first who asks gets the answer of the moment; the others get the same, whatever has changed since."""
    one = saves(2)
    begin(one, 0, 1)
    assert one.ask(0, "save 8", now=False) == [SaveVerdict(rank=0, about="save 8", go=False)]
    assert one.ask(1, "save 8", now=True) == [SaveVerdict(rank=1, about="save 8", go=False)]
    for step in range(13, 60):
        one.ask(0, f"save {step}", now=False)
    told = one.ask(1, "save 59", now=True)
    assert told == [SaveVerdict(rank=1, about="save 59", go=False)], "a rank that is far behind gets the same answer"
    assert one.ask(1, "save 12", now=True) == [SaveVerdict(rank=1, about="save 12", go=True)]


def test_an_answer_that_was_lost_is_given_again() -> None:
    """All have asked, and the connection of one breaks before it hears the answer: it hears the same one."""
    one = saves(2)
    one.ask(0, "save 8", now=False)
    one.ask(1, "save 8", now=False)
    assert one.ask(1, "save 8", now=True) == [SaveVerdict(rank=1, about="save 8", go=False)]
    assert one.ask(0, "save 8", now=True) == [SaveVerdict(rank=0, about="save 8", go=False)]
    assert one.ask(0, "save 9", now=True) == [SaveVerdict(rank=0, about="save 9", go=True)]


def test_a_new_server_gives_the_answer_that_a_rank_has_heard() -> None:
    """Rank 0's writer was killed after it had told one of them."""
    one = saves(3)
    one.judged(1, "save 8", go=False)
    assert one.ask(0, "save 8", now=True) == [SaveVerdict(rank=0, about="save 8", go=False)]
    assert one.ask(2, "save 8", now=True) == [SaveVerdict(rank=2, about="save 8", go=False)]


def test_a_new_server_learns_outcomes_from_those_who_have_heard_them() -> None:
    """Rank 0's writer was killed after it had told some: the others end the same way instead of waiting."""
    one = saves(2)
    begin(one, 0)
    told = one.heard("s-1", value={"deleted": []}, error=None)
    assert told == [SaveOutcome(save="s-1", value={"deleted": []})]
    assert one.heard("s-1", value=None, error=named_error("HoldfastError", "?")) == []
    assert one.heard("s-0", value=None, error=None) == [], "nobody waits for this one"
    assert one.begun(1, "s-0", "step_2", 2, 0.0) == [SaveOutcome(save="s-0", ranks=(1,))]


def test_an_upload_that_failed_is_tried_again_without_its_errors() -> None:
    """Ranks that have brought their parts are done; the error of another is that of one try."""
    uploads, order = JointUploads(2), {"do": "upload", "save": "s-1", "directory": "step_4"}
    answers: dict[int, dict[str, Any] | None] = {0: None, 1: named_error("StorageError", "no answer")}

    def send(message: dict[str, Any]) -> None:
        for rank, error in answers.items():
            uploads.uploaded(rank, message["save"], error)

    with pytest.raises(StorageError, match="rank 1: no answer"):
        uploads.bring(order, send, lambda: False)
    uploads.gone(0, "its writer process has died")
    answers = {1: None}
    uploads.bring(order, send, lambda: False)
    assert uploads.order is None
