"""The example of the function trainer does what its first line says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_digits(tmp_path: Path) -> None:
    """A worker is killed in mid-epoch, the run goes on, the best two checkpoints stay, the plot is there."""
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--storage", str(tmp_path), "--epochs", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 restart" in done.stderr
    result = hf.Result.from_path(tmp_path / "digits")
    assert [attempt.reason for attempt in result.attempts][-1] == "finished"
    assert len(result.attempts) == 2
    assert result.attempts[1].resumed_from == "checkpoint_000001"
    assert list(result.metrics_dataframe["epoch"]) == [0, 1, 2, 3, 4]
    assert len(result.best_checkpoints) == 2
    assert result.metrics["accuracy"] > 0.9
    assert (tmp_path / "digits" / "digits.png").stat().st_size > 1000


@pytest.mark.slow
def test_digits_on_four_workers_and_then_on_two(tmp_path: Path) -> None:
    """The same run, asked for more epochs with another number of workers, goes on where it was."""
    for workers, epochs in ((4, 3), (2, 5)):
        command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--storage", str(tmp_path), "--no-kill"]
        command += ["--workers", str(workers), "--epochs", str(epochs)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
    result = hf.Result.from_path(tmp_path / "digits")
    assert [attempt.resumed_from for attempt in result.attempts] == [None, "checkpoint_000002"]
    assert list(result.metrics_dataframe["epoch"]) == [0, 1, 2, 3, 4]
