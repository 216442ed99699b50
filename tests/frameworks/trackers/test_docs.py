"""The page about trackers and the example run."""

from __future__ import annotations

from pathlib import Path

from docs_kit import page_test, run_example

test_python_blocks_run = page_test("trackers")


def test_example(tmp_path: Path) -> None:
    """The example loads the checkpoint that MLflow knows to be the best."""
    said = run_example("track_runs.py", tmp_path, "--folder", str(tmp_path))
    assert "rate-0.02: loss" in said
    assert "loaded 4 tensors, every byte checked" in said
