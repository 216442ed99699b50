"""examples/follow_run.py: a trainer, an evaluator and a server of weights, each a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs_kit import run_example


@pytest.mark.slow
def test_the_evaluator_decides_the_best_and_the_server_never_stops(tmp_path: Path) -> None:
    """The server reaches the last weights, and the best is one that only the evaluator could know."""
    said = run_example("follow_run.py", tmp_path, str(tmp_path / "run"))
    assert "none failed; weights of steps" in said
    assert "best: step 60, val_loss" in said
    assert "exit codes [0, 0]" in said
