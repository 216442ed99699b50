"""What the workers of the end-to-end tests run. Imports little: workers load this module."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import holdfast as hf


def rank() -> int:
    return hf.get_context().get_world_rank()


def attempt() -> int:
    return int(hf.get_context().get_trial_id().rsplit("-", 1)[1])


def save_directory(epoch: int, metrics: dict[str, Any], **options: Any) -> None:
    """Report a temporary directory from rank 0, nothing but metrics from the others, as Ray's documentation does it."""
    if rank() != 0:
        hf.report(metrics)
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "epoch.txt").write_text(str(epoch))
        hf.report(metrics, checkpoint=hf.Checkpoint.from_directory(directory), **options)


def load_epoch() -> int:
    """Return the first epoch that is not in the checkpoint."""
    checkpoint = hf.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        return int(Path(directory, "epoch.txt").read_text()) + 1


def meet() -> None:
    """Wait for all ranks."""
    import torch
    import torch.distributed as dist

    if hf.get_context().get_world_size() > 1:
        dist.all_reduce(torch.ones(1))


def count_up(config: dict[str, Any]) -> None:
    """Train: one epoch, one checkpoint; fail as the config says in the first attempt."""
    start = load_epoch()
    print(f"starts at epoch {start}")
    for epoch in range(start, config.get("epochs", 4)):
        meet()
        if epoch == config.get("fail_epoch") and attempt() in config.get("fail_attempts", (1,)):
            fail(config["how"], config.get("fail_rank", 0))
        save_directory(epoch, {"epoch": epoch, "score": float(config.get("scores", range(100))[epoch])})


def fail(how: str, which: int) -> None:
    """End this worker in one of many ways, the others wait for it."""
    if rank() == which:
        if how == "raise":
            raise ValueError(f"intentional failure of rank {which}")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            atexit.register(time.sleep, 1.5)  # as on a busy machine: its peers fail long before it has ended
            sys.exit(7)
        elif how == "preempted":
            os.kill(os.getpid(), signal.SIGTERM)
        elif how == "segfault":
            ctypes.string_at(0)
        elif how == "hang":
            time.sleep(600)
        elif how == "garbage":
            from holdfast.writer.frames import Channel

            for one in [one for one in gc.get_objects() if isinstance(one, Channel)]:
                with contextlib.suppress(OSError, ValueError):
                    os.write(one.fileno(), b"\xff" * 64)
            time.sleep(600)
    meet()


def learn(config: dict[str, Any]) -> None:
    """Train a small model with DDP and report its state, sharded among the ranks."""
    import torch

    from holdfast.torch import prepare_model

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    model = prepare_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if (checkpoint := hf.get_checkpoint()) is not None:
        state["step"] = hf.load(checkpoint, state)["step"]
    start = state["step"]
    for step in range(start, config.get("steps", 6)):
        meet()
        generator = torch.Generator().manual_seed(step * 10 + rank())
        loss = model(torch.randn(8, 64, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] = step + 1
        time.sleep(config.get("sleep", 0.0))
        if step == config.get("fail_step") and attempt() == 1:
            if config.get("sealed", True):
                hf.report({"loss": loss}, state=state)
            fail(config["how"], config.get("fail_rank", 1))
        hf.report({"loss": loss}, state=state)


def guarded(config: dict[str, Any]) -> list[float]:
    """Train a run of its own under a guard; a sample is nan, or its batch is not there. Returns the weights."""
    import torch

    torch.manual_seed(0)
    model: Any = torch.nn.Linear(4, 1)
    if torch.distributed.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(160, 4)
    if config["what"] == "bad":
        data[74] = float("nan")
    elif config["what"] == "without":
        data = torch.cat([data[:72], data[80:]])
    size = 8 // hf.get_context().get_world_size()
    loader: Any = torch.utils.data.DataLoader(data, batch_size=size)
    state = {"model": model, "optimizer": optimizer}
    with hf.Checkpointer(config["run"], state, every=4, guard=hf.Guard(max_rollbacks=config.get("max", 5))) as ck:
        for x in ck.batches(loader):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(mean)
            ck.step(loss=mean)
    return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]
