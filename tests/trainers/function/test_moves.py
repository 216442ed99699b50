"""Agreed saves before workers move: the rank's part, the controller's part, and what each end counts as."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from scripted import Play, kept

from holdfast.errors import HoldfastError
from holdfast.trainers.function.control.actions import Commit, End, KillGroup, NextAttempt, Say, Send, StartGroup
from holdfast.trainers.function.control.plan import FailurePolicy, WaitLimits
from holdfast.trainers.function.engine import Capacity, Draining, Exited
from holdfast.trainers.function.worker.link import Agreement

LIMITS = WaitLimits(settle_capacity_s=3, grow_after_s=60)


def test_ranks_agree_without_waiting_for_one_another() -> None:
    """Ranks at different calls all say yes at the first call that none of them has made."""
    told: list[list[int]] = [[], [], []]
    ranks = [Agreement(lambda header, mine=mine: mine.append(header["calls"])) for mine in told]  # type: ignore[misc]
    for rank, calls in zip(ranks, (5, 7, 6), strict=True):
        assert not any(rank.ask() for _ in range(calls))
        rank.take({"do": "save_soon"})
    assert told == [[5], [7], [6]]
    answers: dict[int, list[bool]] = {0: [], 1: [], 2: []}

    def go_on(number: int) -> None:
        while not answers[number] or not answers[number][-1]:
            answers[number].append(ranks[number].ask())

    threads = [threading.Thread(target=go_on, args=(number,)) for number in answers]
    for thread in threads:
        thread.start()
    for rank in ranks:
        rank.take({"do": "save_at", "call": 8})
    for thread in threads:
        thread.join(30)
    assert answers == {0: [False, False, True], 1: [True], 2: [False, True]}
    assert all(rank.reached for rank in ranks)


def test_a_rank_is_held_after_the_save_and_not_for_ever() -> None:
    """The call after the agreed one waits for the end, within a bound; a verdict that never comes has one too."""
    rank = Agreement(lambda _: None, hold_s=0.05)
    rank.take({"do": "save_soon"})
    assert rank.ask() is False  # no verdict
    rank.take({"do": "save_soon"})
    rank.take({"do": "save_at", "call": 2})
    assert rank.ask() is True
    assert rank.ask() is False
    assert not rank.reached
    assert rank.take({"do": "answer"}) is False
    held = Agreement(lambda _: None)
    held.take({"do": "save_soon"})
    thread = threading.Thread(target=held.ask)
    thread.start()
    held.end()
    thread.join(30)
    assert not thread.is_alive()


def test_a_verdict_that_does_not_come_costs_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls after it go on at once, and heed the verdict if it comes after all."""
    rank = Agreement(lambda _: None, hold_s=0.05)
    rank.take({"do": "save_soon"})
    waits: list[float] = []
    wait_for = rank._changed.wait_for

    def count(*args: Any) -> bool:
        waits.append(args[1])
        return wait_for(*args)

    monkeypatch.setattr(rank._changed, "wait_for", count)
    assert [rank.ask() for _ in range(3)] == [False] * 3
    assert waits == [0.05]
    rank.take({"do": "save_at", "call": 5})
    assert [rank.ask(), rank.ask()] == [False, True]


def draining(**fields: Any) -> Play:
    play = Play(finds_places=True, limits=LIMITS, **fields).open().found()
    play.feed(Capacity(num_workers=2))
    play.go()
    play.feed(Draining(ranks=(1,), detail="node b goes in 15 s"))
    return play


def sent(play: Play, do: str) -> list[tuple[int, dict[str, Any]]]:
    return [(one.rank, dict(one.header)) for one in play.all(Send) if one.header["do"] == do]


def test_drained_with_an_agreed_save() -> None:
    """All ranks are asked where they are and told where to save; after that commit the group is a preemption."""
    play = draining(policy=FailurePolicy(max_failures=0))
    assert sent(play, "save_soon") == [(0, {"do": "save_soon"}), (1, {"do": "save_soon"})]
    assert "node b goes in 15 s" in play.only(Say).line
    assert sent(play, "save_at") == []
    play.say(0, on="at", calls=4)
    play.say(1, on="at", calls=5)
    assert sent(play, "save_at") == [(rank, {"do": "save_at", "call": 6}) for rank in (0, 1)]
    play.feed(Draining(ranks=(0,), detail="node a goes too"))
    assert play.out == []
    for rank in (0, 1):  # one that was on its way before
        play.report(rank, 1)
    play.committed()
    assert not any(isinstance(action, KillGroup) for action in play.out)
    for rank in (0, 1):
        play.report(rank, 2, agreed=True)
    play.committed()
    assert play.only(KillGroup)
    play.feed(Capacity(num_workers=1))
    play.exit_all(signal=15)
    assert play.only(NextAttempt).details["cause"] == "preemption"
    assert play.only(NextAttempt).reason == "node b goes in 15 s"
    play.next_attempt().found(kept("checkpoint_000001", 2))
    play.feed(Capacity(num_workers=2))
    assert play.only(StartGroup)


def test_a_lost_agreed_save_is_agreed_on_again() -> None:
    """A storage that refuses the save does not leave the move undone: three saves are tried, then it stays."""
    play = draining(policy=FailurePolicy(max_failures=0))
    for attempt in range(1, 4):
        assert len(sent(play, "save_soon")) == 2, attempt
        for rank in (0, 1):
            play.say(rank, on="at", calls=attempt)
        for rank in (0, 1):
            play.report(rank, attempt, agreed=True)
        play.outcome(play.only(Commit), error=HoldfastError("the storage is full"))
        assert not any(isinstance(action, KillGroup) for action in play.out)
    assert sent(play, "save_soon") == []
    play.feed(Draining(ranks=(0,), detail="node a goes too"))
    assert len(sent(play, "save_soon")) == 2


def test_drained_without_should_save() -> None:
    """Where the train function never asks, the next commit has to do."""
    play = draining()
    for rank in (0, 1):
        play.say(rank, on="at", calls=0)
    for rank in (0, 1):
        play.report(rank, 1)
    assert play.all(Commit)
    play.committed()
    assert play.only(KillGroup)


def saved(play: Play, index: int, *, seconds: float, asks: bool = True) -> None:
    """All ranks report a checkpoint, whose commit takes so long."""
    more = {"asks": True} if asks else {}
    for rank in (0, 1):
        play.report(rank, index, **more)
    commit = play.only(Commit)
    play.now += seconds
    play.out = [commit]
    play.committed()


@pytest.mark.parametrize(
    ("left_s", "seconds", "asks", "wait_s"),
    [(15, 0.25, True, 6.0), (10, 0.5, True, 3.0), (15, 2.0, True, 0.0), (15, 0.1, False, 0.0), (3600, 5.0, True, 6.0)],
)
def test_fast_saves_wait_for_other_notices(left_s: float, seconds: float, asks: bool, wait_s: float) -> None:
    """Workers whose saves are known to be fast train on for a while: what else is drained then is the same move."""
    play = Play(finds_places=True, limits=LIMITS).open().found()
    play.feed(Capacity(num_workers=2))
    play.go()
    saved(play, 1, seconds=seconds, asks=asks)
    play.feed(Draining(ranks=(1,), detail="node b goes", left_s=left_s))
    assert len(sent(play, "save_soon")) == (0 if wait_s else 2)
    if not wait_s:
        return
    assert play.controller.deadline() == play.now + wait_s
    play.feed(Draining(ranks=(0,), detail="node a goes", left_s=left_s), after=wait_s - 1)
    assert play.out == []
    play.tick(after=1)
    assert len(sent(play, "save_soon")) == 2
    play.tick(after=1)
    assert sent(play, "save_soon") == []


def test_a_rank_that_finishes_before_the_ranks_are_asked() -> None:
    """It would never answer: nobody is asked to wait for it, and the others go on."""
    play = Play(finds_places=True, limits=LIMITS).open().found()
    play.feed(Capacity(num_workers=2))
    play.go()
    saved(play, 1, seconds=0.25)
    play.feed(Draining(ranks=(1,), detail="node b goes", left_s=15))
    play.say(0, on="finished")
    assert play.only(Say).line == "node b goes: rank 0 finished meanwhile, the others go on"
    play.tick(after=7)
    assert sent(play, "save_soon") == []


def test_a_second_notice_may_hurry_the_first() -> None:
    """The save comes in time for the node that goes first."""
    play = Play(finds_places=True, limits=LIMITS).open().found()
    play.feed(Capacity(num_workers=2))
    play.go()
    saved(play, 1, seconds=1.0)
    play.feed(Draining(ranks=(1,), detail="node b goes", left_s=60))
    assert sent(play, "save_soon") == []
    play.feed(Draining(ranks=(0,), detail="node a goes", left_s=5), after=1)
    assert len(sent(play, "save_soon")) == 2


def test_drained_before_it_could_save() -> None:
    """A node that goes although it said so is a preemption all the same, with a limit of its own."""
    play = draining(policy=FailurePolicy(max_failures=0, max_preemptions=0))
    play.feed(Exited(rank=1, exit_code=None, signal=None, reason="drained", detail="gone"))
    play.exit(0)
    assert "preemption 1 with max_preemptions=0" in str(play.only(End).error)


@pytest.mark.parametrize("elastic", [True, False])
def test_growth(elastic: bool) -> None:
    """A range grows when there is room, not before a group has run for a while, and that is no failure."""
    play = Play(finds_places=True, limits=LIMITS, num_workers=3, min_workers=1 if elastic else None)
    play.open().found().feed(Capacity(num_workers=1 if elastic else 3))
    if not elastic:
        play.go()
        play.feed(Capacity(num_workers=5))
        play.tick(after=100)
        assert sent(play, "save_soon") == []
        return
    play.tick(after=3)
    assert play.only(StartGroup).num_workers == 1
    play.say(0, on="running")
    play.feed(Capacity(num_workers=2))
    assert play.controller.deadline() == play.now + 60
    play.tick(after=60)
    assert sent(play, "save_soon") == [(0, {"do": "save_soon"})]
    assert "room for 2 workers, 1 run" in play.only(Say).line
    play.say(0, on="at", calls=3)
    play.report(0, 1, agreed=True)
    play.committed()
    play.exit(0, signal=15)
    assert play.only(NextAttempt).details["cause"] == "resize"
    play.next_attempt().found(kept("checkpoint_000000", 1))
    assert play.only(StartGroup).num_workers == 2


def test_growth_by_itself() -> None:
    """A group grows once workers start at once in the new places; one that has grown, not before that has paid."""
    play = Play(finds_places=True, limits=WaitLimits(settle_capacity_s=3), num_workers=3, min_workers=1)
    play.open().found().feed(Capacity(num_workers=1, num_ready=1))
    play.tick(after=3)
    play.say(0, on="running")
    play.feed(Capacity(num_workers=2, num_ready=1), after=1)
    assert (play.controller.deadline() or 1e9) > play.now + 60
    play.feed(Capacity(num_workers=2, num_ready=2), after=2)
    assert play.controller.deadline() == play.now + 1
    play.tick(after=1)
    assert sent(play, "save_soon") == [(0, {"do": "save_soon"})]
    play.say(0, on="at", calls=3)
    play.report(0, 1, agreed=True)
    play.committed()
    play.exit(0, signal=15)
    play.next_attempt().found(kept("checkpoint_000000", 1))
    play.tick(after=4)  # seconds until the larger group runs
    play.say(0, on="running")
    play.say(1, on="running")
    play.feed(Capacity(num_workers=3, num_ready=3))
    assert play.controller.deadline() == play.now + 20
