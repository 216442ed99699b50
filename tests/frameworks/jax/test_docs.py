"""The page and the example of JAX run."""

from __future__ import annotations

from pathlib import Path

from docs_kit import page_test, run_example

test_python_blocks_run = page_test("jax")


def test_example(tmp_path: Path) -> None:
    """The example is killed by itself, goes on, and finds the same weights as without."""
    said = run_example("jax_tree.py", tmp_path, "--folder", str(tmp_path))
    assert "the same weights, bit by bit" in said
