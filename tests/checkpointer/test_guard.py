"""The guard: bad values are found, the run goes back, and bad data are left out by all later lives."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import signal
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from guard_training import BATCHES, in_a_child, live
from torch.utils.data import DataLoader

import holdfast as hf
from holdfast.checkpointer.guard import GuardWatch, Judge
from holdfast.cli.main import cli
from holdfast.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, TrainingError
from holdfast.page import collect
from holdfast.run.catalog import Catalog
from holdfast.run.rollbacks import BatchSpan, Rollback, choose, read_rollbacks
from holdfast.storage.resolve import resolve

# -- the judge


def judged(values: list[float], **options: Any) -> list[int]:
    """Places of the values with which patience is over."""
    judge = Judge(hf.Guard(**options))
    return [place for place, value in enumerate(values) if judge.take(place, value, ()) is not None]


def test_a_spike_is_what_the_formula_says() -> None:
    """The two bisections agree with the median absolute deviation computed plainly, for 3 000 random values."""
    rng = random.Random(3)
    judge, window = Judge(hf.Guard(spike=4.0, window=50, action="warn")), []
    for step in range(3000):
        value = rng.gauss(5.0, 1.0) if rng.random() < 0.95 else rng.uniform(0, 40)
        expected = False
        if len(window) >= 20:
            median = statistics.median(window)
            distances = sorted(abs(one - median) for one in window)
            # More than half of the window has to lie nearer than the limit.
            scale = max(distances[len(window) // 2], 0.01 * abs(median))
            expected = value - median > 4.0 * scale
        judge._streak = None
        assert (judge.take(step, value, ()) is not None) == expected, step
        window = [*window, value][-50:]


def test_what_is_not_finite_is_bad_from_the_first_value_on() -> None:
    """Nan and both infinities; a spike needs twenty values before it."""
    assert judged([math.nan]) == [0]
    assert judged([1.0, math.inf]) == [1]
    assert judged([1.0, -math.inf]) == [1]
    assert judged([1.0] * 19 + [1e9]) == []
    assert judged([1.0] * 20 + [1e9]) == [20]
    assert judged([1.0] * 20 + [1e9], spike=None) == []


def test_a_window_without_noise_takes_a_hundredth_for_noise() -> None:
    """Eight hundredths above a constant are no spike, nine are; a window of zeros judges nothing."""
    assert judged([1.0] * 30 + [1.07]) == []
    assert judged([1.0] * 30 + [1.09]) == [30]
    assert judged([0.0] * 30 + [5.0]) == []
    assert judged([1.0] * 30 + [0.0]) == [], "a low value is no spike"


def test_patience_counts_bad_values_in_a_row() -> None:
    """Two of three are forgiven by a sound one; the third in a row is not, and the first is the bad step."""
    assert judged([1.0, math.nan, math.nan, 1.0, math.nan, math.nan, math.nan], patience=3) == [6]
    judge = Judge(hf.Guard(patience=2))
    judge.take(7, math.nan, ())
    alarm = judge.take(8, math.nan, ())
    assert alarm is not None
    assert alarm.step == 7


def test_a_judge_that_was_saved_goes_on_as_the_one_before() -> None:
    """Window and values in a row are part of the state, through JSON."""
    first, second = Judge(hf.Guard(window=30, patience=2)), Judge(hf.Guard(window=30, patience=2))
    for step in range(50):
        first.take(step, 1.0 + step % 3, ())
    first.take(50, math.nan, (BatchSpan("train", 0, 50, 51),))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.judged == 50
    alarm = second.take(51, 99.0, ())
    assert alarm is not None
    assert (alarm.step, alarm.place) == (50, (BatchSpan("train", 0, 50, 51),))


@pytest.mark.parametrize(
    "wrong",
    [{"metric": ""}, {"spike": 0}, {"spike": True}, {"window": 1}, {"patience": 0}, {"max_rollbacks": -1},
     {"action": "delete"}, {"skip": "all"}],
)  # fmt: skip
def test_arguments_are_checked(wrong: dict[str, Any]) -> None:
    """Each wrong value is named."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        hf.Guard(**wrong)


def test_a_guard_that_is_none_is_refused(tmp_path: Path) -> None:
    """``guard=True`` says what to give."""
    with pytest.raises(ConfigError, match=r"give a holdfast\.Guard"):
        hf.Checkpointer(tmp_path, guard=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"every": "soon"}, {"rescue": 0}])
def test_a_wrong_interval_is_called_by_its_argument(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Two arguments take intervals: the message says which one is wrong."""
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=f"^{name}={value!r}: "):
        hf.Checkpointer(tmp_path, **wrong)


@pytest.mark.parametrize("metric", ["loss", "los"])
def test_a_short_run_without_its_metric_was_not_watched(
    tmp_path: Path, metric: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that was mistyped is said at the end of a run of any length."""
    with hf.Checkpointer(tmp_path, {"x": 1}, guard=hf.Guard(metric=metric)) as ck:
        ck.step(loss=1.0)
        ck.step(loss=1.0)
    assert ("so nothing was watched" in caplog.text) == (metric == "los")


def test_what_follows_is_said_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loop with batches of its own is not promised that they are left out; 0 rollbacks are not counted."""

    def loop(**options: Any) -> None:
        with hf.Checkpointer(tmp_path, {"x": 1}, guard=hf.Guard(**options)) as ck:
            ck.step(loss=1.0)
            ck.step(loss=math.nan)

    with pytest.raises(
        TrainingError, match=r"step 2: loss is nan\. The guard has max_rollbacks=0: the run is not taken"
    ):
        loop(max_rollbacks=0)
    printed = CliRunner().invoke(cli, ["log", str(tmp_path)]).output
    assert "step 2: the guard: loss is nan. The guard has max_rollbacks=0" in printed
    with pytest.raises(SystemExit):
        loop()
    err = capsys.readouterr().err
    assert "loss is nan: it is trained again, once. The same command" in err
    assert "left out" not in err


# -- lives


def to_its_end(run: Path, **options: Any) -> tuple[bytes, int]:
    """Live until the run has ended in order; return its end state, and how often the guard took it back."""
    for count in range(60):
        try:
            return live(run, **options), count
        except SystemExit as end:
            assert end.code == 86  # noqa: PT017 - each life but the last ends so
    raise AssertionError("it does not end")


def rollbacks(run: Path) -> list[Rollback]:
    return read_rollbacks(Catalog(resolve(run)).index.notes)


@pytest.mark.parametrize("what", ["nan", pytest.param("spike", marks=pytest.mark.slow)])
def test_a_poisoned_batch_is_tried_once_more_and_then_left_out(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end state is that of a twin whose data never held the batch; two lives end for it, with status 86."""
    bad = (1, 7 if what == "nan" else 12)
    twin = live(tmp_path / "twin", leave_out=frozenset({bad}))
    end, count = to_its_end(tmp_path / "run", poison={bad: what})
    assert (end == twin, count) == (True, 2)
    first, second = rollbacks(tmp_path / "run")
    span = BatchSpan("train", 1, bad[1], bad[1] + 1)
    assert (first.place, first.left_out) == ((span,), ())
    assert (second.place, second.left_out) == ((span,), (span,))
    said = capsys.readouterr().err
    assert f"left out, as the guard has found: batch {bad[1]} of epoch 1" in said
    newest = Catalog(resolve(tmp_path / "run")).newest()
    assert newest is not None
    manifest = hf.Checkpoint(tmp_path / "run" / newest.name).manifest
    assert manifest is not None
    assert manifest.extra["left_out"] == [["train", 1, bad[1], bad[1] + 1]]
    found = [
        event.why for event in Catalog(resolve(tmp_path / "run")).index.read_history().events if event.what == "guard"
    ]
    assert ["left out from now on" in why for why in found] == [False, True]
    assert sum("the guard, step" in line for line in collect(resolve(tmp_path / "run"))["warnings"]) == 2
    logged = json.loads(CliRunner().invoke(cli, ["log", str(tmp_path / "run"), "--json"]).stdout)
    assert [event["why"] for event in logged["guard"]] == found


@pytest.mark.slow
def test_the_batches_around_the_end_of_an_epoch_can_be_left_out(tmp_path: Path, caplog: Any) -> None:
    """The first of an epoch, the last of one, and the very last of the training: no batch twice, no false remark."""
    bad = {(0, 0): "nan", (0, BATCHES - 1): "nan", (1, 0): "nan", (1, BATCHES - 1): "nan"}
    twin = live(tmp_path / "twin", leave_out=frozenset(bad))
    caplog.clear()  # that loop leaves batches out itself, which is said
    end, count = to_its_end(tmp_path / "run", poison=bad)
    assert (end == twin, count) == (True, 8)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_flipped_bit_costs_a_repetition_and_no_batch(tmp_path: Path) -> None:
    """The end state is that of the clean twin, although the damage was saved before any loss could show it."""
    twin = live(tmp_path / "twin")
    end, count = to_its_end(tmp_path / "run", flip_at=20)
    assert (end == twin, count) == (True, 1)
    (found,) = rollbacks(tmp_path / "run")
    assert (found.step, found.left_out) == (21, ())
    kept = {record.step for record in Catalog(resolve(tmp_path / "run")).records()}
    assert 15 in kept, "Keep(last=1) alone would have pushed out the last sound one by step 20, which was broken"


@pytest.mark.slow
def test_the_first_checkpoint_of_a_run_is_not_trusted_before_a_sound_step_after_it(tmp_path: Path) -> None:
    """A bit flips before it is saved, or the next batch is bad: the run begins anew, also after a kill in between."""
    end, count = to_its_end(tmp_path / "run", poison={(0, 5): "nan"})
    assert (end == live(tmp_path / "twin", leave_out=frozenset({(0, 5)})), count) == (True, 2)
    clean = live(tmp_path / "clean")
    assert to_its_end(tmp_path / "flip", flip_at=5) == (clean, 1)
    with pytest.raises(SystemExit) as end_of_life:
        live(tmp_path / "both", flip_at=5, kill_at=5, kill_how=signal.SIGTERM)
    assert end_of_life.value.code == 85
    assert to_its_end(tmp_path / "both", flip_at=5) == (clean, 1)


@pytest.mark.slow
def test_accumulated_batches_are_left_out_together(tmp_path: Path) -> None:
    """A step of three batches: which of them was bad the loss does not say."""
    bad = frozenset((0, index) for index in (12, 13, 14))
    twin = live(tmp_path / "twin", leave_out=bad, accumulate=3, every=2)
    end, _ = to_its_end(tmp_path / "run", poison={(0, 14): "nan"}, accumulate=3, every=2)
    assert end == twin


@pytest.mark.slow
def test_since_leaves_out_all_batches_from_the_checkpoint_on(tmp_path: Path) -> None:
    """Step 18 is bad and 15 the checkpoint before it: three batches are gone."""
    guard = hf.Guard(skip="since")
    twin = live(tmp_path / "twin", leave_out=frozenset((0, index) for index in range(15, 18)), guard=guard)
    end, _ = to_its_end(tmp_path / "run", poison={(0, 17): "nan"}, guard=guard)
    assert end == twin
    assert rollbacks(tmp_path / "run")[-1].left_out == (BatchSpan("train", 0, 15, 18),)


@pytest.mark.slow
def test_with_patience_what_was_saved_meanwhile_is_not_gone_on_from(tmp_path: Path) -> None:
    """Three bad steps until the guard acts, saved each: the next life goes on from before the first of them."""
    guard = hf.Guard(patience=3)
    bad = {(0, 9): "nan"}  # the weights are nan from then on
    end, count = to_its_end(tmp_path / "run", poison=bad, guard=guard, every=1, keep=hf.Keep(last=2))
    assert (end == live(tmp_path / "twin", leave_out=frozenset(bad)), count) == (True, 2)
    assert rollbacks(tmp_path / "run")[0].step == 10


@pytest.mark.slow
def test_a_run_whose_first_checkpoints_are_bad_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was saved before the bad step, in a life that had begun afresh: that is said."""
    guard = hf.Guard(patience=3)
    end, _ = to_its_end(tmp_path / "run", poison={(0, 0): "nan"}, guard=guard, every=2)
    assert end == live(tmp_path / "twin", leave_out=frozenset({(0, 0)}))
    assert "may hold a bad step" in capsys.readouterr().err


@pytest.mark.slow
def test_the_rollbacks_of_a_run_are_bounded(tmp_path: Path) -> None:
    """Two bad steps are allowed; the third is an error that says so, and so is each start after it."""
    guard = hf.Guard(max_rollbacks=2)
    poison = {(0, index): "nan" for index in (5, 10, 15)}
    with pytest.raises(TrainingError, match=r"step 14: loss is nan.*max_rollbacks=2"):
        to_its_end(tmp_path / "run", poison=poison, guard=guard)
    with pytest.raises(TrainingError, match="max_rollbacks=2"):
        to_its_end(tmp_path / "run", poison=poison, guard=guard)
    end, _ = to_its_end(tmp_path / "run", poison=poison, guard=hf.Guard(max_rollbacks=3))
    assert end == live(tmp_path / "twin", leave_out=frozenset(poison))


def test_stop_ends_with_an_error_and_saves_nothing_of_the_bad_step(tmp_path: Path) -> None:
    """The newest checkpoint is one from before it."""
    with pytest.raises(TrainingError, match=r"step 13: loss is nan.*action='stop'"):
        live(tmp_path / "run", poison={(0, 12): "nan"}, guard=hf.Guard(action="stop"))
    assert max(record.step for record in Catalog(resolve(tmp_path / "run")).records()) == 10


def test_warn_says_it_once_and_trains_on(tmp_path: Path, caplog: Any) -> None:
    """One warning for a row of bad steps, and the run comes to its end."""
    live(tmp_path / "run", poison={(1, 20): "nan"}, guard=hf.Guard(action="warn"))
    said = [record.message for record in caplog.records if "loss is nan" in record.message]
    assert said == ["holdfast: step 45: loss is nan (batch 20 of epoch 1)"]


def test_a_loop_without_batches_is_tried_again_and_then_ends_with_words(tmp_path: Path) -> None:
    """There is nothing that could be left out."""

    def loop() -> None:
        with hf.Checkpointer(tmp_path, {"w": [0]}, every=5, guard=hf.Guard()) as ck:
            while ck.global_step < 30:
                ck.step(loss=math.nan if ck.global_step == 17 else 1.0)

    with pytest.raises(SystemExit) as end:
        loop()
    assert end.value.code == 86
    with pytest.raises(TrainingError, match=r"step 18: loss is nan, again.*ck\.batches"):
        loop()


def test_a_metric_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """A vector has no place in a window."""
    with hf.Checkpointer(tmp_path, {}, guard=hf.Guard()) as ck, pytest.raises(ConfigError, match="give one number"):
        ck.step(loss=torch.ones(3))


def test_a_metric_of_a_report_is_watched_too(tmp_path: Path) -> None:
    """A nested one, reported after the step: the run goes back at the boundary of that step."""
    guard = hf.Guard(metric="val/loss")
    with pytest.raises(SystemExit) as end, hf.Checkpointer(tmp_path, {}, every=2, guard=guard) as ck:
        for batch in ck.batches(DataLoader(range(20), batch_size=1)):
            ck.step()
            ck.report(val={"loss": math.nan if int(batch) == 7 else 1.0})
    assert end.value.code == 86
    assert rollbacks(tmp_path)[0].step == 8


def test_a_signal_comes_before_the_guard(tmp_path: Path) -> None:
    """SIGTERM in a bad step: status 85 for whoever sent it, nothing bad is saved, and the next start goes back."""
    with pytest.raises(SystemExit) as end:
        live(tmp_path / "run", poison={(0, 12): "nan"}, kill_at=13, kill_how=signal.SIGTERM)
    assert end.value.code == 85
    assert max(record.step for record in Catalog(resolve(tmp_path / "run")).records()) == 10
    assert rollbacks(tmp_path / "run")[0].step == 13


def test_a_checkpoint_whose_own_metric_is_bad_is_not_gone_on_from(tmp_path: Path) -> None:
    """Saved by a life without a guard: a life with one takes an older one; if there is none, it says why."""
    for steps, loss in ((4, 1.0), (8, math.nan)):
        with hf.Checkpointer(tmp_path, {}, every=4, keep=None) as ck:
            while ck.global_step < steps:
                ck.step(loss=loss)
    with hf.Checkpointer(tmp_path, {}, every=4, keep=None, guard=hf.Guard()) as ck:
        assert ck.global_step == 4
        assert os.readlink(tmp_path / "latest") == "step_00000004"
    hf.Checkpoint(tmp_path / "step_00000004").delete()
    with pytest.raises(CorruptCheckpointError, match="its loss is nan"):
        hf.Checkpointer(tmp_path, {}, every=4, keep=None, guard=hf.Guard()).start()
    assert not (tmp_path / "latest").is_symlink()
    with pytest.raises(CheckpointNotFoundError, match=r"its guard would go on from: step_00000008 \(its loss is nan\)"):
        hf.load(tmp_path)
    with hf.Checkpointer(tmp_path, {}, every=4, keep=None) as ck:
        assert ck.global_step == 8, "without a guard nothing is refused"
        assert os.readlink(tmp_path / "latest") == "step_00000008"


def test_no_way_into_a_run_leads_to_what_its_guard_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Link, `ls`, `latest`, `show` and `load` give what the next start takes, or say what is wrong with it."""
    run, bad = tmp_path / "run", "step_00000008"

    def told(*args: object) -> tuple[str, str]:
        result = CliRunner().invoke(cli, [str(arg) for arg in args])
        assert result.exit_code == 0, result.output
        return result.stdout, result.stderr

    with pytest.raises(SystemExit), hf.Checkpointer(run, {}, every=2, keep=None, guard=hf.Guard(patience=3)) as ck:
        for _ in ck.batches(range(20)):
            ck.step(loss=1.0 if ck.global_step < 7 else math.nan)
            if ck.global_step == 9:
                ck.wait()
                assert (run / bad).exists()
                assert os.readlink(run / "latest") == "step_00000006", "the value of step 8 is bad, whatever follows"
    assert os.readlink(run / "latest") == "step_00000006"
    out, err = told("latest", run)
    assert out.endswith("step_00000006\n")
    assert f"no start takes them, for its guard: {bad} (it holds step 8 of attempt 1, where loss is nan)" in err
    out, _ = told("ls", run)
    assert "bad step" in out
    assert f"{bad}: it holds step 8 of attempt 1" in out
    listed = {row["name"]: row for row in json.loads(told("ls", run, "--json")[0])["checkpoints"]}
    assert (listed["step_00000006"]["marks"], listed[bad]["marks"]) == (["newest"], [])
    assert "no start takes it: it holds step 8" in told("show", run / bad)[0]
    assert "no start takes it: it holds step 8" in told("pin", run / bad)[1]
    assert hf.load(run)["holdfast"]["progress"]["step"] == 6
    assert next(hf.follow(run, timeout_s=1)).path.endswith("step_00000006")
    assert f"is taken; newer, but no start takes them, for its guard: {bad}" in caplog.text
    with hf.Checkpointer(run, {}, every=2, keep=None, guard=hf.Guard(patience=3)) as ck:
        assert (ck.global_step, ck.latest()) == (6, ck.resumed_from)


def test_a_rollback_of_a_start_afresh_says_that_the_next_one_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``resume='never'``: without it the same command goes on, and `holdfast run` is no help."""
    with pytest.raises(SystemExit):
        live(tmp_path / "run", poison={(0, 2): "nan"}, resume="never")
    said = capsys.readouterr().err
    assert "from before that step without resume='never', with it it begins anew (exit status 86)" in said
    assert "`holdfast run` starts it again" not in said


def test_no_checkpoint_of_a_bad_step_is_the_best(tmp_path: Path) -> None:
    """Weights of NaN may have the best metric: neither ``best``, nor retention, nor `holdfast ls` takes them for it."""
    run, keep = tmp_path / "run", hf.Keep(last=1, best=1, metric="val")

    def train(*, is_bad: bool) -> hf.Checkpointer:
        with contextlib.suppress(SystemExit), hf.Checkpointer(
            run, {"w": torch.zeros(2)}, every=1, keep=keep, guard=hf.Guard(metric="loss", patience=2)
        ) as ck:  # fmt: skip
            while ck.global_step < 7:
                now = is_bad and ck.global_step >= 4
                ck.step(loss=math.nan if now else 1.0)
                ck.report(val=0.01 if now else {2: 0.4}.get(ck.global_step, 0.5))
        return ck

    ck = train(is_bad=True)
    assert ck.best().step == 2
    listed = json.loads(CliRunner().invoke(cli, ["ls", str(run), "--json"]).stdout)["checkpoints"]
    assert [row["step"] for row in listed if "best" in row["marks"]] == [2]
    ck = train(is_bad=False)
    assert ck.best().step == 2
    assert {2, 7} <= {one.step for one in ck.checkpoints()}
    assert all(one.manifest.attempt == 2 for one in ck.checkpoints() if one.step > 4), "the bad ones had to go"


def test_a_fresh_start_each_time_is_refused_where_each_death_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`holdfast run` would start it again, and the guard take it back, for ever; a guard that ends the run may stay."""
    monkeypatch.setenv("HOLDFAST_LIFE", str(tmp_path))
    with pytest.raises(hf.ConfigError, match="rolled back, for ever"):
        hf.Checkpointer(tmp_path / "run", {}, resume="never", guard=hf.Guard())
    for options in ({"guard": hf.Guard(action="stop")}, {"guard": hf.Guard(action="warn")}, {}):
        hf.Checkpointer(tmp_path / "run", {}, resume="never", **options)
    hf.Checkpointer(tmp_path / "run", {}, guard=hf.Guard())


@pytest.mark.slow
def test_a_fresh_start_that_is_asked_for_knows_nothing_of_bad_steps(tmp_path: Path) -> None:
    """``resume='never'``: other data, other batches."""
    to_its_end(tmp_path / "run", poison={(0, 12): "nan"})
    clean = live(tmp_path / "clean")
    assert live(tmp_path / "run", resume="never") == clean


@pytest.mark.slow
def test_what_is_left_out_is_in_the_checkpoint_too(tmp_path: Path) -> None:
    """The index of the run is lost after the rollbacks: the state of the newest checkpoint remembers."""
    bad = {(0, 12): "nan"}
    for status in (86, 86, 85):
        with pytest.raises(SystemExit) as end_of_life:
            live(tmp_path / "run", poison=bad, kill_at=20, kill_how=signal.SIGTERM)
        assert end_of_life.value.code == status
    (tmp_path / "run" / "run.json").unlink()
    for path in (tmp_path / "run" / "reports").iterdir():
        path.unlink()
    end, count = to_its_end(tmp_path / "run", poison=bad)
    assert (end == live(tmp_path / "twin", leave_out=frozenset(bad)), count) == (True, 0)


def test_retention_goes_on_where_the_metric_does_not_come(tmp_path: Path) -> None:
    """A guard of a metric that nobody reports must not keep every checkpoint for it."""
    with hf.Checkpointer(tmp_path, {}, every=1, keep=hf.Keep(last=1), guard=hf.Guard(metric="los")) as ck:
        for _ in range(25):
            ck.step(loss=1.0)
    assert len(ck.checkpoints()) <= 10


@pytest.mark.slow
def test_a_checkpoint_that_is_named_is_taken_and_its_damage_ends_the_run_in_bounded_time(tmp_path: Path) -> None:
    """``resume=PATH`` of a state that gives nan for ever: two rollbacks for a step, at most, and then an error."""

    def loop(**options: Any) -> None:
        weight = torch.zeros(1)
        with hf.Checkpointer(tmp_path, {"w": weight}, every=5, keep=None, **options) as ck:
            for _ in ck.batches(range(10)):
                weight += math.nan
                ck.step(loss=weight.sum())

    loop()
    for _ in range(2 * 3):
        with pytest.raises(SystemExit):
            loop(guard=hf.Guard(max_rollbacks=3), resume=tmp_path / "step_00000005")
    with pytest.raises(TrainingError):
        loop(guard=hf.Guard(max_rollbacks=3), resume=tmp_path / "step_00000005")


def test_a_rescued_snapshot_does_not_push_out_the_sound_checkpoint(tmp_path: Path) -> None:
    """With patience a snapshot may hold a bad step; where it is rescued, the run goes on from the one before it."""
    run = tmp_path / "run"
    options: dict[str, Any] = {"every": 15, "rescue": 1, "keep": hf.Keep(last=1), "guard": hf.Guard(patience=5)}
    assert in_a_child(run, None, poison={(0, 17): "nan"}, kill_at=20, **options) == -signal.SIGKILL
    with hf.Checkpointer(run, {"x": torch.zeros(2)}, strict=False, **options) as ck:
        assert ck.resumed_from is not None
        assert ck.global_step == 15
        assert [found.step for found in ck.checkpoints()] == [19, 15], "the snapshot was rescued"


def test_both_sides_of_a_mirrored_run_keep_the_sound_checkpoint(tmp_path: Path) -> None:
    """A checkpoint without a sound step after it pushes out none, here and at the remote, in this life and the next."""

    def train(steps: int, *, bad_from: int = 1000) -> int:
        with hf.Checkpointer(
            tmp_path / "far", {"x": torch.zeros(2)}, local_dir=tmp_path / "near", every=10, keep=hf.Keep(last=1),
            guard=hf.Guard(),
        ) as ck:  # fmt: skip
            began = ck.global_step
            while ck.global_step < steps:
                ck.step(loss=1.0 if ck.global_step + 1 < bad_from else math.nan)
        return began

    assert train(20) == 0
    with pytest.raises(SystemExit, match="86"):
        train(30, bad_from=21)
    for side in ("near", "far"):
        assert [path.name for path in sorted((tmp_path / side).glob("step_*"))] == ["step_00000010", "step_00000020"]
    assert train(15) == 10


def test_a_save_that_was_lost_proves_nothing() -> None:
    """The sound checkpoint before a lost save is kept until a newer one is durable, and has a sound step after it."""
    lost, told = {"b"}, []
    session: Any = SimpleNamespace(
        extra={}, saves=SimpleNamespace(is_lost=lost.__contains__), stats=SimpleNamespace(last_durable_step=-1),
        client=SimpleNamespace(run_op=lambda op, *, names: told.append(names)),
    )  # fmt: skip
    guard = hf.Guard()
    judge = Judge(guard)
    watch = GuardWatch(guard, judge, session, [], step=0)
    saves = {2: "a", 4: "b", 6: "c"}
    for step in range(1, 10):
        watch.take(step, {"loss": 1.0}, ())
        if step in saves:
            watch.saving(step, saves[step])
        if step in (3, 8):  # the first and the last are durable by now, the second never is
            session.stats.last_durable_step = max(at for at in saves if at < step)
    watch.protect()
    assert told == [["a"], ["c"]]
    assert judge.proven == 6


def test_choose_takes_a_checkpoint_without_a_sound_step_after_it_last() -> None:
    """A later life's checkpoints are not judged by what an earlier one has found."""
    bad = Rollback(attempt=2, step=10, why="loss is inf", after=8)
    rows = [("late", 3, 12), ("bad", 2, 10), ("next", 2, 9), ("good", 2, 8), ("old", 1, 11)]
    unsound, doubtful = choose(rows, [bad])
    assert (sorted(unsound), doubtful) == (["bad", "old"], ["next"])


def test_a_step_costs_microseconds(tmp_path: Path) -> None:
    """The check of a value, with a full window, alone: 20 us are allowed, and a machine may be busy."""
    judge = Judge(hf.Guard())
    values = [2.0 + random.random() for _ in range(2000)]
    costs = []
    for step, value in enumerate(values):
        begun = time.perf_counter()
        judge.take(step, value, ())
        costs.append(time.perf_counter() - begun)
    assert statistics.median(costs[500:]) < 20e-6
