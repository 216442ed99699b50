"""The examples in the documentation run."""

from __future__ import annotations

from pathlib import Path

from docs_kit import page_test, run_example

test_python_blocks_run = page_test("ray_engine", timeout_s=200)


def test_the_example_runs(tmp_path: Path) -> None:
    """A node dies, another one comes, and nothing is used twice."""
    said = run_example(
        "ray_three_nodes.py", tmp_path, "--folder", "r", "--epochs", "1", "--pause", "0.3", timeout_s=280
    )
    assert "every sample used 1 times: True" in said
