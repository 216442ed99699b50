"""Models built on the meta device get memory once: a load needs no second copy of the state."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
import torch
from torch import nn
import holdfast as hf
from memory_kit import peak_bytes

os.chdir(sys.argv[1])

def model():
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(32)])  # 128 MiB

pid = os.fork()
if pid == 0:  # made by somebody else, so that its memory is not ours
    try:
        made = model()
        optimizer = torch.optim.Adam(made.parameters())
        made(torch.ones(2, 1024)).sum().backward()
        optimizer.step()
        hf.save("ck", {"model": made, "optimizer": optimizer})
    finally:
        os._exit(0)
os.waitpid(pid, 0)
with torch.device("meta"):
    small = nn.Linear(64, 64)
hf.save("warm", {"m": nn.Linear(64, 64)})  # what is needed in any case
hf.load("warm", {"m": small})
with torch.device("meta"):
    live = model()
optimizer = torch.optim.Adam(live.parameters())
if sys.argv[2] == "sharded":
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
    fully_shard(live, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(live.parameters())
before = peak_bytes()
hf.load("ck", {"model": live, "optimizer": optimizer})
print(peak_bytes() - before)
"""
STATE = 3 * 128 << 20


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "sharded"])
def test_a_meta_model_is_loaded_without_a_second_copy(tmp_path, how):
    """Peak memory grows by the state, model and optimizer, and by less than 32 MB beside it; the model has 134 MB."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert STATE * 0.9 < int(done.stdout) < STATE + 32_000_000
