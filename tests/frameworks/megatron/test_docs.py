"""The page and the example of Megatron-Core run."""

from __future__ import annotations

from pathlib import Path

from docs_kit import page_test, run_example

test_python_blocks_run = page_test("megatron")


def test_example(tmp_path: Path) -> None:
    """The example loses a rank, and one rank goes on from what two have left."""
    said = run_example("megatron_tp.py", tmp_path, "--folder", str(tmp_path))
    assert "2 attempts" in said
    assert "'step': 60" in said
