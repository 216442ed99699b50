"""Devices, models, loaders and seeds for training functions, on one rank and on two."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_kit import forked_interpreters
from ranks_kit import RankServer
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import holdfast as hf
from holdfast.torch import enable_reproducibility, get_device, get_devices, prepare_data_loader, prepare_model
from holdfast.trainers import torch_helpers
from holdfast.trainers.torch_helpers import DealtSampler

WORLD = 2


@pytest.fixture(scope="module")
def ranks(ranks: RankServer, tmp_path_factory) -> list[dict]:
    """What two ranks saw."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    script = Path(__file__).with_name("ranks.py")
    with forked_interpreters(ranks):
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(store)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank),
                     "LOCAL_WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(WORLD)
        ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * WORLD
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_models_are_wrapped_and_gradients_averaged(ranks: list[dict]) -> None:
    """DDP on both ranks, gradients are the mean; what is wrapped, or has nothing to train, is left as it is."""
    for one in ranks:
        assert one["wrapped"] == "DistributedDataParallel"
        assert one["again"] is True
        assert (one["frozen"], one["plain"]) == ("Linear", "Linear")
        assert one["grad"] == [[1.5, 1.5]]


def test_several_ranks_without_a_process_group_are_told(ranks: list[dict]) -> None:
    """The error names the rank and what makes a group."""
    assert [f"this is rank {rank} of 2" in one["without_group"] for rank, one in enumerate(ranks)] == [True, True]


def test_data_are_split_over_the_ranks(ranks: list[dict]) -> None:
    """Each sample is seen once per epoch; shuffled loaders shuffle each epoch anew, ordered ones stay in order."""
    for epoch in (0, 1):
        assert sorted(ranks[0]["epochs"][epoch] + ranks[1]["epochs"][epoch]) == list(range(10))
    assert ranks[0]["epochs"][0] != ranks[0]["epochs"][1]
    assert [one["ordered"] for one in ranks] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert [one["length"] for one in ranks] == [3, 3]
    assert [one["alone"] for one in ranks] == [list(range(10))] * 2


def test_other_samplers_are_dealt_out(ranks: list[dict]) -> None:
    """Weights are not lost: both ranks draw from the heavy half, and four samples each, not the same ones."""
    drawn = [one["weighted"] for one in ranks]
    assert [len(one) for one in drawn] == [4, 4]
    assert all(5 <= index < 10 for one in drawn for index in one)
    assert drawn[0] != drawn[1]


def test_a_resumed_rank_gets_the_rest_of_its_epoch(ranks: list[dict]) -> None:
    """The position counts samples of all ranks and is the same on each, so that one stored copy serves all."""
    assert ranks[0]["state"] == ranks[1]["state"]
    assert ranks[0]["state"]["position"]["samples"] == 4
    for one in ranks:
        assert one["rest"] == one["epochs"][0][2:]


def test_batch_samplers_of_the_user_are_not_guessed_at(ranks: list[dict]) -> None:
    """With several workers the error says what to do."""
    assert all("OddBatches" in one["odd"] and "add_dist_sampler=False" in one["odd"] for one in ranks)


def test_one_worker_needs_nothing() -> None:
    """No process group, no wrapper, no sampler."""
    model = nn.Linear(1, 1)
    assert prepare_model(model) is model
    sampler = prepare_data_loader(DataLoader(TensorDataset(torch.arange(4)), shuffle=True)).sampler
    assert type(sampler) is RandomSampler
    assert get_devices() == [get_device()]


def test_strategies() -> None:
    """One worker has nothing to shard; an unknown strategy is refused."""
    model = nn.Linear(1, 1)
    assert prepare_model(model, parallel_strategy="fsdp") is model
    with pytest.raises(hf.ConfigError, match="use 'ddp', 'fsdp' or None"):
        prepare_model(model, parallel_strategy="zero")


def test_models_move_where_they_are_told() -> None:
    """A device, or not at all."""
    model = prepare_model(nn.Linear(1, 1), move_to_device=torch.device("meta"))
    assert model.weight.device.type == "meta"
    model = prepare_model(nn.Linear(1, 1, device="meta"), move_to_device=False)
    assert model.weight.device.type == "meta"


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_the_device_is_that_of_the_local_rank(monkeypatch, gpus: int) -> None:
    """Each local rank has its GPU; where only its own is visible, it is number 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in (("RANK", "7"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert get_device() == (torch.device("cuda", 3 % gpus) if gpus else torch.device("cpu"))


def test_samplers_that_know_their_rank_are_kept(monkeypatch) -> None:
    """One in the loader, one inside of a batch sampler; a plain BatchSampler is taken apart."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = TensorDataset(torch.arange(9))
    mine = DistributedSampler(data, num_replicas=2, rank=1, seed=7)
    loader = prepare_data_loader(DataLoader(data, sampler=mine))
    assert loader.sampler is mine
    assert loader.state_dict()["seed"] == 7
    batches = BatchSampler(mine, 2, drop_last=True)
    assert prepare_data_loader(DataLoader(data, batch_sampler=batches)).batch_sampler is batches
    plain = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, drop_last=True))
    assert [batch[0].tolist() for batch in prepare_data_loader(plain)] == [[1, 3], [5, 7]]
    single = DataLoader(data, batch_size=None, sampler=SequentialSampler(data))
    assert [int(sample[0]) for sample in prepare_data_loader(single)] == [1, 3, 5, 7, 0]


@pytest.mark.parametrize("size", [0, 1, 5, 6])
def test_dealing_out(size: int) -> None:
    """Ranks get equally many, everything is dealt, the first are dealt again to make the number divide."""
    parts = [DealtSampler(SequentialSampler(range(size)), rank=rank, num_replicas=3) for rank in range(3)]
    dealt = [list(part) for part in parts]
    assert {len(one) for one in dealt} == {len(parts[0])}
    assert {index for one in dealt for index in one} == set(range(size))


def test_enable_reproducibility(monkeypatch) -> None:
    """Generators are seeded, kernels are deterministic, and prepared loaders take the seed."""
    monkeypatch.setattr(torch_helpers, "_seed", None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    try:
        drawn = []
        for _ in range(2):
            enable_reproducibility(11)
            drawn.append((random.random(), float(np.random.random()), float(torch.rand(()))))
        assert drawn[0] == drawn[1]
        assert torch.are_deterministic_algorithms_enabled()
        loader = prepare_data_loader(DataLoader(TensorDataset(torch.arange(4))))
        assert loader.state_dict()["seed"] == 11
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
