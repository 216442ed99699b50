"""The examples in the documentation run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs_kit import ROOT, pages_of, run_page


@pytest.mark.parametrize("page", pages_of("ray_tune"), ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """Every Python block of the page, in order, in one process."""
    run_page(page, tmp_path)


def test_the_example_runs(tmp_path: Path) -> None:
    """A small population, to its end."""
    script = ROOT / "examples" / "ray_tune_pbt.py"
    done = subprocess.run(
        [sys.executable, script, "--trials", "2", "--epochs", "2", "--folder", tmp_path / "t"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "best accuracy" in done.stdout
