"""What scripts of Composer do that ours did otherwise: names of uploads, ends of epochs, evaluations, early stops."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop_kit import Crash, CrashAt, loader, plain

import holdfast as hf
from holdfast.callbacks import Callback, EarlyStopper
from holdfast.core import DataSpec, Evaluator, Event, Time
from holdfast.trainers.loop import stop_policy


class Events(Callback):
    """Notes the events that it is asked to, with the batch of each."""

    def __init__(self, *events: Event) -> None:
        self.events, self.seen = events, []

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        if event in self.events:
            self.seen.append((event.name, int(state.timestamp.batch), int(state.timestamp.epoch)))


class Zeros:
    """A metric object of nobody's: the share of targets that are zero."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.zeros = self.all = 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.zeros += int((targets == 0).sum())
        self.all += len(targets)

    def compute(self) -> float:
        return self.zeros / self.all if self.all else 0.0

    def state_dict(self) -> dict[str, int]:
        return {"zeros": self.zeros, "all": self.all}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.zeros, self.all = state["zeros"], state["all"]


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_torchmetrics_go_on(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """After a resume in the middle of an epoch, metrics of torchmetrics cover all of it, from a single file too."""
    torchmetrics = pytest.importorskip("torchmetrics")

    def make(folder: Path, **options: Any) -> hf.Trainer:
        accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        mean = torchmetrics.MetricCollection([torchmetrics.F1Score(task="multiclass", num_classes=3)])
        return plain(
            folder, train_metrics={"acc": accuracy, "more": mean}, eval_dataloader=loader(9, shuffle=False),
            eval_metrics={"acc": accuracy.clone()}, save_filename="ba{batch}" + suffix, save_interval="2ba",
            max_duration="1ep", seed=3, **options,
        )  # fmt: skip

    whole = make(tmp_path / "whole")
    whole.fit()
    with pytest.raises(Crash):
        make(tmp_path / "runs", callbacks=CrashAt(5)).fit()
    capsys.readouterr()
    again = make(tmp_path / "runs", autoresume=True)
    assert int(again.state.train_metrics["acc"].tp.sum() + again.state.train_metrics["acc"].fn.sum()) == 24
    assert "NOT restored" not in capsys.readouterr().err
    again.fit()
    assert again.state.train_metric_values == whole.state.train_metric_values


@pytest.mark.parametrize("duration", ["6ba", "34sp"])
def test_a_duration_ends_an_epoch(tmp_path: Path, duration: str) -> None:
    """A duration that ends with an epoch's last batch ends the epoch, and `fit` goes on with the next one."""
    seen = Events(Event.EPOCH_END, Event.EPOCH_CHECKPOINT)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = plain(
        tmp_path, model=model, optimizers=optimizer, schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        callbacks=seen, max_duration=duration,
    )  # fmt: skip
    trainer.fit()
    assert trainer.state.timestamp.epoch == 1
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert seen.seen == [("EPOCH_END", 6, 1), ("EPOCH_CHECKPOINT", 6, 1)]
    trainer.fit("1ep")
    assert (int(trainer.state.timestamp.epoch), int(trainer.state.timestamp.batch)) == (2, 12)
    short = plain(None, max_duration="4ba")
    short.fit()
    assert short.state.timestamp.epoch == 0


def test_evaluating_other_data_changes_nothing(tmp_path: Path) -> None:
    """eval(other) leaves its metrics in the state; what fit() evaluates, and what checkpoints record, stays."""
    trainer = plain(
        tmp_path, eval_dataloader=loader(9, shuffle=False), eval_metrics={"zeros": Zeros()}, max_duration="1ep",
    )  # fmt: skip
    trainer.fit()
    own, metrics = trainer.state.eval_dataloaders, trainer.state.eval_metrics
    found = trainer.eval(loader(4, shuffle=False))
    assert (list(found), found["eval"]["zeros"]) == (["eval"], 0.5)
    assert trainer.state.eval_dataloaders == own
    assert float(trainer.state.eval_metrics["eval"]["zeros"].compute()) == 0.5
    saved = hf.Checkpoint(trainer.save_checkpoint(str(tmp_path / "after")))
    assert saved.metrics.get("eval/zeros") is None
    assert saved.load()["state"]["eval_metrics"]["eval"]["zeros"]["all"] == 9
    assert trainer.eval()["eval"]["zeros"] == pytest.approx(1 / 3)
    assert trainer.state.eval_metrics == metrics
    assert trainer.eval({"b": loader(4, shuffle=False)}, subset_num_batches=1)["b"]["zeros"] == 0.5
    assert set(trainer.state.eval_metrics) == {"eval", "b"}
    trainer.fit("1ep")
    assert trainer.state.eval_metrics == metrics
    assert list(trainer.state.evaluators) == ["eval"]


def test_evaluating_without_data_of_its_own() -> None:
    """As in Composer, `state.eval_metrics` has what `eval(data)` came to in a trainer that has no evaluation data."""
    trainer = plain(None, eval_metrics={"zeros": Zeros()})
    trainer.eval(loader(4, shuffle=False))
    assert float(trainer.state.eval_metrics["eval"]["zeros"].compute()) == 0.5


@pytest.mark.parametrize(("given", "labels"), [
    ((loader(6), loader(9)), ["eval", "eval-1"]),
    ([loader(6)], ["eval"]),
    (DataSpec(loader(6)), ["eval"]),
    ({"dataloader": loader(6)}, ["eval"]),
    ([(torch.ones(6, 4), torch.zeros(6, dtype=torch.long))], ["eval"]),
    ([Evaluator(label="a", dataloader=loader(6)), Evaluator(label="b", dataloader=DataSpec(loader(9)))], ["a", "b"]),
    ({"x": loader(6), "y": DataSpec(loader(9))}, ["x", "y"]),
])  # fmt: skip
def test_evaluation_data_in_every_form(given: Any, labels: list[str]) -> None:
    """One loader or several, with labels or without, specs and evaluators; a list of batches is data, too."""
    trainer = plain(None, eval_dataloader=given, eval_metrics={"zeros": Zeros()})
    assert list(trainer.eval()) == labels
    assert all(set(one) == {"loss", "zeros"} for one in trainer.state.eval_metric_values.values())


def test_evaluators(tmp_path: Path) -> None:
    """Evaluators have intervals, lengths and a choice of metrics of their own; labels that meet are refused."""
    seen: dict[str, list[int]] = {"often": [], "never": [], "default": [], "asked": []}
    events: list[str] = []

    class Look(Callback):
        def eval_end(self, state: Any, logger: Any) -> None:
            seen[state.dataloader_label].append(int(state.timestamp.batch))

    def ask(state: Any, event: Event) -> bool:
        events.append(event.name)
        return event is Event.BATCH_END and int(state.timestamp.batch) == 3

    trainer = plain(
        tmp_path, max_duration="8ba", eval_interval="1ep", callbacks=Look(), eval_subset_num_batches=2,
        eval_metrics={"zeros": Zeros(), "other": Zeros()},
        eval_dataloader=[
            Evaluator(label="often", dataloader=loader(24), eval_interval="4ba", metric_names=["zer"]),
            Evaluator(label="never", dataloader=loader(6), eval_interval=0),
            Evaluator(label="default", dataloader=loader(24), subset_num_batches=1),
            Evaluator(label="asked", dataloader=loader(6), eval_interval=ask),
        ],
    )  # fmt: skip
    trainer.fit()
    assert seen == {"often": [4, 8], "never": [], "default": [6, 8], "asked": [3]}
    assert events == [*["BATCH_END"] * 6, "EPOCH_END", "BATCH_END", "BATCH_END", "FIT_END"]
    assert set(trainer.state.eval_metric_values["often"]) == {"loss", "zeros"}
    assert trainer.state.eval_metrics["often"]["zeros"].all == 12
    assert trainer.state.eval_metrics["default"]["zeros"].all == 6
    with pytest.raises(hf.ConfigError, match="two evaluators are called 'a'"):
        plain(None, eval_dataloader=[Evaluator(label="a", dataloader=loader(6))] * 2)
    with pytest.raises(hf.ConfigError, match="no metric is called 'acc'"):
        plain(None, eval_dataloader=Evaluator(label="a", dataloader=loader(6), metric_names=["acc"]))


def test_an_interval_of_the_trainer_may_be_a_function_or_nothing() -> None:
    """eval_interval=0 switches evaluations off, also the last one; a function decides alone."""
    seen = Events(Event.EVAL_AFTER_ALL)
    plain(None, eval_dataloader=loader(6), eval_interval=0, callbacks=seen).fit()
    assert seen.seen == []
    plain(
        None, eval_dataloader=loader(6), callbacks=seen, eval_interval=lambda state, event: event is Event.FIT_END
    ).fit()
    assert seen.seen == [("EVAL_AFTER_ALL", 12, 2)]


def test_data_specs() -> None:
    """Functions of a DataSpec change, split and count batches."""
    parts: list[int] = []

    class Look(Callback):
        def before_forward(self, state: Any, logger: Any) -> None:
            parts.append(len(state.batch[0]))
            assert state.batch[0].abs().max() == 0

    spec = DataSpec(
        loader(12), num_samples=12, batch_transforms=lambda batch: (batch[0] * 0 + 1, batch[1]),
        microbatch_transforms=lambda batch: (batch[0] - 1, batch[1]),
        split_batch=lambda batch, size: [(batch[0][:1], batch[1][:1]), (batch[0][1:], batch[1][1:])],
        get_num_samples_in_batch=lambda batch: 10, get_num_tokens_in_batch=lambda batch: 7,
    )  # fmt: skip
    trainer = plain(None, train_dataloader=spec, grad_accum=2, callbacks=Look(), max_duration="1ep")
    trainer.fit()
    assert parts == [1, 5, 1, 5]
    assert (trainer.state.timestamp.sample, trainer.state.timestamp.token) == (Time(20, "sp"), Time(14, "tok"))


def test_early_stops_in_batches() -> None:
    """A patience in batches for a metric of training is looked at after every batch, not at the end of the epoch."""
    stop = EarlyStopper("zeros", "train", patience="3ba", comp=lambda new, best: False)
    trainer = plain(None, train_metrics={"zeros": Zeros()}, callbacks=stop, max_duration="2ep")
    trainer.fit()
    assert int(trainer.state.timestamp.batch) == 5  # the first look is the best one; 4 after it are more than 3


def test_the_clock_goes_on_over_the_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A duration in time counts what is done between two epochs, too; what lies between two trainings it does not."""
    now = 0.0

    class Takes(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            nonlocal now
            now += 1.0

        def eval_start(self, state: Any, logger: Any) -> None:
            nonlocal now
            now += 3600.0

    clock = SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic)
    monkeypatch.setattr(stop_policy, "time", clock)
    trainer = plain(None, callbacks=[Takes(), CrashAt(20)], eval_dataloader=loader(6), max_duration="2h")
    trainer.fit()
    assert (int(trainer.state.timestamp.batch), trainer.state.timestamp.total_wct.total_seconds()) == (13, 7213.0)
    trainer.fit("1ba")
    assert trainer.state.timestamp.total_wct.total_seconds() == 7214.0
