"""`ReportCallback` inside the function trainer: real Lightning, two workers, a worker killed."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import EPOCHS, TREES, make_model, make_trainer, same, weights

import holdfast as hf
from holdfast.lightning import RayTrainReportCallback, ReportCallback
from holdfast.torch import TorchTrainer


def fit(function: Any, root: Path, *, workers: int, storage: str | None = None, **config: Any) -> hf.Result:
    return TorchTrainer(
        function,
        train_loop_config={"root": str(root), **config},
        scaling_config=hf.ScalingConfig(num_workers=workers),
        run_config=hf.RunConfig(
            name="run",
            storage_path=storage or root,
            failure_config=hf.FailureConfig(max_failures=1),
            checkpoint_config=hf.CheckpointConfig(
                num_to_keep=1, checkpoint_score_attribute="val_loss", checkpoint_score_order="min"
            ),
        ),
    ).fit()


def goes_on(trainer: Any, model: Any) -> None:
    checkpoint = hf.get_checkpoint()
    if checkpoint is None:
        trainer.fit(model)
        return
    with checkpoint.as_directory() as directory:
        trainer.fit(model, ckpt_path=f"{directory}/{ReportCallback.CHECKPOINT_NAME}")


def train_and_die(config):
    """In its first life: train to the end without Holdfast, then train and be killed; in the second go on."""
    tree, root = config["tree"], Path(config["root"])
    pl = importlib.import_module(tree)
    rank = hf.get_context().get_world_rank()
    options = {"devices": 2, "strategy": "ddp", "enable_checkpointing": False}
    first = hf.get_checkpoint() is None

    class Kill(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if first and trainer.current_epoch == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    if first:
        model = make_model(tree)
        make_trainer(tree, root, **options).fit(model)
        torch.save(weights(model), root / f"whole-{rank}.pt")
    model = make_model(tree)
    reports = ReportCallback(checkpoint_upload_mode=hf.CheckpointUploadMode.SYNC)  # there is something to go on from
    trainer = make_trainer(tree, root, callbacks=[Kill(), reports], **options)
    assert trainer.world_size == 2
    goes_on(trainer, model)
    torch.save(weights(model), root / f"resumed-{rank}.pt")


def test_two_ranks_killed_and_resumed(tmp_path: Path, bucket: str) -> None:
    """One of two DDP ranks is killed: both go on from the last report to S3, to the same weights as without the kill.

    Rank 0 alone stores, the best one stays, and nothing is left of what was on its way.
    """
    result = fit(train_and_die, tmp_path, workers=2, storage=f"{bucket}/fit", tree=TREES[0])
    assert len(result.attempts) == 2
    assert list(result.metrics_dataframe["epoch"]) == list(range(EPOCHS))
    assert list(result.metrics_dataframe["step"]) == [4, 8, 12, 16, 20]
    for rank in (0, 1):
        assert same(torch.load(tmp_path / f"resumed-{rank}.pt"), torch.load(tmp_path / f"whole-{rank}.pt"))
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        assert sorted(os.listdir(directory)) == ["checkpoint.ckpt", "manifest.json"]
    best = min(result.metrics_dataframe["val_loss"])
    kept = {metrics["val_loss"]: checkpoint.verify().ok for checkpoint, metrics in result.best_checkpoints}
    assert kept == {best: True}
    assert result.checkpoint.verify()


class WithMyMetrics(ReportCallback):
    """What users do: other metrics."""

    def metrics(self, trainer):
        return {**super().metrics(trainer), "mine": 1.0}


def train_in_its_rhythm(config):
    tree = config["tree"]
    callbacks = [WithMyMetrics(every_n_epochs=2), RayTrainReportCallback(every_n_steps=12)]
    goes_on(make_trainer(tree, config["root"], callbacks=callbacks, enable_checkpointing=False), make_model(tree))


def test_rhythm(tmp_path: Path) -> None:
    """Under the package's other name: metrics every epoch, a checkpoint every second one; every 12 steps as well."""
    result = fit(train_in_its_rhythm, tmp_path, workers=1, tree=TREES[1])
    frame = result.metrics_dataframe
    by_epoch = frame[frame["mine"] == 1.0]
    assert list(by_epoch["epoch"]) == list(range(EPOCHS))
    assert list(frame[frame["mine"].isna()]["step"]) == [12, 24, 36]
    assert result.checkpoint is not None
    assert result.checkpoint.name == "checkpoint_000004"  # after 12, 16, 24, 32 and 36 steps
    assert result.checkpoint.metrics["step"] == 36


class NotingMetrics(ReportCallback):
    """Notes what it would report."""

    def report(self, trainer, *, with_checkpoint=True):
        self.found.append(self.metrics(trainer))


def test_metrics_of_other_weights_are_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A validation every second epoch says nothing of the epochs between; it is said once."""
    noting = NotingMetrics()
    noting.found = []
    options = {"check_val_every_n_epoch": 2, "enable_checkpointing": False, "max_epochs": 6}
    with caplog.at_level("WARNING", "holdfast.frameworks"):
        make_trainer(TREES[0], tmp_path, callbacks=[noting], **options).fit(make_model(TREES[0]))
    assert ["val_loss" in metrics for metrics in noting.found] == [False, True] * 3
    assert all("train_loss" in metrics for metrics in noting.found)
    (said,) = [record.message for record in caplog.records if record.name == "holdfast.frameworks"]
    assert "val_loss: last validated at step 16, so the report of step 24 has no value" in said


class ReportsByItself(NotingMetrics):
    """What the guide shows: a rhythm of the user's own."""

    def on_train_epoch_end(self, trainer, pl_module):
        self.report(trainer)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", [NotingMetrics, ReportsByItself])
def test_reports_come_after_the_end_of_the_epoch_of_the_module(tmp_path: Path, tree: str, kind: Any) -> None:
    """What it logs and does there belongs to the epoch; other callbacks for checkpoints are found as ever."""

    class Own(type(make_model(tree))):
        def on_train_epoch_end(self):
            self.log("accuracy", float(self.current_epoch))

    pl = importlib.import_module(tree)
    for checkpoints in ([], [pl.callbacks.ModelCheckpoint(tmp_path)]):
        noting = kind()
        noting.found = []
        trainer = make_trainer(
            tree, tmp_path, callbacks=[noting, *checkpoints], max_epochs=3, enable_checkpointing=bool(checkpoints)
        )
        trainer.fit(Own())
        assert [metrics.get("accuracy") for metrics in noting.found] == [0, 1, 2]
        assert trainer.checkpoint_callbacks == checkpoints
        trainer.fit_loop.max_epochs = 4
        trainer.fit(Own())
        assert noting.found[-1]["accuracy"] == 3


def test_a_callback_is_free_after_an_exception(tmp_path: Path) -> None:
    """It can be given to the next trainer."""

    class Fails(type(make_model(TREES[0]))):
        def training_step(self, batch, _):
            raise RuntimeError("out of luck")

    noting = NotingMetrics()
    noting.found = []
    for model in (Fails(), make_model(TREES[0])):
        trainer = make_trainer(TREES[0], tmp_path, callbacks=[noting], max_epochs=1, enable_checkpointing=False)
        if isinstance(model, Fails):
            with pytest.raises(RuntimeError, match="out of luck"):
                trainer.fit(model)
        else:
            trainer.fit(model)
    assert len(noting.found) == 1


class Noting(ReportCallback):
    """Notes when it would report, and saves there."""

    def report(self, trainer, *, with_checkpoint=True):
        self.steps.append(trainer.global_step)
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def test_a_step_is_reported_once(tmp_path: Path) -> None:
    """Who goes on after step 3, whose gradients only gather at first, does not report it again."""
    lives = []
    for start in (None, tmp_path / "3.ckpt"):
        noting = Noting(every_n_steps=3)
        noting.steps, noting.folder = [], tmp_path
        trainer = make_trainer(
            TREES[0], tmp_path, callbacks=[noting], max_epochs=2, accumulate_grad_batches=2, enable_checkpointing=False
        )
        trainer.fit(make_model(TREES[0]), ckpt_path=start)
        lives.append(noting.steps)
    assert lives == [[3, 6], [6]]


def test_steps_that_come_in_twos_are_reported(tmp_path: Path) -> None:
    """A module that steps two optimizers in each batch: a report is due when a multiple is passed."""
    base = type(make_model(TREES[0]))

    class Two(base):
        automatic_optimization = False

        def training_step(self, batch, _):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(torch.nn.functional.mse_loss(self(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.01), torch.optim.SGD(self.parameters(), lr=0.02)]

    lives = []
    for start in (None, tmp_path / "6.ckpt"):
        noting = Noting(every_n_steps=5)
        noting.steps, noting.folder = [], tmp_path
        trainer = make_trainer(TREES[0], tmp_path, callbacks=[noting], max_epochs=1, enable_checkpointing=False)
        trainer.fit(Two(), ckpt_path=start)
        lives.append(noting.steps)
    assert lives == [[6, 10, 16], [10, 16]]


def train_as_for_ray(config):
    """As Ray Train's guide has it: devices are counted by the trainer around."""
    from holdfast.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    root = Path(config["root"])
    options = {"devices": "auto", "strategy": RayDDPStrategy(), "enable_checkpointing": False, "max_epochs": 1}
    trainer = make_trainer(TREES[0], root, plugins=[RayLightningEnvironment()], **options)
    trainer = prepare_trainer(trainer)
    model = make_model(TREES[0])
    trainer.fit(model)
    rank = hf.get_context().get_world_rank()
    assert (trainer.world_size, trainer.global_rank) == (2, rank)
    assert trainer.num_training_batches == 4  # half of the data
    torch.save(weights(model), root / f"ray-{rank}.pt")
    hf.report({"done": 1})


def test_the_strategies_of_ray_train(tmp_path: Path) -> None:
    """`RayDDPStrategy` and its environment take ranks from the workers; the weights agree."""
    assert fit(train_as_for_ray, tmp_path, workers=2).metrics == {"done": 1}
    assert same(torch.load(tmp_path / "ray-0.pt"), torch.load(tmp_path / "ray-1.pt"))


class Silent(ReportCallback):
    """Reports nothing."""

    def report(self, trainer, *, with_checkpoint=True):
        pass


def train_three_in_two_lives(config):
    """Without a break, then with one after two epochs."""
    root = Path(config["root"])
    options = {"devices": 3, "strategy": "ddp", "enable_checkpointing": False}
    models = [make_model(TREES[0], width=64) for _ in range(3)]
    make_trainer(TREES[0], root, callbacks=[Silent()], **options).fit(models[0])
    before = make_trainer(TREES[0], root, callbacks=[Silent()], max_epochs=2, **options)
    before.fit(models[1])
    before.save_checkpoint(root / "two.ckpt")
    make_trainer(TREES[0], root, callbacks=[Silent()], **options).fit(models[2], ckpt_path=root / "two.ckpt")
    hf.report({"same": same(weights(models[0]), weights(models[2]))})


def test_three_ranks_add_gradients_in_one_order(tmp_path: Path) -> None:
    """The first step after a resume gives the bits that it gives in the middle of a training."""
    assert fit(train_three_in_two_lives, tmp_path, workers=3).metrics == {"same": True}


def test_a_search_after_which_nothing_is_resumed(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A finder searches again in the next life, and Lightning then begins at step 0: it is said, once there was one."""
    trainer = SimpleNamespace(
        ckpt_path="here/.lr_find_1.ckpt", global_step=0, is_global_zero=True,
        strategy=SimpleNamespace(model=torch.nn.Linear(1, 1)),
    )  # fmt: skip
    for found, is_said in ((None, False), ("checkpoint_000003", True)):
        monkeypatch.setattr("holdfast.lightning.get_checkpoint", lambda found=found: found)
        ReportCallback().on_train_start(trainer, None)
        assert ("after which Lightning resumes nothing but weights" in caplog.text) == is_said
