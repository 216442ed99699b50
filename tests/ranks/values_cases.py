"""Ranks whose plain values and small objects differ: what the ranks of `test_values_of_ranks` run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

import holdfast as hf


class Sampler:
    """Draws samples of this rank; its position is plain data behind ``state_dict``."""

    def __init__(self) -> None:
        self.position = 100 * dist.get_rank()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "history": [self.position]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["history"] == [state["position"]]
        self.position = state["position"]


class Average:
    """What a metric keeps: tensors, of its rank until somebody puts them together."""

    def __init__(self, width: int = 2) -> None:
        self.total = torch.zeros(width)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "each": [self.total / 2]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["each"][0], state["total"] / 2)
        self.total = state["total"]


def fresh() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return {
        "model": nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "sampler": Sampler(),
        "data": {"seen": 0, "files": []},
        "parts": [Sampler(), torch.zeros(3), {"a/b": 0}],
        "losses": {},
        "average": Average(),
        "alike": Average(),
    }


def train(root: str, until: int) -> dict[str, Any]:
    """Steps after which each rank has values of its own."""
    state, rank = fresh(), dist.get_rank()
    with hf.Checkpointer(root, state, every=1, keep=None) as ck:
        begun = values_of(state)
        for number in range(ck.global_step, until):
            state["model"](torch.ones(1, 2)).sum().backward()
            state["optimizer"].step()
            state["sampler"].position += 1 + rank
            state["parts"][0].position += 2 + rank
            state["parts"][2]["a/b"] += 1 + rank
            state["average"].total = state["average"].total + 1 + rank
            state["alike"].total = state["alike"].total + 3
            state["data"]["seen"] += 10 + rank
            state["data"]["files"].append(f"rank-{rank}-{number}")
            state["losses"][number] = float("nan") if rank else 0.5
            ck.step()
    return {"begun": begun, "ended": values_of(state)}


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    """What differs, as JSON."""
    first, _, last = state["parts"]
    return {
        "sampler": state["sampler"].position, "data": repr(state["data"]), "parts": [first.position, last["a/b"]],
        "losses": repr(state["losses"]), "totals": [state[name].total.tolist() for name in ("average", "alike")],
    }  # fmt: skip


def functions(root: str) -> dict[str, Any]:
    """Save and load without a run, with ``into`` and without."""
    rank, path = dist.get_rank(), Path(root, "one")
    state = {**fresh(), "same": [1, 2], "big": Average(1 << 19)}
    state["big"].total += rank
    state["data"]["seen"] = 7 + rank
    hf.save(path, state)
    anew = hf.load(path)
    into, big = fresh(), Average(1 << 19)
    into["sampler"].position = -1
    back = hf.load(path, {**into, "same": [], "big": big}, ranks="all")
    return {
        "anew": [anew["data"]["seen"], anew["sampler"]["position"], anew["same"]],
        "into": [back["data"]["seen"], into["sampler"].position, back["same"]],
        "big": big.total.unique().tolist(),
    }


class Scaled(nn.Module):
    """Has weights, and buffers that each rank changes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("scale", torch.ones(2))


def buffers(root: str) -> None:
    """Save modules whose buffers differ: DDP with and without a broadcast of buffers, one compiled, and FSDP2.

    Of one the buffers are given for each rank; of three optimizers one has another learning rate on each rank, and one
    other gradients for a parameter of its own.
    """
    modules: dict[str, nn.Module] = {
        "synced": nn.parallel.DistributedDataParallel(Scaled()),
        "apart": nn.parallel.DistributedDataParallel(Scaled(), broadcast_buffers=False),
        "spread": fully_shard(Scaled(), mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
    }
    modules["compiled"] = torch.compile(nn.parallel.DistributedDataParallel(Scaled()), backend="eager")
    modules["given"] = fully_shard(Scaled(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for module in modules.values():
        for buffer in module.buffers():
            buffer.add_(dist.get_rank())
    spread = modules["spread"].parameters()
    optimizers = {
        "optimizer": torch.optim.SGD(spread, lr=1.0 + dist.get_rank()),
        "other": torch.optim.SGD(modules["synced"].parameters(), lr=1.0),
        "lonely": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9),
    }
    (parameter,) = optimizers["lonely"].param_groups[0]["params"]  # of no module: a model that an object keeps
    parameter.grad = torch.full((2,), 1.0 + dist.get_rank())
    optimizers["lonely"].step()
    given = hf.PerRank(dict(modules["given"].named_buffers()))
    hf.save(Path(root, "buffers"), {**modules, **optimizers, "buffers": given})
    averages = {name: AveragedModel(nn.BatchNorm1d(2), use_buffers=True) for name in ("average", "alike")}
    averages["average"].module.running_mean.add_(dist.get_rank())
    hf.save(Path(root, "averages"), averages)


def alone(root: str) -> dict[str, Any]:
    """One process loads what two ranks have saved."""
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    into = fresh()
    hf.load(Path(root, "one"), {**into, "same": [], "big": Average(1 << 19)})
    return {"words": words, "position": into["sampler"].position}
