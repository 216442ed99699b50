"""Several ranks, each a process, beside DCP: what saving costs with more of them, and loading in another layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .bench import Context, Goal, Outcome, remove
from .limits import Limits
from .states import gpt2_state

__all__ = ["run"]

_ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 600.0
_TURNS = 2  # of one launch: a disk is quicker in one minute than in the next, so worlds have to take turns too


def run(context: Context) -> Outcome:
    """Save the same state in worlds of one and four ranks, in turns; load what one, two and four have saved."""
    outcome = Outcome()
    outcome.notes.append("loads: hf.load(ranks='all'), so that the ranks read each byte once between them")
    outcome.notes.append(
        "DCP: FileSystemWriter(thread_count=2, sync_files=True), plans cached, one stager for all saves"
    )
    worlds = (1, 2) if context.quick else (1, 2, 4)
    many = worlds[-1]
    limits = Limits(context, gpt2_state(scale=context.scale, quick=context.quick).nbytes)
    limits.memcpy()
    outcome.limits = limits.to_json()
    limits.close()
    kept = str(context.folder("kept"))
    rounds = -(-context.repeat // _TURNS)
    try:
        for number in range(rounds):
            last = number == rounds - 1
            for world in worlds if last else (1, many):
                order = {
                    "world": world,
                    "saved": [one for one in worlds if one <= world],
                    "keep": last,
                    "load": last and world == many,
                    "turns": min(_TURNS, context.repeat) if world in (1, many) else 0,
                    "repeat": context.repeat,
                    "scale": context.scale,
                    "quick": context.quick,
                    "kept": kept,
                    "folder": str(context.scratch),
                }
                for sample in _launch(order):
                    outcome.add(sample["method"], first=sample["first"], **{sample["kind"]: sample["value"]})
                context.say(f"{world} ranks: done")
    finally:
        for path in Path(kept).parent.glob(Path(kept).name + "-*"):
            remove(path)
    _judge(outcome, worlds)
    return outcome


def _launch(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a world of processes; what rank 0 measured."""
    with tempfile.TemporaryDirectory() as place:
        order = {**order, "store": f"{place}/store", "result": f"{place}/result"}
        Path(place, "order").write_text(json.dumps(order))
        paths = os.pathsep.join([str(_ROOT), *sys.path])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks._ranks_script", f"{place}/order"]
        ranks = []
        try:
            for rank in range(order["world"]):
                with Path(place, f"errors-{rank}").open("w") as errors:
                    ranks.append(subprocess.Popen([*command, str(rank)], env=environment, stderr=errors))
            codes = [rank.wait(_LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            told = [Path(place, f"errors-{rank}").read_text()[-2000:] for rank, code in enumerate(codes) if code]
            raise RuntimeError(f"ranks ended with {codes}: {told[0]}")
        found: list[dict[str, Any]] = json.loads(Path(place, "result").read_text())
        return found


def _judge(outcome: Outcome, worlds: tuple[int, ...]) -> None:
    many = worlds[-1]
    for method in ("raw write", "save_async", "save", "DCP save", "DCP async_save"):
        ratio = outcome.median(method, f"durable {many}") / outcome.median(method, "durable 1")
        at_most = 1.0 if method.startswith("save") else None
        outcome.goals.append(Goal(what=f"{method}: durable, {many} ranks / 1 rank", value=ratio, at_most=at_most))
    same = f"{many} -> {many}"
    for kind in ("warm", "cold"):
        reshards = [*(f"{world} -> {many}" for world in worlds[:-1]), f"{same} columns"]
        for method in reshards:
            ratio = outcome.median(method, kind) / outcome.median(same, kind)
            outcome.goals.append(Goal(what=f"load {method} / same layout, {kind}", value=ratio, at_most=1.15))
    for peer, ours, kind in (
        ("DCP save", "save", f"durable {many}"),
        ("DCP async_save", "save_async", f"durable {many}"),
        ("DCP async_save", "save_async", f"held {many}"),
        (f"DCP {same}", same, "warm"),
        (f"DCP {same}", same, "cold"),
        (f"DCP {same} columns", f"{same} columns", "warm"),
        (f"DCP {same} columns", f"{same} columns", "cold"),
    ):
        outcome.goals.append(
            Goal(what=f"{ours}, {kind}: faster than {peer}", value=outcome.speedup(peer, ours, kind), at_least=1.0)
        )
