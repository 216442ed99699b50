"""A callback that forks: what the child does at its end is no business of the training."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
import torch
from torch.nn import functional
import holdfast as hf
from holdfast.callbacks import CheckpointSaver
from holdfast.core import Callback

class Forks(Callback):
    def batch_end(self, state, logger):
        if int(state.timestamp.batch) == 3:
            child = os.fork()
            if child == 0:
                sys.exit(7)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
loader = torch.utils.data.DataLoader(data, batch_size=4)
files = CheckpointSaver(sys.argv[1] + "/files", "ba{batch}.pt", save_interval="1ba")
with hf.Trainer(torch.nn.Linear(4, 3), loader, max_duration="1ep", loss_fn=functional.cross_entropy, progress_bar=False,
                save_folder=sys.argv[1] + "/run", save_filename="ba{batch}", save_interval="1ba",
                callbacks=[Forks(), files]) as trainer:
    trainer.fit()
print("saved", len(trainer.saved_checkpoints))
"""


def test_a_forked_child_leaves_the_training_alone(tmp_path: Path) -> None:
    """It ends at once, with its own status, and the trainer saves and ends as if nothing had been."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["child", "7", "saved", "12"]
    assert {path.name for path in (tmp_path / "run").glob("ba*")} == {f"ba{batch}" for batch in range(1, 7)}
    assert {path.name for path in (tmp_path / "files").glob("ba*")} == {f"ba{batch}.pt" for batch in range(1, 7)}
