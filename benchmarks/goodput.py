"""Goodput: the useful part of the wall time of a training that is killed again and again, and started again at once.

Useful are the steps that count at the end, at the median time of a step in the same training: a machine may be slower
for one than for the next. The training process gets SIGKILL at the same moments for all. `holdfast run` and torchrun
start it again; the peers save at the interval that was the best of several.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import struct
import subprocess
import sys
import time
from array import array
from pathlib import Path

from .bench import Context, Goal, Outcome, remove

__all__ = ["run"]

_SCRIPT = Path(__file__).with_name("_goodput_script.py")
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
             "--max-restarts", "1000", "--monitor-interval", "0.1"]  # fmt: skip
_MOST = 1 << 16  # steps of a training
_RUN = [sys.executable, "-m", "holdfast", "run", "--", sys.executable]


def run(context: Context) -> Outcome:
    """Measure each tool with kills 30 s apart; `--scale 4` makes that 2 minutes, `--scale 10` 5 minutes.

    Of 20, 60 and 180 steps both peers did best with 60 at 30 s (2026-11-28). The best interval grows by the root of the
    time between kills (Young 1974).
    """
    outcome, longer = Outcome(), max(1.0, context.scale)
    width, wall_s, apart_s = (64, 10.0, 6.0) if context.quick else (2048, 90.0 * longer, 30.0 * longer)
    of_peers = "20" if context.quick else str(round(60 * longer**0.5))
    if longer > 1:
        wall_s = 1.5 * apart_s
    folder = context.folder("goodput")
    outcome.limits = {"bytes": 3 * 4 * 3 * (width * width + width)}
    settings = [("holdfast", "auto"), ("holdfast", "auto+rescue")]
    settings += [(tool, of_peers) for tool in ("torch.save", "DCP async_save")]
    for turn in range(max(1, context.repeat // 3)):
        for tool, every in settings:
            done, step_s, kills, took_s = _training(
                folder, tool, every, width, wall_s=wall_s, apart_s=apart_s, first_s=apart_s * (0.5 + turn / 4)
            )
            useful = done * step_s / took_s
            outcome.add(f"{tool}, every {every}", useful=useful, steps=done, step_s=step_s, kills=kills)
            context.say(f"{tool}, every {every}: {done} steps, {kills} kills, useful {useful:.3f}")
    ours = _best(outcome, [name for name in outcome.samples if name.startswith("holdfast")])
    best = _best(outcome, [name for name in outcome.samples if not name.startswith("holdfast")])
    outcome.goals.append(
        Goal(what=f"useful part, {ours[0]}, over the best peer ({best[0]})", value=ours[1] / best[1], at_least=1.0)
    )
    outcome.goals.append(Goal(what=f"useful part of the wall time, {ours[0]}", value=ours[1], unit=""))
    outcome.notes.append(
        f"kills {apart_s:g} s apart, {wall_s:g} s each; torchrun and holdfast run start the script again"
    )
    outcome.notes.append(
        "torch.save: one file, synced and renamed; DCP: FileSystemWriter(thread_count=2, sync_files=True)"
    )
    return outcome


def _best(outcome: Outcome, names: list[str]) -> tuple[str, float]:
    name = max(names, key=lambda name: outcome.median(name, "useful"))
    return name, outcome.median(name, "useful")


def _training(
    folder: Path, tool: str, every: str, width: int, *, wall_s: float, apart_s: float, first_s: float
) -> tuple[int, float, int, float]:
    """Return the steps that count after ``wall_s``, seconds of one of them, the kills, and the seconds in all.

    The last are more than ``wall_s`` where a new life has done no step by then.
    """
    folder.mkdir()
    (folder / "steps").write_bytes(bytes(8 * _MOST))
    launcher = _RUN if tool == "holdfast" else _TORCHRUN
    command = [*launcher, str(_SCRIPT), tool, str(folder), every, str(width)]
    begun, kills, due = time.monotonic(), 0, first_s
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while (now := time.monotonic() - begun) < wall_s or (not _steps(folder) and now < wall_s + 60):
            if now >= due and now < wall_s:
                due += apart_s
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
                    kills += 1
                    time.sleep(0.02)
                    _reset(folder)  # what a dead life has done does not count any more
            time.sleep(0.01)
        done, took_s = _steps(folder), time.monotonic() - begun
        return done, _step_s(folder), kills, took_s
    finally:
        for number in (process.pid, int((folder / "pid").read_text())):
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        process.wait()
        time.sleep(1.0)  # a writer that outlives its trainer is done by then
        remove(folder)


def _reset(folder: Path) -> None:
    with open(folder / "steps", "r+b") as file:  # not cut: the training has mapped it
        file.write(bytes(8))


def _steps(folder: Path) -> int:
    with open(folder / "steps", "rb") as file:
        return int(struct.unpack("<q", file.read(8))[0])


def _step_s(folder: Path) -> float:
    """Return the median time between the ends of two steps, of all lives; 0.0 without two."""
    ends = [end for end in array("d", (folder / "steps").read_bytes())[1:] if end]
    gaps = [after - before for before, after in itertools.pairwise(ends) if after > before]
    return statistics.median(gaps) if gaps else 0.0
