"""The steps and the metrics of a killed life are known up to the kill, whichever front door it came through."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from process_kit import wait_until

from holdfast.run.catalog import Catalog
from holdfast.run.costs import stats
from holdfast.run.index import RunIndex
from holdfast.storage import LocalStorage

pytestmark = pytest.mark.usefixtures("forked")

DIED = -9
OWN = """
import os, sys, torch, holdfast as hf
state = {"w": torch.zeros(3)}
with hf.Checkpointer(sys.argv[1], state, every=4, keep=None) as ck:
    while ck.global_step < 12:
        ck.step(loss=float(ck.global_step), mean=torch.tensor(0.5))
        if ck.global_step == 5 and ck.resumed_from is None:
            ck.wait()
        if ck.global_step == 7 and ck.resumed_from is None:
            os.kill(os.getpid(), 9)
"""
LOOP = """
import os, sys, torch
from torch.nn import functional
import holdfast as hf
from holdfast.callbacks import Callback

class Kill(Callback):
    def batch_end(self, state, logger):
        if int(state.timestamp.batch) == 5 and not resumed:
            trainer._group.savers[0].settle()
        if int(state.timestamp.batch) == 7 and not resumed:
            os.kill(os.getpid(), 9)

data = [(torch.ones(2, 4), torch.ones(2, 1))] * 20
trainer = hf.Trainer(
    model=torch.nn.Linear(4, 1), loss_fn=functional.mse_loss, train_dataloader=data, max_duration="12ba",
    save_folder=sys.argv[1], save_filename="b{batch}", save_interval="4ba", autoresume=True, callbacks=Kill(),
)
resumed = int(trainer.state.timestamp.batch)
trainer.fit()
trainer.close()
"""
FUNCTION = """
import os, sys, time, holdfast as hf
from holdfast.torch import TorchTrainer

def train():
    first = hf.get_checkpoint()
    start = 0 if first is None else first.load()["step"]
    for step in range(start + 1, 13):
        hf.report({"loss": float(step)}, state={"step": step} if step % 4 == 0 else None)
        while step == 5 and first is None and hf.get_checkpoint() is None:
            time.sleep(0.01)
        if step == 7 and first is None:
            time.sleep(0.1)  # what was reported in the last millisecond is lost
            os.kill(os.getpid(), 9)

place, name = os.path.split(sys.argv[1])
run = hf.RunConfig(name=name, storage_path=place, failure_config=hf.FailureConfig(max_failures=1))
scaling = hf.ScalingConfig(num_workers=0 if sys.argv[2] == "here" else 1)
TorchTrainer(train, scaling_config=scaling, run_config=run).fit()
"""


def lives(tmp_path: Path, script: str, how: str = "") -> tuple[list[int], list[int]]:
    """Run a script that is killed once; return the steps that each start left for the next, and those with metrics."""
    (tmp_path / "train.py").write_text(script)
    root = tmp_path / "run"
    command = [sys.executable, str(tmp_path / "train.py"), str(root), how]
    first = subprocess.run(command, capture_output=True, timeout=120, check=False)
    if first.returncode:
        assert first.returncode == DIED, first.stderr
        storage = LocalStorage(root)
        wait_until(lambda: RunIndex.load(storage).attempts[-1].ended is not None, timeout_s=30)
        again = subprocess.run(command, capture_output=True, timeout=120, check=False)
        assert again.returncode == 0, again.stderr
    catalog = Catalog(LocalStorage(root))
    history = catalog.index.read_history()
    first = sorted({row["step"] for row in history.rows if row["attempt"] == 1 and row["metrics"]})
    return [row["lost_steps"] for row in stats(history, catalog.records())["attempts"]], first


@pytest.mark.parametrize("script", [OWN, pytest.param(LOOP, marks=pytest.mark.long)], ids=["own loop", "loop trainer"])
def test_a_trainer_that_is_killed(tmp_path: Path, script: str) -> None:
    """Killed in step 7 with a checkpoint of step 4: 3 steps are done again, and the metrics of all 7 are there."""
    assert lives(tmp_path, script) == ([3, 0], [1, 2, 3, 4, 5, 6, 7])


@pytest.mark.long
@pytest.mark.parametrize("how", ["worker", "here"])
def test_a_function_that_is_killed(tmp_path: Path, how: str) -> None:
    """A worker, or the process that drives as well: 3 reports are made again, and the metrics of all 7 are there."""
    assert lives(tmp_path, FUNCTION, how) == ([3, 0], [1, 2, 3, 4, 5, 6, 7])
