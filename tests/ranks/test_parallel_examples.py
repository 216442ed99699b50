"""The examples of training on several processes, as a user starts them: with torchrun, and again with other numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf

ROOT = Path(__file__).resolve().parents[2]
WINDOWS, BATCH = 96, 4


def torchrun(example: str, processes: int, out: Path, steps: int) -> str:
    """Run an example to its end; what it printed on stderr."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes),
        str(ROOT / "examples" / example), "--out", str(out / "run"), "--steps", str(steps), "--every", "2ba",
        "--windows", str(WINDOWS), "--batch", str(BATCH), "--trace", str(out / "trace.jsonl"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(("example", "chain"), [
    pytest.param("fsdp2.py", [(2, 6), (1, 18)], id="fsdp2 2-1", marks=pytest.mark.slow),
    pytest.param("ddp.py", [(2, 6), (1, 18)], id="ddp 2-1", marks=pytest.mark.long),
    pytest.param("ddp.py", [(4, 3), (2, 6), (3, 8)], id="ddp 4-2-3", marks=pytest.mark.long),
    pytest.param("fsdp2.py", [(4, 3), (2, 6), (3, 8)], id="fsdp2 4-2-3", marks=pytest.mark.long),
])  # fmt: skip
@pytest.mark.timeout(240)
def test_an_example_goes_on_with_other_numbers_of_processes(tmp_path: Path, example: str, chain) -> None:
    """Within one epoch every sample is seen once; the start block says what is another thing on other ranks."""
    for (processes, steps), before in zip(chain, [None, *chain], strict=False):
        said = torchrun(example, processes, tmp_path, steps)
        if before is None:
            assert "fresh start" in said
        else:
            assert f"resumed from {tmp_path}/run/step_{before[1]:08d} at step {before[1]}, epoch 0" in said
            assert f"split over {processes} rank(s), was {before[0]}" in said
            assert f"derived for {processes} rank(s) (the checkpoint has {before[0]})" in said
    trace = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert {row["epoch"] for row in trace} == {0}
    assert sorted(index for row in trace for index in row["ids"]) == list(range(WINDOWS))
    newest = max((tmp_path / "run").glob("step_*"))
    assert newest.name == f"step_{chain[-1][1]:08d}"
    assert hf.Checkpoint(newest).verify()
