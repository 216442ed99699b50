"""An idle `Checkpointer.step` and `Checkpointer.batches`: what saving costs when nothing is due."""

from __future__ import annotations

import time
from typing import Any

import torch

import holdfast as hf

from .bench import Context, Goal, Outcome, remove

__all__ = ["run"]


def run(context: Context) -> Outcome:
    """Time blocks of steps with a tensor as metric, with a float, and without."""
    outcome = Outcome()
    block = 200 if context.quick else 2000
    root = context.folder("step")
    loss = torch.tensor(0.5)
    with hf.Checkpointer(root, {"model": torch.nn.Linear(4, 4)}, every="1h", keep=None) as ck:
        ck.step(loss=loss)
        for turn in range(4 * context.repeat + 1):
            for name, metrics in (("tensor", {"loss": loss}), ("float", {"loss": 0.5}), ("none", {})):
                start = time.perf_counter()
                for _ in range(block):
                    ck.step(**metrics)
                outcome.add(name, first=not turn, microseconds=(time.perf_counter() - start) / block * 1e6)
    remove(root)
    loader = torch.utils.data.DataLoader(_Data(), batch_size=8, shuffle=True)
    for name, is_seeded in (("batch", True), ("batch, samples not seeded", False)):
        model = {"model": torch.nn.Linear(4, 4)}
        with hf.Checkpointer(root, model, every="1h", keep=None, seed_samples=is_seeded) as ck:
            for turn in range(2 * context.repeat + 1):
                outcome.add(name, first=not turn, microseconds=(_pass(ck.batches(loader)) - _pass(loader)) * 1e6)
        remove(root)
    value = outcome.median("tensor", "microseconds")
    outcome.goals.append(Goal(what="idle ck.step(loss=tensor)", value=value, unit="us", at_most=20.0))
    value = outcome.median("batch, samples not seeded", "microseconds")
    what = "ck.batches, the ledger with it, beyond the loader: each batch of 8 samples, 2 KiB"
    outcome.goals.append(Goal(what=what, value=value, unit="us", at_most=50.0))
    return outcome


def _pass(batches: Any) -> float:
    """Return the seconds for each batch of one epoch."""
    start = time.perf_counter()
    num = sum(1 for _ in batches)
    return (time.perf_counter() - start) / num


class _Data(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Samples of 256 bytes."""

    def __init__(self) -> None:
        self.rows = torch.randn(16_000, 64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index % 2
