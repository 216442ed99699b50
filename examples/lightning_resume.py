"""PyTorch Lightning, killed in the middle and started again: the same weights as without the kill.

    python examples/lightning_resume.py [DIRECTORY OR s3://BUCKET/RUN]

Needs `pip install lightning`. The script starts itself: the first life is killed by SIGKILL in epoch 3, the second goes
on from the newest sound checkpoint, and a third run without any kill says what the weights should be.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import warnings

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from holdfast.lightning import HoldfastCheckpointIO

EPOCHS = 6


class Regression(pl.LightningModule):
    """A small model on made-up data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, _):
        """Return the loss of one batch."""
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        """Use AdamW, whose state has to come back too."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        """Give the same data in the same order in every life."""
        features = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=32)


class Kill(pl.Callback):
    """Ends this process the hard way."""

    def on_train_epoch_start(self, trainer, pl_module):
        """Die at the start of epoch 3."""
        if trainer.current_epoch == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def train(root: str, *callbacks: pl.Callback) -> Regression:
    """Train, from where an earlier life of this run was."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    io = HoldfastCheckpointIO(root)
    found = io.latest()
    print("going on from", os.path.basename(found) if found else "nothing", flush=True)
    model = Regression()
    best = pl.callbacks.ModelCheckpoint(
        dirpath="unused", monitor="loss", save_top_k=2, save_last=True, filename="{epoch}"
    )
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", plugins=[io], callbacks=[best, *callbacks], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, ckpt_path=found)
    return model


def main() -> None:
    """Kill, go on, compare."""
    if sys.argv[1:2] == ["first-life"]:
        train(sys.argv[2], Kill())
    with tempfile.TemporaryDirectory() as scratch:
        root = sys.argv[1] if len(sys.argv) > 1 else f"{scratch}/run"
        killed = subprocess.run([sys.executable, __file__, "first-life", root], check=False)
        print("the first life ended with status", killed.returncode)
        resumed = train(root).state_dict()
        whole = train(f"{scratch}/whole").state_dict()
        same = all(torch.equal(value, resumed[name]) for name, value in whole.items())
        print("weights are the same as without the kill:", same)
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
