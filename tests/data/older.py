"""Runs of an earlier version, and the command that made them: ``python tests/data/older.py FOLDER``, with that version.

``8ea6d6b`` was made once with the sources of that commit and is never made again: newer versions have to list, verify,
load and resume it. The numbers are whole, so that every machine comes to the same ones.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch

import holdfast as hf

SAMPLES = 12
EPOCHS = 2


class Died(Exception):
    """The end of a life in the middle of its training."""


class Counts(torch.nn.Module):
    """Counts in a parameter how often each sample was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, batch: Any) -> torch.Tensor:
        return -self.seen[batch].sum()

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs


def loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(range(SAMPLES), batch_size=2, shuffle=True)


def loop(run: str | Path, *, until: int = EPOCHS * SAMPLES, pin: int = 0) -> tuple[Counts, Any]:
    """Train a loop of one's own up to a step; returns the model, and the checkpoint that it went on from."""
    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = {"model": model, "optimizer": optimizer, "best": 0.5, "rng": hf.RNG}
    batches = loader()
    with hf.Checkpointer(run, state, every=2, keep=hf.Keep(last=2)) as ck:
        for _ in ck.epochs(EPOCHS):
            for batch in ck.batches(batches):
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
                ck.step(loss=1.0 / (ck.global_step + 1), note="whole numbers")
                if pin and ck.global_step == pin:
                    ck.wait()
                    ck.latest().pin()
                if ck.global_step >= until:
                    ck.wait()
                    raise Died
    return model, ck.resumed_from


def worker(config: dict[str, Any]) -> None:
    """Report one state an epoch, in the manner of Ray Train."""
    model = Counts()
    start = 0
    if (checkpoint := hf.get_checkpoint()) is not None:
        start = checkpoint.load(into={"model": model, "epoch": 0})["epoch"]
    for epoch in range(start, config["epochs"]):
        with torch.no_grad():
            model.seen += 1
        hf.report({"epoch": epoch, "loss": 1.0 / (epoch + 1)}, state={"model": model, "epoch": epoch + 1})


def workers(storage: str | Path, *, epochs: int) -> hf.Result:
    from holdfast.torch import TorchTrainer

    return TorchTrainer(
        worker,
        train_loop_config={"epochs": epochs},
        scaling_config=hf.ScalingConfig(num_workers=1),
        run_config=hf.RunConfig(
            name="workers", storage_path=str(storage), checkpoint_config=hf.CheckpointConfig(num_to_keep=2)
        ),
    ).fit()


def trainer(folder: str | Path, *, max_duration: str, name: str, **options: Any) -> hf.Trainer:
    """Train with the loop trainer, in the manner of Composer: checkpoints that are single files, or directories."""
    model = Counts()
    made = hf.Trainer(
        model=model,
        train_dataloader=loader(),
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        max_duration=max_duration,
        save_folder=str(folder),
        save_filename=name,
        save_interval="1ep",
        run_name="older",
        progress_bar=False,
        **options,
    )
    made.fit()
    return made


if __name__ == "__main__":
    home = Path(sys.argv[1])
    for until, pin in ((4, 2), (8, 0)):
        with contextlib.suppress(Died):
            loop(home / "loop", until=until, pin=pin)
    workers(home, epochs=2)
    trainer(home / "files", max_duration="1ep", name="ep{epoch}-ba{batch}.pt")
    trainer(home / "folders", max_duration="1ep", name="ep{epoch}-ba{batch}")
