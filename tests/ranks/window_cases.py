"""What the ranks of `test_windows_of_ranks` run: saves through windows, and a writer that is killed during one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast as hf
from holdfast.state.save import windows
from holdfast.writer.client import WriterClient

WINDOWS = 2 << 20  # two of 1 MiB


def train(root: str, until: int, what: str, rank: int, at: int) -> dict[str, Any]:
    """Save each step; the writer of a rank is killed before its ``at``-th window, or ("seal") with a save sealed."""
    mine, seen = dist.get_rank(), 0
    step, model = torch.zeros(1), torch.nn.Linear(1024, 768, bias=False)
    state = {"model": model, "mine": hf.PerRank(torch.zeros(768 << 10)), "step": step}
    files = {"config.json": lambda: json.dumps({"step": int(step)})}
    copy, seal = windows.copy_window, WriterClient.seal

    def kill(name: str) -> bool:
        nonlocal seen
        seen += name == what and mine == rank
        if name != what or mine != rank or seen != at:
            return False
        os.kill(ck._session.client.process_id, signal.SIGSTOP if name == "seal" else signal.SIGKILL)
        return True

    def copy_window(*args: Any, **options: Any) -> None:
        kill("window")
        copy(*args, **options)

    def sealed(client: WriterClient, *args: Any, **options: Any) -> None:
        is_stopped = kill("seal")
        seal(client, *args, **options)
        if is_stopped:  # it has not read that
            os.kill(ck._session.client.process_id, signal.SIGKILL)

    windows.copy_window, WriterClient.seal = copy_window, sealed
    options: dict[str, Any] = {"every": 1, "keep": None, "max_staging_bytes": WINDOWS, "model_files": files}
    with hf.Checkpointer(Path(root), state, timeout_s=60, **options) as ck:
        start = ck.global_step
        assert state["mine"].value[0] == (10 * start + mine if start else 0)
        while ck.global_step < until:
            step.fill_(ck.global_step + 1)
            with torch.no_grad():
                model.weight.fill_(float(step))
            state["mine"].value.fill_(10 * float(step) + mine)
            ck.step()
            ck.wait()
    return {"start": start, "killed": mine == rank and seen >= at}
