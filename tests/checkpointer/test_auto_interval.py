"""`every="auto"`: the interval that loses least, from what saves cost and how often a run fails."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.checkpointer import auto_interval
from holdfast.checkpointer.auto_interval import FIRST_S, MOST_S, PRIOR_S, AutoInterval, Lives, best_interval_s
from holdfast.checkpointer.save_policy import Schedule
from holdfast.run import costs
from holdfast.run.index import RunIndex
from holdfast.run.journal import JournalEvent
from holdfast.run.reports import Attempt, RunHistory
from holdfast.state.save.snapshot import Snapshotter
from holdfast.storage import LocalStorage

BEGUN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def at(seconds: float) -> str:
    return (BEGUN + timedelta(seconds=seconds)).isoformat()


def history(*lives: tuple[float, float | None, str | None], events=()) -> RunHistory:
    attempts = {
        number: Attempt(
            attempt=number, start_id=f"s{number}", started=at(begun), ended=None if ended is None else at(ended),
            reason=reason,
        )
        for number, (begun, ended, reason) in enumerate(lives, 1)
    }  # fmt: skip
    return RunHistory(rows=[], attempts=attempts, run_id="r", notes={}, events=list(events))


def test_the_interval():
    """Young's formula between its bounds: 20 times the cost, half an hour, and the time until a save is durable."""
    assert best_interval_s(2.0, 3600.0, durable_s=1.0) == math.sqrt(2 * 2.0 * 3600.0)
    assert best_interval_s(2.0, 300.0, durable_s=1.0) == 40.0
    assert best_interval_s(2.0, 1e9, durable_s=1.0) == MOST_S
    assert best_interval_s(0.001, 60.0, durable_s=30.0) == 36.0
    assert best_interval_s(1.0, 60.0, durable_s=3000.0) == 3600.0
    assert best_interval_s(300.0, 60.0, durable_s=1.0) == best_interval_s(300.0, 1e9, durable_s=1.0) == MOST_S
    assert best_interval_s(0.0, 60.0, durable_s=0.0) == 1.0
    assert best_interval_s(1e-9, 60.0, durable_s=0.01) == 1.0


@pytest.mark.parametrize(
    ("reason", "failures"), [("finished", 0), ("stopped", 0), ("closed", 0), (None, 1), ("KeyError", 1)]
)
def test_which_ends_are_failures(reason, failures):
    """Those after which work was lost."""
    assert Lives.of(history((0, 10, reason)), before=2).failures == failures


def test_lives():
    """What saved its last step is no failure; a life that was killed lasted to its last sign; ours does not count."""
    events = [JournalEvent(what="saved", time=(BEGUN + timedelta(seconds=160)).timestamp(), attempt=2, name="a")]
    lives = (
        (0, 100, "stopped"),
        (120, None, None),
        (200, 250, "ValueError: x"),
        (300, 310, "finished"),
        (400, None, None),
    )
    assert Lives.of(history(*lives, events=events), before=5) == Lives(100 + 40 + 50 + 10, 2)


def test_a_failure_says_more_than_a_guess():
    """The time that the run has lived counts, this life too; until the first failure twice of it, or four hours."""
    auto = AutoInterval(Lives(50.0, 0), now=1000.0)
    assert auto.seconds(1000.0) == FIRST_S
    auto.paid(0.5, 1.0)
    assert auto.seconds(1000.0) == 20 * 0.5  # a save every two times its cost, if nothing bounded it
    assert auto.seconds(2000.0) == best_interval_s(0.5, 2 * 1050.0, durable_s=1.0)
    assert auto.seconds(1e9) == best_interval_s(0.5, PRIOR_S, durable_s=1.0)
    for failures, between_s in ((1, 2000.0), (4, 500.0)):
        auto = AutoInterval(Lives(500.0, failures), now=1000.0)
        auto.paid(0.5, 1.0)
        assert auto.seconds(2500.0) == best_interval_s(0.5, between_s, durable_s=1.0)


def test_lives_that_end_before_their_first_save():
    """Each of them halves the time until it, or the run would never save at all."""
    assert [AutoInterval(Lives(0.0, failures), now=0.0).seconds(0.0) for failures in (0, 1, 3, 5, 99)] == [
        FIRST_S, FIRST_S / 2, FIRST_S / 8, 1.0, 1.0,
    ]  # fmt: skip


def test_a_failure_whose_snapshot_was_saved_counts_for_snapshots_alone():
    """Saves are as rare as if there had been none; a failure that no snapshot covers counts for both."""
    events = [
        JournalEvent(what="saved", time=BEGUN.timestamp() + 90, attempt=1, step=9, why="the trainer died"),
        JournalEvent(what="saved", time=BEGUN.timestamp() + 150, attempt=2, step=20),
    ]
    lives = Lives.of(
        history((0, 100, "the trainer died"), (100, 200, None), (300, 400, "closed"), events=events), before=4
    )
    assert (lives.failures, lives.rescued) == (2, 1)
    between = {"save": lives.seconds, "snapshot": lives.seconds / 2}
    for what, between_s in between.items():
        auto = AutoInterval(lives, now=0.0, what=what)
        auto.paid(0.1, 0.0)
        assert auto.seconds(0.0) == best_interval_s(0.1, between_s, durable_s=0.0)
    covered = AutoInterval(Lives(100.0, 1, 1), now=0.0)
    covered.paid(0.1, 0.0)
    assert covered.seconds(0.0) == best_interval_s(0.1, 200.0, durable_s=0.0)
    assert "ever more rarely while nothing fails without a snapshot" in (covered.news(0.0) or "")


def test_the_first_snapshot_comes_at_once_and_what_it_costs_decides():
    """A second after the start: it is one copy of memory, and says what the next ones cost."""
    auto = AutoInterval(now=0.0, what="snapshot")
    assert auto.seconds(0.0) == 1.0
    auto.paid(0.02, 0.0)
    assert auto.seconds(100.0) == math.sqrt(2 * 0.02 * 200.0)
    assert auto.news(100.0) == (
        "snapshots every 2.8 s now, ever more rarely while nothing fails (every 24 s in the end): a snapshot costs "
        "20 ms"
    )


def test_earlier_lives_know_what_a_save_costs():
    """A second life begins with the costs in the journal, not with a guess."""
    events = [
        JournalEvent(
            what="cost", time=1.0, attempt=1, name=f"step_{number}", step=number, held_s=0.1, lost_s=0.25, durable_s=2.0
        )
        for number in range(20)
    ]  # fmt: skip
    auto = AutoInterval(Lives(), costs.saves(events), now=0.0)
    assert auto.seconds(1e9) == best_interval_s(0.25, PRIOR_S, durable_s=2.0)


def test_news():
    """Said when it first applies and when it has moved by a third, with both of its causes; not for growing old."""
    auto = AutoInterval(Lives(), now=0.0)
    assert auto.news(0.0) is None
    auto.paid(1.0, 0.5)
    assert auto.news(600.0) == (
        "saves every 49.0 s now, ever more rarely while nothing fails (every 2m50s in the end): a save costs 1 s"
    )
    auto.paid(1.5, 0.5)
    assert auto.news(7200.0) is None
    for _ in range(8):
        auto.paid(2.0, 0.5)
    assert "a save costs 2 s" in (auto.news(7200.0) or "")
    failed = AutoInterval(Lives(7200.0, 2), now=0.0)
    failed.paid(1.0, 0.5)
    assert failed.news(0.0) == "saves every 1m25s from now on: a save costs 1 s, a failure every 1h00m00s"
    assert failed.news(1800.0) is None
    assert "a failure every 2h00m00s" in (failed.news(7200.0) or "")


def test_the_schedule_moves_with_it():
    """An adjusted interval counts from the last save; the shorter of it and an interval given decides."""
    schedule = Schedule((), now=100.0)
    assert schedule.next_time == math.inf
    schedule.adjust(60.0)
    assert schedule.next_time == 160.0
    schedule.adjust(20.0)
    assert schedule.next_time == 120.0
    progress: Any = SimpleNamespace(step=1)
    schedule.saved(progress, now=130.0)
    assert schedule.next_time == 150.0
    both = Schedule((hf.checkpointer.options.parse_intervals("10s")), now=0.0)  # type: ignore[attr-defined]
    both.adjust(60.0)
    assert both.next_time == 10.0


def lost_share(interval_s, *, cost_s, durable_s, failures, total_s=400 * 3600.0, auto=None):
    """Play a training: seconds of it that were lost to saves, and to work done again, as a share."""
    now = done = safe = lost = 0.0
    failures = iter(failures)
    fails = next(failures)
    while now < total_s:
        wait = interval_s if auto is None else auto.seconds(now)
        if now + wait + cost_s + durable_s > fails:  # before this save is safe
            lost += min(fails, now + wait + cost_s) - now + (done - safe)
            now, done = fails, safe
            if auto is not None:
                auto._lives = Lives(fails, auto._lives.failures + 1)
                auto._begun = fails
            fails = now + next(failures)
            continue
        now, done = now + wait + cost_s, done + wait
        safe, lost = done, lost + cost_s
        if auto is not None:
            auto.paid(cost_s, durable_s)
    return lost / now


STORAGES = {"disk": (0.15, 0.9), "slow disk": (0.2, 28.0), "object store": (0.3, 6.0), "mirrored": (0.15, 9.0)}
"""Seconds of training that a save costs, and until it is durable: about those of a state of 1.4 GiB."""


@pytest.mark.slow
@pytest.mark.parametrize("between_s", [600.0, 1800.0, 7200.0, 14400.0, 86400.0])
@pytest.mark.parametrize("storage", STORAGES)
def test_as_good_as_the_best_fixed_interval(storage, between_s):
    """The useful time is within a hundredth of the best of a sweep, for 5 rates of random failures x 4 storages."""
    cost_s, durable_s = STORAGES[storage]

    def failures():
        moments = random.Random(7)
        while True:
            yield moments.expovariate(1 / between_s)

    told = {"cost_s": cost_s, "durable_s": durable_s}
    fixed = [1.3**power for power in range(5, 32) if 1.3**power >= durable_s]
    best = min(lost_share(interval, **told, failures=failures()) for interval in fixed)
    ours = lost_share(0.0, **told, failures=failures(), auto=AutoInterval(now=0.0))
    assert (1 - ours) / (1 - best) > 0.99


def test_a_run_that_finds_its_interval(tmp_path, monkeypatch, capsys):
    """It saves after 10 s (here: at once), says the interval that follows, and writes it into the manifests."""
    monkeypatch.setattr(auto_interval, "_SOONEST_S", 0.01)
    monkeypatch.setattr(auto_interval, "FIRST_S", 0.01)
    monkeypatch.setattr(auto_interval, "PRIOR_S", 0.5)
    model = torch.nn.Linear(8, 8)
    with hf.Checkpointer(tmp_path, {"model": model}, every="auto") as ck:
        while ck.stats.saves < 4:
            ck.step()
    said = [line for line in capsys.readouterr().err.splitlines() if "saves every" in line]
    assert "a save costs" in said[0]
    assert "ever more rarely while nothing fails" in said[0]
    intervals = [one.manifest.extra["every_s"] for one in ck.checkpoints()]
    assert all(interval > 0 for interval in intervals)
    with hf.Checkpointer(tmp_path, {"model": model}, every="auto"):
        pass
    assert "saves every" in capsys.readouterr().err  # known from the life before


def test_a_save_does_not_pay_for_snapshots(tmp_path, monkeypatch):
    """Ten of 20 ms before each save leave what a save costs, and so the interval, as it is; they are counted apart."""
    keep, paid = Snapshotter.keep, []

    def slow(self, *args):
        time.sleep(0.02)
        return keep(self, *args)

    monkeypatch.setattr(Snapshotter, "keep", slow)
    with hf.Checkpointer(tmp_path, {"x": 1}, every="auto", rescue=1) as ck:
        session = ck._boundary._session
        follow, session.paid = session.paid, lambda *cost: (paid.append(cost[0]), follow(*cost))
        for _ in range(3):
            for _ in range(10):
                ck.step()
            ck.save()
            ck.wait()
    assert len(paid) == 3
    assert max(paid) < 10 * 0.02
    assert ck.stats.seconds_blocked > 27 * 0.02  # the totals have both
    history = RunIndex.load(LocalStorage(tmp_path)).read_history()
    known = costs.saves(history.events)
    assert [save.held_s for save in known] == pytest.approx([save.lost_s for save in known], abs=0.1)
    assert sum(save.held_s for save in known) < 10 * 0.02
    assert max(event.held_s for event in history.events if event.what == "snapshots") > 27 * 0.02
    assert costs.goodput(history, known)["held_s"] > 27 * 0.02


def test_auto_beside_other_intervals(tmp_path):
    """It may stand in a list; the other intervals apply as well."""
    with hf.Checkpointer(tmp_path, {"x": 1}, every=["auto", "2ba"]) as ck:
        for _ in range(5):
            ck.step()
    assert sorted(one.step for one in ck.checkpoints()) == [2, 4, 5]


SCRIPT = """
import os, signal, sys, holdfast
from holdfast.checkpointer import auto_interval
auto_interval.FIRST_S = auto_interval._SOONEST_S = 0.01
with holdfast.Checkpointer(sys.argv[1], {"x": 1}, every="auto") as ck:
    while True:
        ck.step()
        if ck.stats.saves == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_three_kills_are_failures(tmp_path):
    """From the third kill on the run's own lives say how often it fails."""
    for _ in range(4):
        told = subprocess.run(
            [sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, env={**os.environ}, check=False
        )
        assert told.returncode == -signal.SIGKILL, told.stderr
    assert "ever more rarely" not in told.stderr
    assert "a failure every" in told.stderr
    assert "saves every" in told.stderr
