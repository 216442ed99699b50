"""What the ranks of `test_guard_of_ranks` run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf

STEPS = 24


def train(root: str, poison: int = -1, leave_out: int = -1, action: str = "rollback") -> dict[str, Any]:
    """Train to the end; rank 1 finds nan in its batch number ``poison``, and no rank trains ``leave_out``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.arange(STEPS * 8), torch.randn(STEPS * 8, 4))
    seen: list[int] = []
    state = {"model": model, "optimizer": optimizer, "seen": hf.PerRank(seen)}
    rank = torch.distributed.get_rank()
    with hf.Checkpointer(root, state, every=4, keep=hf.Keep(last=1), guard=hf.Guard(action=action)) as ck:
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
    weights = [value.tolist() for value in model.state_dict().values()]
    return {"step": ck.global_step, "weights": weights, "seen": seen}
