"""The page and the example of DeepSpeed run."""

from __future__ import annotations

from pathlib import Path

from docs_kit import page_test, run_example

test_python_blocks_run = page_test("deepspeed")


def test_example_of_a_loop(tmp_path: Path) -> None:
    """Both ranks are killed and go on from what they kept."""
    said = run_example("deepspeed_keeper.py", tmp_path)
    assert "goes on after step 6" in said
    assert "of ['step_00000012'" in said


def test_example(tmp_path: Path) -> None:
    """The example loses a rank on the way, and puts the weights of both together."""
    said = run_example("deepspeed_zero.py", tmp_path, "--folder", str(tmp_path))
    assert "2 attempts" in said
    assert "weights of both ranks put together" in said
