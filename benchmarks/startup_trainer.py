"""From nothing to the first line of train_func, and from a dead worker to the next one.

The limit is what nobody can beat who starts one interpreter for each worker: so many of them importing torch at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.storage.local.local_storage import LocalStorage
from holdfast.trainers.function.engine import Exited, GroupSpec, Started
from holdfast.trainers.function.engines.process_engine import LocalEngine
from holdfast.trainers.function.transit import pack_call

from .bench import Context, Goal, Outcome, remove

__all__ = ["run"]

_LIMIT_S = 120.0


def run(context: Context) -> Outcome:
    """Start groups of workers, kill one, start again."""
    outcome = Outcome()
    folder = context.folder("startup-trainer")
    folder.mkdir(parents=True)
    sizes = (1, 2) if context.quick else (1, 2, 4)
    for turn in range(context.repeat + 1):
        for size in sizes:
            first = turn == 0
            outcome.add(f"{size} interpreters import torch", first=first, s=_interpreters(size))
            started, steps = _group(folder, size)
            outcome.add(f"{size} workers, to the first line", first=first, s=started)
            outcome.add(f"{size} workers, kill -9 to the next first line", first=first, s=sum(steps.values()), **steps)
            context.say(f"{size} workers: {started:.2f} s, again {sum(steps.values()):.3f} s {steps}")
    remove(folder)
    for size in sizes:
        limit = outcome.median(f"{size} interpreters import torch", "s")
        value = outcome.median(f"{size} workers, to the first line", "s") / limit
        outcome.goals.append(Goal(what=f"first line / {size} interpreters importing torch", value=value, at_most=1.2))
    for size in sizes:
        value = outcome.median(f"{size} workers, kill -9 to the next first line", "s")
        outcome.goals.append(Goal(what=f"kill -9 of 1 of {size} to the next first line", value=value, unit="s"))
    return outcome


def _interpreters(number: int) -> float:
    begun = time.perf_counter()
    running = [subprocess.Popen([sys.executable, "-c", "import torch, os; os._exit(0)"]) for _ in range(number)]
    for process in running:
        process.wait()
    return time.perf_counter() - begun


def _first_line(config: dict[str, Any]) -> None:
    now = time.monotonic()  # the same clock in all processes
    Path(config["folder"], f"{os.getpid()}.tmp").write_text(repr(now))
    os.rename(f"{config['folder']}/{os.getpid()}.tmp", f"{config['folder']}/{os.environ['RANK']}-{config['attempt']}")
    time.sleep(600)


def _group(folder: Path, size: int) -> tuple[float, dict[str, float]]:
    """Seconds to the first line of the last rank; and the same after a kill, split."""
    begun = time.monotonic()
    engine = LocalEngine(num_workers=size)
    try:
        pids = _start(engine, folder, size, 1)
        started = _wait_lines(engine, folder, size, 1) - begun
        killed = time.monotonic()
        os.kill(pids[size - 1], signal.SIGKILL)
        _wait(engine, Exited, 1)
        seen = time.monotonic()
        engine.kill()
        _wait(engine, Exited, size - 1)
        stopped = time.monotonic()
        _start(engine, folder, size, 2)
        again = _wait_lines(engine, folder, size, 2)
    finally:
        engine.close()
        for file in folder.iterdir():
            file.unlink()
    return started, {"detect": seen - killed, "stop": stopped - seen, "start": again - stopped}


def _start(engine: LocalEngine, folder: Path, size: int, attempt: int) -> dict[int, int]:
    engine.start(GroupSpec(num_workers=size, attempt=attempt))
    call = pack_call(_first_line, {"folder": str(folder), "attempt": attempt})
    storage = LocalStorage(folder)
    common = {"do": "begin", "experiment_name": "bench", "run_name": "bench", "attempt": attempt, "first_index": 1}
    common |= {"start_id": "0badcafe", "storage": {}, "strategy": None, "score": None, "report_timeout_s": 60.0}
    common |= {"checkpoint": None, "run_root": {"storage": storage.describe(), "uri": storage.uri, "name": ""}}
    for rank in range(size):
        ranks = {"rank": rank, "local_rank": rank, "world_size": size, "local_world_size": size, "node_rank": 0}
        engine.send(rank, {**common, **ranks}, [call])
    return {event.rank: event.pid for event in _wait(engine, Started, size)}


def _wait(engine: LocalEngine, kind: type[Any], number: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < number:
        events = engine.events(_LIMIT_S)
        if not events:
            raise TimeoutError(f"workers gave no {kind.__name__} within {_LIMIT_S:g} s")
        found += [event for event in events if isinstance(event, kind)]
    return found


def _wait_lines(engine: LocalEngine, folder: Path, size: int, attempt: int) -> float:
    """When the last rank was in its function."""
    files = [folder / f"{rank}-{attempt}" for rank in range(size)]
    deadline = time.monotonic() + _LIMIT_S
    while not all(file.exists() for file in files):
        engine.events(0.02)  # nothing is timed here: the ranks write down when it was
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {size} workers reached their function within {_LIMIT_S:g} s")
    return max(float(file.read_text()) for file in files)
