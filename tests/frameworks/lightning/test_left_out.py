"""What Lightning leaves out of a resume by itself, and `HoldfastCallback` puts back: compared with a whole training."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TREES, make_trainer
from torch.utils.data import DataLoader, TensorDataset

from holdfast.lightning import HoldfastCallback, HoldfastCheckpointIO

TREE = TREES[0]
pl = importlib.import_module(TREE)
LENGTH = 6


class OutOfLuckError(Exception):
    pass


class Rows(pl.loggers.Logger):  # type: ignore[misc, name-defined]
    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, metrics.get("loss", metrics.get("val_loss"))))


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Draws at the beginning of each epoch and in each batch; fails in batch ``fails``."""

    plateau, lr, size = False, 0.01, 4

    def __init__(self, fails: int = -1) -> None:
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        self.fails, self.trained, self.starts = fails, 0, []

    def on_train_epoch_start(self):
        self.starts.append((self.current_epoch, torch.rand(1).item()))

    def training_step(self, batch, _):
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == self.fails:
            raise OutOfLuckError
        x = batch[0].to(self.dtype) + torch.rand(1, dtype=self.dtype)
        loss = self.head(self.backbone(x)).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", torch.tensor(1.0 + self.current_epoch))

    def train_dataloader(self):
        data = torch.randn(LENGTH * 4, 3, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=self.size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(4, 3)), batch_size=4)

    def configure_optimizers(self):
        # A frozen layer is added by `BackboneFinetuning`, when it thaws.
        optimizer = torch.optim.Adam([weight for weight in self.parameters() if weight.requires_grad], lr=self.lr)
        if self.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        return optimizer


class WithPlateau(Net):
    plateau = True


class Searches(Net):
    lr, size = 1e-4, 1

    def validation_step(self, batch, _):
        self.log("val_loss", torch.rand(1))


class Thaws(Net):
    def __init__(self, fails: int = -1) -> None:
        super().__init__(fails)
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self):
        self.backbone.requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, *, start: Any = None, saves: Any = None, model: Any = Net, fails: int = -1, **options: Any):
    """Train; returns all there is at the end, the rows that were logged, and what epochs began with."""
    pl.seed_everything(1 if start is None else 2, verbose=False)
    made = [make() for make in options.pop("callbacks", ())]
    if saves is not None:
        made.append(pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **saves))
    logger, module = Rows(), model(fails)
    trainer = make_trainer(
        TREE, folder, callbacks=[HoldfastCallback(), *made], enable_checkpointing=bool(made), num_sanity_val_steps=0,
        **{"max_epochs": 3, "logger": logger, "log_every_n_steps": 1, **options},
    )  # fmt: skip
    with contextlib.suppress(OutOfLuckError):
        trainer.fit(module, ckpt_path=start)
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return (weights, rates, trainer.global_step, trainer.current_epoch), logger.rows, module.starts


CASES: dict[str, dict[str, Any]] = {
    "a plateau": {"model": WithPlateau},
    "float64": {"precision": "64-true"},
    "overfitted": {"overfit_batches": 4},
    "gathered by epoch": {"callbacks": [lambda: pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]},
    "thawed": {"callbacks": [lambda: pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)]},
    "averaged": {"callbacks": [lambda: pl.callbacks.StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=1)]},
    "pruned": {"callbacks": [lambda: pl.callbacks.ModelPruning("l1_unstructured", amount=0.3)]},
    "searched": {
        "model": Searches,
        "callbacks": [
            lambda: pl.callbacks.BatchSizeFinder(steps_per_trial=1, init_val=1, max_trials=3, batch_arg_name="size"),
            lambda: pl.callbacks.LearningRateFinder(min_lr=1e-4, num_training_steps=10),
        ],
    },
}


@pytest.mark.parametrize("case", CASES)
def test_within_an_epoch(tmp_path: Path, case: str) -> None:
    """Checkpoints of the second epoch and the third: every weight, rate and logged row is that of one training."""
    options = CASES[case]
    whole, rows, _ = fit(tmp_path, saves={"every_n_train_steps": 1}, **options)
    within = sorted(tmp_path.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    for path in (within[LENGTH], within[-2]):
        resumed, tail, _ = fit(tmp_path, start=path, **options)
        assert resumed == whole, path
        assert tail == rows[-len(tail) :], path


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 3 * LENGTH}])
@pytest.mark.parametrize("saves", [{"every_n_train_steps": LENGTH}, {"every_n_epochs": 1}])
def test_at_the_end_of_an_epoch(tmp_path: Path, limits: Any, saves: Any) -> None:
    """After the last batch too: the next epoch begins like any other, with its hook and the draws of that."""
    whole, rows, starts = fit(tmp_path, saves=saves, **limits)
    resumed, tail, begun = fit(tmp_path, start=tmp_path / f"step={LENGTH}.ckpt", **limits)
    assert resumed == whole
    assert tail == rows[-len(tail) :]
    assert begun == starts[1:]


@pytest.mark.parametrize("case", ["averaged", "pruned"])
def test_after_the_end_of_an_epoch(tmp_path: Path, case: str) -> None:
    """What these callbacks have done by then is not lost."""
    options = CASES[case]
    whole, rows, _ = fit(tmp_path, saves={"save_on_train_epoch_end": True}, **options)
    for steps in (LENGTH, 2 * LENGTH):
        resumed, tail, _ = fit(tmp_path, start=tmp_path / f"step={steps}.ckpt", **options)
        assert resumed == whole
        assert tail == rows[-len(tail) :]


ENDS: dict[str, tuple[int, Any]] = {
    "averaged by step": (3, lambda: pl.callbacks.EMAWeightAveraging(decay=0.9)),
    "averaged by epoch": (3, lambda: pl.callbacks.StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=1)),
    "stopped early": (2, lambda: pl.callbacks.EarlyStopping("val_loss", patience=1)),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_training_that_had_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """The same script once more trains nothing, and has what it had at the end: averages, not the last weights."""
    num_epochs, callback = ENDS[case]
    whole, _, _ = fit(tmp_path, saves={"save_on_train_epoch_end": True}, callbacks=[callback])
    end = tmp_path / f"step={num_epochs * LENGTH}.ckpt"
    again, rows, starts = fit(tmp_path, start=end, callbacks=[callback])
    assert again == whole
    assert (rows, starts) == ([], [])
    place = f"step {num_epochs * LENGTH}, epoch {num_epochs}"
    assert f"{end} is the end of a training, at {place}" in capsys.readouterr().err


def test_an_early_stop_does_not_hold_for_ever(tmp_path: Path) -> None:
    """Without the callback that has stopped it, a training goes on."""
    fit(tmp_path, saves={"save_on_train_epoch_end": True}, callbacks=[ENDS["stopped early"][1]])
    assert fit(tmp_path, start=tmp_path / f"step={2 * LENGTH}.ckpt")[0][2:] == (3 * LENGTH, 3)


def test_what_was_to_be_accumulated_after_the_last_batch(tmp_path: Path) -> None:
    """The epoch after it has the number of batches to a step that is its own."""
    options = CASES["gathered by epoch"]
    whole = fit(tmp_path, saves={"every_n_train_steps": LENGTH}, **options)[0]
    assert fit(tmp_path, start=tmp_path / f"step={LENGTH}.ckpt", **options)[0] == whole


def test_a_search_is_no_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What finders save and load for themselves counts for nothing, and a resume that leaves them out says so."""
    options = {**CASES["searched"], "max_epochs": 1}
    fit(tmp_path, saves={"every_n_train_steps": 2}, **options)
    assert "holdfast: fresh start: fit() was given no ckpt_path" in capsys.readouterr().err
    fit(tmp_path, start=tmp_path / "step=4.ckpt", **options)
    said = capsys.readouterr().err
    assert "step=4.ckpt at step 4, epoch 0" in said
    assert "BatchSizeFinder does not search again: size is 4" in said
    assert "LearningRateFinder does not search again: lr is " in said
    fit(tmp_path / "without", saves={"every_n_train_steps": 2}, max_epochs=1)
    fit(tmp_path, start=tmp_path / "without" / "step=4.ckpt", **options)
    assert "NOT restored  size: no BatchSizeFinder had found one" in capsys.readouterr().err


def test_the_steps_of_a_logger_after_an_exception(tmp_path: Path) -> None:
    """The batch that failed had not been counted."""
    whole, rows, _ = fit(tmp_path)
    fit(tmp_path, fails=8, callbacks=[lambda: pl.callbacks.OnExceptionCheckpoint(tmp_path, "failed")])
    resumed, tail, _ = fit(tmp_path, start=tmp_path / "failed.ckpt")
    assert resumed == whole
    assert tail == rows[-len(tail) :]


def test_what_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """A hook that is not called again, and what it had thawed; a plateau without its metric; a second fit."""
    fit(tmp_path, saves={"every_n_train_steps": 4}, model=WithPlateau)
    fit(tmp_path, start=tmp_path / "step=8.ckpt", model=WithPlateau, max_epochs=2, limit_val_batches=0)
    assert "NOT restored  on_train_epoch_start of WithPlateau" in capsys.readouterr().err
    assert "no step of ReduceLROnPlateau after this epoch: no value of val_loss yet" in caplog.text
    thaws = tmp_path / "thaws"
    fit(thaws, saves={"every_n_train_steps": 4}, model=Thaws)
    assert "frozen" not in caplog.text
    fit(thaws, start=thaws / "step=8.ckpt", model=Thaws)
    assert "2 parameter(s) are frozen now and were trained when the checkpoint was saved (backbone.bias" in caplog.text
    trainer = make_trainer(TREE, tmp_path, callbacks=[HoldfastCallback()], max_epochs=1, enable_checkpointing=False)
    module = Net()
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert f"holdfast: goes on at step {LENGTH} with what this process has" in capsys.readouterr().err


class Averages(Net):
    def __init__(self, fails: int = -1) -> None:
        super().__init__(fails)
        self.metric = torch.nn.Module()
        self.metric._update_count = 1

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss


def test_averages_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing is averaged over the epoch nothing is lost, and nothing is said."""
    for model, said in ((Net, ""), (Averages, "NOT restored  averages over the epoch of mean, metric: Lightning")):
        fit(tmp_path / model.__name__, saves={"every_n_train_steps": 4}, model=model, max_epochs=1)
        capsys.readouterr()
        fit(tmp_path, start=tmp_path / model.__name__ / "step=4.ckpt", model=model, max_epochs=1)
        block = capsys.readouterr().err
        assert said in block
        assert ("averages over the epoch" in block) == bool(said)


def test_a_strategy_that_saves_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It does not use the plugin, so `latest` would find nothing at every start: the block says so."""

    class ModelParallelStrategy(pl.strategies.SingleDeviceStrategy):  # type: ignore[misc, name-defined]
        pass

    for strategy, is_said in ((ModelParallelStrategy("cpu"), True), ("auto", False)):
        make_trainer(
            TREE, tmp_path, callbacks=[HoldfastCallback()], plugins=[HoldfastCheckpointIO(tmp_path / "run")],
            strategy=strategy, max_epochs=1,
        ).fit(Net())  # fmt: skip
        said = "ModelParallelStrategy saves by itself: HoldfastCheckpointIO is not used" in capsys.readouterr().err
        assert said == is_said


class Larger(Net):
    size = 8


def test_another_number_of_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning counts batches: where their size changes within an epoch samples are left out, and it is said."""
    fit(tmp_path, saves={"every_n_train_steps": 2})
    capsys.readouterr()
    for steps, model, is_said in ((8, Net, False), (6, Larger, False), (8, Larger, True)):
        fit(tmp_path, start=tmp_path / f"step={steps}.ckpt", model=model)
        said = "NOT restored  length of the epoch: it had 6 batches, now one has 3" in capsys.readouterr().err
        assert said == is_said
