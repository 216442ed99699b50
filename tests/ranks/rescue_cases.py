"""Training of several ranks that keep each step in memory, with lives that end when they are told to."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.checkpointer import auto_interval


def train(
    run: str, total: int, *, kill_at: dict[str, int] | None = None, raise_at: int | None = None,
    after_s: dict[str, float] | None = None, every: int | None = None, rescue: Any = 1, width: int = 16,
    soonest_s: float = 1.0, kill_within: dict[str, int] | None = None, save_at: int = 0,
) -> int:  # fmt: skip
    """Train to the end, or until this rank is killed: at a step, or so many seconds after its training has begun."""
    rank = int(os.environ["RANK"])
    auto_interval._SOONEST_S = soonest_s
    random.seed(0)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "seen": hf.PerRank([])}
    done = os.open(f"{run}-{rank}", os.O_WRONLY | os.O_CREAT)
    with hf.Checkpointer(run, state, every=every, rescue=rescue) as ck:
        os.pwrite(done, f"{ck.global_step:8d}{ck.global_step:8d}".encode(), 0)
        if after_s is not None and str(rank) in after_s:
            threading.Timer(after_s[str(rank)], os.kill, (os.getpid(), signal.SIGKILL)).start()
        while ck.global_step < total:
            drawn = torch.Generator().manual_seed(1000 * ck.global_step + rank)
            loss = model(torch.randn(4, width, generator=drawn)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state["seen"].value.append(ck.global_step)
            if kill_within is not None and kill_within.get(str(rank)) == ck.global_step + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ck.step(loss=float(loss.detach()))
            os.pwrite(done, f"{ck.global_step:8d}".encode(), 0)
            time.sleep(0.002 if after_s else 0.0)  # a life of some seconds has hundreds of steps, which twins do again
            if save_at == ck.global_step:
                ck.save()
            if kill_at is not None and kill_at.get(str(rank)) == ck.global_step:
                os.kill(os.getpid(), signal.SIGKILL)
            if raise_at == ck.global_step and rank == 0:
                raise ZeroDivisionError
        return ck.global_step
