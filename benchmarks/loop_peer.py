"""Composer's trainer on the work of `loop`; run by the Python that HOLDFAST_BENCH_COMPOSER names, prints JSON.

Stands alone: that Python has neither Holdfast nor the torch of this one.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

begun = time.perf_counter()
import torch  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

torch_s = time.perf_counter() - begun
warnings.simplefilter("ignore")
begun = time.perf_counter()
from composer import Callback, Trainer  # noqa: E402
from composer.models import ComposerModel  # noqa: E402

import_s = time.perf_counter() - begun


class Model(ComposerModel):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
            torch.nn.Linear(width, 10),
        )  # fmt: skip

    def forward(self, batch: Any) -> Any:
        return self.layers(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return functional.cross_entropy(outputs, batch[1])


class Held(Callback):  # type: ignore[misc]
    """Measures how long the saver holds training; it comes after the callbacks at a checkpoint event."""

    def __init__(self) -> None:
        self.begun, self.seconds = 0.0, list[float]()

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        self.begun = time.perf_counter()

    def batch_start(self, state: Any, logger: Any) -> None:
        if self.begun:
            self.seconds.append(time.perf_counter() - self.begun)


def trainer(width: int, loader: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Model(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Trainer(
        model=model, optimizers=optimizer, train_dataloader=loader, device="cpu", progress_bar=False, **options
    )


def step(width: int, batch: int, epochs: int) -> float:
    """Return milliseconds a batch; nothing is saved."""
    data = TensorDataset(torch.randn(batch * 40, width), torch.randint(10, (batch * 40,)))
    one = trainer(width, DataLoader(data, batch_size=batch, shuffle=True), max_duration=f"{epochs}ep")
    start = time.perf_counter()
    one.fit()
    seconds = time.perf_counter() - start
    one.close()
    return seconds / (40 * epochs) * 1e3


def saves(width: int, number: int, folder: str) -> list[float]:
    """Return the seconds that each save holds training."""
    held, rows = Held(), torch.randn(2 * number, width)
    data = TensorDataset(rows, torch.randint(10, (2 * number,)))
    one = trainer(
        width, DataLoader(data, batch_size=2), max_duration="1ep", save_folder=folder, save_interval="1ba",
        save_filename="ba{batch}.pt", save_num_checkpoints_to_keep=2, callbacks=held,
    )  # fmt: skip
    one.fit()
    one.close()
    shutil.rmtree(folder)
    return held.seconds


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    found = {
        "import_s": import_s,
        "torch_s": torch_s,
        "step_ms": [step(*asked["step"]) for _ in range(asked["repeat"] + 1)],
        "save_s": saves(asked["width"], asked["repeat"] + 3, asked["folder"]),
    }
    Path(asked["out"]).write_text(json.dumps(found))
