"""Two workers learn to read handwritten digits; one is killed in mid-epoch; training goes on and loses nothing.

    python examples/digits.py [--workers 2] [--epochs 8] [--storage PATH] [--no-kill]

Needs scikit-learn (the digits come with it), pandas and matplotlib. The plot is saved as digits.png in the run.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.torch import TorchTrainer, prepare_data_loader, prepare_model


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1 797 pictures of 8 x 8 pixels, split into 1 500 to learn from and 297 to be judged by."""
    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pictures, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)[order]
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def make_network() -> torch.nn.Module:
    """A small convolutional network, about 38 000 parameters."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
        torch.nn.Linear(512, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10),
    )  # fmt: skip


def train(config: dict) -> None:
    """What every worker runs."""
    torch.manual_seed(1)
    learn, judge = digits()
    model = prepare_model(make_network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loader = prepare_data_loader(DataLoader(learn, batch_size=50, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "data": loader, "epoch": 0}

    checkpoint = holdfast.get_checkpoint()
    if checkpoint is not None:
        state["epoch"] = checkpoint.load(into=state)["epoch"]
    for epoch in range(state["epoch"], config["epochs"]):
        model.train()
        for number, (x, y) in enumerate(loader):
            if (epoch, number) == config["kill_at"] and holdfast.get_context().get_world_rank() == 1:
                die_once(config["marker"])
            loss = functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state["epoch"] = epoch + 1
        holdfast.report({"epoch": epoch, "loss": loss.item(), "accuracy": accuracy(model, judge)}, state=state)


def accuracy(model: torch.nn.Module, data: TensorDataset) -> float:
    """Share of pictures read correctly."""
    x, y = data.tensors
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def die_once(marker: str) -> None:
    """Kill this worker as hard as the kernel can, in its first life only."""
    if not os.path.exists(marker):
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def show(result: holdfast.Result) -> None:
    """Print what happened and save a plot of the metrics."""
    console = Console()
    starts = Table("attempt", "resumed from", "ended by", title="Lives of the workers")
    for attempt in result.attempts:
        starts.add_row(str(attempt.attempt), attempt.resumed_from or "fresh start", escape(attempt.reason or ""))
    console.print(starts)
    kept = Table("checkpoint", "epoch", "accuracy", title="Kept: the best two by accuracy, and the newest")
    for checkpoint, metrics in result.best_checkpoints:
        kept.add_row(checkpoint.name, str(metrics["epoch"]), f"{metrics['accuracy']:.4f}")
    console.print(kept)
    console.print(f"last report: {result.metrics}")
    console.print(f"plot: {plot(result)}")


def plot(result: holdfast.Result) -> Path:
    """Draw loss and accuracy over the epochs, a line where each kept checkpoint was made."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    frame = result.metrics_dataframe
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(frame["epoch"], frame["loss"], color="tab:gray", marker=".", label="loss")
    axis.set(xlabel="epoch", ylabel="loss")
    right = axis.twinx()
    right.plot(frame["epoch"], frame["accuracy"], color="tab:blue", marker=".", label="accuracy")
    right.set_ylabel("accuracy")
    for checkpoint, metrics in result.best_checkpoints:
        axis.axvline(metrics["epoch"], color="tab:green", linestyle=":", label=f"kept: {checkpoint.name}")
    figure.legend(loc="outside lower center", ncols=2)
    target = Path(result.path) / "digits.png"
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target


def main() -> None:
    """Train, be killed, go on, show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--storage", default=None, help="where runs are kept (default: ~/holdfast_results)")
    parser.add_argument("--no-kill", action="store_true", help="let all workers live")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = TorchTrainer(
            train,
            train_loop_config={
                "lr": 2e-3,
                "epochs": options.epochs,
                "kill_at": None if options.no_kill else (options.epochs // 2, 7),
                "marker": f"{scratch}/was-killed",
            },
            scaling_config=holdfast.ScalingConfig(num_workers=options.workers),
            run_config=holdfast.RunConfig(
                name="digits",
                storage_path=options.storage,
                checkpoint_config=holdfast.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy"),
                failure_config=holdfast.FailureConfig(max_failures=1),
            ),
        )
        show(trainer.fit())


if __name__ == "__main__":
    main()
