"""`holdfast run` over two ranks with `guard=` and `rescue=`: a rank killed, a bad batch; bitwise the end of a twin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from catalog_kit import catalog_of

from holdfast.run.rollbacks import read_rollbacks

CASES = Path(__file__).parents[1]
# Of two trainings: one around a Checkpointer, and one of the loop trainer. Rank 1 is killed in the first life.
SCRIPT = f"""
import json, os, sys
from pathlib import Path
sys.path[:0] = [{str(CASES / "ranks")!r}, {str(CASES / "trainers" / "loop")!r}, {str(CASES / "kits")!r}]
kind, home, bad, without, kill_at = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6])
rank = int(os.environ["RANK"])
first = not (home / f"began-{{rank}}").exists()
(home / f"began-{{rank}}").touch()
import torch
torch.distributed.init_process_group("gloo")
kill = {{"1": kill_at}} if first and kill_at >= 0 else None
if kind == "own":
    import guard_cases
    end = guard_cases.train(str(home / "run"), bad, without, rescue=1, kill_at=kill)
else:
    import rank_cases
    end = rank_cases.guarded(str(home / "run"), bad if bad >= 0 else None, without if without >= 0 else None,
                             rescue="1ba", kill_at=kill)
(home / f"end-{{rank}}.json").write_text(json.dumps(end))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def supervised(home: Path, kind: str, *, torchrun: bool = False, bad: int = -1, without: int = -1, kill_at: int = -1):
    """Run the script of two ranks to its end; what each rank came to, and what the supervisor has said."""
    home.mkdir()
    (home / "script.py").write_text(SCRIPT)
    script = [str(home / "script.py"), kind, str(home), *map(str, (bad, without, kill_at))]
    options, python = ([], [sys.executable, *TORCHRUN]) if torchrun else (["--nproc", "2"], [sys.executable])
    command = [sys.executable, "-m", "holdfast", "run", *options, "--", *python, *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads((home / f"end-{rank}.json").read_text()) for rank in range(2)], done.stderr


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("torchrun", [False, True], ids=["nproc", "torchrun"])
@pytest.mark.parametrize("kind", ["own", "trainer"])
def test_a_killed_rank_and_a_bad_batch_leave_nothing_behind(tmp_path: Path, kind: str, torchrun: bool) -> None:
    """Four lives: one killed, two for the bad batch, one to the end; the snapshot of the killed one is gone on from."""
    end, said = supervised(tmp_path / "a", kind, torchrun=torchrun, bad=14, kill_at=6)
    twin, _ = supervised(tmp_path / "b", kind, without=14)
    assert end == twin
    assert said.count("rolled back by its guard") == 2, said
    assert "done, after 4 lives" in said
    index = catalog_of(tmp_path / "a" / "run").index
    assert [bool(rollback.left_out) for rollback in read_rollbacks(index.notes)] == [False, True]
    # Rank 0 may have been in the step in flight.
    kept = ("/step_00000006 ", "/step_00000005 ") if kind == "own" else ("/ep0-ba6 ", "/ep0-ba5 ")
    assert any(name in said for name in kept), said


DEADLINE = """
import sys, torch, holdfast
torch.distributed.init_process_group("gloo")
with holdfast.Checkpointer(sys.argv[1], {"w": torch.zeros(2)}, deadline="7s") as ck:
    while True:
        torch.distributed.barrier()
        ck.step()
"""


@pytest.mark.slow
def test_ranks_that_stop_for_their_deadline_below_torchrun_are_not_started_again(tmp_path: Path) -> None:
    """They leave with 85 and torchrun ends with 1: the job is to be queued again, and no life makes one more step."""
    (tmp_path / "script.py").write_text(DEADLINE)
    command = [sys.executable, "-m", "holdfast", "run", "--", sys.executable, *TORCHRUN]
    command += [str(tmp_path / "script.py"), str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 85, done.stderr
    assert "starting again" not in done.stderr


HANGS = """
import os, sys, time
from pathlib import Path
import torch, holdfast
from torch.utils.data import DataLoader, TensorDataset
home, rank = Path(sys.argv[1]), os.environ["RANK"]
first = not (home / f"began-{rank}").exists()
(home / f"began-{rank}").touch()
torch.distributed.init_process_group("gloo")
calls = 0
def loss_fn(output, target):
    global calls
    calls += 1
    if first and rank == "1" and calls == 6: time.sleep(600)
    if not torch.is_grad_enabled(): time.sleep(1.5)
    return torch.nn.functional.mse_loss(output, target)
data = DataLoader(TensorDataset(torch.zeros(64, 2), torch.zeros(64, 2)), batch_size=4)
trainer = holdfast.Trainer(
    model=torch.nn.Linear(2, 2), loss_fn=loss_fn, train_dataloader=data, eval_dataloader=data, max_duration="1ep",
    save_folder=str(home / "run"), save_interval="2ba", autoresume=True, device="cpu",
)
trainer.fit()
(home / f"end-{rank}").write_text(str(trainer.state.timestamp.batch))
"""


@pytest.mark.slow
def test_a_loop_trainer_that_hangs_is_started_again_and_a_long_evaluation_is_no_hang(tmp_path: Path) -> None:
    """Rank 1 hangs in its sixth batch. Eight batches of an evaluation, 12 s in all, each count as a sign of life."""
    (tmp_path / "script.py").write_text(HANGS)
    command = [sys.executable, "-m", "holdfast", "run", "--no-warm", "--nproc", "2", "--hang", "8s", "--"]
    command += [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this is a hang") == 1
    assert "(step 5; the limit was 8 s)" in done.stderr
    assert "the newest durable step it knew is 4" in done.stderr
    assert "done, after 2 lives" in done.stderr
    assert [(tmp_path / f"end-{rank}").read_text() for rank in range(2)] == ["8ba", "8ba"]
