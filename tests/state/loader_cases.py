"""Datasets that show what was loaded and drawn, and lives to load them in."""

from __future__ import annotations

import itertools
import mmap
import random
import struct

import numpy as np
import pytest
import torch
from torch.utils.data import (
    Dataset,
)

from holdfast.state.data.batches import ResumableBatches
from holdfast.state.tree import rng

N = 43


class Ids(Dataset):
    """Sample i is i; counts the calls for each sample in memory shared with the workers."""

    def __init__(self, length: int = N) -> None:
        self.length = length
        self.calls = mmap.mmap(-1, 4 * length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        (before,) = struct.unpack_from("<I", self.calls, 4 * index)
        struct.pack_into("<I", self.calls, 4 * index, before + 1)
        return index

    def called(self) -> list[int]:
        return list(struct.unpack(f"<{self.length}I", self.calls))


class Augmented(Dataset):
    """Sample i is i and three random numbers from the generators that augmentation uses."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.standard_normal()), torch.rand(1).item()


class AugmentedInOneCall(Augmented):
    """The same with a batched fetch."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float]]:
        return [self[index] for index in indices]


def masked(samples: list) -> tuple[list, float]:
    """Collate with a random number of its own, as language-model collators that mask tokens do."""
    return samples, random.random()


def as_list(samples: list) -> list:
    return samples


def run(loader, position=None, *, epoch=0, stop=None, seed=7, **options):
    """Live one life: return the batches drawn until ``stop`` batches and the position then."""
    batches = ResumableBatches(loader, position, seed=seed, epoch=epoch, **options)
    drawn = list(itertools.islice(batches, stop)) if stop is not None else list(batches)
    # As the checkpoint stores it: an epoch later nothing may hang on live objects.
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in drawn], batches.state_dict()


def lives(make, stops=(2, 1, 3), **options):
    """Live several lives with fresh loaders, each stopped after some batches, and a last one to the end."""
    position, drawn = None, []
    for stop in (*stops, None):
        part, position = run(make(), position, stop=stop, **options)
        drawn += part
    assert position["done"]
    return drawn


def flat(batches):
    return [index for batch in batches for index in batch]


WORKERS = [
    pytest.param({"num_workers": 0}, id="no workers"),
    pytest.param({"num_workers": 2}, id="2 workers"),
    pytest.param({"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}, id="2 persistent workers"),
]


def assert_same_generators(before):
    now = rng.capture()
    assert torch.equal(now.pop("torch"), before["torch"])
    assert now == {name: value for name, value in before.items() if name != "torch"}
