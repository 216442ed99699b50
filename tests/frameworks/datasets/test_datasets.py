"""`datasets` 5.0.0, whose streams resume right once and begin at sample 0 in every later life; 5.2 is right again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast as hf


def stream(*, shards: int = 1, buffer: int = 0) -> Any:
    """Return a stream of 40 numbers."""
    data = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=shards)
    return data.shuffle(seed=1, buffer_size=buffer) if buffer else data


LOADERS = {
    "in batches": lambda: StatefulDataLoader(stream(), 4),
    "shuffled": lambda: StatefulDataLoader(stream(shards=4, buffer=8), 4),
    "two workers": lambda: StatefulDataLoader(stream(shards=4), 4, num_workers=2),
    "the stream itself": stream,
}


def life(path: Path, loader: Any, until: int) -> list[Any]:
    """Train until a step and stop in order, so that nobody knows which batch should come next."""
    seen = []
    with hf.Checkpointer(path, {"model": torch.nn.Linear(1, 1)}, every=None) as ck:
        for batch in ck.batches(loader):
            seen.append(torch.as_tensor(batch["x"]).tolist())
            ck.step()
            if ck.global_step == until:
                break
    return seen


@pytest.mark.parametrize("name", LOADERS)
def test_a_state_of_the_begin_is_said_before_a_batch_is_drawn(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The second resume of a stream whose state has gone back to its begin is an error; the first one is right."""
    make = LOADERS[name]
    with caplog.at_level(logging.WARNING, "holdfast"):
        first = life(tmp_path, make(), 3)
        second = life(tmp_path, make(), 5)
    assert not [record for record in caplog.records if record.name.startswith("holdfast")]
    assert not [batch for batch in second if batch in first]
    with pytest.raises(hf.StateMismatchError, match="says that its data set has given no sample of it, and this run"):
        life(tmp_path, make(), 7)
