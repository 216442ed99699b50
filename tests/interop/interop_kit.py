"""Models, states and helpers that the tests of import and export share."""

from __future__ import annotations

from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast as hf


class Net(nn.Module):
    """Tied weights, buffers of many dtypes, an empty one, a number without dimensions; 7 rows do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 7)
        self.lin = nn.Linear(7, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.lin(self.emb(x))))


class Odd(Net):
    """With what only some formats can hold without a detour."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.emb.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("scale", torch.tensor(2.5, dtype=torch.bfloat16))
        self.register_buffer("low", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("counts", torch.arange(3).to(torch.uint16))


def trained(seed: int, *, steps: int = 1, kind: type[Net] = Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of a seed and its AdamW with two groups, after some steps."""
    torch.manual_seed(seed)
    model = kind()
    optimizer = adamw(model)
    for _ in range(steps):
        model(torch.arange(8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, the rest does not."""
    wide = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() <= 1]
    return torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def full_state(seed: int = 1) -> dict[str, Any]:
    """A state with everything in it."""
    model, optimizer = trained(seed, kind=Odd)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        **plain_state(),
    }


def plain_state() -> dict[str, Any]:
    """Plain data and loose tensors of every kind."""
    shared = torch.arange(6.0).reshape(2, 3)
    return {
        "step": 7,
        "note": "é",
        "queue": deque([1, shared, {"x": 2}], maxlen=3),
        "array": np.arange(6, dtype=">i2").reshape(2, 3),
        "loose": [torch.ones(2), {"a": 1}, shared],
        "pair": (1, torch.zeros(3, dtype=torch.float8_e5m2)),
        "complex": torch.complex(torch.ones(2), torch.tensor([1.0, float("nan")])),
        "half_complex": torch.zeros(2, dtype=torch.complex128),
        "turned": torch.arange(24.0).reshape(4, 6).t(),
        "stretched": torch.ones(1).expand(4),
        "number": torch.tensor(-0.0),
        "none": torch.zeros(0, 3, dtype=torch.int8),
        "options": OrderedDict(
            path=Path("x"), big=2**5000, nan=float("nan"), odd={frozenset([1]): 2, (1, "a"): b"\xff"}
        ),
        "dtype": torch.bfloat16,
        "keys": {1: "a", "1": "b", None: {True: 1}},
    }


def load_all(path: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a checkpoint of `full_state` into fresh objects; returns them and the plain rest."""
    model, optimizer = trained(2, kind=Odd)
    live = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
    }
    hf.load(path, live, only=list(live))
    return live, hf.load(path, skip=list(live))
