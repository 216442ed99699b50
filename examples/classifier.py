"""Learn to read handwritten digits, be killed, go on by itself, and fine-tune what came out with another head.

    python examples/classifier.py [--folder PATH] [--epochs 12]

Needs scikit-learn (the digits come with it). Everything that can be resumed is saved every 5 epochs (one is kept), the
weights alone after every epoch.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Trainer
from holdfast.callbacks import Callback, CheckpointSaver
from holdfast.core import LabelSmoothing


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1 797 pictures of 8 x 8 pixels: 1 500 to learn from, 297 to be judged by."""
    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pictures, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)[order]
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


class Reader(torch.nn.Module):
    """A body that sees, and a head that decides."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Flatten(), torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2),
        )  # fmt: skip
        self.head = torch.nn.Linear(64, num_classes)

    def forward(self, batch: object) -> torch.Tensor:
        """Take pictures, or a batch of pictures and labels."""
        return self.head(self.body(batch[0] if isinstance(batch, (list, tuple)) else batch))

    def loss(self, outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Tell how wrong it was."""
        return functional.cross_entropy(outputs, batch[1])


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Share of pictures read correctly."""
    return (outputs.argmax(1) == targets).float().mean()


class KillAt(Callback):
    """Ends this process as hard as the kernel can, once."""

    def __init__(self, epoch: int, marker: Path) -> None:
        self.epoch, self.marker = epoch, marker

    def batch_start(self, state, logger) -> None:
        """Die in the middle of an epoch."""
        if (
            int(state.timestamp.epoch) == self.epoch
            and int(state.timestamp.batch_in_epoch) == 7
            and not self.marker.exists()
        ):
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, epochs: int) -> None:
    """Train, or go on training: the same command."""
    torch.manual_seed(1)
    learn, judge = digits()
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(learn, batch_size=50, shuffle=True),
        eval_dataloader=DataLoader(judge, batch_size=297),
        eval_metrics={"accuracy": accuracy},
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        algorithms=LabelSmoothing(0.05),
        max_duration=f"{epochs}ep",
        save_folder=folder / "full",
        save_filename="ep{epoch}",
        save_interval="5ep",
        save_num_checkpoints_to_keep=1,
        callbacks=[
            CheckpointSaver(folder / "weights", "ep{epoch}.pt", save_interval="1ep", weights_only=True, overwrite=True),
            KillAt(epochs // 2 + 1, folder / "was-killed"),
        ],
        autoresume=True,
    )
    trainer.fit()
    print(f"accuracy {float(trainer.state.eval_metric_values['eval']['accuracy']):.4f}")
    trainer.close()


def fine_tune(folder: Path, epochs: int) -> None:
    """Keep the body, put another head on it: does a picture show an even number?"""
    learn, judge = (TensorDataset(data.tensors[0], data.tensors[1] % 2) for data in digits())
    model = Reader(num_classes=2)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(learn, batch_size=50, shuffle=True),
        eval_dataloader=DataLoader(judge, batch_size=297),
        eval_metrics={"accuracy": accuracy},
        optimizers=torch.optim.AdamW(model.head.parameters(), lr=1e-2),
        max_duration="2ep",
        load_path=folder / "weights" / f"ep{epochs}.pt",
        load_weights_only=True,
        load_strict_model_weights=False,  # the head has another shape: it is said, and starts afresh
    )
    trainer.fit()
    print(f"even or odd: accuracy {float(trainer.state.eval_metric_values['eval']['accuracy']):.4f}")


def main() -> None:
    """Train in a process that is killed, again in one that is not, then fine-tune."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints go (default: a temporary folder)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--train-only", action="store_true", help="be the process that trains")
    options = parser.parse_args()
    if options.train_only:
        train(options.folder, options.epochs)
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="classifier-"))
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--train-only", "--folder", str(folder), "--epochs", str(options.epochs)]
    first = subprocess.run(command, check=False)
    print(f"the first life ended with {first.returncode}; the same command again:", flush=True)
    subprocess.run(command, check=True)
    # The weights need nothing of Holdfast.
    weights = torch.load(folder / "weights" / f"ep{options.epochs}.pt", weights_only=True)["state"]["model"]
    print(f"{len(weights)} tensors, the head is {tuple(weights['head.weight'].shape)}")
    fine_tune(folder, options.epochs)
    kept = sorted(p.name for p in (folder / "full").iterdir() if p.name.startswith("ep"))
    print(f"full checkpoints in {folder / 'full'}: {', '.join(kept)}")


if __name__ == "__main__":
    main()
