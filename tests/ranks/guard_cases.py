"""What the ranks of `test_guard_of_ranks` run."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf

STEPS = 24


def train(
    root: str, poison: int = -1, leave_out: int = -1, action: str = "rollback", rescue: int | None = None,
    kill_at: dict[str, int] | None = None, kill_how: int = signal.SIGKILL,
) -> dict[str, Any]:  # fmt: skip
    """Train to the end; rank 1 finds nan in its batch number ``poison``, and no rank trains ``leave_out``.

    Args:
        root: the run.
        poison: the bad batch of rank 1.
        leave_out: the batch of a twin that never had it.
        action: of the guard.
        rescue: steps between snapshots.
        kill_at: steps after which ranks are killed.
        kill_how: by which signal.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.arange(STEPS * 8), torch.randn(STEPS * 8, 4))
    seen: list[int] = []
    state = {"model": model, "optimizer": optimizer, "seen": hf.PerRank(seen)}
    rank = torch.distributed.get_rank()
    guard = hf.Guard(action=action)
    with hf.Checkpointer(root, state, every=4, keep=hf.Keep(last=1), guard=guard, rescue=rescue) as ck:
        seen[:] = ck.state["seen"].value
        for index, (which, x) in ck.enumerate(DataLoader(data, batch_size=4, shuffle=True)):
            if index == leave_out:
                continue
            if index == poison and rank == 1:
                x.mul_(math.nan)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += which.tolist()
            ck.state["seen"] = hf.PerRank(list(seen))
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            ck.step(loss=mean)
            if (kill_at or {}).get(str(rank)) == ck.global_step:
                os.kill(os.getpid(), kill_how)
    weights = [value.tolist() for value in model.state_dict().values()]
    return {"step": ck.global_step, "weights": weights, "seen": seen}


PLACES = {"replicate": Replicate(), "partial": Partial(), "shard": Shard(0)}


def spread_loss(root: str, kind: str, guarded: bool = True) -> int:
    """Give a loss that is a DTensor, of which rank 0 alone reads values; step 5 is nan."""
    mesh = init_device_mesh("cpu", (2,))
    with hf.Checkpointer(root, {}, every=100, guard=hf.Guard() if guarded else None) as ck:
        for index in ck.batches(range(300)):  # long enough to agree on a step
            torch.distributed.barrier()  # as in any training: no rank runs ahead
            own = torch.full((1,) if kind == "shard" else (), math.nan if index == 4 else 1.0)
            ck.step(loss=DTensor.from_local(own, mesh, [PLACES[kind]]))
    return ck.global_step


def differ(root: str, **of_rank_0: Any) -> None:
    """Give rank 0 alone what all ranks have to agree on."""
    options: dict[str, Any] = {"guard": hf.Guard()} if "guard" in of_rank_0 else of_rank_0
    rank = torch.distributed.get_rank()
    with hf.Checkpointer(root, {}, timeout_s=20.0, **(options if rank == 0 else {})) as ck:
        ck.step(loss=1.0)
