"""The function trainer end to end: rate of reports, reporting a big directory, start, recovery, shared bytes.

Ray Train runs beside it when ``HOLDFAST_RAY_PYTHON`` names an interpreter that has ``ray[train]`` and torch.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .bench import Context, Goal, Outcome, remove

__all__ = ["run"]

_SCRIPT = Path(__file__).with_name("_trainer_script.py")
_LIMIT_S = 400.0


def run(context: Context) -> Outcome:
    """Run each case with Holdfast, then with Ray where there is one."""
    outcome = Outcome()
    ray = os.environ.get("HOLDFAST_RAY_PYTHON")
    tools = {"holdfast": sys.executable, **({"ray": ray} if ray else {})}
    if ray is None:
        outcome.notes.append("Ray Train was not at hand: set HOLDFAST_RAY_PYTHON to an interpreter that has ray[train]")
    size = 8 << 20 if context.quick else int((1 << 30) * context.scale)
    cases: dict[str, dict[str, Any]] = {
        "rate-1": {"workers": 1, "reports": 200 if context.quick else 20_000},
        "rate-4": {"workers": 4, "reports": 200 if context.quick else 20_000},
        "directory": {"workers": 1, "bytes": size},
        "kill": {"workers": 2},
        "same": {"workers": 4, "bytes": size // 16},
    }
    for case, settings in cases.items():
        for tool, python in tools.items():
            told = dict(settings)
            if tool == "ray" and case.startswith("rate"):
                told["reports"] = 10  # two seconds each
            turns = 1 if context.quick or tool == "ray" else min(3, context.repeat)
            for turn in range(turns):
                values = _one(context, outcome, python, tool, case, told)
                if values is not None:
                    outcome.add(f"{tool} {case}", **values)
                    context.say(f"{tool} {case} (turn {turn + 1}): {values}")
    _judge(outcome, size)
    return outcome


def _one(
    context: Context, outcome: Outcome, python: str, tool: str, case: str, settings: dict[str, Any]
) -> dict[str, float] | None:
    folder = context.folder(f"trainer-{tool}-{case}")
    folder.mkdir(parents=True)
    told = json.dumps({**settings, "tool": tool, "case": case, "folder": str(folder), "begun": time.time()})
    root = str(Path(__file__).resolve().parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": root if tool == "holdfast" else ""}
    try:
        done = subprocess.run(
            [python, str(_SCRIPT), told], capture_output=True, text=True, timeout=_LIMIT_S, env=environment, check=False
        )
        if done.returncode:
            outcome.notes.append(f"{tool} {case} failed: {done.stderr.strip()[-300:]}")
            return None
        return dict(json.loads((folder / "values.json").read_text()))
    except subprocess.TimeoutExpired:
        outcome.notes.append(f"{tool} {case}: not done after {_LIMIT_S:.0f} s")
        return None
    finally:
        remove(folder)


def _judge(outcome: Outcome, size: int) -> None:
    goals = outcome.goals
    for workers in (1, 4):
        value = outcome.median(f"holdfast rate-{workers}", "per_s")
        goals.append(Goal(what=f"metrics-only reports, {workers} worker(s)", value=value, unit="/s", at_least=5000))
    what = f"report of a directory of {size >> 20} MiB, deletion asked for, async: training is held"
    goals.append(Goal(what=what, value=outcome.median("holdfast directory", "held_ms"), unit="ms", at_most=10))
    value = outcome.median("holdfast directory", "wait_ms")
    goals.append(Goal(what="the same, SYNC without deletion (the copy is made by the writer)", value=value, unit="ms"))
    what = "four ranks report the same files: bytes stored / bytes of one"
    goals.append(Goal(what=what, value=outcome.median("holdfast same", "stored"), at_most=1.01))
    for name, words in (("first_line_s", "fit() to the first line"), ("recovery_s", "kill -9 to the next first step")):
        ours, ray = outcome.median("holdfast kill", name), outcome.median("ray kill", name)
        goals.append(Goal(what=words, value=ours, unit="s"))
        if not math.isnan(ray):
            goals.append(Goal(what=f"{words}: share of Ray Train's", value=ours / ray, at_most=1 / 3))
    for case, name in (("rate-1", "per_s"), ("directory", "held_ms"), ("same", "stored")):
        value = outcome.median(f"ray {case}", name)
        if not math.isnan(value):
            goals.append(Goal(what=f"Ray Train, {case}: {name}", value=value, unit=""))
