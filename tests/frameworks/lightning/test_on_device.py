"""A training on an accelerator that is as late as CUDA allows: it ends in the middle and goes on bit by bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import on_device
from tiny import TREES
from torch.utils.data import DataLoader, TensorDataset

from holdfast.lightning import HoldfastCallback, HoldfastCheckpointIO
from holdfast.testing import assert_state_equal


class Dead(Exception):
    """What a life dies of."""


def make_trainer(pl: Any, folder: Path) -> tuple[Any, Any]:
    """Return a trainer whose strategy puts everything on the first late device, and its checkpoint plugin."""

    class Late(pl.accelerators.Accelerator):  # type: ignore[misc, name-defined]
        def setup_device(self, device: torch.device) -> None:
            torch.late.set_device(device)

        def teardown(self) -> None:
            pass

        def get_device_stats(self, device: torch.device) -> dict[str, Any]:
            return {}

        parse_devices = staticmethod(int)
        get_parallel_devices = staticmethod(lambda devices: [torch.device("late", number) for number in range(devices)])
        auto_device_count = staticmethod(lambda: 2)
        is_available = staticmethod(lambda: True)
        name = staticmethod(lambda: "late")

    io = HoldfastCheckpointIO(str(folder / "run"))
    strategy = pl.strategies.SingleDeviceStrategy(torch.device("late", 0), accelerator=Late(), checkpoint_io=io)
    keep = pl.callbacks.ModelCheckpoint(every_n_train_steps=3, save_top_k=2, monitor="step", mode="max")
    trainer = pl.Trainer(
        max_epochs=2, strategy=strategy, callbacks=[HoldfastCallback(), keep], default_root_dir=str(folder),
        enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip
    return trainer, io


def fit(tree: str, folder: Path, *, die_at: int | None = None) -> Any:
    pl = importlib.import_module(tree)

    class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(128, 160), torch.nn.BatchNorm1d(160), torch.nn.Dropout(0.2), torch.nn.Linear(160, 1)
            )

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            if self.global_step == die_at:
                raise Dead
            assert batch[0].device.type == "late"
            return (self.net(batch[0]) + torch.randn(1, device=self.device)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    pl.seed_everything(1, verbose=False)
    model = Net()
    data = TensorDataset(torch.randn(28, 128, generator=torch.Generator().manual_seed(3)))
    trainer, io = make_trainer(pl, folder)
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=io.latest())
    assert trainer.global_step == 14
    generators = [torch.rand(2, device=f"late:{number}").cpu() for number in range(2)]
    optimizer = [{k: v.cpu() for k, v in each.items()} for each in trainer.optimizers[0].state.values()]
    return {"model": {k: v.cpu() for k, v in model.state_dict().items()}, "optimizer": optimizer, "rng": generators}


@pytest.mark.parametrize("tree", TREES)
@on_device
def test_a_lightning_training_on_a_device_goes_on(tree: str, tmp_path: Path) -> None:
    """Weights, statistics, optimizer, and the generators of host and devices are those of the uninterrupted one."""
    whole = fit(tree, tmp_path / "whole")
    with pytest.raises(Dead):
        fit(tree, tmp_path / "parts", die_at=8)
    assert_state_equal(whole, fit(tree, tmp_path / "parts"))
