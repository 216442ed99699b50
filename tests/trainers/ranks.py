"""Run by several ranks at once (see test_torch_helpers): a JSON line of what this rank saw goes to stdout."""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, WeightedRandomSampler

import holdfast as hf
from holdfast.torch import get_device, prepare_data_loader, prepare_model


class OddBatches(BatchSampler):
    """A batch sampler of the user's own."""


def refused(call) -> str:
    try:
        call()
    except hf.ConfigError as error:
        return str(error)
    return ""


def samples(loader, batches: int | None = None) -> list[int]:
    found = []
    for number, (batch,) in enumerate(loader):
        if number == batches:
            break
        found += batch.tolist()
    return found


def main() -> None:
    store = sys.argv[1]
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    without_group = refused(lambda: prepare_model(model))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    wrapped = prepare_model(model, parallel_strategy_kwargs={"bucket_cap_mb": 1})
    frozen = nn.Linear(2, 1).requires_grad_(False)
    wrapped(torch.full((1, 2), float(rank + 1))).sum().backward()
    data = TensorDataset(torch.arange(10))
    shuffled = prepare_data_loader(DataLoader(data, batch_size=2, shuffle=True), seed=5)
    ordered = prepare_data_loader(DataLoader(data, batch_size=2))
    weights = WeightedRandomSampler([0.0] * 5 + [1.0] * 5, 8)
    weighted = prepare_data_loader(DataLoader(data, batch_size=2, sampler=weights))
    alone = prepare_data_loader(DataLoader(data, batch_size=2), add_dist_sampler=False)
    odd = DataLoader(data, batch_sampler=OddBatches(SequentialSampler(data), 3, drop_last=False))
    epochs = [samples(shuffled), samples(shuffled)]
    stopped = prepare_data_loader(DataLoader(data, batch_size=2, shuffle=True), seed=5)
    iterator = iter(stopped)
    next(iterator)
    state = stopped.state_dict()
    again = prepare_data_loader(DataLoader(data, batch_size=2, shuffle=True))
    again.load_state_dict(state)
    print(
        json.dumps({
            "rank": rank, "world": world, "without_group": without_group, "device": str(get_device()),
            "wrapped": type(wrapped).__name__, "frozen": type(prepare_model(frozen)).__name__,
            "again": prepare_model(wrapped) is wrapped,
            "plain": type(prepare_model(nn.Linear(1, 1), parallel_strategy=None)).__name__,
            "grad": model.weight.grad.tolist(), "length": len(shuffled), "epochs": epochs, "ordered": samples(ordered),
            "weighted": samples(weighted), "alone": samples(alone), "odd": refused(lambda: prepare_data_loader(odd)),
            "rest": samples(again), "state": state,
        })
    )  # fmt: skip
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
