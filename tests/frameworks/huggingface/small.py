"""A small network in a loop of one's own with an `Accelerator`: gradients gather, and do not divide the epoch."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

import holdfast as hf
from holdfast.accelerate import Checkpointer, load_state, report_model, report_state

EPOCHS = 3


class Points(Dataset[Any]):
    """26 points: 7 batches of 4, so that the last gathering of an epoch is a short one."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, 26)[index] * torch.arange(1.0, 5.0)
        return x, x.square().sum()[None]


class Average:
    """An object of the user's own for ``register_for_checkpointing``."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * loss

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Prepared:
    """What a script makes before its loop."""

    def __init__(
        self, *, scaler: bool = False, stateful: bool = False, on_late_device: bool = False, dispatched: bool = False
    ) -> None:
        torch.set_num_threads(1)
        if on_late_device:
            import late_device

            late_device.load()
            os.environ["ACCELERATE_TORCH_DEVICE"] = "late:0"  # how Accelerate is given a device whose name it lacks
        set_seed(5)
        self.accelerator = accelerator = Accelerator(
            cpu=not on_late_device, gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(
                use_stateful_dataloader=stateful, use_seedable_sampler=True, dispatch_batches=dispatched or None
            ),
        )  # fmt: skip
        if scaler:  # as with fp16 on a GPU
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        width = 8192 if on_late_device else 16  # enough to be copied late
        model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = DataLoader(Points(), batch_size=4, shuffle=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.average = Average()
        accelerator.register_for_checkpointing(self.average)

    def train_one(self, batch: Any) -> torch.Tensor:
        x, y = batch
        with self.accelerator.accumulate(self.model):
            loss = torch.nn.functional.mse_loss(self.model(x), y)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.average.add(loss.item())
        return loss

    def ended(self) -> dict[str, Any]:
        """Everything that a resume has to bring back."""
        model = self.accelerator.unwrap_model(self.model).state_dict()
        device = self.accelerator.device
        generator = (torch if device.type == "cpu" else torch.get_device_module(device)).get_rng_state()
        return {
            "device": str(device), "generator": generator.tolist(),
            "weights": {name: value.tolist() for name, value in model.items()},
            "rate": self.scheduler.get_last_lr(), "average": self.average.value,
            "scale": None if self.accelerator.scaler is None else self.accelerator.scaler.get_scale(),
        }  # fmt: skip


def checkpointed(told: dict[str, Any]) -> None:
    """A loop with a `Checkpointer`."""
    prepared = Prepared(**told.get("options", {}))
    with Checkpointer(told["run"], prepared.accelerator, every=2, keep=hf.Keep(last=1, best=1, metric="loss")) as ck:
        resumed = ck.resumed_from.step if ck.resumed_from is not None else None
        for _ in ck.epochs(EPOCHS):
            for batch in ck.batches(prepared.loader):
                ck.step(loss=prepared.train_one(batch))
                if ck.global_step == told.get("kill_at") and prepared.accelerator.sync_gradients:
                    ck.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
        steps = ck.global_step
    ended = {**prepared.ended(), "steps": steps, "resumed": resumed}
    if prepared.accelerator.is_main_process:
        Path(told["result"]).write_text(json.dumps(ended))
    prepared.accelerator.wait_for_everyone()
    prepared.accelerator.end_training()  # gloo's threads abort a process that ends with its group


def reported(config: dict[str, Any]) -> None:
    """The ``train_func`` of the function trainer: ``save_state`` after every epoch; the first life ends in epoch 2."""
    prepared = Prepared()
    accelerator = prepared.accelerator
    checkpoint = load_state(accelerator)
    for epoch in range(checkpoint.metrics["epoch"] if checkpoint is not None else 0, EPOCHS):
        prepared.loader.set_epoch(epoch)  # the order of the seedable sampler: nothing else tells a resumed loader
        for batch in prepared.loader:
            prepared.train_one(batch)
            if config.get("kill") and epoch == 2 and checkpoint is None:
                os.kill(os.getpid(), signal.SIGKILL)
        report_state(accelerator, {"epoch": epoch + 1, "score": -prepared.average.value})
    report_model(accelerator, prepared.model, {"epoch": EPOCHS, "score": 0.0})
    ended = prepared.ended()
    if accelerator.is_main_process:
        Path(config["result"]).write_text(json.dumps(ended))


if __name__ == "__main__":
    checkpointed(json.loads(sys.argv[1]))
