"""A pipeline and a mixture of experts in training: what the ranks of `test_pipeline` run."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast as hf

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))


def pipeline(run: str, stages: int, steps: int, die_at: int | None = None) -> None:
    """The example, with a save at every fourth step."""
    import pipeline as example

    torch.set_num_threads(1)
    shape = (stages, dist.get_world_size() // stages)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    told = argparse.Namespace(out=run, steps=steps, every="4ba", die_at=die_at)
    example.train(told, mesh, torch.device("cpu"))


class Mixture(nn.Module):
    """A router, the experts of this rank, and a head; every token goes to the expert of its group of ranks."""

    def __init__(self, experts: range) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        made = {str(number): nn.Linear(16, 16) for number in range(4)}
        self.experts = nn.ModuleDict({str(number): made[str(number)] for number in experts})
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.enter(x))
        for expert in self.experts.values():
            x = x + self.drop(torch.relu(expert(x)))
        return self.head(x)


def mixture(run: str, groups: int, steps: int, die_at: int | None = None) -> None:
    """Train four experts that ``groups`` of ranks have between them, each spread over the ranks of its group."""
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (groups, world_size // groups), mesh_dim_names=("ep", "edp"))
    each, group = 4 // groups, rank // (world_size // groups)
    model = Mixture(range(group * each, (group + 1) * each))
    for expert in model.experts.values():
        fully_shard(expert, mesh=mesh["edp"])
    for dense in (model.enter, model.head):
        fully_shard(dense, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(5 + rank)
    with hf.Checkpointer(run, {"model": model, "optimizer": optimizer}, every=4, keep=None) as ck:
        while ck.global_step < steps:
            optimizer.zero_grad()
            model(torch.randn(6, 8)).square().mean().backward()
            for weight in model.norm.parameters():
                dist.all_reduce(weight.grad)
            optimizer.step()
            ck.step()
            if ck.global_step == die_at and ck.resumed_from is None:
                ck.wait()
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)


def whole_mixture(run: str, name: str) -> dict[str, Any]:
    """Load all experts into one model, spread over all ranks."""
    model = Mixture(range(4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    hf.load(Path(run, name), {"model": model}, only="model", ranks="all")
    stored = hf.load(Path(run, name), only="model")["model"]
    weights = {key: value.full_tensor() for key, value in model.state_dict().items()}
    return {"same": stored.keys() == weights.keys() and all(torch.equal(stored[key], weights[key]) for key in stored)}
