"""Goodput: the useful part of the wall time of a training that is killed again and again, and started again at once.

Useful are the steps that count at the end, at the time that they take without saving. The training process gets SIGKILL
at the same moments for all. `holdfast run` and torchrun start it again; for the peers several intervals are tried, and
the best one counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from .bench import Context, Goal, Outcome, remove

__all__ = ["run"]

_SCRIPT = Path(__file__).with_name("_goodput_script.py")
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
             "--max-restarts", "1000", "--monitor-interval", "0.1"]  # fmt: skip
_RUN = [sys.executable, "-m", "holdfast", "run", "--", sys.executable]


def run(context: Context) -> Outcome:
    """Measure each tool with kills 30 s apart; `--scale 4` makes that 2 minutes, `--scale 10` 5 minutes.

    At 30 s the best of the three intervals of the peers was the middle one. It grows by the root of the time between
    kills (Young 1974), so where that is longer it alone is tried.
    """
    outcome, longer = Outcome(), max(1.0, context.scale)
    width, wall_s, apart_s = (64, 10.0, 6.0) if context.quick else (2048, 90.0 * longer, 30.0 * longer)
    intervals = ("20",) if context.quick else ("20", "60", "180")
    if longer > 1:
        wall_s, intervals = 1.5 * apart_s, (str(round(60 * longer**0.5)),)
    folder = context.folder("goodput")
    step_s = _undisturbed(folder, width, seconds=2.0 if context.quick else 12.0)
    outcome.limits = {"step_s": step_s, "bytes": 3 * 4 * 3 * (width * width + width)}
    settings = [("holdfast", "auto"), ("holdfast", "auto+rescue")]
    settings += [(tool, every) for tool in ("torch.save", "DCP async_save") for every in intervals]
    for turn in range(max(1, context.repeat // 3)):
        for tool, every in settings:
            done, kills, took_s = _life(
                folder, tool, every, width, wall_s=wall_s, apart_s=apart_s, first_s=apart_s * (0.5 + turn / 4)
            )
            useful = done * step_s / took_s
            outcome.add(f"{tool}, every {every}", useful=useful, steps=done, kills=kills)
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


def _undisturbed(folder: Path, width: int, *, seconds: float) -> float:
    """Return the seconds of a step without saving, the first ones left out."""
    folder.mkdir()
    (folder / "steps").write_bytes(bytes(8))
    process = subprocess.Popen([sys.executable, str(_SCRIPT), "bare", str(folder), "0", str(width)])
    try:
        while _steps(folder) < 20:
            time.sleep(0.01)
        begun, first = time.monotonic(), _steps(folder)
        time.sleep(seconds)
        return (time.monotonic() - begun) / (_steps(folder) - first)
    finally:
        process.kill()
        process.wait()
        remove(folder)


def _life(
    folder: Path, tool: str, every: str, width: int, *, wall_s: float, apart_s: float, first_s: float
) -> tuple[int, int, float]:
    """Return the steps that count after ``wall_s``, how often the training was killed, and the seconds in all.

    These are more than ``wall_s`` where a new life has done no step by then.
    """
    folder.mkdir()
    (folder / "steps").write_bytes(bytes(8))
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
        return _steps(folder), kills, time.monotonic() - begun
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
    return int(struct.unpack("<q", (folder / "steps").read_bytes())[0])
