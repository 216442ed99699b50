"""The trainer beside saving: events, evaluation, metrics, algorithms, loggers, data of every kind."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_kit import Crash, CrashAt, Points, accuracy, everything, loader, network, plain, rich
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import holdfast as hf
from holdfast.callbacks import Callback, EarlyStopping
from holdfast.core import EMA, Algorithm, Event, LabelSmoothing, Time
from holdfast.loggers import ConsoleLogger, JSONLLogger, TensorBoardLogger
from holdfast.state.tree import rng
from holdfast.testing import assert_state_equal
from holdfast.trainers.loop import callbacks
from holdfast.trainers.loop.data import microbatches


class Order(Callback):
    """Notes every event."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        self.events.append(event.name)


def test_order_of_events() -> None:
    """Every event comes, in the documented order."""
    order = Order()
    trainer = plain(None, callbacks=order, train_dataloader=loader(6), eval_dataloader=loader(6), max_duration="1ep")
    trainer.fit()
    assert order.events == [
        "INIT",
        "BEFORE_LOAD",
        "AFTER_LOAD",
        "FIT_START",
        "EPOCH_START",
        "BEFORE_DATALOADER",
        "AFTER_DATALOADER",
        "BATCH_START",
        "BEFORE_TRAIN_BATCH",
        "BEFORE_FORWARD",
        "AFTER_FORWARD",
        "BEFORE_LOSS",
        "AFTER_LOSS",
        "BEFORE_BACKWARD",
        "AFTER_BACKWARD",
        "AFTER_TRAIN_BATCH",
        "BATCH_END",
        "BATCH_CHECKPOINT",
        "BEFORE_DATALOADER",
        "EPOCH_END",
        "EVAL_BEFORE_ALL",
        "EVAL_START",
        "EVAL_BATCH_START",
        "EVAL_BEFORE_FORWARD",
        "EVAL_AFTER_FORWARD",
        "EVAL_BATCH_END",
        "EVAL_END",
        "EVAL_AFTER_ALL",
        "EPOCH_CHECKPOINT",
        "FIT_END",
    ]
    trainer.eval()
    assert order.events[-1] == "EVAL_STANDALONE_END"


class Own(torch.nn.Module):
    """A model in Composer's way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch["x"])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(outputs, batch["labels"])

    def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Any) -> None:
        metric.update(outputs.argmax(1), batch["labels"])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"hits": lambda guesses, labels: (guesses == labels).float().mean()}


def as_dict(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in rows]), "labels": torch.tensor([int(y) for _, y in rows])}


def test_models_with_their_own_loss() -> None:
    """A model with loss, update_metric and get_metrics needs nothing else; batches may be dictionaries."""
    data = DataLoader(Points(), batch_size=6, collate_fn=as_dict)
    trainer = plain(
        None, model=Own(), loss_fn=None, train_dataloader=data, eval_dataloader={"a": data, "b": data}, grad_accum=3
    )
    trainer.fit()
    assert set(trainer.state.eval_metric_values) == {"a", "b"}
    assert 0 <= float(trainer.state.train_metric_values["hits"]) <= 1
    with pytest.raises(hf.ConfigError, match="loss"):
        plain(None, loss_fn=None).fit()


def test_the_loop_is_the_hand_written_one() -> None:
    """Weights after training are those of the loop one would write by hand."""
    data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])) for _ in range(4)]
    trainer = plain(None, train_dataloader=data, optimizers=None, max_duration="2ep", grad_clip_norm=0.5)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer.fit()
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert torch.equal(model.weight, trainer.state.model.weight)


def test_grad_accum_is_the_whole_batch() -> None:
    """Parts of a batch weigh by their samples: the gradient is that of the whole, up to rounding."""
    one = plain(None)
    one.fit()
    many = plain(None, grad_accum=4)  # made here, so that both draw the same random numbers
    many.fit()
    assert torch.allclose(one.state.model.weight, many.state.model.weight, atol=1e-5)
    parts = microbatches((torch.arange(5), {"y": torch.arange(10).view(5, 2)}), 2)
    assert [part[0].tolist() for part, _ in parts] == [[0, 1], [2, 3, 4]]
    assert [share for _, share in parts] == [0.4, 0.6]
    with pytest.raises(hf.ConfigError, match="grad_accum"):
        microbatches("text", 2)


def test_early_stopping(tmp_path: Path) -> None:
    """Training ends when the metric has not improved for the patience, and the last moment is saved."""
    stop = EarlyStopping("loss", patience="2ep", comp=lambda new, best: False)
    trainer = plain(tmp_path, callbacks=stop, eval_dataloader=loader(6), max_duration="50ep", save_interval="100ep")
    trainer.fit()
    assert trainer.state.timestamp.epoch == Time("4ep")
    assert [path.rsplit("/", 1)[1] for path in trainer.saved_checkpoints] == ["ep4-ba24"]
    trainer.close()
    again = plain(
        tmp_path, callbacks=EarlyStopping("loss"), eval_dataloader=loader(6), max_duration="50ep", autoresume=True
    )
    again.fit()
    assert again.state.timestamp.epoch == 4
    with pytest.raises(hf.ConfigError, match="no such metric"):
        plain(None, callbacks=EarlyStopping("apples"), eval_dataloader=loader(6)).fit()
    with pytest.raises(hf.ConfigError, match="comp"):
        EarlyStopping("loss", comp="sideways")


@pytest.mark.parametrize("interval", ["1ep", "12ba"])
def test_patience_in_epochs_is_the_same_for_every_save_interval(tmp_path: Path, interval: str) -> None:
    """An evaluation may come before the end of its epoch, for a save of its last batch: it is that of the epoch."""

    class Second(Callback):
        def eval_end(self, state: Any, logger: Any) -> None:
            state.eval_metric_values["eval"]["loss"] = torch.tensor(float(int(state.timestamp.batch) != 12))

    trainer = plain(
        tmp_path, callbacks=[Second(), EarlyStopping("loss", patience="1ep")], eval_dataloader=loader(6),
        max_duration="9ep", save_interval=interval,
    )  # fmt: skip
    trainer.fit()
    assert trainer.state.timestamp.epoch == Time("4ep")


def test_early_stopping_without_data(caplog: pytest.LogCaptureFixture) -> None:
    """It would look at an evaluation that there is none of: that is said when training begins."""
    plain(None, callbacks=EarlyStopping("loss", dataloader_label="valid"), max_duration="1ba").fit()
    assert "'loss', dataloader_label='valid') never stops this training" in caplog.text


def test_ema() -> None:
    """The average follows its formula, evaluation sees it, training does not."""
    seen = []

    class Look(Callback):
        def eval_start(self, state: Any, logger: Any) -> None:
            seen.append(state.model.weight.detach().clone())

    ema = EMA(half_life="1ba")
    trainer = plain(
        None, algorithms=ema, callbacks=Look(), eval_dataloader=loader(6), max_duration="2ba", eval_interval="2ba"
    )
    weights = [trainer.state.model.weight.detach().clone()]
    look = trainer.state.callbacks[0]
    look.batch_end = lambda state, logger: weights.append(state.model.weight.detach().clone())
    trainer._engine.listen(trainer.state.callbacks)
    trainer.fit()
    expected = weights[0]
    for one in weights[1:]:
        expected = expected.lerp(one, 0.5)
    assert torch.allclose(seen[0], expected)
    assert torch.equal(trainer.state.model.weight, weights[-1])
    with pytest.raises(hf.ConfigError, match="EMA"):
        EMA(half_life="1ba", smoothing=0.5)


def test_an_average_that_has_not_begun_begins_when_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sharded model the average is laid out from the start: a resume does not take that for its begin."""
    monkeypatch.setattr(callbacks, "is_sharded", lambda model: True)

    def make(folder: str, crash_at: int | None = None) -> hf.Trainer:
        callbacks = [] if crash_at is None else [CrashAt(crash_at)]
        return plain(
            tmp_path / folder, algorithms=EMA(smoothing=0.5, ema_start="9ba"), save_interval="3ba", callbacks=callbacks,
            autoresume=True,
        )  # fmt: skip

    whole = make("whole")
    whole.fit()
    with pytest.raises(Crash):
        make("twin", 5).fit()
    with make("twin") as again:
        again.fit()
    averages = [trainer.state.algorithms[0].average for trainer in (again, whole)]
    assert_state_equal(*averages)


@pytest.mark.parametrize("how", ["", ".pt", "folder"])
def test_a_save_within_an_evaluation_has_what_training_has(tmp_path: Path, how: str) -> None:
    """The weights that are trained and not the averages, and generators that the evaluation has not moved."""

    class SaveAtEvaluation(Callback):
        trainer: Any = None

        def eval_batch_end(self, state: Any, logger: Any) -> None:
            torch.rand(3)

        def eval_end(self, state: Any, logger: Any) -> None:
            if self.trainer is None or int(state.timestamp.batch) != 9:
                return
            evaluated, drawn = state.model[0].weight.clone(), torch.get_rng_state()
            if how == "folder":
                self.trainer.save_checkpoint_to_save_folder()
            else:
                self.trainer.save_checkpoint(str(tmp_path / f"saved{how}"))
            assert torch.equal(evaluated, state.model[0].weight)
            assert torch.equal(drawn, torch.get_rng_state())

    saver = SaveAtEvaluation()
    options: dict[str, Any] = {"eval_interval": "9ba", "save_interval": "100ep"}
    saver.trainer = whole = rich(tmp_path / "a", callbacks=[saver], **options)
    whole.fit()
    saved = tmp_path / ("a/ep1-ba9" if how == "folder" else f"saved{how}")
    again = rich(tmp_path / "b", callbacks=[SaveAtEvaluation()], load_path=saved, **options)
    assert int(again.state.timestamp.batch) == 9
    again.fit()
    assert_state_equal(everything(again), everything(whole))


@pytest.mark.parametrize(
    ("how", "interval", "batch"), [("", "1ep", 6), (".pt", "1ep", 6), ("folder", "1ep", 6), ("", "4ba", 4)]
)
def test_who_goes_on_from_a_save_within_an_evaluation_evaluates_again(
    tmp_path: Path, how: str, interval: str, batch: int
) -> None:
    """It was not over when the state was saved: its metrics are those of an undisturbed training, none is left out."""

    class SaveAndDie(Callback):
        trainer: Any = None

        def __init__(self) -> None:
            self.evaluated: list[tuple[int, float]] = []

        def eval_end(self, state: Any, logger: Any) -> None:
            self.evaluated.append((int(state.timestamp.batch), float(state.eval_metric_values["eval"]["loss"])))

        def eval_batch_end(self, state: Any, logger: Any) -> None:
            if self.trainer is None or int(state.timestamp.batch) != batch:
                return
            if how == "folder":
                self.trainer.save_checkpoint_to_save_folder()
            else:
                self.trainer.save_checkpoint(str(tmp_path / f"saved{how}"))
            raise Crash

    options: dict[str, Any] = {
        "eval_interval": interval, "save_interval": "100ep", "eval_dataloader": loader(9, shuffle=False)
    }  # fmt: skip
    plain(None, callbacks=(whole := SaveAndDie()), **options).fit()
    dies = SaveAndDie()
    dies.trainer = plain(tmp_path / "run", callbacks=dies, **options)
    with pytest.raises(Crash):
        dies.trainer.fit()
    dies.trainer.close()
    start: dict[str, Any] = {"autoresume": True} if how == "folder" else {"load_path": tmp_path / f"saved{how}"}
    plain(tmp_path / "run", callbacks=(again := SaveAndDie()), **options, **start).fit()
    assert again.evaluated == [(at, loss) for at, loss in whole.evaluated if at >= batch]


def test_an_evaluation_leaves_the_generators_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that draws on its device while it is evaluated: training goes on with the numbers it would have had."""

    class Devices:
        states = (torch.zeros(16, dtype=torch.uint8),)

        def is_available(self) -> bool:
            return True

        def device_count(self) -> int:
            return 1

        def get_rng_state_all(self) -> list[torch.Tensor]:
            return list(self.states)

        def set_rng_state(self, state: torch.Tensor, device: int) -> None:
            self.states = (state,)

        set_rng_state_all = None

    class Draw(Callback):
        def eval_batch_end(self, state: Any, logger: Any) -> None:
            devices.states = (devices.states[0] + 1,)

    devices = Devices()
    monkeypatch.setattr(torch, "imagined", devices, raising=False)
    monkeypatch.setattr(rng, "_accelerator", lambda: "imagined")
    plain(None, callbacks=Draw(), eval_dataloader=loader(6), max_duration="1ep").fit()
    assert not devices.states[0].any()


def test_an_error_before_an_evaluation_leaves_the_weights_of_training() -> None:
    """A callback that raises at EVAL_BEFORE_ALL finds the averages in the model; whoever goes on must not."""

    class Raise(Callback):
        def eval_before_all(self, state: Any, logger: Any) -> None:
            raise Crash

    trainer = plain(
        None, algorithms=EMA(half_life="9ba"), callbacks=Raise(), eval_dataloader=loader(6), max_duration="1ep"
    )
    weights: list[torch.Tensor] = []
    trainer.state.callbacks[0].batch_end = lambda state, logger: weights.append(state.model.weight.detach().clone())
    trainer._engine.listen(trainer.state.callbacks)
    with pytest.raises(Crash):
        trainer.fit()
    assert torch.equal(trainer.state.model.weight, weights[-1])


def test_label_smoothing() -> None:
    """The loss is that of cross entropy with the same smoothing; metrics see the hard labels."""
    found = []

    class Look(Callback):
        def after_loss(self, state: Any, logger: Any) -> None:
            found.append(
                (state.loss.item(), functional.cross_entropy(state.outputs, state.batch[1], label_smoothing=0.2).item())
            )

    plain(None, algorithms=LabelSmoothing(0.2), callbacks=Look(), train_metrics=accuracy, max_duration="1ep").fit()
    assert all(mine == pytest.approx(theirs, rel=1e-5) for mine, theirs in found)


def test_own_algorithm() -> None:
    """An algorithm runs where it matches."""

    class Freeze(Algorithm):
        def match(self, event: Event, state: Any) -> bool:
            return event is Event.AFTER_BACKWARD

        def apply(self, event: Event, state: Any, logger: Any) -> None:
            state.model.weight.grad = None

    trainer = plain(None, algorithms=Freeze())
    before = trainer.state.model.weight.detach().clone()
    trainer.fit()
    assert torch.equal(before, trainer.state.model.weight)


def test_torchmetrics(tmp_path: Path) -> None:
    """Torchmetrics objects are used as they are, and saved."""
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.MeanMetric()
    found = {"accuracy": torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro")}

    class Mean(torchmetrics.MeanMetric):
        def update(self, outputs: Any, targets: Any) -> None:
            super().update(outputs.mean())

    trainer = plain(tmp_path, train_metrics=Mean(), eval_metrics=found, eval_dataloader=loader(9), max_duration="1ep")
    trainer.fit()
    assert 0 <= float(trainer.state.eval_metric_values["eval"]["accuracy"]) <= 1
    state = hf.load(tmp_path / "ep1-ba6")["state"]
    assert state["train_metrics"]["Mean"]
    assert plain(tmp_path / "n", save_metrics=False).state.live()["state"]["train_metrics"] == {}
    assert metric is not None


def test_loggers(tmp_path: Path) -> None:
    """JSON lines hold every batch's loss and every evaluation; the console prints once an epoch."""
    path, stream = tmp_path / "{run_name}.jsonl", io.StringIO()
    console = ConsoleLogger(stream=stream)
    trainer = plain(None, loggers=[JSONLLogger(path), console], eval_dataloader=loader(6), run_name="it")
    trainer.fit()
    trainer.close()
    rows = [json.loads(line) for line in (tmp_path / "it.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss/train/total" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "metrics/eval/loss" in row] == [6, 12]
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1  batch 6")


def test_tensorboard_is_optional(tmp_path: Path) -> None:
    """Without the package the logger says what to install; with it, it writes."""
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        with pytest.raises(hf.MissingExtraError, match="tensorboard"):
            TensorBoardLogger(tmp_path)
        return
    trainer = plain(None, loggers=TensorBoardLogger(tmp_path), max_duration="1ep")
    trainer.fit()
    trainer.close()
    assert any(tmp_path.iterdir())


class Streaming(IterableDataset[Any]):
    """A dataset that knows its position, as StreamingDataset does."""

    def __init__(self) -> None:
        self.start = 0
        self.drawn: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        first, self.start = self.start, 0
        for number in range(first, 30):
            self.drawn.append(number)
            yield torch.full((4,), float(number)), torch.tensor(number % 3)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {"sample": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["sample"]


def test_streaming_datasets(tmp_path: Path) -> None:
    """A dataset with a position of its own goes on there: nothing is drawn twice."""

    def make(**options: Any) -> tuple[hf.Trainer, Streaming]:
        data = Streaming()
        trainer = plain(tmp_path, train_dataloader=DataLoader(data, batch_size=5), save_interval="1ba", **options)
        return trainer, data

    first, _ = make(max_duration="4ba")
    first.fit()
    first.close()
    second, data = make(max_duration="8ba", autoresume=True)
    second.fit()
    assert data.drawn[:10] == list(range(20, 30))
    assert data.drawn[10:20] == list(range(10))


def test_stateful_loaders(tmp_path: Path) -> None:
    """A StatefulDataLoader is asked for its own state: training ends as it would have, in mid-epoch and at its end."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make(folder: str, duration: str) -> hf.Trainer:
        torch.manual_seed(0)  # the sampler draws the seed of its order here, before there is a trainer
        data = torchdata.StatefulDataLoader(Points(), batch_size=6, shuffle=True)
        return plain(
            tmp_path / folder, train_dataloader=data, max_duration=duration, save_interval="2ba", autoresume=True
        )

    whole = make("whole", "3ep")
    whole.fit()
    for duration in ("4ba", "1ep", "2ep", "14ba", "3ep"):
        again = make("parts", duration)
        again.fit()
    assert int(again.state.timestamp.sample) == 3 * 34
    assert torch.equal(again.state.model.weight, whole.state.model.weight)


def test_seeds() -> None:
    """The same seed gives the same training; another one another."""

    def weights(seed: int) -> torch.Tensor:
        trainer = plain(None, seed=seed, model=None)
        trainer.fit()
        return trainer.state.model.weight.detach()

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_empty_data_is_an_error() -> None:
    """Data without a batch would train for ever."""
    with pytest.raises(hf.ConfigError, match="no batch"):
        plain(None, train_dataloader=[]).fit()


def test_schedulers_by_batch() -> None:
    """Schedulers step after each epoch, or after each batch if asked."""
    for by_batch, steps in ((False, 2), (True, 12)):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        plain(None, model=model, optimizers=optimizer, schedulers=scheduler, step_schedulers_every_batch=by_batch).fit()
        assert scheduler.last_epoch == steps


def test_several_processes_need_a_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several processes, by its environment, with nothing in it that says where they meet."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(hf.ConfigError, match="this is rank 0 of 2, and MASTER_ADDR"):
        plain(None)


def test_json_lines_are_written_with_each_save(tmp_path: Path) -> None:
    """No checkpoint is ahead of its metrics, and what a training that dies has logged is written."""
    seen: list[int] = []

    def count(state: Any, event: Any) -> bool:
        seen.append(len(path.read_text().splitlines()) if path.exists() else 0)
        return int(state.timestamp.batch) == 2

    path = tmp_path / "log.jsonl"
    trainer = plain(tmp_path / "runs", loggers=JSONLLogger(path), save_interval=count, callbacks=CrashAt(4))
    with pytest.raises(Crash):
        trainer.fit()
    assert seen == [0, 0, 2]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    trainer.close()


def test_rows_are_json(tmp_path: Path) -> None:
    """A loss that is not finite is written as any parser of JSON takes it; a metric called "step" hides no step."""
    path = tmp_path / "rows.jsonl"
    with plain(None, loggers=JSONLLogger(path)) as trainer:
        rates = [1.0, float("inf")]
        trainer.logger.log_metrics({"loss": torch.tensor(float("nan")), "rates": rates, "step": 7, "time": "noon"}, 3)
    row = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert isinstance(row.pop("time"), float)
    assert row == {"step": 3, "loss": "NaN", "rates": [1.0, "Infinity"], "metrics/step": 7, "metrics/time": "noon"}
