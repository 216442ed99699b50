"""The controller's answers to reports: what is committed when, under which name, and who hears of it."""

from __future__ import annotations

import sys

import pytest
from scripted import Play, kept, location

from holdfast.errors import ConfigError, HoldfastError, ReportMismatchError, StorageFullError
from holdfast.trainers.function.control.actions import (
    Answer,
    Call,
    Commit,
    Note,
    Say,
    Send,
    StoreRows,
)
from holdfast.trainers.function.control.plan import WaitLimits
from holdfast.trainers.function.transit import error_to_wire


def troubles(play: Play) -> list[tuple[int, int]]:
    """(rank, report) of troubles told in the last step."""
    sends = [send for send in play.all(Send) if send.header["do"] == "trouble"]
    assert all(send.error is not None for send in sends)
    return [(send.rank, send.header["index"]) for send in sends]


def sources(commit: Commit) -> list[tuple[int, str, str]]:
    """(rank, path, whether the directory is taken over or left where it is)."""
    return [(one.rank, one.path, "owned" if one.owned else "left") for one in commit.sources]


def test_directories_are_committed_when_all_ranks_are_in() -> None:
    """All sources merge into one numbered directory; all ranks that wait are answered."""
    play = Play().run()
    play.report(0, 1)
    assert play.all(Commit) == []
    play.report(1, 1, source={"path": "/tmp/x", "owned": True})
    ingest = play.only(Commit)
    assert (ingest.directory, ingest.save_id, ingest.index) == ("checkpoint_000000", "s1-1", 1)
    assert sources(ingest) == [(0, "/tmp/0-1", "left"), (1, "/tmp/x", "owned")]
    assert ingest.manifest == {
        "run_id": "r",
        "attempt": 1,
        "parent": None,
        "world_size": 2,
        "versions": {},
        "checkpoint_id": "r-s1-1",
        "step": 1,
        "epoch": None,
        "metrics": {"loss": 1.0},
    }
    play.committed()
    where = {"checkpoint": location("checkpoint_000000")}
    assert [(one.rank, one.call, one.value) for one in play.all(Answer)] == [(0, 10, where), (1, 10, where)]
    assert [(one.rank, one.header["index"]) for one in play.all(Send)] == [(0, 1), (1, 1)]


COMING = {"path": ".incoming-s1/1-0", "owned": True}


def test_an_upload_says_in_the_end_where_it_is() -> None:
    """Until then the report is entered, and nothing is committed; a rank whose upload fails ends it for all."""
    play = Play().open().found(taken=frozenset({"up"})).go()
    where = {"storage": None, "uri": "/runs/run", "name": "up"}
    play.report(0, 1, "uploaded", call=None, coming=True)
    play.report(1, 1, "directory", call=None, coming=True, source=None)
    play.ask(0, upto=1)
    assert play.only(Answer).value == {"checkpoint": None, "memory": False}  # nobody waits for it
    play.say(0, on="part", index=1, location=where)
    assert play.all(Commit) == []
    play.say(1, on="part", index=1, source={"path": "/tmp/there", "owned": True})
    commit = play.only(Commit)
    assert (commit.directory, commit.uploaded) == ("up", True)
    assert sources(commit) == [(1, "/tmp/there", "owned")]
    play.committed()
    for rank in range(2):
        play.report(rank, 2, "uploaded", call=None, coming=True)
    told, data = error_to_wire(HoldfastError("the bucket is gone"))
    play.say(1, data, on="part", index=2, error=told)
    assert [(one.rank, one.header["do"], str(one.error)) for one in play.all(Send)] == [
        (0, "trouble", "the bucket is gone")
    ]


def refuse(play: Play, rank: int, index: int, **cause: int) -> None:
    """The call of a report raises on a rank."""
    told, data = error_to_wire(HoldfastError("no files here"))
    play.say(rank, data, on="part", index=index, error=told, **cause)
    play.count(rank, index)


def test_a_report_that_raised_on_one_rank_makes_no_checkpoint() -> None:
    """Whoever was first: it would lack the files of that rank. The next report is whole again."""
    play = Play().run()
    play.report(0, 1)
    refuse(play, 1, 1)
    assert play.all(Commit) == []
    refuse(play, 0, 2)
    play.report(1, 2)
    answer = play.only(Answer)
    assert (answer.rank, str(answer.error)) == (1, "no files here")
    play.report(0, 3)
    play.report(1, 3)
    assert play.only(Commit).index == 3


@pytest.mark.parametrize("first", [0, 1])
def test_a_state_on_one_rank_and_a_directory_on_the_other(first: int) -> None:
    """Both hear of it at once, whoever was first: the rank of the directory waits in its call."""
    play = Play().run()
    for rank in (first, 1 - first):
        play.report(rank, 1, "state" if rank == 0 else "directory")
    assert troubles(play) == [(0, 1)]
    answer = next(one for one in play.all(Answer) if one.rank == 1)
    assert "different kinds of checkpoints (rank 0: state, rank 1: directory)" in str(answer.error)


def test_one_failure_in_the_background_is_raised_once_by_each_rank() -> None:
    """Report 2 fails because rank 0 raised the error of report 1 in it: rank 1, which was ahead, has that error."""
    play = Play().run()
    for index in (1, 2):
        play.report(1, index, call=None)
    told, data = error_to_wire(HoldfastError("the bucket is gone"))
    play.report(0, 1, call=None, coming=True, source=None)
    play.say(0, data, on="part", index=1, error=told)
    (trouble,) = play.all(Send)
    assert trouble.header == {"do": "trouble", "index": 1, "root": 1}
    if sys.version_info >= (3, 11):
        assert trouble.error is not None
        assert trouble.error.__notes__ == ["holdfast: on rank 0, in report 1"]
    play.say(0, data, on="part", index=2, error=told, root=1)
    assert [one.header for one in play.all(Send)] == [{"do": "trouble", "index": 2, "root": 1}]
    assert play.only(Say).line == "report 2 makes no checkpoint: rank 0 raised the error of report 1 in it"
    play.count(0, 2)
    assert play.all(Commit) == []


def test_a_source_that_cannot_be_is_an_error_of_its_report() -> None:
    """The run goes on."""
    play = Play(num_workers=1).run()
    play.report(0, 1, source={"path": "here", "owned": False})
    assert "'here': give an absolute path" in str(play.only(Answer).error)
    play.report(0, 2)
    assert play.only(Commit).index == 2


def test_directories_that_are_on_their_way_are_waited_for() -> None:
    """All ranks are in, so no time runs for them; the commit follows the last word that one is there."""
    play = Play().run()
    play.report(0, 1, source=COMING, coming=True)
    play.report(1, 1, source={**COMING, "path": ".incoming-s1/1-1"}, coming=True)
    assert play.tick(after=100_000) == []
    play.part(1, 1)
    assert play.all(Commit) == []
    play.part(0, 1)
    assert [one.path for one in play.only(Commit).sources] == [".incoming-s1/1-0", ".incoming-s1/1-1"]
    play.committed()
    assert [one.rank for one in play.all(Answer)] == [0, 1]


def test_a_directory_that_does_not_come_fails_the_report() -> None:
    """The other ranks hear of it, where they wait; the next report is made as ever."""
    play = Play().run()
    for rank in (0, 1):
        play.report(rank, 1, source=COMING, coming=True)
    told, data = error_to_wire(HoldfastError("no way"))
    play.say(0, data, on="part", index=1, error=told)
    answer = play.only(Answer)
    assert (answer.rank, str(answer.error)) == (1, "no way")
    for rank in (0, 1):
        play.report(rank, 2, source=COMING, coming=True)
        play.part(rank, 2)
    assert play.only(Commit).index == 2


def test_a_directory_of_a_living_rank_is_waited_for_after_a_death() -> None:
    """That of the dead one has come: the checkpoint is committed before the others are stopped."""
    for dead, commits in ((1, 1), (0, 0)):
        play = Play().run()
        for rank in (0, 1):
            play.report(rank, 1, source=COMING, coming=True)
        play.part(1, 1)
        play.exit(dead, signal=9, code=None)
        play.part(0, 1)
        assert len(play.all(Commit)) == commits


def test_a_parent_is_the_checkpoint_before() -> None:
    """The newest that is committed when a save begins, whoever asks about that save, and however many fail."""
    play, parents = Play().run(), []
    for index in (1, 2, 3):
        play.report(0, index)
        play.report(1, index)
        ingest = play.only(Commit)
        parents.append(ingest.manifest["parent"])
        if index == 2:
            play.outcome(ingest, error=StorageFullError("no space"))
        else:
            play.committed()
    assert parents == [None, "r-s1-1", "r-s1-1"]


def test_all_ranks_name_the_same_parent() -> None:
    """A save that began before another was committed keeps the parent that its first rank was told."""
    play = Play().run()
    play.report(0, 1)
    play.report(1, 1)
    first = play.out
    play.report(0, 2, "state")
    parents = [play.only(Answer).value["go"]["manifest"]["parent"]]
    play.out = first
    play.committed()
    play.report(1, 2, "state")
    parents.append(play.only(Answer).value["go"]["manifest"]["parent"])
    for rank in (0, 1):
        play.part(rank, 2)
    assert [*parents, play.only(Commit).manifest["parent"]] == [None, None, None]


def test_a_count_that_comes_late_takes_nothing_back() -> None:
    """Messages of a rank may overtake each other: what it has entered it has entered."""
    play = Play().run()
    play.count(1, 2)
    play.count(1, 1)
    play.report(0, 2)
    assert play.only(Commit).index == 2


def test_ranks_without_data_count_as_in() -> None:
    """Checkpoints of rank 0 alone are the habit; the others come with metrics."""
    play = Play().run()
    play.count(1, 3)  # ahead of rank 0
    play.rows(1, {"loss": 1.0})
    play.report(0, 2)
    assert sources(play.only(Commit)) == [(0, "/tmp/0-2", "left")]
    play.committed()
    assert [one.rank for one in play.all(Answer)] == [0]
    assert [one.rank for one in play.all(Send)] == [0, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_a_checkpoint_that_another_rank_brings_has_the_metrics_of_rank_0(first: int) -> None:
    """Whichever of them comes first, and although rank 0 is some reports ahead."""
    play, found = Play().run(), {}
    if first == 0:
        play.rows(1, {"loss": 1.0}, {"loss": 2.0, "epoch": 5}, {"loss": 3.0})
    for index in (1, 2, 3):
        play.report(1, index, source={"path": f"/tmp/{index}", "owned": True})
        if first == 1:
            play.rows(index, {"loss": float(index), **({"epoch": 5} if index == 2 else {})})
        ingest = play.only(Commit)
        found[index] = ingest.manifest["metrics"], ingest.manifest["epoch"]
        play.committed()
    assert found == {1: ({"loss": 1.0}, None), 2: ({"loss": 2.0, "epoch": 5}, 5), 3: ({"loss": 3.0}, None)}


def test_metrics_that_no_checkpoint_will_have_are_forgotten() -> None:
    """A training may report for weeks."""
    play = Play().run()
    for index in range(1, 5):
        play.rows(index, {"loss": 1.0})
        play.count(1, index)
    assert len(play.controller.reports.ledger._metrics) <= 1


def test_metrics_of_a_report_with_data_are_stored_at_once() -> None:
    """Not only when the checkpoint is committed, and only those of rank 0."""
    play = Play().run()
    play.report(1, 1)
    assert play.all(StoreRows) == []
    play.report(0, 1)
    assert play.only(StoreRows).rows[0]["metrics"] == {"loss": 1.0}


def test_a_failed_commit_is_told_to_all_that_brought_something() -> None:
    """As the answer to whoever waits, as trouble to the others; the name is free again."""
    play = Play().run()
    play.report(0, 1, name="best")
    play.report(1, 1, call=None)
    error = HoldfastError("disk full")
    play.outcome(play.only(Commit), error=error)
    assert play.only(Answer) == Answer(rank=0, call=10, error=error)
    assert troubles(play) == [(1, 1)]
    play.report(0, 2, name="best")
    play.count(1, 2)
    assert play.only(Commit).directory == "best"


def test_states_are_answered_at_once_and_committed_in_parts() -> None:
    """Nobody waits for anybody; the manifest has the metrics of rank 0 even if rank 1 was first."""
    play = Play().run()
    play.report(1, 1, "state")
    first = play.only(Answer).value
    play.report(0, 1, "state")
    second = play.only(Answer).value
    assert first is not None
    assert second is not None
    assert first["go"]["directory"] == second["go"]["directory"] == "checkpoint_000000"
    assert first["go"]["save_id"] == "s1-1"
    play.part(1, 1)
    assert play.all(Commit) == []
    play.part(0, 1)
    commit = play.only(Commit)
    assert (commit.writers, commit.wait_s) == ((0, 1), 0.0)
    assert commit.manifest["metrics"] == {"loss": 1.0}
    play.committed()
    assert play.all(Answer) == []
    assert len(play.all(Send)) == 2


def test_a_part_that_fails_fails_the_report() -> None:
    """The rank knows; the others are told, also those that come later: they must not make a checkpoint of the rest."""
    play = Play(num_workers=3).run()
    play.report(0, 1, "state")
    play.report(1, 1, "state")
    told, data = error_to_wire(HoldfastError("no space"))
    play.say(0, data, on="part", index=1, error=told)
    assert troubles(play) == [(1, 1)]
    play.report(2, 1, "state")
    answer = play.only(Answer)
    assert answer.rank == 2
    assert isinstance(answer.error, HoldfastError)
    assert play.part(1, 1) == []
    for rank in range(3):
        play.report(rank, 2, "state")
        play.part(rank, 2)
    assert play.only(Commit).index == 2


def test_a_state_that_a_rank_does_not_bring() -> None:
    """The ranks share the work, so one that is missing cannot be made up for."""
    play = Play().run()
    play.report(0, 1, "state")
    play.part(0, 1)
    play.count(1, 1)
    (send,) = play.all(Send)
    assert send.rank == 0
    assert isinstance(send.error, ReportMismatchError)
    assert "rank 1 called it without state=" in str(send.error)


def test_ranks_that_do_different_things() -> None:
    """Directory here, state there: nothing is committed and all hear why."""
    play = Play().run()
    play.report(0, 1)
    play.report(1, 1, "state")
    play.part(1, 1)
    assert play.all(Commit) == []
    play.tick()
    assert play.controller.reports.ledger.reports == {}


def test_a_rank_that_reports_once_more_is_found() -> None:
    """Its directories come to the reports before, with those of other steps: said at once, and in the error."""
    play = Play().run()
    play.rows(1, {"loss": 1.0})
    play.report(1, 1)
    assert play.all(Say) == []
    play.committed()
    play.report(0, 2)
    play.report(1, 2)
    (said,) = play.all(Say)
    assert "(rank 1 from report 1 on; ranks 0, 1 from report 2 on)" in said.line
    play.committed()
    play.report(0, 3)
    play.report(1, 3)
    assert play.all(Say) == []
    play.committed()
    play.report(0, 4)
    play.say(1, on="finished")
    found = play.controller.reports.mismatch(play.now)
    assert found is not None
    assert "hold files of different steps" in str(found[1])


def test_names() -> None:
    """Numbers go on behind what lies there; a chosen name is used once, by all ranks that give one."""
    play = Play().open().found(taken=frozenset({"checkpoint_000007", "reports", "mine"})).go()
    play.report(0, 1)
    play.count(1, 1)
    assert play.only(Commit).directory == "checkpoint_000008"
    play.report(0, 2, name="epoch-2")
    play.report(1, 2)
    assert play.only(Commit).directory == "epoch-2"
    play.report(0, 3, name="epoch-2")
    play.count(1, 3)
    assert isinstance(play.only(Answer).error, ConfigError)
    play.report(0, 4, name="mine")
    play.count(1, 4)
    assert "'mine' is taken" in str(play.only(Answer).error)
    play.report(0, 5, name="a")
    play.report(1, 5, name="b")
    assert {answer.rank for answer in play.all(Answer)} == {0, 1}
    assert play.all(Commit) == []
    play.report(0, 6)
    play.count(1, 6)
    assert play.only(Commit).directory == "checkpoint_000009"


@pytest.mark.parametrize("name", ["a/b", ".hidden", "reports", "logs", "..", ""])
def test_names_that_are_none(name: str) -> None:
    """They would lead out of the run, or hide in it."""
    play = Play(num_workers=1).run()
    play.report(0, 1, name=name)
    assert isinstance(play.only(Answer).error, ConfigError)


def test_the_name_of_a_damaged_checkpoint() -> None:
    """Training that comes by there again must not fail for ever: the new one gets a number behind its name."""
    play = Play(num_workers=1).open().found(set_aside=frozenset({"epoch-3"}), taken=frozenset({"epoch-3"})).go()
    play.report(0, 1, name="epoch-3")
    assert play.only(Commit).directory == "epoch-3-2"


def test_uploaded_checkpoints() -> None:
    """They are committed where they are, under the name they have."""
    play = Play().open().found(taken=frozenset({"up"})).go()
    where = {"storage": None, "uri": "/runs/run", "name": "up"}
    play.report(0, 1, "uploaded", location=where)
    play.report(1, 1, "uploaded", location=where)
    assert play.only(Commit).directory == "up"
    play.committed()
    assert len(play.all(Answer)) == 2
    play.report(0, 2, "uploaded", location=where)
    play.report(1, 2, "uploaded", location={**where, "name": "other"})
    assert all("ranks named different places" in str(one.error) for one in play.all(Answer))


def test_get_checkpoint_waits_for_synchronous_reports() -> None:
    """It is the newest committed one once all reports before the question have ended."""
    play = Play().run()
    play.report(0, 1)
    play.ask(1, upto=1)
    assert play.all(Answer) == []
    play.count(1, 1)
    ingest = play.only(Commit)
    assert play.all(Answer) == []
    play.out = [ingest]
    play.committed()
    assert Answer(rank=1, call=7, value={"checkpoint": location("checkpoint_000000"), "memory": False}) in play.all(
        Answer
    )


def test_get_checkpoint_is_the_same_on_all_ranks() -> None:
    """A checkpoint that is committed between two ranks' questions changes nothing; the next question sees it."""
    play = Play().run(kept("a", 0, attempt=1))
    play.report(0, 1, call=None)
    play.report(1, 1, call=None)
    ingest = play.only(Commit)
    play.ask(0, upto=1)
    assert play.only(Answer).value == {"checkpoint": location("a"), "memory": False}
    play.out = [ingest]
    play.committed()
    play.ask(1, upto=1)
    assert play.only(Answer).value == {"checkpoint": location("a"), "memory": False}
    play.ask(1, upto=1)
    assert play.only(Answer).value == {"checkpoint": location("checkpoint_000000"), "memory": False}


def test_all_reported_checkpoints() -> None:
    """Oldest first, with their metrics and status, once everything before has ended or the time is over."""
    play = Play(validates=True).run(kept("a", 0, loss=3.0, _validated="failed"))
    play.report(0, 1, call=None, validation=True)
    play.count(1, 1)
    ingest = play.only(Commit)
    play.ask(0, upto=1, what="all", mode="committed", timeout_s=5.0)
    play.ask(1, upto=1, what="all", mode="validated")
    assert play.all(Answer) == []
    play.tick(after=5)
    assert [row["checkpoint"]["name"] for row in play.only(Answer).value["checkpoints"]] == ["a"]  # type: ignore[index]
    play.ask(0, upto=1, what="all", mode="committed")
    play.out = [ingest]
    play.committed()
    rows = play.only(Answer).value["checkpoints"]  # type: ignore[index]
    assert [(row["metrics"], row["status"]) for row in rows] == [
        ({"loss": 3.0}, "VALIDATION_FAILED"),
        ({"loss": 1.0}, "PENDING_VALIDATION"),
    ]


def test_a_question_is_not_kept_waiting_by_a_rank_that_is_done() -> None:
    """A rank that has ended brings nothing more."""
    play = Play().run()
    play.rows(1, {"loss": 1.0})
    play.ask(0, upto=1)
    assert play.all(Answer) == []
    play.say(1, on="finished")
    assert play.only(Answer).value == {"checkpoint": None, "memory": False}


def test_dictionaries_by_score() -> None:
    """Those in flight count as kept; what is not written stays in memory, under a number of its own."""
    strategy = {"num_to_keep": 1, "attribute": "acc", "order": "max"}
    play = Play(strategy=strategy).run()
    play.report(0, 1, "values", score=0.5, metrics={"acc": 0.5})
    go = play.only(Answer).value["go"]  # type: ignore[index]
    assert go["directory"] == "checkpoint_000001"
    assert go["manifest"]["metrics"] == {"acc": 0.5}
    play.report(0, 2, "values", score=0.5)
    assert play.only(Answer).value == {"memory": True}
    assert play.only(Note) == Note(key="number", value=2)
    play.say(0, b"packed", on="memory", index=2)
    play.ask(0, upto=2)
    play.part(0, 1)
    assert play.only(Commit).writers == (0,)  # the other rank brings nothing and is not waited for
    play.committed()
    assert play.all(Answer) == []
    play.count(1, 2)
    answer = play.only(Answer)
    assert (answer.value, answer.memory) == ({"checkpoint": None, "memory": True}, b"packed")
    play.report(0, 3, "values", score=0.6)
    assert play.only(Answer).value["go"]["directory"] == "checkpoint_000003"  # type: ignore[index]


def test_numbers_go_on_after_a_restart_of_the_driver() -> None:
    """Also those of checkpoints that were never written."""
    strategy = {"num_to_keep": 0, "attribute": "_timestamp", "order": "max"}
    play = Play(strategy=strategy).open(notes={"number": 12}).found().go()
    play.report(0, 1, "values", score=1.0)
    assert play.only(Note).value == 13


def test_the_newest_dictionary_is_written_whatever_clocks_say() -> None:
    """The default score is the time, which may go back."""
    strategy = {"num_to_keep": 1, "attribute": "_timestamp", "order": "max"}
    play = Play(strategy=strategy).run(kept("checkpoint_000001", 0, _timestamp=1000.0))
    play.report(0, 1, "values", score=10.0)
    assert "go" in play.only(Answer).value  # type: ignore[operator]


def test_callbacks_hear_of_reports() -> None:
    """With the metrics of all ranks, once all have made the report; of checkpoints when they are committed."""
    play = Play(has_callbacks=True).run()
    play.rows(1, {"loss": 1.0})
    assert play.all(Call) == []
    play.rows(1, {"loss": 2.0}, {"loss": 4.0}, rank=1)
    assert play.only(Call).arguments == {"metrics": [{"loss": 1.0}, {"loss": 2.0}], "checkpoint": None}
    assert play.all(StoreRows) == []  # the history has those of rank 0
    play.report(0, 2)
    assert play.all(Call) == []


def test_callbacks_hear_of_a_commit() -> None:
    """What other ranks reported with it comes along; a rank that has ended is waited for no more."""
    play = Play(has_callbacks=True).run()
    play.report(0, 1)
    play.rows(1, {"loss": 5.0}, rank=1)
    ingest = play.only(Commit)
    play.out = [ingest]
    play.committed()
    call = play.only(Call)
    assert call.arguments["metrics"] == [{"loss": 1.0}, {"loss": 5.0}]
    where = location("checkpoint_000000")
    assert {name: call.arguments["checkpoint"][name] for name in where} == where
    assert call.arguments["checkpoint"]["step"] == 1
    play.rows(2, {"loss": 7.0})
    assert play.all(Call) == []
    play.finish(1)
    assert play.only(Call).arguments == {"metrics": [{"loss": 7.0}, {}], "checkpoint": None}


@pytest.mark.parametrize("end", ["commit", "failure", "death"])
def test_callbacks_hear_of_reports_in_their_order(end: str) -> None:
    """Also of those without a checkpoint: what comes last is the newest. None is lost with a commit that fails."""
    play = Play(has_callbacks=True).run()
    for rank in range(2):
        play.report(rank, 1)
    first = play.only(Commit)
    for rank in range(2):
        play.rows(2, {"loss": 2.0}, rank=rank)
    assert play.all(Call) == []
    if end == "death":
        out = play.exit(1)
        out += play.outcome(first, error=StorageFullError("no space"))
        out += play.exit_all()
        calls = [call for call in out if isinstance(call, Call) and call.hook == "after_report"]
        assert [call.arguments["metrics"][0] for call in calls] == [{"loss": 2.0}]
        return
    for rank in range(2):
        play.report(rank, 3)
    third = play.only(Commit)
    if end == "failure":
        play.outcome(first, error=StorageFullError("no space"))
        assert [call.arguments["metrics"][0] for call in play.all(Call)] == [{"loss": 2.0}]
    else:
        play.out = [first]
        assert [call.arguments["metrics"][0] for call in play.committed() if isinstance(call, Call)] == [
            {"loss": 1.0},
            {"loss": 2.0},
        ]
    play.out = [third]
    assert [call.arguments["metrics"][0] for call in play.committed() if isinstance(call, Call)] == [{"loss": 3.0}]


def test_an_unknown_message_is_said() -> None:
    """A worker of another version, perhaps."""
    play = Play().run()
    assert play.say(0, on="dance") != []


def test_the_time_for_a_report_runs_from_the_first_rank() -> None:
    """Ranks may come one after the other."""
    play = Play(num_workers=3, limits=WaitLimits(report_s=60)).run()
    play.report(0, 1)
    first = play.now
    play.tick(after=30)
    play.report(1, 1)
    assert play.controller.deadline() == first + 60


def test_a_directory_beside_an_upload() -> None:
    """One rank has put its files into the run, another brings a directory: both become one checkpoint."""
    play = Play().open().found(taken=frozenset({"up"})).go()
    play.report(0, 1)
    play.report(1, 1, "uploaded", location={"storage": None, "uri": "/runs/run", "name": "up"})
    commit = play.only(Commit)
    assert commit.directory == "up"
    assert sources(commit) == [(0, "/tmp/0-1", "left")]
    play.committed()
    assert len(play.all(Answer)) == 2
