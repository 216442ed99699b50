"""When saves happen: exactly at the multiples and at the end, whatever the interval counts."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run_kit as kit
import torch
from catalog_kit import index_of

import holdfast as hf
from holdfast import core
from holdfast._units import parse_intervals
from holdfast.checkpointer import boundaries, checkpointer, save_policy
from holdfast.checkpointer.save_policy import Deadline, Schedule


def counted(step: int, samples: int) -> Any:
    """Counters of a run, as a schedule looks at them."""
    return SimpleNamespace(step=step, samples=samples)


def simulate(every: Any, max_steps: int, *, samples: int = 1, seconds: float = 1.0) -> list[int]:
    """Steps after which a schedule asks for a save, with a clock that ticks once per step."""
    schedule = Schedule(parse_intervals(every), now=0.0)
    schedule.start(counted(0, 0))
    saved = []
    for step in range(1, max_steps + 1):
        progress, now = counted(step, step * samples), step * seconds
        if schedule.due(progress, now=now):
            saved.append(step)
            schedule.saved(progress, now=now)
    return saved


def test_units_of_time() -> None:
    """Each has its seconds, and one after another they add up."""
    texts = {"90s": 90, "2sec": 2, "1m": 60, "15min": 900, "1h": 3600, "1hr": 3600, "2d": 172800, "1h20m40s": 4840}
    assert {text: parse_intervals(text)[0].value for text in texts} == texts


@pytest.mark.parametrize(
    ("words", "short"),
    [("500 steps", "500ba"), ("1 step", "1ba"), ("20 batches", "20ba"), ("2 Epochs", "2ep"), ("1e3 samples", "1000sp"),
     ("1e6 tokens", "1e6tok"), ("90 seconds", "90s"), ("15 minutes", "15min"), ("1 hour 20 minutes", "1h20m"),
     ("2 days", "48h")],
)  # fmt: skip
def test_units_may_be_written_out(words, short):
    """Whoever has not read the grammar writes words: as an interval and as a time of the loop trainer."""
    assert parse_intervals(words) == parse_intervals(short)
    assert core.Time(words) == core.Time(short)


@pytest.mark.parametrize("text", ["2 months", "steps", "5 stepsize", "1.5 steps", "3 epoch 2 steps"])
def test_what_is_no_interval_is_refused(text):
    """With the grammar."""
    with pytest.raises(hf.ConfigError, match="interval"):
        parse_intervals(text)


def test_a_deadline_leaves_time_for_the_last_save() -> None:
    """Twice a step and twice a save before it, and a margin; a moment counts from now."""
    deadline = Deadline(100, now=0.0)
    assert deadline.near(now=60.0, step_s=0.0, save_s=20.0)
    assert deadline.near(now=60.0, step_s=20.0, save_s=0.0)
    assert not deadline.near(now=50.0, step_s=0.0, save_s=20.0)
    moment = datetime.now(timezone.utc) + timedelta(hours=1)
    assert 3500 < Deadline(moment, now=0.0).at <= 3600
    with pytest.raises(hf.ConfigError, match="has passed"):
        Deadline(moment - timedelta(hours=2), now=0.0)
    for spec in ("tomorrow", "500ba", [1], True):
        with pytest.raises(hf.ConfigError, match=r"deadline=.*a span of time.*an aware datetime, or 'slurm'"):
            Deadline(spec, now=0.0)
    assert Deadline("1 hour", now=0.0).at == 3600


def test_an_interval_that_adjusts_itself_never_saves_less_often_than_was_asked_for() -> None:
    """From the last save on, the sooner of the two."""
    schedule = Schedule(parse_intervals("60s"), now=0.0)
    schedule.saved(counted(1, 1), now=10.0)
    for seconds, due in ((20.0, 30.0), (500.0, 70.0)):
        schedule.adjust(seconds)
        assert schedule.next_time == due


def test_steps_are_saved_at_their_multiples_only() -> None:
    """For every interval of 1 to 20 steps and 1 to 20 steps in all: the multiples, nothing else."""
    for every in range(1, 21):
        for max_steps in range(1, 21):
            assert simulate(every, max_steps) == list(range(every, max_steps + 1, every))


@pytest.mark.parametrize(
    ("every", "saved"),
    [
        (None, []),
        ([], []),
        ("4ba", [4, 8, 12]),
        ([3, "4ba"], [3, 4, 6, 8, 9, 12]),
        ("5sp", [3, 5, 8, 10]),
        (timedelta(seconds=5), [5, 10]),
        ("5s", [5, 10]),
        (["5s", 4], [4, 8, 12]),
    ],
)
def test_every_kind_of_interval(every: Any, saved: list[int]) -> None:
    """Twelve steps of one second and two samples each; a save of any kind puts the clock's next one off."""
    assert simulate(every, 12, samples=2) == saved


@pytest.mark.parametrize("every", [0, -1, "0ba", "3 parsecs", "1000tok", 2.5, True, "-1s"])
def test_an_interval_that_is_none_is_refused_at_construction(every: Any, tmp_path: Path) -> None:
    """ConfigError, before a directory is made."""
    with pytest.raises(hf.ConfigError):
        hf.Checkpointer(tmp_path / "run", every=every)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options",
    [{"when_busy": "never"}, {"on_full": "panic"}, {"keep": 3}, {"timeout_s": 0}, {"local_dir": "/"},
     {"max_staging_bytes": 10}, {"exit_code_for_requeue": 300}, {"state": [1]}, {"state": {"holdfast": 1}}],
)  # fmt: skip
def test_wrong_arguments_are_refused_at_construction(options: dict[str, Any], tmp_path: Path) -> None:
    """ConfigError names the argument, before a directory is made."""
    with pytest.raises(hf.ConfigError, match=next(iter(options))):
        hf.Checkpointer(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_run_saves_the_multiples_and_the_last_step_once(tmp_path: Path) -> None:
    """Whole runs, the last step being a multiple or not."""
    memory = "memory://schedule"
    for every, max_steps in [(1, 3), (3, 7), (4, 8), (5, 3), (None, 4)]:
        path = f"{memory}/{every}-{max_steps}"
        ck = kit.train(path, max_steps, every=every)
        wanted = {step for step in range(1, max_steps + 1) if every and step % every == 0} | {max_steps}
        assert kit.steps(path) == sorted(wanted)
        assert ck.stats.saves == len(wanted)


def test_epochs_are_saved_when_they_are_over(tmp_path: Path) -> None:
    """Every "2ep" saves after the second and fourth epoch, with the counter on the next one, and the end."""
    path = "memory://epochs/run"
    state = kit.make_state()
    with hf.Checkpointer(path, state, every="2ep", keep=None) as ck:
        for _ in ck.epochs(5):
            for batch in ck.batches(kit.loader()):
                ck.step(loss=kit.train_one(state, batch))
    assert kit.steps(path) == [8, 16, 20]
    assert [one.manifest.epoch for one in reversed(ck.checkpoints())] == [2, 4, 5]


def test_time_is_measured_by_the_monotonic_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ten minutes of a clock that advances four per step: after steps 3, 6 and at the end."""

    class Clock:
        now = 1000.0
        perf_counter = staticmethod(time.perf_counter)
        sleep = staticmethod(time.sleep)

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    for module in (checkpointer, boundaries, save_policy):
        monkeypatch.setattr(module, "time", clock)
    with hf.Checkpointer("memory://clock/run", {"w": torch.zeros(2)}, every="10min", keep=None) as ck:
        for _ in range(7):
            clock.now += 240
            ck.step()
    assert kit.steps("memory://clock/run") == [3, 6, 7]


def test_samples_are_those_of_trained_steps(tmp_path: Path) -> None:
    """Every 6 samples at batches of 3: every second step, over the borders of epochs and across a resume."""
    path = "memory://samples/run"
    for steps in (5, 9):
        state = kit.make_state()
        with hf.Checkpointer(path, state, every="6sp", keep=None) as ck:
            for _ in ck.epochs(100):
                for batch in ck.batches(kit.loader(15)):
                    ck.step(loss=kit.train_one(state, batch))
                    if ck.global_step == steps:
                        break
                if ck.global_step == steps:
                    break
    assert kit.steps(path) == [2, 4, 5, 6, 8, 9]


@pytest.mark.parametrize(
    ("every", "loop", "said"),
    [
        ("1ep", "plain", "every='1ep' never comes due"),
        ("5sp", "epochs", "every='5sp' never comes due"),
        ("1ep", "epochs", ""),
        ("1ep", "batches", ""),
        (["1ep", "auto"], "plain", ""),
    ],
)
def test_an_interval_that_a_loop_does_not_count_is_said_once(
    every: Any, loop: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Epochs and samples of a plain loader are unknown: without a word nothing would be saved before the end."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=every, keep=None) as ck:
        if loop == "plain":
            for _ in range(3 * 70):
                ck.step()
        for _ in ck.epochs(3) if loop != "plain" else ():
            for _ in ck.batches([0] * 70) if loop == "batches" else range(70):
                ck.step()
    assert caplog.text.count("never comes due") == bool(said)
    assert said in caplog.text
    if every == "1ep" and not said:
        assert kit.steps(tmp_path) == [70, 140, 210]


def test_an_exception_saves_nothing_new_and_finishes_what_is_under_way(tmp_path: Path) -> None:
    """The broken state after step 4 is not saved; the save of step 4 itself, still being written, is finished."""
    state = kit.make_state()
    with pytest.raises(ZeroDivisionError), hf.Checkpointer(tmp_path, state, every=4, keep=None) as ck:
        for _ in range(4):
            ck.step(loss=kit.train_one(state))
        good = kit.weights(state)
        with torch.no_grad():
            state["model"][0].weight.fill_(float("nan"))
        ck.step()
        1 / 0  # noqa: B018
    assert kit.steps(tmp_path) == [4]
    fresh = kit.make_state(seed=3)
    with hf.Checkpointer(tmp_path, fresh, every=None) as ck:
        assert ck.global_step == 4
        assert all(torch.equal(one, two) for one, two in zip(good, kit.weights(fresh), strict=True))
    reasons = [attempt.reason for attempt in index_of(ck.storage).attempts]
    assert reasons == ["ZeroDivisionError: division by zero", "finished"]


def test_saving_one_step_twice_makes_one_checkpoint(tmp_path: Path) -> None:
    """ck.save() beside a due save, twice in a row, and before the end: one directory, with the metrics of both."""
    with hf.Checkpointer(tmp_path, kit.make_state(), every=2, keep=None) as ck:
        ck.step()
        ck.step()
        ck.save(first=1.0)
        ck.save(second=2.0)
    assert kit.steps(tmp_path) == [2]
    assert ck.stats.saves == 1
    newest = ck.latest()
    assert newest is not None
    assert newest.metrics == {"first": 1.0, "second": 2.0}


def test_the_numbers_in_stats_add_up(tmp_path: Path) -> None:
    """Saves, bytes and durations of a run agree with each other and with what lies on the disk."""
    begun = time.perf_counter()
    ck = kit.train(tmp_path, 7, every=2)
    seconds = time.perf_counter() - begun
    stats = ck.stats
    assert (stats.saves, stats.skipped, stats.last_durable_step) == (4, 0, 7)
    on_disk = sum(checkpoint.size_bytes for checkpoint in ck.checkpoints())
    assert stats.bytes_written + stats.bytes_reused >= on_disk * 0.9
    assert stats.bytes_written <= on_disk * 1.1
    assert 0 < stats.seconds_blocked < seconds
    assert stats.seconds_blocked <= stats.seconds_lost < seconds
    assert len(stats.seconds_to_durable) == 4
    assert all(0 < one < seconds for one in stats.seconds_to_durable)


@pytest.mark.parametrize("call", ["step", "save", "report", "wait", "epochs"])
def test_outside_of_the_body_there_is_no_session(call: str, tmp_path: Path) -> None:
    """Before entering and after leaving, everything that needs the run is SessionError."""
    ck = hf.Checkpointer("memory://session/run", {"w": torch.zeros(1)})
    arguments = (3,) if call == "epochs" else ()

    for _ in range(2):
        with pytest.raises(hf.SessionError):
            getattr(ck, call)(*arguments)
        if not ck._ended:
            with ck:
                pass
    with pytest.raises(hf.SessionError), ck:
        pass
