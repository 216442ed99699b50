"""What ranks do in tests of `ShardKeeper`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast._ranks import current_ranks
from holdfast.integrations.shard_keeper import ShardKeeper


def keep(run: str, steps: int, *, fails: bool = False, kill: int | None = None, **options: Any) -> dict[str, Any]:
    """Every rank writes its file, a few times; tells what the newest was at the start, and what is there at the end."""
    rank = current_ranks().rank
    with ShardKeeper(run, keep=hf.Keep(last=1, best=1, metric="loss"), **options) as keeper:
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


def not_seen(run: str, folder: str) -> str:
    """Rank 1 does not see what rank 0 makes, as on another machine."""
    if current_ranks().rank == 1:
        os.path.isdir = lambda path: False
    try:
        with ShardKeeper(run, folder=folder) as keeper, keeper.writing(step=1):
            return "written"
    except hf.ConfigError as error:
        return str(error)
