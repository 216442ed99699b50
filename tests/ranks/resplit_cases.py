"""What the ranks of `test_resplit` run, each in a process of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast as hf
from holdfast.verify.state import digests

SAMPLES, BATCH, EPOCHS = 48, 2, 2


class Stream(IterableDataset):
    """Every n-th sample for this rank, in order."""

    def __iter__(self):
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return iter(torch.arange(float(SAMPLES)).reshape(-1, 1)[rank::world].unsqueeze(1))


def loader_of(kind: str) -> Any:
    data = TensorDataset(torch.arange(float(SAMPLES)).reshape(-1, 1))
    if kind == "plain":
        return DataLoader(data, batch_size=BATCH, shuffle=True)
    if kind == "distributed":
        return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=5))
    if kind == "stateful":
        return StatefulDataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=5))
    return DataLoader(Stream(), batch_size=BATCH)


def parallel_model(how: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    if how == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for weight in model.parameters():
        torch.distributed.broadcast(weight.data, 0)
    return fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all weights and what the optimizer keeps for them, in full on every rank."""
    found: dict[str, Any] = {}
    for name, weight in getattr(model, "module", model).named_parameters():
        values = {"weight": weight.detach(), **optimizer.state.get(weight, {})}
        found[name] = {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in values.items()
        }
    return found


def train(
    run: str, log: str, *, life: str, stop: int | None = None, loader: str = "plain", parallel: str = "ddp"
) -> None:
    """Train with dropout on all ranks; write down each step and, after a resume, what was restored."""
    rank = torch.distributed.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(100 + rank)  # ranks are seeded apart, and take the weights of rank 0
    random.seed(100 + rank)
    model = parallel_model(parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = loader_of(loader)
    with hf.Checkpointer(run, {"model": model, "optimizer": optimizer}, every=1, keep=None, timeout_s=60) as ck:

        def note(event: str, samples: list[int] | None = None) -> None:
            row = {
                "event": event, "life": life, "rank": rank, "step": ck.global_step, "epoch": ck.epoch,
                "samples": samples, "state": digests(whole(model, optimizer)),
                "rng": [torch.get_rng_state().sum().item(), zlib.crc32(repr(random.getstate()).encode())],
            }  # fmt: skip
            with Path(log, f"{life}-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

        if ck.resumed_from is not None:
            note("start")
        for _ in ck.epochs(EPOCHS):
            for batch in ck.batches(data):
                x = batch[0] if isinstance(batch, (list, tuple)) else batch.squeeze(1)
                loss = model(x / SAMPLES).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ck.step(loss=loss)
                note("step", x.view(-1).int().tolist())
                if ck.global_step == stop:
                    ck.wait()
                    torch.distributed.barrier()  # all have seen it safe
                    os.kill(os.getpid(), signal.SIGKILL)
