"""A script for Composer's documented arguments: run with "composer" or "holdfast", writes what came of it as JSON."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
WHICH = sys.argv[1]
if WHICH == "composer":
    from composer import Trainer
    from composer.callbacks import CheckpointSaver
    from composer.models import ComposerModel as Module
else:
    from torch.nn import Module

    from holdfast import Trainer
    from holdfast.callbacks import CheckpointSaver


class Model(Module):  # type: ignore[misc,valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return functional.cross_entropy(outputs, batch[1])


def make(folder: str | None, **options: Any) -> Any:
    torch.manual_seed(1)
    model = Model()
    data = TensorDataset(torch.randn(22, 4), torch.arange(22) % 3)
    options = {
        "train_dataloader": DataLoader(data, batch_size=5), "max_duration": "2ep", "device": "cpu", "run_name": "me",
        "save_filename": "ep{epoch}-ba{batch}.pt", "save_overwrite": True, "progress_bar": False,
        "save_latest_filename": "latest", "optimizers": torch.optim.AdamW(model.parameters(), lr=1e-3), **options,
    }  # fmt: skip
    return Trainer(model=model, save_folder=folder, **options)


def tree() -> list[str]:
    """Every file and link below the working directory."""
    found = []
    for path in sorted(Path().rglob("*")):
        if path.is_symlink():
            found.append(f"{path} -> {os.readlink(path)}")
        elif path.is_file():
            found.append(str(path))
    return found


def trained(folder: str = "runs", **options: Any) -> dict[str, Any]:
    trainer = make(folder, **options)
    trainer.fit()
    saved = list(trainer.saved_checkpoints)
    trainer.close()
    return {"saved": saved, "tree": tree()}


def asked() -> dict[str, Any]:
    seen = []

    def every(state: Any, event: Any) -> bool:
        seen.append((event.name, int(state.timestamp.batch)))
        return int(state.timestamp.batch) == 3

    return {**trained(save_interval=every), "asked": seen}


def content(**options: Any) -> dict[str, Any]:
    trained(max_duration="1ep", **options)
    found = torch.load("runs/ep1-ba5.pt", weights_only=False)
    state = found["state"]
    optimizers = {name: sorted(one["state"]) for name, one in state.get("optimizers", {}).items()}
    kept = [name for name in state if not name.endswith("_metrics")]  # Composer leaves out what is empty
    return {"top": list(found), "state": kept, "optimizers": optimizers, "model": list(state["model"])}


def savers() -> dict[str, Any]:
    each = [
        CheckpointSaver(folder="w", filename="b{batch}.pt", save_interval="2ba", weights_only=True,
                        num_checkpoints_to_keep=2, latest_filename="latest"),
        CheckpointSaver(folder="f", save_interval="1ep", filename="e{epoch}.pt", latest_filename="newest"),
    ]  # fmt: skip
    trainer = make(None, callbacks=each)
    trainer.fit()
    found = [list(one.saved_checkpoints) for one in each]
    trainer.close()
    return {"each": found, "tree": tree()}


def resumed() -> dict[str, Any]:
    trained(max_duration="1ep")
    trainer = make("runs", load_path="runs/latest")
    where = [int(trainer.state.timestamp.batch), int(trainer.state.timestamp.epoch)]
    trainer.fit()
    trainer.close()
    return {"where": where, "tree": tree()}


CASES: dict[str, Callable[[], Any]] = {
    "plain": trained,
    "folder": lambda: trained("./deep/{run_name}/x/"),
    "batches": lambda: trained(save_interval="3ba", max_duration="7ba"),
    "samples": lambda: trained(save_interval="7sp", max_duration="33sp"),
    "names": lambda: trained(save_filename="{run_name}/b{batch}-{sample}-{batch_in_epoch}-rank{rank}.pt"),
    "no link": lambda: trained(save_latest_filename=None),
    "link elsewhere": lambda: trained(save_latest_filename="links/{run_name}-newest.pt"),
    "link by epoch": lambda: trained(save_latest_filename="ep{epoch}-link.pt"),
    "keep": lambda: trained(save_num_checkpoints_to_keep=2, save_interval="2ba", max_duration="7ba"),
    "function": asked,
    "content": content,
    "content of weights": lambda: content(save_weights_only=True),
    "savers": savers,
    "resumed": resumed,
}

if __name__ == "__main__":
    root, out = Path(sys.argv[2]).absolute(), Path(sys.argv[3]).absolute()
    answers = {}
    for number, (name, case) in enumerate(CASES.items()):
        home = root / str(number)
        home.mkdir(parents=True)
        os.chdir(home)
        answers[name] = case()
    out.write_text(json.dumps(answers))
