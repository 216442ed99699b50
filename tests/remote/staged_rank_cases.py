"""Ranks on machines that share no disk: here each has a local directory of its own, and the remote is a folder."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast as hf
from holdfast.checkpointer import rank_group
from holdfast.testing import FaultyStorage


def train(
    remote: str,
    disks: str,
    until: int,
    *,
    per_node: int = 1,
    fault: dict[str, Any] | None = None,
    broken: dict[str, Any] | None = None,
    bare: bool = False,
    seed: int = 0,
    frozen: int = 0,
    stale_s: float = 4.0,
    patience_s: float = 20.0,
    mirror: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train with PerRank values and DDP-like weights, every second step saved; what this rank has seen.

    ``fault``: rank, step, what ("trainer", "writer", "both": killed at that step; "all": every trainer and writer).
    ``broken``: rank, and how the remote fails for it (arguments of `FaultyStorage`). ``bare``: without a disk in front
    of the remote. ``seed``: not the same on all ranks, times the rank. ``frozen``: numbers that never change, beside
    the rest. ``stale_s`` and ``patience_s``: after which a writer counts as lost, and a save.
    """
    rank_group.BEAT_S, rank_group.ANSWER_MARGIN_S = 0.2, 4.0
    os.environ.update(environment or {})
    rank = dist.get_rank()
    mine = Path(disks, f"node{rank // per_node}")
    mine.parent.mkdir(parents=True, exist_ok=True)
    (mine.parent / f"writer-{rank}").unlink(missing_ok=True)
    torch.manual_seed(3 + seed * rank)
    model = torch.nn.Linear(8, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "mine": hf.PerRank(torch.full((3,), float(rank)))}
    if frozen:
        state["frozen"] = torch.nn.Linear(frozen, 1, bias=False).requires_grad_(False)
    # A fast disk leaves none out that a slow remote has yet to get.
    local = None if bare else hf.Mirror(mine, **{"max_behind": 9, **(mirror or {})})
    storage: Any = remote
    if broken is not None and broken.pop("rank") == rank:
        storage = FaultyStorage(remote, **broken)
    told: list[tuple[str, bool, dict[str, Any]]] = []

    def hear(checkpoint: hf.Checkpoint) -> None:
        told.append((checkpoint.name, checkpoint.manifest is not None, checkpoint.metrics))

    # A file of one name in all saves, of one size, and never of the same contents.
    files = {"config.json": lambda: json.dumps({"drawn": os.urandom(8).hex()})}
    options = {
        "every": 2, "keep": None, "timeout_s": patience_s, "on_commit": hear, "model_files": files, **options,
    }  # fmt: skip
    start = -1
    try:
        with hf.Checkpointer(storage, state, local_dir=local, silence_s=stale_s, **options) as ck:
            start = ck.global_step
            (mine.parent / f"writer-{rank}").write_text(str(ck._session.client.process_id))
            (mine.parent / f"trainer-{rank}").write_text(str(os.getpid()))
            assert start == 0 or state["mine"].value.tolist() == [rank] * 3
            while ck.global_step < until:
                optimizer.zero_grad()
                model(torch.full((2, 8), float(ck.global_step))).square().mean().backward()
                optimizer.step()
                ck.step(loss=0.5)
                if ck.global_step == 4:
                    ck.report(late=1.5)
                ck.wait()
                if fault is not None and fault["step"] == ck.global_step:
                    _happen(fault, rank, ck)
    except hf.HoldfastError as error:
        return {"start": start, "error": f"{type(error).__name__}: {error}"}
    return {
        "start": start,
        "error": None,
        "weights": model.weight.double().sum().item(),
        "remote": ck.stats.last_remote_step,
        "told": told,
    }


def _happen(fault: dict[str, Any], rank: int, ck: hf.Checkpointer) -> None:
    dist.barrier()  # the step is staged everywhere
    writer = ck._session.client.process_id
    assert writer is not None
    if fault["what"] == "all" or (fault["rank"] == rank and fault["what"] in ("writer", "both")):
        os.kill(writer, signal.SIGKILL)
    if fault["what"] == "all" or (fault["rank"] == rank and fault["what"] in ("trainer", "both")):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
