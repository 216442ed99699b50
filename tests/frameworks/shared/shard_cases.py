"""What ranks do in tests of `ShardCheckpoints`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

import holdfast as hf
from holdfast._ranks import current_ranks
from holdfast.frameworks.keepers import ShardCheckpoints


def keep(run: str, steps: int, *, fails: bool = False, kill: int | None = None, **options: Any) -> dict[str, Any]:
    """Every rank writes its file, a few times; tells what the newest was at the start, and what is there at the end."""
    rank = current_ranks().rank
    with ShardCheckpoints(run, keep=hf.Keep(last=1, best=1, metric="loss"), **options) as keeper:
        newest = keeper.latest()
        begun = [] if newest is None else sorted(path.read_text() for path in Path(newest).glob("shard-*"))
        first = int(begun[0].split()[0]) if begun else 0
        heard = []
        for step in range(first + 1, steps + 1):
            try:
                with keeper.writing(step=step, metrics={"loss": abs(step - 2)}) as directory:
                    Path(directory, f"shard-{rank}").write_text(f"{step} {rank}")
                    if fails and step == 1 and rank == 1:
                        raise OSError("no space on rank 1")
            except (OSError, hf.HoldfastError) as error:
                heard.append(str(error))
            if kill == step:
                os.kill(os.getpid(), signal.SIGKILL)
        keeper.wait()
        there = [one.step for one in keeper.checkpoints()]
    return {"begun": begun, "heard": heard, "there": there, "newest": newest}


def keys(run: str, steps: int) -> list[int]:
    """How many keys the ranks have in their store after each save."""
    counts = []
    with ShardCheckpoints(run, keep=None) as keeper:
        for step in range(1, steps + 1):
            with keeper.writing(step=step) as directory:
                Path(directory, f"shard-{current_ranks().rank}").write_text("1234")
            dist.barrier()
            counts.append(dist.distributed_c10d._get_default_store().num_keys())
            dist.barrier()
    return counts


def not_seen(run: str, folder: str, first: str) -> str:
    """Rank 1 does not see what rank 0 makes, as on another machine; what the first call of a training says."""
    if current_ranks().rank == 1:
        os.path.isdir = lambda path: False
    keeper = ShardCheckpoints(run, folder=folder)
    try:
        if first == "latest":
            keeper.latest()
        else:
            with keeper if first == "enter" else keeper.newest():
                return "trained"
        return "trained"
    except hf.ConfigError as error:
        return str(error)
    finally:
        keeper.close()
