"""The controller one step at a time: opening, starting, running, ending."""

from __future__ import annotations

import pytest
from scripted import Play, kept, location

from holdfast.errors import CorruptCheckpointError, HoldfastError, RunBusyError, TrainingError, TrainingFailedError
from holdfast.trainers.function.control.actions import (
    ActionResult,
    Begin,
    Details,
    End,
    FindStart,
    KillGroup,
    Note,
    OpenRun,
    Resumed,
    RunState,
    Say,
    Send,
    StartGroup,
    StoreRows,
    check_transition,
)
from holdfast.trainers.function.control.plan import WaitLimits
from holdfast.trainers.function.engine import Started


def test_a_fresh_run_starts() -> None:
    """Lease, look, start, begin on every rank, running: one after the other."""
    play = Play()
    assert play.kinds() == ["OpenRun"]
    assert play.state is RunState.INITIALIZING
    play.open()
    assert play.out == [FindStart()]
    play.found()
    assert play.out == [StartGroup(attempt=1, num_workers=2)]
    assert play.state is RunState.SCHEDULING
    for rank in range(2):
        play.feed(Started(rank=rank, pid=1))
        header = play.only(Begin).header
        assert (header["rank"], header["world_size"], header["first_index"]) == (rank, 2, 1)
        assert (header["attempt"], header["start_id"], header["checkpoint"]) == (1, "s1", None)
        assert header["run_root"] == location("")
    play.say(0, on="running")
    assert play.state is RunState.SCHEDULING
    play.say(1, on="running")
    assert play.state is RunState.RUNNING


def test_a_run_resumes_from_its_newest_checkpoint() -> None:
    """Workers get it, reports go on behind it, and the index notes it before anything starts."""
    play = Play().open().found(kept("a", 3), kept("b", 5))
    assert play.out == [Resumed(name="b", step=5, attempt=1), StartGroup(attempt=1, num_workers=2)]
    play.feed(Started(rank=0, pid=1))
    header = play.only(Begin).header
    assert header["checkpoint"] == location("b")
    assert header["first_index"] == 6


def test_the_first_checkpoint_serves_runs_without_their_own() -> None:
    """resume_from_checkpoint loses against a checkpoint of the run, and reports begin with 1 otherwise."""
    other = {"storage": None, "uri": "/other", "name": "x"}
    play = Play(first_checkpoint=other).open().found()
    assert play.only(Resumed) == Resumed(name="/other/x", step=0)
    play.feed(Started(rank=0, pid=1))
    assert play.only(Begin).header["checkpoint"] == other
    assert play.only(Begin).header["first_index"] == 1
    play = Play(first_checkpoint=other).open().found(kept("b", 5))
    assert play.only(Resumed).name == "b"
    play = Play(first_memory=b"packed").open().found()
    play.feed(Started(rank=0, pid=1))
    assert play.only(Begin).memory == b"packed"


@pytest.mark.parametrize("error", [RunBusyError("busy"), HoldfastError("the writer died")])
def test_a_run_that_cannot_be_opened(error: HoldfastError) -> None:
    """The error ends the run as it is; nothing was started."""
    play = Play()
    play.outcome(OpenRun(), error=error)
    assert play.only(End).error is error
    assert play.state is RunState.ERRORED
    assert play.feed(ActionResult(action=OpenRun())) == []


def test_no_good_checkpoint_ends_the_run() -> None:
    """Nothing starts from zero where there are checkpoints."""
    play = Play().open()
    error = CorruptCheckpointError("none is good")
    play.outcome(FindStart(), error=error)
    assert play.only(End).error is error


def test_a_storage_that_does_not_answer() -> None:
    """Opening is bounded."""
    play = Play(limits=WaitLimits(start_s=30))
    assert play.controller.deadline() == 130
    assert play.tick(after=29) == []
    play.tick(after=1)
    assert isinstance(play.only(End).error, TrainingError)


def test_metrics_go_to_the_run() -> None:
    """Rows of rank 0 are stored with the number of their report; the first one tells how long the start took."""
    play = Play().run()
    play.rows(1, {"loss": 1.0, "epoch": 2}, {"loss": 0.5}, after=3.0)
    assert list(play.only(StoreRows).rows) == [
        {"step": 1, "epoch": 2, "time": 1.0, "metrics": {"loss": 1.0, "epoch": 2}},
        {"step": 2, "epoch": None, "time": 1.0, "metrics": {"loss": 0.5}},
    ]
    assert play.only(Details).details["seconds"]["load"] == 3.0
    play.rows(3, {"loss": 0.2})
    assert play.kinds() == ["StoreRows"]


def test_metrics_that_cannot_be_stored_are_said_once() -> None:
    """Training does not end for that."""
    play = Play().run()
    play.rows(1, {"loss": 1.0})
    rows = play.only(StoreRows)
    play.outcome(rows, error=HoldfastError("full"))
    assert "metrics could not be stored" in play.only(Say).line
    assert play.outcome(rows, error=HoldfastError("full")) == []


def test_a_run_finishes() -> None:
    """When train_func has returned everywhere, the last commit is made and all processes are gone."""
    play = Play().run()
    play.report(0, 1)
    play.report(1, 1)
    play.committed()
    play.finish(0)
    assert play.state is RunState.RUNNING
    play.finish(1)
    assert play.only(End).state is RunState.FINISHED
    assert play.only(Note) == Note(key="number", value=0)


def test_what_rank_0_returns_is_the_result() -> None:
    """Whoever returns last."""
    for order in ((0, 1), (1, 0)):
        play = Play().run()
        for rank in order:
            play.say(rank, b"of rank %d" % rank, on="finished")
        assert play.controller.returned == b"of rank 0"


def test_the_end_waits_for_the_last_commit() -> None:
    """Asynchronous checkpoints are part of the run."""
    play = Play().run()
    play.report(0, 1, call=None)
    play.report(1, 1, call=None)
    commits = list(play.out)
    play.finish()
    assert play.all(End) == []
    play.out = commits
    play.committed()
    assert play.only(End).state is RunState.FINISHED


def test_the_end_waits_in_bounds() -> None:
    """A commit that never ends becomes an error."""
    play = Play(limits=WaitLimits(end_s=50, drain_s=5)).run()
    play.report(0, 1, call=None)
    play.report(1, 1, call=None)
    play.finish()
    play.tick(after=49)
    assert play.out == []
    play.tick(after=1)
    play.tick(after=5)
    error = play.only(End).error
    assert error is not None
    assert "was not committed within 50 s" in str(error)


def test_a_last_commit_that_fails_ends_the_run_with_an_error() -> None:
    """Nobody is left to be told, so `fit` raises it."""
    play = Play().run()
    play.report(0, 1, call=None)
    play.report(1, 1, call=None)
    (commit,) = play.all(type(play.out[-1]))
    play.finish()
    play.outcome(commit, error=HoldfastError("disk full"))
    error = play.only(End).error
    assert isinstance(error, TrainingFailedError)
    assert set(error.failures) == {0, 1}


def test_processes_that_do_not_end_are_killed() -> None:
    """A thread that the user left behind must not keep the run from finishing."""
    play = Play(limits=WaitLimits(stop_s=30, grace_s=2)).run()
    play.say(0, on="finished")
    play.say(1, on="finished")
    play.exit(0, code=0)
    play.tick(after=30)
    assert play.out == [KillGroup(grace_s=2)]
    play.exit(1, signal=9)
    assert play.only(End).state is RunState.FINISHED


def test_warnings_of_a_commit_are_said() -> None:
    """Differing files of one name, for example."""
    play = Play().run()
    play.report(0, 1)
    play.report(1, 1)
    play.committed(warnings=("several ranks reported different files",))
    assert play.only(Say).line == "checkpoint_000000: several ranks reported different files"
    assert [send.header["do"] for send in play.all(Send)] == ["committed", "committed"]
    play.report(0, 2)
    play.report(1, 2)
    play.committed(warnings=("several ranks reported different files", "something else"))
    assert play.only(Say).line == "checkpoint_000001: something else"  # the other one comes with every report


def test_deadlines_follow_what_is_waited_for() -> None:
    """Without anything to wait for there is none."""
    play = Play(limits=WaitLimits(start_s=60, report_s=40)).open().found()
    assert play.controller.deadline() == 160
    play.go()
    assert play.controller.deadline() is None
    play.report(0, 1)
    assert play.controller.deadline() == 140


def test_states_follow_one_another_as_drawn() -> None:
    """A mistake in the controller shows at once."""
    assert check_transition(RunState.RUNNING, RunState.FINISHED) is RunState.FINISHED
    with pytest.raises(RuntimeError, match="cannot go from finished to running"):
        check_transition(RunState.FINISHED, RunState.RUNNING)
    assert [state for state in RunState if state.is_end] == [RunState.FINISHED, RunState.ERRORED, RunState.ABORTED]
