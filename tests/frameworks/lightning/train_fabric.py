"""A loop with Lightning Fabric: RUN STEPS DEVICES KILL; prints each step's samples and, at the end, the weights."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # whole, beside another rank


def main(fabric: Fabric, run: str, steps: int, kill: int) -> None:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(32, 4), torch.arange(32))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if "chance" in sys.argv:  # a shuffle that no seed of the script repeats
        torch.seed()
    net, optimizer = fabric.setup(net, optimizer)
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
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in net.state_dict().values()))
    say(f"weights {fabric.global_rank} {digest.hexdigest()}")


if __name__ == "__main__":
    _, run, steps, devices, kill, *_ = sys.argv
    fabric = Fabric(accelerator="cpu", devices=int(devices))
    fabric.launch()
    main(fabric, run, int(steps), int(kill))
