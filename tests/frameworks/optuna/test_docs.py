"""The page and the example of Optuna run."""

from __future__ import annotations

from pathlib import Path

from docs_kit import page_test, run_example

test_python_blocks_run = page_test("optuna")


def test_example(tmp_path: Path) -> None:
    """The example is killed in a trial, which goes on, and the search ends with the same values."""
    said = run_example("optuna_resume.py", tmp_path, "--folder", str(tmp_path))
    assert "killed: exit status -9" in said
    assert "trial 4 goes on in epoch 3" in said
    assert "the killed search has found the same values" in said
