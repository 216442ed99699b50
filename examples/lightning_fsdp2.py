"""PyTorch Lightning with the weights spread over two workers (FSDP2): one is killed, and the end is the same.

    python examples/lightning_fsdp2.py [DIRECTORY OR s3://BUCKET/RUNS]

Needs `pip install lightning`. Every worker stores its shards. With GPUs each worker takes one, without them they train
on the CPU. The first fit loses a worker in epoch 2 and goes on from the end of epoch 1; the second is left in peace, to
say what the weights should be.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.lightning import ReportCallback
from holdfast.torch import TorchTrainer

WORKERS, EPOCHS = 2, 4


class Regression(pl.LightningModule):
    """A small model on made-up data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank, before they are spread
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def configure_model(self) -> None:
        """Spread the weights over all workers, layer by layer."""
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def on_train_start(self) -> None:
        """Note where this life begins."""
        self.began = self.current_epoch

    def training_step(self, batch, _):
        """Return the loss of one batch."""
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        """Use AdamW, whose state is spread like the weights."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        """Give the same data in the same order in every life."""
        features = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=16)

    def on_train_end(self) -> None:
        """Note a digest of the whole weights, which no rank has alone."""
        whole = [one.full_tensor() for one in self.net.parameters()]
        self.digest = torch.cat([one.detach().flatten() for one in whole]).double().sum().item()


class Kill(pl.Callback):
    """Ends one worker the hard way."""

    def on_train_epoch_start(self, trainer, pl_module):
        """Die at the start of epoch 2."""
        if trainer.current_epoch == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(config: dict[str, Any]) -> None:
    """Train on one of the workers, from where an earlier life of them was."""
    checkpoint = holdfast.get_checkpoint()
    callbacks: list[pl.Callback] = [ReportCallback()]
    if config["kill"] and checkpoint is None:
        callbacks.append(Kill())
    model = Regression()
    strategy = ModelParallelStrategy(data_parallel_size=WORKERS, tensor_parallel_size=1)
    trainer = pl.Trainer(
        max_epochs=EPOCHS, devices=WORKERS, strategy=strategy, logger=False, callbacks=callbacks,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    if checkpoint is None:
        trainer.fit(model)
    else:
        with checkpoint.as_directory() as directory:
            trainer.fit(model, ckpt_path=f"{directory}/{ReportCallback.CHECKPOINT_NAME}")
    holdfast.report({"epoch": EPOCHS, "began": model.began, "digest": model.digest})


def fit(root: str, *, kill: bool) -> holdfast.Result:
    """Run the workers to the end of the training."""
    return TorchTrainer(
        train,
        train_loop_config={"kill": kill},
        scaling_config=holdfast.ScalingConfig(num_workers=WORKERS, use_gpu=torch.cuda.device_count() >= WORKERS),
        run_config=holdfast.RunConfig(
            name="killed" if kill else "whole",
            storage_path=root,
            checkpoint_config=holdfast.CheckpointConfig(num_to_keep=2),
            failure_config=holdfast.FailureConfig(max_failures=1),
        ),
    ).fit()


def main() -> None:
    """Lose a worker, go on, compare."""
    with tempfile.TemporaryDirectory() as scratch:
        root = sys.argv[1] if len(sys.argv) > 1 else scratch
        killed, whole = fit(root, kill=True), fit(root, kill=False)
        print(f"{len(killed.attempts)} attempts; the newest checkpoint is {killed.checkpoint.uri}")
        began = killed.metrics["began"]
        print("the last attempt went on from epoch", began)
        same = killed.metrics["digest"] == whole.metrics["digest"]
        print("weights are the same as without the kill:", same)
        sys.exit(0 if same and began > whole.metrics["began"] == 0 else 1)


if __name__ == "__main__":
    main()
