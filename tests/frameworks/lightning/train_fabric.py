"""A loop with Lightning Fabric: RUN STEPS DEVICES KILL; prints each step's samples and, at the end, the weights.

After these "chance" leaves the shuffle to chance, and "sharded" shards the weights over the devices (FSDP2).
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # whole, beside another rank


def main(fabric: Fabric, run: str, steps: int, kill: int) -> None:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(32, 4), torch.arange(32))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    if "chance" in sys.argv:  # a shuffle that no seed of the script repeats
        torch.seed()
    net = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    with hf.Checkpointer(run, {"model": net, "optimizer": optimizer}, every=1) as ck:
        for _ in ck.epochs(100):
            for x, samples in ck.batches(loader):
                if ck.global_step == steps:
                    break
                loss = net(x).square().mean()
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                say(f"step {fabric.global_rank} {ck.epoch} {samples.tolist()}")
                ck.step()
                if ck.global_step == kill:
                    ck.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
            if ck.global_step == steps:
                break
    whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in net.state_dict().values()]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in whole))
    say(f"weights {fabric.global_rank} {digest.hexdigest()}")


if __name__ == "__main__":
    _, run, steps, devices, kill, *_ = sys.argv
    sharded = ModelParallelStrategy(
        lambda net, mesh: fully_shard(net, mesh=mesh["data_parallel"]), data_parallel_size=2, tensor_parallel_size=1
    )
    strategy = sharded if "sharded" in sys.argv else "auto"
    fabric = Fabric(accelerator="cpu", devices=int(devices), strategy=strategy)
    fabric.launch()
    main(fabric, run, int(steps), int(kill))
