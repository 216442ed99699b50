"""What several tests of the state layer share."""

import itertools

import torch
from torch import nn

import holdfast as hf
from holdfast.testing import assert_state_equal

_numbers = itertools.count()


def memory_uri():
    """Return a place in memory nobody used before."""
    return f"memory://state-{next(_numbers)}/checkpoint"


def roundtrip(value, **arguments):
    """Save one value as a state's entry and return what comes back."""
    where = memory_uri()
    hf.save(where, {"value": value})
    return hf.load(where, **arguments)["value"]


def assert_same(left, right):
    """Check exact types and bits, NaN payloads and signs of zero included."""
    assert_state_equal({"value": left}, {"value": right})


def bits(tensor):
    """Return the bytes of a tensor in row-major order."""
    flat = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def net(seed=0, width=4):
    """Return a small network with parameters and buffers of its own values."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def train(model, *optimizers, steps=2, seed=1):
    """Take some optimizer steps; every bit of the outcome depends on model and optimizer state."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(5, 3, generator=generator, dtype=next(model.parameters()).dtype)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(inputs).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def snapshot(module):
    """Return copies of every tensor of a module's state."""
    return {key: value.clone() for key, value in module.state_dict().items()}
