"""The controller when workers fail: what is saved, what is killed, and what starts again."""

from __future__ import annotations

import signal

import pytest
from scripted import Play, kept, location

from holdfast.errors import (
    CorruptCheckpointError,
    HoldfastError,
    ReportMismatchError,
    RunBusyError,
    StorageFullError,
    TrainingError,
    TrainingFailedError,
    WorkerHangError,
)
from holdfast.trainers.function.control.actions import (
    Answer,
    Begin,
    Call,
    Commit,
    End,
    FindStart,
    KillGroup,
    NextAttempt,
    Resumed,
    RunState,
    Say,
    StartGroup,
    StoreRows,
)
from holdfast.trainers.function.control.plan import FailurePolicy, WaitLimits
from holdfast.trainers.function.engine import Dying, Started
from holdfast.trainers.function.transit import error_to_wire

ONCE = FailurePolicy(max_failures=1)


def test_a_killed_worker_restarts_all() -> None:
    """Kill the others, end the attempt, look for the newest checkpoint, start again behind it."""
    play = Play(policy=ONCE).run()
    play.report(0, 1)
    play.report(1, 1)
    play.committed()
    play.exit(1, signal=signal.SIGKILL)
    assert play.out == [KillGroup(grace_s=2.0)]
    assert play.state is RunState.RESTARTING
    play.exit(0, signal=signal.SIGTERM)
    attempt = play.only(NextAttempt)
    assert "SIGKILL" in attempt.reason
    assert attempt.details["cause"] == "failure"
    assert set(attempt.details["failures"]) == {"1"}
    assert "stop" in attempt.details["seconds"]
    play.next_attempt().found(kept("checkpoint_000000", 1))
    assert play.only(Resumed) == Resumed(name="checkpoint_000000", step=1, attempt=1)
    assert "starting 2 workers again from checkpoint_000000 (attempt 2)" in play.only(Say).line
    assert play.only(StartGroup).attempt == 2
    play.feed(Started(rank=0, pid=2))
    assert play.only(Begin).header["first_index"] == 2
    assert play.only(Begin).header["start_id"] == "s2"


def test_a_full_disk_takes_the_next_attempt_when_it_has_room() -> None:
    """What has ended a worker may refuse the attempt after it as well: tried again for as long as a start may take."""
    full = StorageFullError("run.json: no room")
    play = Play(policy=ONCE, limits=WaitLimits(start_s=10.0)).run()
    play.exit(1, signal=signal.SIGKILL)
    play.exit(0, signal=signal.SIGTERM)
    asked = play.only(NextAttempt)
    play.outcome(asked, error=full)
    assert "waits until it can be noted" in play.only(Say).line
    assert "no room" in play.only(Say).line
    assert play.controller.deadline() == play.now + 2.0
    play.tick(after=2.0)
    assert play.only(NextAttempt) == asked
    play.outcome(asked, error=full)
    assert play.out == []  # said once
    play.tick(after=2.0)
    play.next_attempt().found()
    assert play.only(StartGroup).attempt == 2

    play = Play(policy=ONCE, limits=WaitLimits(start_s=10.0)).run()
    play.exit(1, signal=signal.SIGKILL)
    play.exit(0, signal=signal.SIGTERM)
    for _ in range(4):
        play.outcome(play.only(NextAttempt), error=full)
        play.tick(after=2.0)
    play.outcome(play.only(NextAttempt), error=full)
    assert play.only(End).error is full


def test_giving_up() -> None:
    """The error has every failure, and says what is left."""
    play = Play().run()
    cause = ValueError("boom")
    play.fail(0, cause)
    play.exit(0, code=1)
    play.exit(1, code=1)
    end = play.only(End)
    assert end.state is RunState.ERRORED
    assert isinstance(end.error, TrainingFailedError)
    assert {rank: type(error) for rank, error in end.error.failures.items()} == {0: ValueError, 1: TrainingError}
    assert "failure 1 with max_failures=0" in str(end.error)
    assert end.details["failures"]["0"] == "ValueError: boom"


def test_the_dead_explain_the_others() -> None:
    """An error that comes first may be the consequence of a death that is told a moment later."""
    play = Play().run()
    play.fail(0, RuntimeError("connection closed by peer"))
    assert play.out == []  # waits for an explanation
    play.exit(1, signal=signal.SIGTERM)
    assert play.only(KillGroup)
    play.exit(0, code=1)
    attempt = play.only(NextAttempt)  # a preemption, which does not count as a failure
    assert attempt.details["cause"] == "preemption"
    assert list(attempt.details["failures"]) == ["1", "0"]


def test_the_explanation_is_not_waited_for_long() -> None:
    """A rank that computes alone tells nothing for a long time."""
    play = Play(limits=WaitLimits(settle_s=1.0)).run()
    play.fail(0, RuntimeError("x"))
    assert play.controller.deadline() == play.now + 1.0
    play.tick(after=1.0)
    assert play.only(KillGroup)


@pytest.mark.parametrize("sign", ["dying", "leaving"])
def test_a_worker_seen_to_end_is_waited_for(sign: str) -> None:
    """On a busy machine the status of a process comes long after the errors of its peers: it is their cause."""
    play = Play(policy=ONCE, limits=WaitLimits(settle_s=1.0)).run()
    if sign == "dying":
        play.feed(Dying(rank=1))
    else:
        play.say(1, on="leaving")
    assert play.out == []
    play.fail(0, RuntimeError("connection closed by peer"))
    play.feed(Dying(rank=0))
    assert play.tick(after=5.0) == []
    play.exit(1, code=7)
    assert play.only(KillGroup)
    play.exit(0, code=1)
    reason = play.only(NextAttempt).reason
    assert reason.startswith("rank 1: ")
    assert "exited with status 7" in reason


def test_workers_that_a_guard_takes_back_have_not_failed() -> None:
    """They say so before they end with 86: no failure is counted. The status alone is one."""
    for said in (True, False):
        play = Play(policy=FailurePolicy(max_failures=0)).run()
        for rank in range(2):
            play.say(rank, on="leaving", rolled_back=said)
            play.exit(rank, code=86)
        if said:
            asked = play.only(NextAttempt)
            assert asked.details["cause"] == "rollback"
        else:
            assert play.controller.state is RunState.ERRORED


def test_rank_0_says_what_the_end_of_the_others_by_its_guard_comes_to() -> None:
    """It may have raised, because the run must not go on: that is a failure, and its error comes first."""
    play = Play(policy=FailurePolicy(max_failures=0), limits=WaitLimits(settle_s=1.0)).run()
    play.say(1, on="leaving", rolled_back=True)
    play.exit(1, code=86)
    assert play.tick(after=5.0) == []
    play.fail(0, TrainingError("max_rollbacks"))
    play.exit(0, code=1)
    assert play.controller.state is RunState.ERRORED
    assert str(play.only(End).error.__cause__) == "max_rollbacks"


def test_a_worker_that_does_not_end_is_not_waited_for_without_end() -> None:
    """Its exit handlers may hang: the wait is that for complete reports."""
    play = Play(limits=WaitLimits(settle_s=1.0, drain_s=10.0)).run()
    play.say(1, on="leaving")
    play.fail(0, RuntimeError("connection closed by peer"))
    assert play.tick(after=9.0) == []
    assert play.controller.deadline() == play.now + 1.0
    play.tick(after=1.0)
    assert play.only(KillGroup)


def test_the_first_to_die_is_named_first() -> None:
    """NCCL ends the ranks that wait for a dead one by SIGABRT; statuses come in any order."""
    play = Play(policy=ONCE, num_workers=3).run()
    play.feed(Dying(rank=2))
    play.feed(Dying(rank=0))
    play.exit(0, signal=signal.SIGABRT)
    assert play.out == []  # how rank 2 has ended is about to be known
    play.exit(2, signal=signal.SIGKILL)
    assert play.only(KillGroup)
    play.exit(1, signal=signal.SIGTERM)
    attempt = play.only(NextAttempt)
    assert attempt.reason.startswith("rank 2: ")
    assert list(attempt.details["failures"]) == ["2", "0"]


def test_the_first_word_of_a_rank_counts() -> None:
    """Its later errors, and signs of an end that was seen already, change neither the cause nor the order."""
    play = Play(policy=ONCE, num_workers=3).run()
    for rank in (2, 0, 2):
        play.feed(Dying(rank=rank))
    play.exit(0, signal=signal.SIGABRT)
    play.fail(1, HoldfastError("the first"))
    play.fail(1, HoldfastError("the second"))
    play.exit(2, signal=signal.SIGKILL)
    play.exit(1, signal=signal.SIGTERM)
    failures = play.only(NextAttempt).details["failures"]
    assert list(failures) == ["2", "0", "1"]
    assert failures["1"].endswith("the first")


def test_one_that_was_told_to_go_makes_a_preemption_of_it() -> None:
    """The others fail because it is gone, whichever end is heard of last."""
    for order in ((0, 1), (1, 0)):
        play = Play(policy=FailurePolicy(max_failures=0)).run()
        for rank in (0, 1):
            play.feed(Dying(rank=rank))
        for rank in order:
            play.exit(rank, signal=signal.SIGTERM if rank == 0 else signal.SIGABRT)
        assert play.only(NextAttempt).details["cause"] == "preemption", order


def test_exits_after_the_kill_are_no_failures() -> None:
    """Whom we kill did nothing wrong."""
    play = Play().run()
    play.exit(1, code=3)
    play.exit(0, signal=signal.SIGKILL)
    error = play.only(End).error
    assert isinstance(error, TrainingFailedError)
    assert set(error.failures) == {1}


@pytest.mark.parametrize("sealed", [True, False])
def test_what_is_sealed_is_committed(sealed: bool) -> None:
    """The snapshot that was complete when a worker died is committed by its writer; others are dropped at once."""
    play = Play(policy=ONCE).run()
    for rank in range(2):
        play.report(rank, 1, "state")
        if sealed or rank == 0:
            play.part(rank, 1, on="sealed")
    play.exit(1, signal=signal.SIGKILL)
    if not sealed:
        assert play.kinds() == ["KillGroup"]
        return
    commit = play.only(Commit)
    assert commit.writers == (0, 1)
    assert commit.wait_s > 5
    play.committed()
    assert play.only(KillGroup)
    assert play.controller.reports.known.newest() is not None


def test_what_is_stored_by_now_need_not_be_sealed() -> None:
    """One part is durable, the other left to its writer: the checkpoint is made."""
    play = Play(policy=ONCE).run()
    for rank in range(2):
        play.report(rank, 1, "state")
    play.part(0, 1)
    play.part(1, 1, on="sealed")
    play.exit(1, signal=signal.SIGKILL)
    assert play.only(Commit).writers == (0, 1)


def test_living_workers_may_still_seal() -> None:
    """The dead one had sealed its part; the others are about to."""
    play = Play(policy=ONCE).run()
    play.report(0, 1, "state")
    play.report(1, 1, "state")
    play.part(1, 1, on="sealed")
    play.exit(1, signal=signal.SIGKILL)
    assert play.out == []
    play.part(0, 1, on="sealed")
    assert play.only(Commit).writers == (0, 1)


def test_reports_that_all_have_entered_are_finished_in_bounds() -> None:
    """The commit goes on; if it takes too long the group is killed all the same."""
    play = Play(policy=ONCE, limits=WaitLimits(drain_s=10)).run()
    play.report(0, 1)
    play.report(1, 1)
    ingest = play.only(Commit)
    play.exit(1, signal=signal.SIGKILL)
    assert play.out == []
    play.tick(after=10)
    assert play.only(KillGroup)
    play.exit(0, signal=signal.SIGKILL)
    play.next_attempt().found().go()
    play.out = [ingest]
    play.committed()  # late: it was behind in the writer's queue, and counts all the same
    assert play.out == []
    assert play.controller.reports.known.newest() == kept("checkpoint_000000", 1, loss=1.0, checkpoint_id="r-s1-1")


def test_what_comes_after_a_failure_is_not_taken() -> None:
    """Survivors that report on must not keep the run from restarting."""
    play = Play(policy=ONCE).run()
    play.report(0, 1)
    play.report(1, 1)
    play.exit(1, signal=signal.SIGKILL)
    assert play.report(0, 2) == []
    assert 2 not in play.controller.reports.ledger.reports


def test_a_rank_that_ends_early_while_others_wait() -> None:
    """The same error as a time-out, at once."""
    play = Play().run()
    play.report(0, 2)
    play.say(1, on="finished")
    play.tick(after=1)
    play.exit_all()
    error = play.only(End).error
    assert isinstance(error, TrainingFailedError)
    assert isinstance(error.failures[1], ReportMismatchError)
    assert "rank 1: it ended without it (last report of rank 0: 2, rank 1: 0)" in str(error.failures[1])


def test_a_rank_that_does_not_report() -> None:
    """After the time-out the missing ranks are named."""
    play = Play(num_workers=3, limits=WaitLimits(report_s=60)).run()
    play.report(0, 1)
    play.tick(after=59)
    assert play.out == []
    play.tick(after=2)
    play.exit_all()
    error = play.only(End).error
    assert isinstance(error, TrainingFailedError)
    assert set(error.failures) == {1, 2}
    assert "was not called by ranks 1, 2: they did not come to it within 60 s" in str(error.failures[1])


def test_what_storage_takes_is_no_hang() -> None:
    """Workers that wait for a commit are silent; so are those whose writers still store a part."""
    play = Play(limits=WaitLimits(hang_s=30)).run()
    play.report(0, 1)
    play.report(1, 1)
    ingest = play.only(Commit)
    assert play.controller.deadline() is None
    play.tick(after=100)
    play.out = [ingest]
    play.committed()
    assert play.controller.deadline() == play.now + 30
    for rank in range(2):
        play.report(rank, 2, "state")
        play.part(rank, 2, on="sealed")
    for _ in range(5):
        play.say(0, on="storing")
        play.tick(after=29)
    assert play.out == []


@pytest.mark.parametrize("ranks", [(), (0,)], ids=["nobody", "the others"])
def test_a_worker_that_stops_while_its_part_is_stored_hangs(ranks: tuple[int, ...]) -> None:
    """Nobody hears that the part is there: a process that was stopped says nothing, and its storage is no excuse."""
    play = Play(limits=WaitLimits(hang_s=30)).run()
    for rank in range(2):
        play.report(rank, 1, "state")
        play.part(rank, 1, on="sealed")
    for rank in ranks:
        play.part(rank, 1)
    play.out.clear()
    play.tick(after=29)
    assert play.out == []
    play.tick(after=1)
    play.committed()  # their writers have all of it
    assert play.only(KillGroup)
    play.exit_all()
    error = play.only(End).error
    assert isinstance(error, TrainingFailedError)
    assert isinstance(error.failures[1], WorkerHangError)


@pytest.mark.parametrize("kind", ["directory", "state"])
def test_what_a_worker_brings_is_no_hang(kind: str) -> None:
    """Directories on their way to a store, and shares on their way from a disk of their node, wait for storage."""
    play = Play(limits=WaitLimits(hang_s=30)).run()
    for rank in range(2):
        coming = {"source": {"path": f".incoming-1/1-{rank}", "owned": True}, "coming": True}
        play.report(rank, 1, kind, **(coming if kind == "directory" else {}))
        if kind == "state":
            play.part(rank, 1, on="staged")
    play.part(0, 1)
    play.out.clear()
    for _ in range(5):
        play.say(1, on="storing")
        play.tick(after=29)
    assert play.out == []
    play.part(1, 1)
    assert play.only(Commit)


def test_an_upload_function_that_hangs_is_a_hang() -> None:
    """It is code of the user, as what is around it: silence has its limit, and the error says whose upload of what."""
    play = Play(limits=WaitLimits(hang_s=30)).run()
    for rank in range(2):
        play.report(rank, 1, "uploaded", call=None, coming=True)
    play.part(0, 1)
    play.tick(after=30)
    play.exit_all()
    error = play.only(End).error
    assert isinstance(error, TrainingFailedError)
    assert str(error.failures[1]).startswith("checkpoint_upload_fn has not returned for report 1 of rank 1: give its")


def test_a_name_is_free_again_when_its_report_is_lost() -> None:
    """Rank 0 had begun to store it, and rank 1 died before it came to it."""
    play = Play(policy=ONCE).run()
    play.report(0, 1, "state", name="epoch-0")
    play.exit(1, signal=signal.SIGKILL)
    play.exit_all()
    play.next_attempt().found().go()
    for rank in range(2):
        play.report(rank, 1, "state", name="epoch-0")
        answer = play.only(Answer)
        assert answer.error is None, answer.error


LEFT = {"kind": "directory", "home": ".incoming-1/1-1", "path": "/scratch/x", "rank": 1, "owned": True}


def play_left(kind: str) -> Play:
    """Rank 0 has brought its part of report 1; that of rank 1, which is on a disk of its node, is on its way."""
    play = Play(policy=ONCE, limits=WaitLimits(drain_s=10)).run()
    for rank in range(2):
        coming = {"path": f".incoming-1/1-{rank}", "owned": True}
        if kind == "directory":
            play.report(rank, 1, kind, call=None, source=coming, coming=True, unfinished=LEFT)
        else:
            play.report(rank, 1, kind)
            play.say(rank, on="staged", index=1, unfinished=LEFT)
    play.part(0, 1)
    return play


@pytest.mark.parametrize("kind", ["directory", "state"])
def test_a_node_finishes_what_its_dead_worker_has_left(kind: str) -> None:
    """It is waited for, and committed; the group starts again from it."""
    play = play_left(kind)
    play.exit(1, signal=signal.SIGKILL)
    assert play.out == []
    play.part(1, 1)
    assert play.only(Commit)
    play.committed()
    assert play.only(KillGroup)
    assert play.controller.reports.known.newest() is not None


@pytest.mark.parametrize("kind", ["directory", "state"])
def test_a_node_that_cannot_finish_it(kind: str) -> None:
    """A node that is lost too, one that says so, and one that is too slow: the report is not committed."""
    play = play_left(kind)
    play.exit(1, signal=signal.SIGKILL, reason="node")
    assert play.kinds() == ["KillGroup"]
    play = play_left(kind)
    play.exit(1, signal=signal.SIGKILL)
    error, data = error_to_wire(HoldfastError("the disk is gone"))
    play.say(1, data, on="part", index=1, error=error)
    assert play.only(KillGroup)
    play = play_left(kind)
    play.exit(1, signal=signal.SIGKILL)
    play.tick(after=10)
    assert play.only(KillGroup)
    assert play.all(Commit) == []
    assert play.controller.reports.known.newest() is None


def test_silence_is_a_hang() -> None:
    """Every rank that has not finished is named, with its last report."""
    play = Play(limits=WaitLimits(hang_s=30)).run()
    play.rows(1, {"loss": 1.0})
    play.tick(after=29)
    assert play.out == []
    play.tick(after=1)
    assert play.only(KillGroup)
    play.exit_all()
    error = play.only(End).error
    assert isinstance(error, TrainingFailedError)
    assert isinstance(error.failures[0], WorkerHangError)
    assert "rank 0 30.0 s ago (report 1), rank 1 30.0 s ago (report 0)" in str(error.failures[0])


def test_workers_that_do_not_start() -> None:
    """The start is bounded as well."""
    play = Play(limits=WaitLimits(start_s=60)).open().found()
    play.feed(Started(rank=0, pid=1))
    play.say(0, on="running")
    play.feed(Started(rank=1, pid=1))
    play.tick(after=60)
    play.exit_all()
    error = play.only(End).error
    assert isinstance(error, TrainingFailedError)
    assert "train_func did not begin on rank 1 within 60 s" in str(error.failures[1])


def test_workers_that_cannot_be_started() -> None:
    """An engine that fails ends the run, not in a loop."""
    play = Play(policy=FailurePolicy(max_failures=-1)).open().found()
    error = HoldfastError("no processes left")
    play.outcome(play.only(StartGroup), error=error)
    assert play.only(End).error is error


def test_endless_failures_are_slowed_down() -> None:
    """With no limit, starts that come to nothing wait longer and longer."""
    play = Play(num_workers=1, policy=FailurePolicy(max_failures=-1)).run()
    waits = []
    for _ in range(6):
        play.exit(0, code=1)
        play.next_attempt().found()
        started = play.all(StartGroup)
        waits.append(0.0 if started else (play.controller.deadline() or 0.0) - play.now)
        if not started:
            play.tick(after=waits[-1])
            assert play.only(StartGroup)
        play.go()
    assert waits == [0.0, 0.0, 0.0, 1.0, 2.0, 4.0]


def test_a_damaged_start_does_not_count() -> None:
    """If the bytes that the group started from are damaged, the older checkpoint is taken for free."""
    play = Play().run(kept("a", 1), kept("b", 2))
    play.fail(0, CorruptCheckpointError("chunk 3 differs"))
    play.exit(1, code=1)
    play.exit(0, code=1)
    assert play.only(FindStart).deep == ("b",)
    play.found(kept("a", 1), skipped=(("b", "chunk 3 differs"),), set_aside=frozenset({"b"}))
    play.next_attempt().found(kept("a", 1))
    assert play.only(Resumed).name == "a"
    assert play.only(StartGroup)


def test_a_sound_start_counts() -> None:
    """An error of that kind over something else is a failure like any."""
    play = Play().run(kept("b", 2))
    play.fail(0, CorruptCheckpointError("some other file"))
    play.exit(0, code=1)
    play.exit(1, code=1)
    play.found(kept("b", 2))
    assert isinstance(play.only(End).error, TrainingFailedError)


def test_damage_after_a_report_is_a_failure_like_any() -> None:
    """The group had read what it started from: its checkpoint is no suspect."""
    play = Play(policy=ONCE).run(kept("b", 2))
    play.count(0, 3)
    play.fail(0, CorruptCheckpointError("some other file"))
    play.exit(0, code=1)
    play.exit(1, code=1)
    assert play.all(FindStart) == []
    assert play.only(NextAttempt)


def test_a_lost_lease_ends_the_run() -> None:
    """Somebody else writes to the run: nothing may be written any more, and nothing is started again."""
    play = Play(policy=FailurePolicy(max_failures=-1)).run()
    play.rows(1, {"loss": 1.0})
    busy = RunBusyError("taken over by host b")
    play.outcome(play.only(StoreRows), error=busy)
    play.exit_all()
    assert play.only(End).error is busy


def test_a_stop_request_ends_in_order() -> None:
    """Complete reports are committed, then the workers are stopped; the error policy is not asked."""
    play = Play(policy=FailurePolicy(max_failures=-1)).run()
    play.report(0, 1)
    play.report(1, 1)
    ingest = play.only(Commit)
    play.stop()
    assert play.out == []
    play.out = [ingest]
    play.committed()
    assert play.only(KillGroup)
    assert play.all(Answer) != []
    play.exit_all()
    end = play.only(End)
    assert (end.state, end.reason, end.error) == (RunState.ABORTED, "SIGINT", None)


def test_a_second_stop_request_waits_for_nothing() -> None:
    """Whoever presses Ctrl-C twice wants to leave."""
    play = Play().run()
    play.report(0, 1)
    play.report(1, 1)
    play.stop()
    assert play.all(KillGroup) == []
    play.stop()
    assert play.out == [KillGroup(grace_s=0.0)]
    play.exit_all()
    assert play.only(End).state is RunState.ABORTED


def test_a_stop_request_before_anything_runs() -> None:
    """There is nobody to stop."""
    play = Play()
    play.stop("SIGTERM")
    assert play.only(End).state is RunState.ABORTED


def test_a_process_that_survives_sigkill() -> None:
    """No second attempt beside one that is stuck in the kernel."""
    play = Play(policy=FailurePolicy(max_failures=-1), limits=WaitLimits(stop_s=30, grace_s=2)).run()
    play.exit(0, signal=signal.SIGKILL)
    play.tick(after=32)
    assert "rank 1 did not end within 30 s of SIGKILL" in str(play.only(End).error)


def test_callbacks_hear_of_failures() -> None:
    """With the exceptions themselves."""
    play = Play(policy=ONCE, has_callbacks=True).run()
    play.exit(1, signal=signal.SIGKILL)
    play.exit(0, signal=signal.SIGKILL)
    call = play.only(Call)
    assert call.hook == "after_exception"
    assert set(call.arguments["worker_exceptions"]) == {1}


def test_memory_wins_over_an_older_checkpoint() -> None:
    """Values that were not written are the newest there is, until something newer is committed."""
    strategy = {"num_to_keep": 1, "attribute": "acc", "order": "max"}
    play = Play(policy=ONCE, strategy=strategy).run()
    play.report(0, 1, "values", score=0.5)
    play.part(0, 1)
    play.committed()
    play.report(0, 2, "values", score=0.1)
    assert play.only(Answer).value == {"memory": True}
    play.say(0, b"packed", on="memory", index=2)
    play.exit(1, signal=signal.SIGKILL)
    play.exit(0, signal=signal.SIGKILL)
    play.next_attempt().found(kept("checkpoint_000001", 1))
    assert play.only(Resumed) == Resumed(name="checkpoint_000002 (in memory)", step=2, attempt=1)
    play.feed(Started(rank=0, pid=1))
    assert play.only(Begin).memory == b"packed"
    assert play.only(Begin).header["first_index"] == 3
    assert location("x")["uri"] == play.plan.uri
