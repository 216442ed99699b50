"""The training of `benchmarks.goodput`: the same model and steps, saved by one of several tools.

    _goodput_script.py TOOL FOLDER EVERY WIDTH

It writes "PID" to FOLDER/pid before it imports anything large, and its steps so far to FOLDER/steps, with the moment
that each ended at: bytes that survive a SIGKILL.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

tool, folder, every, width = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
(folder / "pid.new").write_text(str(os.getpid()))
(folder / "pid.new").rename(folder / "pid")

import torch  # noqa: E402


def count(step: int) -> None:
    """Note that a step is done."""
    struct.pack_into("<d", _memory, 8 * step, time.monotonic())
    struct.pack_into("<q", _memory, 0, step)


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Return a model, its optimizer and what does a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(32, width)).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def holdfast() -> None:
    """Save by `Checkpointer`; ``every`` may be "auto", with "+rescue" behind it for snapshots."""
    import holdfast as hf

    model, optimizer, step = make()
    interval, _, rescue = every.partition("+")
    state = {"model": model, "optimizer": optimizer}
    options: dict[str, Any] = {"rescue": "auto"} if rescue else {}
    with hf.Checkpointer(folder / "run", state, every=interval, **options) as ck:
        while not ck.should_stop:
            step()
            ck.step()
            count(ck.global_step)


def torch_save() -> None:
    """Write one file by `torch.save`, synced, and renamed over the one before."""
    model, optimizer, step = make()
    target, done = folder / "last.pt", 0
    if target.exists():
        found = torch.load(target, mmap=True, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        done = found["step"]
    while True:
        step()
        done += 1
        if done % int(every) == 0:
            with open(folder / "last.tmp", "wb") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(folder / "last.tmp", target)
        count(done)


def dcp_async() -> None:
    """Save by `torch.distributed.checkpoint.async_save` into a new directory each time; the newest two are kept."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group("gloo")
    model, optimizer, step = make()
    saved = sorted(
        (path for path in folder.glob("step_*") if (path / ".metadata").exists()), key=lambda path: path.name
    )
    done, running = 0, None
    if saved:
        model_state, optim_state = get_state_dict(model, optimizer)
        found = {"model": model_state, "optimizer": optim_state}
        dcp.load(found, checkpoint_id=saved[-1])
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        done = int(saved[-1].name[5:])
    while True:
        step()
        done += 1
        if done % int(every) == 0:
            if running is not None:
                running.result()
                for path in sorted(folder.glob("step_*"))[:-2]:
                    shutil.rmtree(path)
            model_state, optim_state = get_state_dict(model, optimizer)
            writer = dcp.FileSystemWriter(folder / f"step_{done:08d}", thread_count=2, sync_files=True)
            running = dcp.async_save({"model": model_state, "optimizer": optim_state}, storage_writer=writer)
        count(done)


with open(folder / "steps", "r+b") as _file:
    _memory = mmap.mmap(_file.fileno(), 0)
{"holdfast": holdfast, "torch.save": torch_save, "DCP async_save": dcp_async}[tool]()
