"""A Lightning module under either name of the package, trained the same way every time."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

TREES = ["lightning.pytorch", "pytorch_lightning"]
EPOCHS = 5


def data() -> TensorDataset:
    features = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(features, features.sum(1, keepdim=True))


def make_model(tree: str, **hparams: Any) -> Any:
    pl = importlib.import_module(tree)

    class Tiny(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 8, lr: float = 0.05, **more: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
            self.log("train_loss", loss, on_epoch=True, on_step=False)
            return loss

        def validation_step(self, batch, _):
            self.log("val_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

        def train_dataloader(self):
            return DataLoader(data(), batch_size=8)

        def val_dataloader(self):
            return DataLoader(data(), batch_size=16)

    torch.manual_seed(0)
    return Tiny(**hparams)


def make_trainer(tree: str, folder: Path, *, plugins: Any = None, callbacks: Any = (), **options: Any) -> Any:
    pl = importlib.import_module(tree)
    options = {"max_epochs": EPOCHS, "devices": 1, "logger": False, **options}
    return pl.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=list(callbacks), plugins=plugins, **options,
    )  # fmt: skip


def keeper(tree: str, folder: Path | str, **options: Any) -> Any:
    """What ranks and names checkpoints."""
    pl = importlib.import_module(tree)
    told = {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "filename": "{epoch}", **options}
    return pl.callbacks.ModelCheckpoint(dirpath=folder, **told)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
