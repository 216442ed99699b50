"""Accelerate with the weights spread over two processes (FSDP2): both are killed, and the end is the same.

    python examples/accelerate_fsdp2.py [DIRECTORY OR s3://BUCKET/RUN]

The script starts itself with torchrun. The first life is killed by SIGKILL in the middle of an epoch. The second goes
on from the last checkpoint, into which every process has put its shards (one that began from nothing would be an
error). A third run without any kill says what the weights should be. With GPUs each process takes one, without them
they train on CPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.accelerate import Checkpointer

PROCESSES, EPOCHS, KILL_AT = 2, 3, 6


def accelerated() -> Accelerator:
    """Make an `Accelerator` that shards."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    on_cpu = torch.cuda.device_count() < PROCESSES
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    if on_cpu:  # Accelerate passes over the plugin there without a word: told after it has looked
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def train(root: str, result: str, kill: str) -> None:
    """Be one of the processes: train, from where an earlier life was; a file says where that was, and the weights."""
    accelerator = accelerated()
    set_seed(1)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    x = torch.randn(256, 8)
    data = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=16, shuffle=True)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    rate = torch.optim.lr_scheduler.StepLR(adam, 4, 0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(net, adam, data, rate)

    with Checkpointer(root, accelerator, every=4, keep=holdfast.Keep(last=2)) as ck:
        began = ck.global_step
        for _ in ck.epochs(EPOCHS):
            for inputs, targets in ck.batches(loader):
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                ck.step(loss=loss)
                if kill and ck.global_step == KILL_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
    shards = accelerator.unwrap_model(model).state_dict()
    whole = {name: shard.full_tensor() for name, shard in shards.items()}  # no process has them alone
    if accelerator.is_main_process:
        torch.save({"began": began, "weights": whole}, result)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def main() -> None:
    """Kill, go on, compare."""
    with tempfile.TemporaryDirectory() as scratch:
        root = sys.argv[1] if len(sys.argv) > 1 else f"{scratch}/run"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
        ended, peace = f"{scratch}/ended.pt", f"{scratch}/peace.pt"
        for run, result, kill in ((root, ended, "kill"), (root, ended, ""), (f"{scratch}/peace", peace, "")):
            done = subprocess.run([*launch, __file__, "life", run, result, kill], check=False)
            print("this life ended with status", done.returncode, flush=True)
        resumed, whole = torch.load(ended, weights_only=True), torch.load(peace, weights_only=True)
        print("the second life went on from step", resumed["began"])
        same = all(torch.equal(one, resumed["weights"][name]) for name, one in whole["weights"].items())
        print("weights are the same as without the kill:", same)
        sys.exit(0 if same and resumed["began"] > whole["began"] == 0 else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["life"]:
        train(*sys.argv[2:])
    else:
        main()
