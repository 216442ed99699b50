"""What the tests of the loop trainer share: a small classifier with everything that has state, and crashes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import holdfast as hf
from holdfast.callbacks import Callback
from holdfast.core import EMA, LabelSmoothing
from holdfast.run.lease import is_of_lease

NUM_SAMPLES = 34  # batches of 6: the last one is short


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Noisy points of three classes; the noise is random augmentation."""

    def __init__(self, count: int = NUM_SAMPLES) -> None:
        self.count = count
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(count, 4, generator=generator), torch.arange(count) % 3

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.01 * torch.randn(4), self.y[index]


class Crash(Exception):
    """What a test's training dies of."""


class CrashAt(Callback):
    """Ends training by an error after so many batches in all."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) == self.batch:
            raise Crash


class Seen(Callback):
    """Notes losses and random numbers of every batch; its own count is state."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.count = 0

    def batch_end(self, state: Any, logger: Any) -> None:
        self.count += 1
        first = state.batch[0].double().sum().item()
        self.rows.append((int(state.timestamp.batch), first, float(state.loss), torch.rand(1).item()))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)
    )


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def loader(count: int = NUM_SAMPLES, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 6, "shuffle": True, **options}
    return DataLoader(Points(count), **options)


def plain(folder: Any = None, **options: Any) -> hf.Trainer:
    """A trainer of one small layer, nothing beside it."""
    torch.manual_seed(1)
    model = options.pop("model", None) or torch.nn.Linear(4, 3)
    options = {
        "model": model, "train_dataloader": loader(), "loss_fn": functional.cross_entropy, "max_duration": "2ep",
        "save_folder": folder, "save_filename": "ep{epoch}-ba{batch}", "progress_bar": False, **options,
    }  # fmt: skip
    return hf.Trainer(**options)


def rich(folder: Any, *, crash_at: int | None = None, seen: list[Seen] | None = None, **options: Any) -> hf.Trainer:
    """A trainer with two optimizers, schedulers and callbacks of one class each, algorithms and metrics."""
    torch.manual_seed(1)
    model = network()
    params = list(model.parameters())
    first = torch.optim.AdamW(params[:2], lr=0.01)
    second = torch.optim.AdamW(params[2:], lr=0.02, amsgrad=True)
    schedulers = [torch.optim.lr_scheduler.StepLR(first, 1, 0.9), torch.optim.lr_scheduler.StepLR(second, 2, 0.5)]
    watchers = [Seen(), Seen()]
    if seen is not None:
        seen.extend(watchers)
    callbacks: list[Any] = [*watchers, *options.pop("callbacks", [])]
    if crash_at is not None:
        callbacks.append(CrashAt(crash_at))
    options = {
        "model": model, "optimizers": [first, second], "schedulers": schedulers, "train_dataloader": loader(),
        "eval_dataloader": loader(9, shuffle=False), "loss_fn": functional.cross_entropy, "train_metrics": accuracy,
        "eval_metrics": {"accuracy": accuracy}, "algorithms": [EMA(smoothing=0.9), LabelSmoothing(0.1)],
        "callbacks": callbacks, "max_duration": "3ep", "save_folder": folder, "save_filename": "ep{epoch}-ba{batch}",
        "save_interval": "2ba", "grad_accum": 2, "grad_clip_norm": 1.0, "progress_bar": False, "run_name": "twin",
        **options,
    }  # fmt: skip
    return hf.Trainer(**options)


def everything(trainer: hf.Trainer) -> dict[str, Any]:
    """All that is saved, clocks apart."""
    from holdfast.trainers.loop.saving.layout import expand

    state = expand(trainer.state.live())["state"]
    state["timestamp"] = {k: v for k, v in state["timestamp"]["Timestamp"].items() if not k.endswith("wct")}
    state["train_metrics"] = {
        name: metric["total"] / max(1, metric["samples"]) for name, metric in state["train_metrics"].value.items()
    }
    state.pop("metadata")
    state["dataset_state"].pop("train")
    return state


def names(folder: Path) -> list[str]:
    """Checkpoints in a folder, without links and the run's own files."""
    own = {"run.json", "reports", "logs"}
    found = [path.name for path in folder.iterdir() if not path.is_symlink()]
    return sorted(name for name in found if name not in own and name[0] != "." and not is_of_lease(name))


def flip(path: Path) -> None:
    """Damage one byte of the first tensor of a checkpoint."""
    if path.is_dir():
        path = next(
            one for one in sorted(path.iterdir()) if one.name.startswith("state") and one.suffix == ".safetensors"
        )
    data = bytearray(path.read_bytes())
    data[-5 if path.suffix == ".safetensors" else len(data) // 2] ^= 0x40
    path.write_bytes(data)
