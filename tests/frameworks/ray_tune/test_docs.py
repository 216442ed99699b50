"""The examples in the documentation run."""

from __future__ import annotations

from pathlib import Path

from docs_kit import page_test, run_example

test_python_blocks_run = page_test("ray_tune", timeout_s=300)


def test_the_example_runs(tmp_path: Path) -> None:
    """A small population, to its end."""
    said = run_example("ray_tune_pbt.py", tmp_path, "--trials", "2", "--epochs", "2", "--folder", "t", timeout_s=300)
    assert "best accuracy" in said
