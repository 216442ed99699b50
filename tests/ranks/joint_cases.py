"""What the tests of many ranks run on each of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast as hf


def make_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "rank": hf.PerRank(dist.get_rank()),
    }


def save_twice(root: str) -> dict[str, Any]:
    """One save that waits and one that does not."""
    state = make_state()
    first = hf.save(Path(root, "first"), state, step=1)
    handle = hf.save_async(Path(root, "second"), state, step=2)
    second = handle.result(30)
    loaded = hf.load(second)
    return {"paths": [first.path, second.path], "rank": loaded["rank"], "pid": os.getpid()}


def ddp_state(seed: int = 0) -> tuple[dict[str, Any], Any]:
    state = make_state(seed)
    state.pop("rank")
    wrapped = torch.nn.parallel.DistributedDataParallel(state["model"])
    return {**state, "model": wrapped}, wrapped


def one_step(state: dict[str, Any], number: int) -> torch.Tensor:
    """A step that depends on the rank's own batch and on its own random numbers."""
    state["optimizer"].zero_grad()
    batch = torch.randn(4, 6) + number + dist.get_rank()
    loss = state["model"](batch).square().mean()
    loss.backward()
    state["optimizer"].step()
    return loss.detach()


def train(root: str, until: int, *, every: Any = 2, crash_at: int = -1, **options: Any) -> dict[str, Any]:
    """A DDP run up to ``until`` steps, in which all ranks die after step ``crash_at``."""
    torch.manual_seed(100 + dist.get_rank())
    state, model = ddp_state()
    torch.manual_seed(100 + dist.get_rank())
    options.setdefault("keep", None)
    with hf.Checkpointer(root, state, every=every, **options) as ck:
        start = ck.global_step
        while ck.global_step < until:
            ck.step(loss=one_step(state, ck.global_step))
            if ck.global_step == crash_at:
                ck.wait()
                os._exit(9)
    tensors = {name: value.double().sum().item() for name, value in model.state_dict().items()}
    return {"start": start, "random": torch.rand(1).item(), "tensors": tensors, "saves": ck.stats.saves}
