"""A loop of one's own with Accelerate, on any number of processes, with gradients gathered over two batches.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --out runs/accelerate --steps 200

Kill it whenever you like and start it again, with another number of processes too: it goes on from the last checkpoint,
in the middle of an epoch. Mixed precision, FSDP and GPUs are what Accelerate is configured for; without a GPU it trains
on CPUs.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.accelerate import Checkpointer


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser()  # torchrun takes --run and --log for abbreviations of options of its own
    parser.add_argument("--out", required=True, help="the run: a directory or a URI; the same one again resumes")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps to train")
    parser.add_argument("--every", default="25ba", help='how often to save: "25ba", "10min"')
    told = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    set_seed(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    x = torch.randn(500, 8)
    loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    def train() -> None:
        for _ in ck.epochs(1000):
            for inputs, targets in ck.batches(loader):
                if ck.global_step >= told.steps:
                    return
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                ck.step(loss=loss)

    with Checkpointer(told.out, accelerator, every=told.every, keep=holdfast.Keep(last=2)) as ck:
        train()
    accelerator.end_training()


if __name__ == "__main__":
    main()
