"""Smaller habits of scripts for Composer: orders of events, losses in dictionaries, times, stores, functions."""

from __future__ import annotations

import gc
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_kit import loader, plain
from torch.nn import functional

import holdfast as hf
from holdfast.callbacks import Callback, ThresholdStopper
from holdfast.core import EMA, Algorithm, DataSpec, Event, Precision, Time, Timestamp, TimeUnit
from holdfast.loggers import JSONLLogger, LoggerDestination
from holdfast.utils import load_checkpoint, save_checkpoint


class Notes(Algorithm):
    """Writes down that it ran."""

    def __init__(self, name: str, seen: list[tuple[str, str]]) -> None:
        self.name, self.seen = name, seen

    def match(self, event: Event, state: Any) -> bool:
        return event in (Event.INIT, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BATCH_END)

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        self.seen.append((event.name, self.name))


def test_orders() -> None:
    """AFTER_* runs algorithms backwards; at INIT loggers come first, algorithms last."""
    seen: list[tuple[str, str]] = []

    class Ours(Callback):
        def init(self, state: Any, logger: Any) -> None:
            seen.append(("INIT", "callback"))

    class Logs(LoggerDestination):
        def init(self, state: Any, logger: Any) -> None:
            seen.append(("INIT", "logger"))

    algorithms = [Notes("a", seen), Notes("b", seen)]
    plain(None, algorithms=algorithms, callbacks=Ours(), loggers=Logs(), max_duration="1ba").fit()
    assert [name for event, name in seen if event == "INIT"] == ["logger", "callback", "a", "b"]
    assert [name for event, name in seen if event != "INIT"] == ["a", "b", "b", "a", "a", "b"]


def test_callbacks_are_closed() -> None:
    """A trainer that nobody closes closes its callbacks when it goes; at the end of the process: `test_loop_fork`."""
    closed: list[str] = []

    class Closes(Callback):
        def close(self, state: Any, logger: Any) -> None:
            closed.append("close")

        def post_close(self) -> None:
            closed.append("post_close")

    trainer = plain(None, callbacks=Closes())
    trainer.close()
    trainer.close()
    assert closed == ["close", "post_close"]
    trainer = plain(None, callbacks=Closes())
    del trainer
    gc.collect()
    assert closed == ["close", "post_close"] * 2


def test_the_duration_may_be_text() -> None:
    """A callback sets the duration as text or as a number of epochs; nonsense is refused."""

    class Longer(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            state.max_duration = "8ba"

    trainer = plain(None, callbacks=Longer(), max_duration="1ep")
    trainer.fit()
    assert trainer.state.timestamp.batch == 8
    trainer.state.max_duration = 3
    assert trainer.state.max_duration == Time("3ep")
    with pytest.raises(hf.ConfigError, match="max_duration='soon'"):
        trainer.state.max_duration = "soon"


@pytest.mark.parametrize("total", [False, True])
def test_a_loss_of_parts(tmp_path: Path, total: bool) -> None:
    """A dictionary of losses is added up, or its "total" taken; each part is logged."""

    def losses(outputs: Any, targets: Any) -> dict[str, Any]:
        one, two = functional.cross_entropy(outputs, targets), outputs.square().mean()
        return {"ce": one, "size": two, **({"total": one} if total else {})}

    rows = tmp_path / "rows.jsonl"
    trainer = plain(None, loss_fn=losses, loggers=JSONLLogger(rows), grad_accum=2, max_duration="2ba")
    trainer.fit()
    trainer.close()
    plainly = functional.cross_entropy if total else lambda o, t: sum(losses(o, t).values())
    like = plain(None, loss_fn=plainly, grad_accum=2, max_duration="2ba")
    like.fit()
    assert torch.equal(trainer.state.model.weight, like.state.model.weight)
    assert float(trainer.state.loss) == pytest.approx(float(like.state.loss))
    row = json.loads(rows.read_text().splitlines()[-1])
    parts = row["loss/train/ce"] + row["loss/train/size"]
    assert row["loss/train/total"] == pytest.approx(row["loss/train/ce"] if total else parts)


def test_times() -> None:
    """How times look, what an epoch takes, where an evaluation is."""
    assert repr(Time("5ep")) == "Time(5, TimeUnit.EPOCH)"
    assert eval(repr(Time("0.5dur"))) == Time(0.5, TimeUnit.DURATION)
    assert Timestamp(batch=4).to_next_batch(duration=None).to_next_epoch(duration=None).epoch == 1  # Composer's default
    later = Timestamp(epoch=1, batch=4, batch_in_epoch=2).to_next_epoch(duration=timedelta(seconds=3))
    assert (int(later.epoch), int(later.batch_in_epoch), later.total_wct) == (2, 0, timedelta(seconds=3))
    seen: list[int] = []

    class Look(Callback):
        def eval_batch_end(self, state: Any, logger: Any) -> None:
            seen.append(int(state.eval_timestamp.batch))

    trainer = plain(None, eval_dataloader=loader(15), callbacks=Look())
    trainer.eval()
    trainer.eval()
    assert seen == [1, 2, 3] * 2
    assert trainer.state.eval_timestamp.sample == 15


def test_parts_of_a_batch() -> None:
    """batch_get_item and batch_set_item, by index, by name and by function."""
    state = plain(None).state
    state.batch = (1, 2)
    state.batch_set_item(0, 5)
    assert (state.batch_get_item(0), state.batch) == (5, (5, 2))
    state.batch = {"a": 1}
    state.batch_set_item("a", 3)
    assert state.batch_get_item("a") == state.batch_get_item(lambda batch: batch["a"]) == 3
    state.batch_set_item(lambda batch, value: {"b": value}, 4)
    assert state.batch == {"b": 4}


def test_metrics_of_training_are_logged_each_batch(tmp_path: Path) -> None:
    """With a logger, metrics of training are there after every batch, over the epoch so far."""
    rows = tmp_path / "rows.jsonl"
    trainer = plain(
        None, loggers=JSONLLogger(rows), max_duration="2ba",
        train_metrics={"zeros": lambda outputs, targets: (targets == 0).float().mean()},
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["step"] for row in found if "metrics/train/zeros" in row] == [1, 2]


@pytest.mark.parametrize(("options", "batch"), [({"stop_on_batch": True}, 1), ({}, 6), ({"comp": "less"}, 12)])
def test_threshold(options: dict[str, Any], batch: int) -> None:
    """Training ends when a metric is past the threshold."""
    stop = ThresholdStopper("zeros", "train", -1.0, **options)
    trainer = plain(
        None, callbacks=stop, max_duration="2ep", precision=Precision.FP32,
        train_metrics={"zeros": lambda outputs, targets: (targets == 0).float().mean()},
    )  # fmt: skip
    trainer.fit()
    assert trainer.state.timestamp.batch == batch


def test_averages_in_other_units() -> None:
    """EMA() has a half-life of 1000 batches; one in epochs moves at their ends; it may begin later."""
    assert EMA().smoothing == pytest.approx(2 ** (-1 / 1000))
    for wrong in ({"half_life": 0.9}, {"half_life": "2ep", "update_interval": "1ba"}, {"half_life": "3sp"}):
        with pytest.raises(hf.ConfigError, match="EMA"):
            EMA(**wrong)
    weights: list[torch.Tensor] = []

    class Look(Callback):
        def epoch_start(self, state: Any, logger: Any) -> None:
            weights.append(state.model.weight.detach().clone())

    by_epoch, late = EMA(half_life="1ep"), EMA(smoothing=0.5, ema_start="0.5dur")
    trainer = plain(None, algorithms=[by_epoch, late], callbacks=Look(), max_duration="2ep")
    trainer.fit()
    last = trainer.state.model.weight
    expected = weights[0].lerp(weights[1], 0.5).lerp(last, 0.5)
    assert torch.allclose(by_epoch.average["weight"], expected)
    assert not torch.equal(late.average["weight"], last)
    assert (late.average["weight"] - last).abs().max() < (weights[0] - last).abs().max()


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_functions(tmp_path: Path, suffix: str) -> None:
    """save_checkpoint and load_checkpoint of a state, with parts left out."""
    trainer = plain(None, max_duration="3ba")
    trainer.fit()
    path = save_checkpoint(trainer.state, f"{tmp_path}/ba{{batch}}{suffix}")
    assert path == f"{tmp_path}/ba3{suffix}"
    bare = save_checkpoint(trainer.state, f"{tmp_path}/bare{suffix}", ignore_keys=["state/optimizers"])
    other = plain(None)
    assert load_checkpoint(path, other.state, other.logger) is not None
    assert other.state.timestamp.batch == 3
    third = plain(None)
    load_checkpoint(bare, third.state, load_weights_only=True)
    assert torch.equal(third.state.model.weight, trainer.state.model.weight)
    assert third.state.timestamp.batch == 0


def test_saved_without_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that leaves the model out is said, once."""
    plain(tmp_path, save_ignore_keys=["state/model"]).fit()
    assert caplog.text.count("is saved without the model") == 1


def test_a_model_without_parameters() -> None:
    """It is evaluated; no optimizer is made for it."""
    trainer = plain(None, model=torch.nn.Identity(), eval_dataloader=loader(6), loss_fn=lambda o, t: o.mean())
    assert trainer.state.optimizers == []
    assert set(trainer.eval()["eval"]) == {"loss"}


def test_tokens_that_nobody_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Batches without "input_ids": a duration in tokens would never end and is refused, an interval in them is said."""
    with pytest.raises(hf.ConfigError, match=r"max_duration='100tok'.*never end.*get_num_tokens_in_batch"):
        plain(None, max_duration="100tok").fit()
    counted = plain(None, max_duration="7tok", train_dataloader=DataSpec(loader(), get_num_tokens_in_batch=len))
    counted.fit()
    assert int(counted.state.timestamp.batch) == 4  # two a batch: inputs and targets
    assert "never comes due" not in caplog.text
    plain(tmp_path, save_interval="50tok").fit()
    assert caplog.text.count("an interval of 50tok never comes due") == 1


def test_an_optimizer_of_another_model(caplog: pytest.LogCaptureFixture) -> None:
    """It would train nothing, without a word."""
    model = torch.nn.Linear(4, 3)
    plain(None, model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    assert not caplog.text
    plain(None, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
    assert caplog.text.count("optimizers[0] (SGD) has no parameter of the model and trains nothing of it") == 1


def test_what_an_overwritten_run_left_is_in_the_way(tmp_path: Path) -> None:
    """The advice helps: to autoresume is what was asked for already."""
    plain(tmp_path, max_duration="3ep").fit()
    plain(tmp_path, max_duration="2ep", save_overwrite=True).fit()
    with pytest.raises(hf.CheckpointExistsError, match=r"\(ep3-ba18\), and save_overwrite=False: move them away, use"):
        plain(tmp_path, max_duration="3ep", autoresume=True).fit()
