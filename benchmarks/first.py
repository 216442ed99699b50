"""The first asynchronous save of a process, in fresh processes: nobody finds memory that another made ready."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from .bench import Context, Goal, Outcome, remove
from .peers import make_peers
from .states import gpt2_state

__all__ = ["run"]

_OURS, _DCP = "save_async", "DCP async_save"


def run(context: Context) -> Outcome:
    """Measure the seconds that the first save holds its caller, and until it is durable."""
    outcome = Outcome()
    for turn in range(context.repeat + 1):
        for name in (_OURS, _DCP) if turn % 2 else (_DCP, _OURS):
            held, durable = _in_process(context, name)
            outcome.add(name, first=not turn, held=held, durable=durable)
            context.say(f"{name}: held {held:.3f} s, durable {durable:.3f} s")
    for kind in ("held", "durable"):
        ratio = outcome.median(_OURS, kind) / outcome.median(_DCP, kind)
        bound = 1.0 if kind == "held" else None
        outcome.goals.append(Goal(what=f"first save: {kind} / that of {_DCP}", value=ratio, at_most=bound))
    return outcome


def _in_process(context: Context, name: str) -> tuple[float, float]:
    target = context.folder("first")
    command = [sys.executable, "-m", "benchmarks.first", name, str(target), str(context.scale), str(int(context.quick))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    try:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=300)
    finally:
        remove(target)
    held, durable = map(float, done.stdout.splitlines()[-1].split())
    return held, durable


def _main(name: str, target: Path, scale: float, quick: bool) -> None:
    import holdfast as hf

    state = gpt2_state(scale=scale, quick=quick)
    (peer,) = make_peers((_DCP,), [])
    save = hf.save_async  # what its name imports is no part of the save, as the import of DCP is none
    start = time.perf_counter()
    if name == _OURS:
        handle = save(target, state.objects)
        held = time.perf_counter() - start
        handle.result()
    else:
        saved = peer.save(target, state.tensors)
        held = time.perf_counter() - start
        saved.wait()
    print(held, time.perf_counter() - start)
    peer.close()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), bool(int(sys.argv[4])))
