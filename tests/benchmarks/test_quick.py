"""A tiny run of every benchmark, so that they cannot rot. No time is asserted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "save", "first", "loaded", "lost", "load", "small", "plan", "control", "many", "ranks", "memory", "step", "catalog",
    "growth_local", "growth", "goodput", "goodput_random", "frozen", "startup", "startup_trainer", "trainer", "remote",
    "loop", "restart",
)  # fmt: skip
METHODS = {
    "save": {"save_async", "Checkpointer", "save", "torch.save", "safetensors", "DCP save", "DCP async_save"},
    "first": {"save_async", "DCP async_save"},
    "loaded": {"save_async", "Checkpointer"},
    "lost": {"holdfast (1 threads)", "torch.save (1 threads)"},
    "load": {"holdfast", "torch.save", "torch.load(mmap)", "safetensors"},
    "small": {"holdfast", "torch.save", "safetensors"},
    "plan": {"4 ranks", "16 ranks", "40 ranks"},
    "control": {"4 writers", "16 writers"},
    "many": {"4 ranks", "40 ranks"},
    "ranks": {"save_async", "save", "DCP save", "DCP async_save", "1 -> 2", "2 -> 2", "2 -> 2 columns", "DCP 2 -> 2"},
    "memory": {"save: holdfast.save_async", "load: holdfast.load"},
    "step": {"tensor", "float", "none"},
    "catalog": {"10 checkpoints", "100 checkpoints"},
    "growth_local": {"10 checkpoints", "100 checkpoints", "10 small files", "100 small files"},
    "frozen": {"holdfast", "torch.save"},
    "startup": {"interpreter", "import holdfast", "writer process alone"},
    "startup_trainer": {"2 interpreters import torch", "2 workers, to the first line"},
    "restart": {"holdfast run", "holdfast run, rescue=1", "torchrun, torch.save"},
    "trainer": {"holdfast rate-1", "holdfast rate-4", "holdfast directory", "holdfast kill", "holdfast same"},
    "loop": {"by hand", "Trainer", "directory", "pt"},
    "goodput": {"holdfast, every auto", "torch.save, every 20", "DCP async_save, every 20"},
    "goodput_random": {"auto, first 12 s", "auto, 24 s", "every 20 steps"},
    "growth": {"enter a run of 30 checkpoints", "save and keep 2 of 30 checkpoints", "commit 20 ranks"},
    "remote": {"limit", "save_async", "save_async to disk", "push", "pull", "load", "push process", "pull process"},
}
# Not a time, so it holds on a busy machine too; the state of a quick run is too small for the others.
REACHED = {"extra memory of a load", "third save: bytes written / changed"}


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_benchmark_runs_and_writes_what_it_measured(tmp_path):
    """Each benchmark ends well, names its goals, and its JSON holds raw samples, limits, hardware and versions."""
    ran = bench("--quick", "--repeat", "1", "--out", tmp_path / "out", "--scratch", tmp_path / "scratch")
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert not list((tmp_path / "scratch").iterdir()), "the benchmarks left files behind"
    results = {path.stem[11:]: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert set(results) == set(NAMES)
    for name, result in results.items():
        assert METHODS[name] <= set(result["samples"]), (name, result["notes"])
        for method, kinds in result["samples"].items():
            for kind, values in kinds.items():
                assert values, (name, method, kind)
                assert all(math.isfinite(value) for value in values), (name, method, kind, values)
        assert result["goals"], name
        for goal in result["goals"]:
            assert goal["value"] is not None, (name, goal)
            assert math.isfinite(goal["value"]), (name, goal)
            assert goal["what"] not in REACHED or goal["value"] < 10, goal
        assert result["hardware"]["cores"] >= 1
        assert result["hardware"]["versions"]["torch"]
        assert name in ran.stdout
    assert results["save"]["limits"]["seconds"]["write"]
    assert results["load"]["limits"]["seconds"]["read_cold"]


def test_unknown_name_is_refused():
    """A misspelt benchmark ends with the list of those there are."""
    ran = bench("sav")
    assert ran.returncode == 2
    assert "sav" in ran.stderr
    assert "startup" in ran.stderr
