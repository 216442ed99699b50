"""Goodput: the useful part of the wall time of a training that is killed again and again, and started again at once.

Useful is the time of the steps that count at the end, each at what it took, or at the median of the hundred steps
before and behind it if that is less: a machine is not equally fast for hours, and what saves, restarts and waits add to
a step is no training. The training process gets SIGKILL at the same moments for all. `holdfast run` and torchrun start
it again; the peers save at the interval that was the best of several.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from .bench import Context, Goal, Outcome, remove

__all__ = ["run", "run_random"]

_SCRIPT = Path(__file__).with_name("_goodput_script.py")
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
             "--max-restarts", "1000", "--monitor-interval", "0.1"]  # fmt: skip
_MOST = 1 << 16  # steps of a training
_NEAR = 100
_RUN = [sys.executable, "-m", "holdfast", "run", "--", sys.executable]


def run(context: Context) -> Outcome:
    """Measure each tool with kills 30 s apart; `--scale 4` makes that 2 minutes, `--scale 10` 5.

    Of 20, 60 and 180 steps both peers did best with 60 at 30 s (2026-11-28). The best interval grows by the root of the
    time between kills (Young 1974). At 5 minutes the two are measured that did best before.
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
    if longer > 5:
        settings = [settings[0], settings[-1]]
    for turn in range(max(1, context.repeat // 3)):
        for tool, every in settings:
            at = itertools.count(apart_s * (0.5 + turn / 4), apart_s)
            (got,) = _training(folder, tool, every, width, until=(wall_s,), kills=at)
            _add(context, outcome, f"{tool}, every {every}", got)
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


def run_random(context: Context) -> Outcome:
    """Measure `every="auto"` for half an hour with kills at random moments, a minute apart in the mean.

    Fixed intervals have the same kills, for the first four minutes, after which "auto" is looked at as well.
    """
    outcome = Outcome()
    width, wall_s, short_s, apart_s = (64, 24.0, 12.0, 6.0) if context.quick else (2048, 1800.0, 240.0, 60.0)
    folder = context.folder("goodput")
    outcome.limits = {"bytes": 3 * 4 * 3 * (width * width + width)}
    chance = random.Random(33)
    at = list(itertools.accumulate(chance.expovariate(1 / apart_s) for _ in range(int(3 * wall_s / apart_s))))
    short, whole = _training(folder, "holdfast", "auto", width, until=(short_s, wall_s), kills=iter(at))
    _add(context, outcome, f"auto, first {short_s:g} s", short)
    _add(context, outcome, f"auto, {wall_s:g} s", whole)
    for every in ("20", "60", "180"):
        (got,) = _training(folder, "holdfast", f"{every}ba", width, until=(short_s,), kills=iter(at))
        _add(context, outcome, f"every {every} steps", got)
    best = _best(outcome, [name for name in outcome.samples if name.startswith("every")])
    value = outcome.median(f"auto, first {short_s:g} s", "useful") / (best[1] or 1.0)  # none in a quick run, perhaps
    outcome.goals.append(
        Goal(what=f"useful part, auto, over the best interval ({best[0]})", value=value, at_least=0.95)
    )
    outcome.notes.append(f"kills at random moments, {apart_s:g} s apart in the mean, the same for all")
    return outcome


def _add(context: Context, outcome: Outcome, name: str, got: tuple[list[float], int, float]) -> None:
    gaps, kills, took_s = got
    useful = sum(min(gap, near) for gap, near in zip(gaps, _near(gaps), strict=True)) / took_s
    outcome.add(name, useful=useful, steps=len(gaps), step_s=statistics.median(gaps or [0.0]), kills=kills)
    context.say(f"{name}: {len(gaps)} steps, {kills} kills, useful {useful:.3f}")


def _near(gaps: list[float]) -> list[float]:
    """Return for each step the median of those near to it."""
    return [statistics.median(gaps[max(0, at - _NEAR) : at + _NEAR]) for at in range(len(gaps))]


def _best(outcome: Outcome, names: list[str]) -> tuple[str, float]:
    name = max(names, key=lambda name: outcome.median(name, "useful"))
    return name, outcome.median(name, "useful")


def _training(
    folder: Path, tool: str, every: str, width: int, *, until: tuple[float, ...], kills: Iterator[float]
) -> list[tuple[list[float], int, float]]:
    """Train, with SIGKILL at the moments ``kills``; return at each of ``until`` (seconds) how far it has come.

    That is the seconds of each step that counts since the one before it, the kills, and the seconds so far: more than
    ``until`` where a new life has done no step by then.
    """
    folder.mkdir()
    (folder / "steps").write_bytes(bytes(8 * _MOST))
    launcher = _RUN if tool == "holdfast" else _TORCHRUN
    command = [*launcher, str(_SCRIPT), tool, str(folder), every, str(width)]
    begun, num_kills, due, found = time.monotonic(), 0, next(kills), []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        for end in until:
            while (now := time.monotonic() - begun) < end or (not _steps(folder) and now < end + 60):
                if now >= due and now < end:
                    due = next(kills)
                    with contextlib.suppress(OSError, ValueError):
                        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
                        num_kills += 1
                        time.sleep(0.02)
                        _reset(folder)  # what a dead life has done does not count any more
                time.sleep(0.01)
            found.append((_gaps(folder), num_kills, time.monotonic() - begun))
        return found
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


def _gaps(folder: Path) -> list[float]:
    """Return the time between the ends of each step and the one before it, of the steps that count but the first."""
    done = _steps(folder)  # before the rest is read: the training goes on
    ends = array("d", (folder / "steps").read_bytes()[8 : 8 * done + 8])
    return [after - before for before, after in itertools.pairwise(ends)]
