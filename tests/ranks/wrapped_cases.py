"""Model and optimizer behind one object, as torch's guide to its distributed checkpoints has it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packed_kit import Compact
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import holdfast as hf


class App:
    """Gives what each rank holds, by torch's own functions; these use collectives."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def whole(self) -> list[Any]:
        """Return weights and momenta of all ranks put together, as JSON."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True))
        momenta = {name: kept["momentum_buffer"] for name, kept in optimizer["state"].items()}
        return [{name: value.tolist() for name, value in sorted(one.items())} for one in (model, momenta)]


def train(root: str, layout: str) -> dict[str, Any]:
    """Go on where another layout has ended, make a step, leave."""
    warnings.simplefilter("ignore")  # torch's, about the tensors of FSDP1
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(5, 4)  # over three ranks: the last one has nothing
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif layout == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    app = App(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if layout == "fsdp1":  # what it keeps are slices, other ones on each rank
        with pytest.raises(hf.UnsupportedStateError, match=r"\['optimizer'\]: the optimizer of a FullySharded"):
            hf.save(f"{root}-refused", {"optimizer": app.optimizer})
    with hf.Checkpointer(root, {"app": app}, every=1) as ck:
        begun = app.whole() if ck.global_step else None
        model(torch.full((2, 5), 1.0 + ck.global_step)).square().sum().backward()
        app.optimizer.step()
        ck.step()
    return {"begun": begun, "ended": app.whole()}


def eight_bit(root: str, until: int) -> list[float]:
    """Train a sharded model by an optimizer that keeps its state in 8 bits; the weights at the end."""
    torch.manual_seed(0)
    model = nn.Linear(6, 8, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Compact(model.parameters())
    with hf.Checkpointer(root, {"model": model, "optimizer": optimizer}, every=2) as ck:
        while ck.global_step < until:
            optimizer.zero_grad()
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * ck.global_step + dist.get_rank()))
            model(x).square().sum().backward()
            optimizer.step()
            ck.step()
    return model.weight.full_tensor().flatten().tolist()


class OwnAdam(torch.optim.Adam):
    """Keeps something beside what torch knows."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "mine"})


class Holder:
    """Keeps an optimizer, and averages that begin with the first step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.means = optimizer, []

    def update(self) -> None:
        weights = [param.detach() for group in self.optimizer.param_groups for param in group["params"]]
        self.means = self.means or [weight.clone() for weight in weights]
        for mean, weight in zip(self.means, weights, strict=True):
            mean.lerp_(weight, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "means": self.means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.means = [*state["means"]]


def odd_optimizers(root: str, until: int, world: str = "fsdp") -> list[Any]:
    """Train by optimizers that keep state in lists, or behind methods, hooks and objects; the weights at the end."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    models = {name: nn.Linear(6, rows) for name, rows in [("lists", 8), ("own", 7), ("hook", 7), ("held", 7)]}
    for model in models.values() if world == "fsdp" else ():
        fully_shard(model, mesh=mesh)
    optimizers: dict[str, Any] = {
        "lists": torch.optim.LBFGS(models["lists"].parameters(), lr=0.1, max_iter=3),
        "own": OwnAdam(models["own"].parameters(), lr=0.1),
        "hook": torch.optim.Adam(models["hook"].parameters(), lr=0.1),
        "held": torch.optim.Adam(models["held"].parameters(), lr=0.1),
    }
    optimizers["hook"].register_state_dict_post_hook(lambda *_: None)
    holder = Holder(optimizers["held"])
    with hf.Checkpointer(root, {"models": models, "optimizers": {**optimizers, "held": holder}}, every=2) as ck:
        while ck.global_step < until:
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(ck.global_step))
            for name, model in models.items():

                def closure(model: nn.Module = model, x: torch.Tensor = x) -> torch.Tensor:
                    model.zero_grad()
                    loss = model(x).square().sum()
                    loss.backward()
                    return loss

                closure()
                optimizers[name].step(closure)
            holder.update()
            ck.step()
    weights = [param for model in models.values() for param in model.parameters()]
    return [getattr(value, "full_tensor", lambda value=value: value)().tolist() for value in weights + holder.means]


class Gathered:
    """Gives everything on rank 0, and nothing elsewhere, as is usual around ``consolidate_state_dict``."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        self.optimizer.consolidate_state_dict(to=0)
        return self.optimizer.state_dict() if dist.get_rank() == 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def zero(root: str, until: int) -> list[Any]:
    """Train with an optimizer whose state is divided over the ranks, that of each parameter on one of them."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(hf.UnsupportedStateError, match="consolidate_state_dict"):
        hf.save(f"{root}-refused", {"model": model, "optimizer": optimizer})
    with hf.Checkpointer(root, {"model": model, "optimizer": Gathered(optimizer)}, every=1) as ck:
        while ck.global_step < until:
            model(torch.full((2, 3), 1.0 + ck.global_step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ck.step()
    return [value.tolist() for value in model.state_dict().values()]
