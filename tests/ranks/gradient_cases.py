"""Three ranks under DDP, in a model large enough for the order of additions to show in the last bits."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.state.gradient_order import fix_gradient_order


def wrapped(kind: str = "plain") -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
    if kind == "frozen":
        model[0].weight.requires_grad_(False)
    if kind == "bfloat16":
        model = model.to(torch.bfloat16)
    options: dict[str, Any] = {
        "view": {"gradient_as_bucket_view": True},
        "small": {"bucket_cap_mb": 0.001},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
    }.get(kind, {})
    return DistributedDataParallel(model, **options)


def gradients(model: DistributedDataParallel, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    model.zero_grad()
    batch = torch.randn(8, 64, generator=generator).to(next(model.parameters()).dtype)
    model(batch).float().square().mean().backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def differing(kind: str, fix: bool) -> dict[str, Any]:
    """Take one batch twice, in the first step and in the second; count the elements that differ."""
    model = wrapped(kind)
    before, generator = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    fixed = fix_gradient_order(model) if fix else None
    untouched = all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    untouched &= torch.equal(generator, torch.get_rng_state()) and all(one.grad is None for one in model.parameters())
    first, second = gradients(model, 1), gradients(model, 1)
    count = sum(int((one != other).sum()) for one, other in zip(first, second, strict=True))
    return {"fixed": fixed, "untouched": untouched, "differ": count}


def hooked(kind: str) -> dict[str, Any]:
    """Hooks, such as those of an optimizer that steps in them: they must not see gradients that nobody trained with."""
    model, calls = wrapped(), []
    if kind == "parameter":
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(calls.append)
    elif kind == "module":
        model.register_forward_hook(lambda *given: calls.append(given))
    else:
        model.register_comm_hook(None, lambda state, bucket: (calls.append(bucket), allreduce_hook(None, bucket))[1])
    return {"fixed": fix_gradient_order(model), "calls": len(calls)}


def train(root: str, until: int, *, crash_at: int = -1, alone: bool = False) -> dict[str, Any]:
    """Train with a `Checkpointer`; with ``alone`` rank 0 alone has the model in its state."""
    model = wrapped()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if alone and dist.get_rank() != 0:
        state = {"rank": hf.PerRank(dist.get_rank())}
    alike = [dist.get_rank()] if alone else None
    with hf.Checkpointer(Path(root), state, every=1, alike=alike) as ck:
        begun = ck.global_step
        for step in range(begun, until):
            gradients(model, step)
            optimizer.step()
            ck.step()
            if step == crash_at:
                ck.wait()
                os._exit(9)
    bits = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    return {"begun": begun, "digest": hashlib.sha256(bits).hexdigest()}


class Behind:
    """An object that keeps the state of a model in DDP."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return self.model.module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.module.load_state_dict(state)


def hidden(root: str) -> int:
    """Enter a run with a DDP behind an object, and modules beside which torch keeps one; elements that differ then."""
    behind, beside = wrapped(), wrapped().module
    replicate(beside)
    with hf.Checkpointer(Path(root), {"app": Behind(behind), "beside": beside, "unused": _unused()}):
        first, second = gradients(behind, 1), gradients(behind, 1)
    return sum(int((one != other).sum()) for one, other in zip(first, second, strict=True))


def _unused() -> nn.Module:
    model: nn.Module = replicate(wrapped().module, find_unused_parameters=True)
    return model


def hook_with_memory(root: str, named: bool) -> None:
    """Train a step under a communication hook that counts; ``named`` puts the count into the state."""
    model, kept = wrapped(), SimpleNamespace(process_group=None, iter=0)

    def reduce(own, bucket):  # DDP takes no annotations that are text
        own.iter += bucket.is_last()
        return allreduce_hook(own.process_group, bucket)

    model.register_comm_hook(kept, reduce)
    hook = {"hook": hf.PerRank(hf.attrs(kept, "iter"))} if named else {}
    with hf.Checkpointer(Path(root), {"model": model, **hook}, every=1) as ck:
        assert kept.iter == (ck.global_step if named else 0)
        gradients(model, ck.global_step)
        ck.step()
