"""The example of the loop trainer does what its first line says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_classifier(tmp_path: Path) -> None:
    """It is killed in mid-epoch.

    The same command goes on from the last full checkpoint, one of them stays, the weights of every epoch are
    there, and fine-tuning takes the body with another head.
    """
    command = [sys.executable, str(ROOT / "examples" / "classifier.py"), "--folder", str(tmp_path), "--epochs", "11"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "the first life ended with -9" in done.stdout
    assert "full/ep5 at batch 150, epoch 5" in done.stderr
    assert "NOT restored" in done.stderr  # the old head
    assert sorted(p.name for p in (tmp_path / "full").iterdir() if p.name.startswith("ep")) == ["ep11"]
    assert {p.name for p in (tmp_path / "weights").iterdir()} >= {f"ep{n}.pt" for n in range(1, 12)}
    accuracy = float(done.stdout.split("accuracy ")[1].split()[0])
    assert accuracy > 0.9
