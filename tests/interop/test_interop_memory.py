"""Export and import go tensor by tensor: what they need beside the interpreter does not grow with the checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLACK = 100_000_000

SCRIPT = """
import os, sys, warnings
import torch
import torch.distributed.checkpoint
import holdfast as hf
from memory_kit import peak_bytes
from holdfast.interop import dcp_storage

warnings.simplefilter("ignore")
folder, total = sys.argv[1], int(sys.argv[2])
os.chdir(folder)
pid = os.fork()
if pid == 0:  # the state is made by somebody else, so that its memory is not ours
    try:
        torch.manual_seed(0)
        half = total // 4 // 2
        model = {"large": torch.randn(half // 1024, 1024), **{str(n): torch.randn(half // 64) for n in range(64)}}
        state = {"model": model}
        if sys.argv[3] == "whole":
            hf.save("ck", state)
        else:
            from mesh_kit import Layout, save_ranks
            from holdfast.storage import LocalStorage

            def columns(rank):
                return {"model": {name: Layout((4,), (one.dim() - 1,)).shard(one) for name, one in model.items()}}

            save_ranks(4, columns, storage=LocalStorage(folder), directory="ck")
        torch.save(state, "theirs.pt")
        torch.distributed.checkpoint.save(state, checkpoint_id="theirs")
    finally:
        os._exit(0)
os.waitpid(pid, 0)
hf.save("warm", {"a": torch.ones(2)})  # what is needed in any case
hf.export("warm", "warm.pt", to="torch")
hf.import_checkpoint("warm.pt", "warm2")
before = peak_bytes()
for name, options in (
    ("a.pt", {"to": "torch"}),
    ("a.safetensors", {"to": "safetensors"}),
    ("b.safetensors", {"to": "safetensors", "dtype": "bfloat16"}),
    ("hf", {"to": "hf", "max_shard_size": total // 3}),
    ("dcp", {"to": "dcp"}),
):
    hf.export("ck", name, **options)
for number, name in enumerate(("a.pt", "a.safetensors", "hf", "dcp", "theirs.pt", "theirs")):
    hf.import_checkpoint(name, f"back{number}")
print(peak_bytes() - before)
"""


def grown(folder, total: int, how: str) -> int:
    kits = str(Path(__file__).parents[1] / "state")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, kits]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(total), how],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = int(done.stdout)
    print(f"{found:,} bytes more for {total:,}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "sharded"])
def test_memory_of_every_route(tmp_path, how) -> None:
    """All routes of 160 MB together, half of it one tensor, stay within the slack that 600 MB have.

    Also where four ranks have saved columns of each matrix.
    """
    assert grown(tmp_path, 160_000_000, how) < SLACK


@pytest.mark.long
@pytest.mark.parametrize("how", ["whole", "sharded"])
def test_memory_of_600_mb(tmp_path, how) -> None:
    """The same with 600 MB."""
    assert grown(tmp_path, 600_000_000, how) < SLACK
