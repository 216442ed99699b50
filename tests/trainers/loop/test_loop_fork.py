"""A training that forks: what the child does at its end is no business of the training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import torch
from torch.nn import functional
import holdfast as hf
from holdfast.callbacks import CheckpointSaver
from holdfast.core import Callback
from holdfast.loggers import JSONLLogger

class Forks(Callback):
    def batch_end(self, state, logger):
        if int(state.timestamp.batch) == 3:
            child = os.fork()
            if child == 0:
                sys.exit(7)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
loader = torch.utils.data.DataLoader(data, batch_size=4)
options = {"max_duration": "1ep", "loss_fn": functional.cross_entropy, "progress_bar": False}
files = CheckpointSaver(sys.argv[1] + "/files", "ba{batch}.pt", save_interval="1ba")
with hf.Trainer(torch.nn.Linear(4, 3), loader, save_folder=sys.argv[1] + "/run", save_filename="ba{batch}",
                save_interval="1ba", callbacks=[Forks(), files], **options) as trainer:
    trainer.fit()
print("saved", len(trainer.saved_checkpoints), flush=True)

left = hf.Trainer(torch.nn.Linear(4, 3), loader, loggers=JSONLLogger(sys.argv[1] + "/rows.jsonl"), **options)
left.logger.log_metrics({"a": 1})
child = os.fork()
if child:
    os.waitpid(child, 0)
sys.exit()  # the child has what the logger keeps, and must not write it
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """What the script has printed, and its folder. It is a real interpreter: its end is what these tests are about."""
    folder = tmp_path_factory.mktemp("forks")
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), folder


def test_a_forked_child_leaves_the_training_alone(done: tuple[list[str], Path]) -> None:
    """It ends at once, with its own status, and the trainer saves and ends as if nothing had been."""
    printed, folder = done
    assert printed == ["child", "7", "saved", "12"]
    assert {path.name for path in (folder / "run").glob("ba*")} == {f"ba{batch}" for batch in range(1, 7)}
    assert {path.name for path in (folder / "files").glob("ba*")} == {f"ba{batch}.pt" for batch in range(1, 7)}


def test_loggers_are_closed_when_the_process_ends(done: tuple[list[str], Path]) -> None:
    """Those of a trainer that nobody closes; and a forked child writes nothing of theirs."""
    rows = (done[1] / "rows.jsonl").read_text().splitlines()
    assert [json.loads(row)["a"] for row in rows] == [1]
