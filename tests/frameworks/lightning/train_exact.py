"""A training with everything that is random: `train_exact.py TREE FOLDER OPTIONS` with OPTIONS as JSON.

Trains with dropout, shuffled data, random augmentation and a validation that draws, and dies by SIGKILL in the step
``kill`` if one is named. Prints one line of JSON at the end: the digest of everything there is.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from holdfast.lightning import HoldfastCallback, HoldfastCheckpointIO
from holdfast.verify.state import digests

tree, folder, told = sys.argv[1:]
options = json.loads(told)
pl = importlib.import_module(tree)


class Noisy(Dataset):  # type: ignore[type-arg]
    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.full((4,), index / 48) + 0.1 * torch.randn(4) + random.random() + float(np.random.rand())
        return x, x.sum(0, keepdim=True)


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self):
        super().__init__()
        width = options.get("width", 8)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        if self.global_step == options.get("kill"):
            self.trainer.strategy.checkpoint_io.teardown()  # what was handed over is durable
            os.kill(os.getpid(), signal.SIGKILL)
        noise = random.random() + float(np.random.rand())
        return (self.net(batch[0] + noise) - batch[1]).pow(2).mean()

    def validation_step(self, batch, _):
        self.log("val_loss", (self.net(batch[0]) - batch[1] + torch.rand(1)).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def train_dataloader(self):
        return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=options.get("workers", 0))

    def val_dataloader(self):
        return DataLoader(Noisy(), batch_size=16)


def main() -> None:
    torch.set_num_threads(1)
    pl.seed_everything(options.get("seed", 1), verbose=False)
    io = HoldfastCheckpointIO(f"{folder}/run" if options.get("root", True) else None)
    keep: dict[str, Any] = {"save_top_k": 2, "monitor": "step", "mode": "max", **options.get("keep", {})}
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", devices=options.get("devices", 1), plugins=[io], default_root_dir=folder,
        callbacks=[*([HoldfastCallback()] if options.get("exact", True) else []), pl.callbacks.ModelCheckpoint(**keep)],
        enable_progress_bar=False, enable_model_summary=False, logger=pl.loggers.CSVLogger(folder),
        strategy="ddp" if options.get("devices", 1) > 1 else "auto", **options.get("trainer", {}),
    )  # fmt: skip
    model = Net()
    where = None if options.get("root", True) else f"{folder}/lightning_logs/version_0/checkpoints"
    known = options.get("root", True) or os.path.isdir(str(where))
    trainer.fit(model, ckpt_path=io.latest(where) if known else None)
    if trainer.is_global_zero:
        assert all(weight.isfinite().all() for weight in model.parameters())
        everything = {"model": model, "optimizer": trainer.optimizers[0].state_dict(), "python": random.random()}
        print(json.dumps({**digests(everything), "torch": torch.rand(1).item(), "numpy": float(np.random.rand())}))


main()
