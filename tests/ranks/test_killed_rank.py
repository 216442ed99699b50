"""A rank that is killed is named first, with its signal, by the others and by the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from catalog_kit import index_of
from process_kit import wait_until

from holdfast.storage import LocalStorage

SCRIPT = """
import os, sys, torch, holdfast as hf
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
with hf.Checkpointer(sys.argv[1], {"w": torch.zeros(3)}, every=5) as ck:
    while ck.global_step < 20:
        torch.distributed.all_reduce(torch.ones(1))
        ck.step()
        if ck.global_step == 7 and rank == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
"""


def test_a_run_that_stops_because_a_rank_was_killed_has_not_stopped_in_order(ranks: Any, tmp_path: Path) -> None:
    """Its history says which rank died: such a life counts as a failure, and its last steps are lost."""
    ended = ranks.ranks(f"{Path(__file__).with_name('fault_cases.py')}:train_apart", str(tmp_path / "run"))
    assert [one.status for one in ended] == [1, -9], ended
    (attempt,) = index_of(LocalStorage(tmp_path / "run")).attempts
    assert "was not saved: rank 1: its trainer process has died" in (attempt.reason or "")


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_in_a_loop_of_ones_own(tmp_path: Path, killed: int) -> None:
    """The terminal and run.json say which rank died and of what signal, and not the error of gloo that others get."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    ended = subprocess.run(
        [*command, str(tmp_path / "run"), str(killed)], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 1
    assert f"rank {killed}: its trainer process has died (killed by SIGKILL). What this rank raises" in ended.stderr
    storage = LocalStorage(tmp_path / "run")
    assert wait_until(lambda: index_of(storage).attempts[-1].ended is not None)
    (attempt,) = index_of(storage).attempts
    assert attempt.reason == f"rank {killed}: its trainer process has died (killed by SIGKILL)"
    assert attempt.details == {"last_step": 7}
