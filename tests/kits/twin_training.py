"""A small training with every kind of state, for the twin runs."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import holdfast as hf

ACCUMULATE = 4


class Augmented(Dataset):
    """Each sample is changed by python, numpy and torch random numbers."""

    def __init__(self, size=48):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.full((6,), index / self.size)
        x = x + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return index, x, torch.tensor([index % 3 - 1.0])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12)
        self.drop, self.last = torch.nn.Dropout(0.2), torch.nn.Linear(12, 1)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class Ema:
    """Moving average of the parameters."""

    def __init__(self, model):
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model):
        for name, value in model.named_parameters():
            self.shadow[name].mul_(0.9).add_(value.detach(), alpha=0.1)

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, state):
        self.shadow = {name: value.clone() for name, value in state.items()}


class Scaler:
    """A loss scale that moves as that of a GradScaler does."""

    def __init__(self):
        self.scale, self.good = 2.0**8, 0

    def update(self):
        self.good += 1
        if self.good % 5 == 0:
            self.scale *= 2 if self.scale < 2**14 else 0.25

    def state_dict(self):
        return {"scale": self.scale, "good": self.good}

    def load_state_dict(self, state):
        self.scale, self.good = state["scale"], state["good"]


def train(run, *, workers=0, epochs=3, every=4, size=48, adjust=None, extra=None):
    """Three epochs of six optimizer steps each (batches of two, four accumulated)."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    ema, scaler = Ema(model), Scaler()
    loader = DataLoader(
        Augmented(size), batch_size=2, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema, "scaler": scaler}
    seen = {"micro": 0}
    state["counters"] = Counters(seen)
    if adjust is not None:
        adjust(state)
    with hf.Checkpointer(run, state, every=every, keep=hf.Keep(last=2)) as ck:
        for _ in ck.epochs(epochs):
            for _, x, y in ck.batches(loader):
                # A draw of the training loop itself, from each generator.
                noise = 0.01 * (random.random() + float(np.random.rand()) + torch.rand(1).item())
                loss = (model(x + noise) - y).pow(2).mean()
                (loss * scaler.scale / ACCUMULATE).backward()
                seen["micro"] += 1
                if seen["micro"] % ACCUMULATE:
                    continue
                for param in model.parameters():
                    param.grad.div_(scaler.scale)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                ema.update(model)
                scaler.update()
                if extra is not None:
                    extra(model)
                ck.step(loss=loss.detach(), lr=scheduler.get_last_lr()[0])
            ck.report(norm=sum(float(value.norm()) for value in ema.shadow.values()))
    return copy.deepcopy(model.state_dict())


class Counters:
    """The user's own counters."""

    def __init__(self, values):
        self.values = values

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        self.values.update(state)
