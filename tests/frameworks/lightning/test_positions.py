"""Which batches a resumed `Trainer` trains: each once, whatever was being done when the checkpoint was saved."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TREES, make_trainer
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.lightning import HoldfastCallback

TREE = TREES[0]
pl = importlib.import_module(TREE)


def loader(first: int = 0, count: int = 32) -> Any:
    return DataLoader(TensorDataset(torch.arange(first, first + count)), batch_size=4, shuffle=True)


def listed(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: listed(part) for name, part in batch.items()}
    return None if batch is None else batch[0].tolist()


class OutOfLuckError(Exception):
    pass


class Seen(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Remembers what it has trained, with a random number of each step; fails in step ``fails``."""

    def __init__(self, fails: int = -1) -> None:
        super().__init__()
        self.net, self.fails, self.seen = torch.nn.Linear(1, 1), fails, []

    def training_step(self, batch, _):
        drawn = torch.rand(1)
        if self.global_step == self.fails:
            raise OutOfLuckError
        self.seen.append((self.current_epoch, listed(batch), drawn.item()))
        return self.net(drawn).sum()

    def validation_step(self, batch, _):
        torch.rand(2)

    def val_dataloader(self):
        return loader(0, 8)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, loaders: Any, *, fails: int = -1, start: Any = None, callbacks: Any = (), **options: Any) -> Any:
    """Train; returns the trainer and what was trained."""
    pl.seed_everything(1 if start is None else 2, verbose=False)
    module = Seen(fails)
    options = {"max_epochs": 3, "limit_val_batches": 0, "enable_checkpointing": bool(callbacks), **options}
    trainer = make_trainer(TREE, folder, callbacks=[HoldfastCallback(), *callbacks], **options)
    with contextlib.suppress(OutOfLuckError):
        trainer.fit(module, loaders(), ckpt_path=start)
    return trainer, module.seen


@pytest.mark.parametrize("fails", [5, 8, 9])
def test_a_save_in_an_exception(tmp_path: Path, fails: int) -> None:
    """`OnExceptionCheckpoint`: the batch in which it came was not trained, and comes again with the same numbers."""
    _, whole = fit(tmp_path, loader)
    saves = pl.callbacks.OnExceptionCheckpoint(tmp_path, "failed")
    _, first = fit(tmp_path, loader, fails=fails, callbacks=[saves])
    _, second = fit(tmp_path, loader, start=tmp_path / "failed.ckpt")
    assert len(first) == fails
    assert first + second == whole


@pytest.mark.parametrize("steps", [5, 8, 9])
def test_a_save_after_the_end(tmp_path: Path, steps: int) -> None:
    """`fit` stops within an epoch, and `save_checkpoint` comes after that: the rest of the epoch is trained."""
    _, whole = fit(tmp_path, loader, max_epochs=-1, max_steps=20)
    own = pl.callbacks.ModelCheckpoint(tmp_path / "own")  # at what Lightning takes for the end of an epoch
    trainer, first = fit(tmp_path, loader, max_epochs=-1, max_steps=steps, callbacks=[own])
    torch.rand(3)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    for start in (tmp_path / "end.ckpt", next((tmp_path / "own").iterdir())):
        _, second = fit(tmp_path, loader, start=start, max_epochs=-1, max_steps=20)
        assert first + second == whole


@pytest.mark.parametrize("is_evaluated", [False, True])
@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 20}])
def test_a_save_at_the_end_of_an_epoch(tmp_path: Path, limits: Any, is_evaluated: bool) -> None:
    """By `ModelCheckpoint` with its defaults, or after a shorter training: the whole next epoch follows."""
    options = {"limit_val_batches": 1.0 if is_evaluated else 0}
    saves = pl.callbacks.ModelCheckpoint(tmp_path / "ends", save_top_k=-1, filename="{step}")
    _, whole = fit(tmp_path, loader, callbacks=[saves], **limits, **options)
    trainer, _ = fit(tmp_path, loader, max_epochs=1, **options)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    for start, step in ((tmp_path / "ends" / "step=8.ckpt", 8), (tmp_path / "after.ckpt", 8),
                        (tmp_path / "ends" / "step=16.ckpt", 16)):  # fmt: skip
        _, second = fit(tmp_path, loader, start=start, **limits, **options)
        assert second == whole[step:], start


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_loaders_of_different_lengths(tmp_path: Path, mode: str) -> None:
    """Each has its own position: one that begins again, or has ended, before the others; at the end of an epoch too."""

    def loaders() -> Any:
        parts = {"labelled": loader(100, 12), "unlabelled": loader()}
        return parts if mode == "max_size_cycle" else pl.utilities.CombinedLoader(parts, mode)

    saves = pl.callbacks.ModelCheckpoint(tmp_path / "steps", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    ends = pl.callbacks.ModelCheckpoint(tmp_path / "ends", save_top_k=-1, filename="{step}")
    _, whole = fit(tmp_path, loaders, callbacks=[saves, ends])
    length = len(whole) // 3
    for path in [tmp_path / "steps" / f"step={step}.ckpt" for step in range(2, length + 2)] + sorted(
        (tmp_path / "ends").iterdir()
    )[:2]:
        _, second = fit(tmp_path, loaders, start=path)
        assert second == whole[int(path.stem.partition("=")[2]) :], path


class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Draws from the generator of training where its samples are loaded."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Has a state and no length, so that Lightning fetches one batch ahead."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 32:
            self.at += 1
            yield self.at, torch.rand(1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Litdatas(DataLoader):  # type: ignore[type-arg]
    """Goes on from the state that it was given until a pass was drawn to its end, as that of litdata (0.2.76)."""

    __module__ = "litdata.streaming.dataloader"
    restore, current_epoch, given = False, 0, 0

    def __iter__(self) -> Any:
        if not self.restore:
            self.current_epoch, self.given = self.current_epoch + 1, 0
        self.generator or torch.rand(1)
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.current_epoch))
        for batch in order.split(4)[self.given :]:
            self.given += 1
            yield [batch]
        self.restore = False

    def state_dict(self) -> dict[str, Any]:
        return {"current_epoch": self.current_epoch, "given": self.given, "dataset": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current_epoch, self.given = state["current_epoch"], state["given"]
        self.restore = 0 < self.given < 8


WITH_A_STATE = {
    "map": lambda: StatefulDataLoader(Noisy(), 4, shuffle=True),
    "both": lambda: {"plain": loader(100, 12), "stated": StatefulDataLoader(Noisy(), 4, shuffle=True)},
    "stream": lambda: StatefulDataLoader(Stream(), 4),
    "kept": lambda: Litdatas(Noisy(), 4),
}


@pytest.mark.parametrize("name", WITH_A_STATE)
def test_loaders_with_a_state(tmp_path: Path, name: str) -> None:
    """They go on after the last trained batch, also behind the last one of an epoch, and with the next epoch."""
    loaders = WITH_A_STATE[name]
    saves = pl.callbacks.ModelCheckpoint(tmp_path / "steps", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    ends = pl.callbacks.ModelCheckpoint(tmp_path / "ends", save_top_k=-1, filename="{step}")
    _, whole = fit(tmp_path, loaders, callbacks=[saves, ends])
    assert len(whole) == 24
    for path in [tmp_path / "steps" / f"step={step}.ckpt" for step in (3, 7, 8, 9, 12, 16)] + sorted(
        (tmp_path / "ends").iterdir()
    )[:2]:
        _, second = fit(tmp_path, loaders, start=path)
        assert second == whole[int(path.stem.partition("=")[2]) :], path
