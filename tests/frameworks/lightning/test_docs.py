"""The page about Lightning runs, and the example."""

from __future__ import annotations

from pathlib import Path

from docs_kit import page_test, run_example

test_python_blocks_run = page_test("lightning", timeout_s=240)


def test_example(tmp_path: Path) -> None:
    """The example kills itself, goes on, and finds the same weights."""
    said = run_example("lightning_resume.py", tmp_path)
    assert "the first life ended with status -9" in said


def test_sharded_example(tmp_path: Path) -> None:
    """With FSDP2 a worker is killed, the shards of both come back, and the weights are the same."""
    said = run_example("lightning_fsdp2.py", tmp_path, str(tmp_path / "runs"))
    assert "2 attempts" in said
    assert "the last attempt went on from epoch 2\n" in said
    assert "the same as without the kill: True" in said
    names = {one.name for one in (tmp_path / "runs" / "killed").glob("checkpoint_*/checkpoint.ckpt/*")}
    assert {"__0_0.distcp", "__1_0.distcp"} <= names
