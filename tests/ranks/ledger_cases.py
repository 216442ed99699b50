"""What the ranks of `test_ledger_of_ranks` run, each in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast as hf

SAMPLES = 48
DATA = [torch.tensor([float(number)]) for number in range(SAMPLES)]


class Numbers(IterableDataset[torch.Tensor]):
    """Every n-th sample for this rank, in order; without a state torchdata counts it wrongly at a second resume."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        mine = DATA[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Restarts(StatefulDataLoader):
    """Takes no notice of its state on rank 1 alone."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if torch.distributed.get_rank() != 1:
            super().load_state_dict(state_dict)


def loader_of(kind: str) -> Any:
    """Return a loader of batches of two."""
    data: Any = DATA
    if kind == "split by us":
        return DataLoader(data, 2, shuffle=True)
    if kind == "distributed":
        return DataLoader(data, 2, sampler=DistributedSampler(data, seed=5))
    if kind == "stateful":
        return StatefulDataLoader(data, 2, sampler=DistributedSampler(data, seed=5))
    if kind == "stateful, shuffled alike":
        return StatefulDataLoader(data, 2, shuffle=True)
    if kind == "stateful stream":
        return StatefulDataLoader(Numbers(), 2)
    if kind == "restarts on one rank":
        return Restarts(Numbers(), 2)
    return DataLoader(Numbers(), 2)


def train(root: str, kind: str, life: int, until: int, save_at: int, how: str, resume: str) -> list[int]:
    """Train until a step; what is said goes to a file of this rank and life."""
    rank = torch.distributed.get_rank()
    told = logging.FileHandler(Path(root) / f"said-{life}-{rank}")
    told.setLevel(logging.WARNING)
    logging.getLogger("holdfast").addHandler(told)
    begun, loader = [], loader_of(kind)
    options: dict[str, Any] = {"resume": Path(root) / "run" / resume} if resume else {}
    with hf.Checkpointer(Path(root) / "run", {"model": torch.nn.Linear(1, 1)}, every=None, keep=None, **options) as ck:
        begun.append(ck.global_step)
        for _ in ck.epochs(9):
            for batch in ck.batches(loader):
                torch.distributed.all_reduce(batch.float().sum())
                ck.step()
                if ck.global_step == save_at:
                    ck.save()
                if ck.global_step == until and (how == "all" or (how == "one" and rank == 1)):
                    os.kill(os.getpid(), signal.SIGKILL)
                if ck.global_step == until and how == "end":
                    return begun
    return begun
