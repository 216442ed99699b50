"""`datasets` 5.0.0, whose streams resume right once and begin at sample 0 in every later life; 5.2 is right again."""

from __future__ import annotations

import itertools
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
    said = [record.getMessage() for record in caplog.records if record.name.startswith("holdfast")]
    assert [text for text in said if "does not hold what lay in its shuffle buffer" not in text] == []
    assert len(said) == (name == "shuffled")
    assert not [batch for batch in second if batch in first]
    with pytest.raises(hf.StateMismatchError, match="says that its data set has given no sample of it, and this run"):
        life(tmp_path, make(), 7)


@pytest.mark.parametrize(("buffer", "size"), [(1, 0), (8, 8)])
def test_what_lies_in_a_shuffle_buffer_is_said_to_be_left_out(
    tmp_path: Path, buffer: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After a stop in order too, where no ledger knows what should come; a buffer of one sample is complete."""

    def make() -> Any:
        shuffled = stream(shards=4, buffer=buffer).map(lambda row: row)
        return StatefulDataLoader(datasets.interleave_datasets([shuffled, stream(shards=4)]), 4)

    life(tmp_path, make(), 3)
    with caplog.at_level(logging.WARNING, "holdfast"):
        life(tmp_path, make(), 5)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("holdfast")]
    assert [f"(buffer_size={size}): these samples are left out" in text for text in said] == [True] * (size > 0)


class Wrapped(torch.utils.data.IterableDataset[Any]):
    """A data set of the user's own around a stream, whose state it hands on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return iter(self.inner)

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state["inner"])


WHOLE = {
    "in batches": lambda: StatefulDataLoader(stream(), 4),
    "workers": lambda: StatefulDataLoader(stream(shards=4), 4, num_workers=2),
    "workers that stay": lambda: StatefulDataLoader(stream(shards=4), 4, num_workers=2, persistent_workers=True),
    "the stream itself": lambda: stream().batch(4),
    "wrapped": lambda: StatefulDataLoader(Wrapped(stream()), 4),
}
WORKERS = [("workers", 3), ("workers that stay", 3), ("workers that stay", 10)]


def epochs(path: Path, loader: Any, until: int | None = None) -> list[tuple[int, Any]]:
    """Train three epochs, or up to a step, on a stream that is not told its epoch."""
    seen = []
    with hf.Checkpointer(path, {"model": torch.nn.Linear(1, 1)}, every=1) as ck:
        for epoch in ck.epochs(3):
            for batch in ck.batches(loader):
                seen.append((epoch, torch.as_tensor(batch["x"]).tolist()))
                ck.step()
                if ck.global_step == until:
                    return seen
    return seen


@pytest.mark.parametrize(
    ("name", "until"), [*itertools.product(["in batches", "the stream itself", "wrapped"], [3, 10]), *WORKERS]
)
def test_the_epochs_after_a_resume_begin_at_the_begin_of_the_stream(tmp_path: Path, name: str, until: int) -> None:
    """A stream keeps the place that it was resumed at, and begins each later pass there, unless it is told not to."""
    make = WHOLE[name]
    before = epochs(tmp_path / "cut", make(), until)
    assert before + epochs(tmp_path / "cut", make()) == epochs(tmp_path / "ref", make())


def test_a_worker_that_has_given_nothing_yet_begins_after_a_resume_as_it_would_have(tmp_path: Path) -> None:
    """A stop before each worker has given a batch; the state of such a one has a generator of no worker."""

    def make() -> Any:
        mixed = datasets.interleave_datasets([stream(shards=4), stream(shards=4)], probabilities=[0.5, 0.5], seed=3)
        return StatefulDataLoader(mixed, 4, num_workers=2)

    whole = life(tmp_path / "ref", make(), 4)
    assert life(tmp_path / "cut", make(), 1) + life(tmp_path / "cut", make(), 4) == whole
