"""The pages of this group and its examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from docs_kit import ROOT, page_test, run_example

test_python_blocks_run = page_test("huggingface")


@pytest.mark.parametrize(("example", "ranks"), [("transformers_gpt.py", 1), ("accelerate_loop.py", 2)], ids=str)
def test_examples_run_twice(example: str, ranks: int, tmp_path: Path) -> None:
    """An example trains; asked for more, it goes on from what it left."""
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    for steps in ("6", "10"):
        arguments = [str(ROOT / "examples" / example), "--out", str(tmp_path / "run"), "--steps", steps]
        done = subprocess.run(
            [sys.executable, *launch, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "from step 6" in done.stdout + done.stderr or "at step 6" in done.stdout + done.stderr


def test_sharded_example(tmp_path: Path) -> None:
    """With FSDP2 both processes are killed, their shards of step 4 come back, and the weights are the same."""
    said = run_example("accelerate_fsdp2.py", tmp_path)
    assert "this life ended with status 1" in said
    assert "the second life went on from step 4\n" in said
    assert "the same as without the kill: True" in said
