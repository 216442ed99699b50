"""Samplers and data sets as strangers write them: a resume is exact, or what is not is said."""

from __future__ import annotations

import functools
import gc
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_data_ledger import life
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import holdfast as hf

SIZE, STEPS = 24, 18  # three epochs of six batches
SHARED = random.Random(5)  # of this module: no life begins with what the one before has left


class Points(Dataset[Any]):
    """Numbers."""

    difficulty = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return index


class Jittered(Points):
    """Augmentation from generators of the data set, and of a transform that it holds."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)
        self.transform = Flip()

    def __getitem__(self, index: int) -> Any:
        return index + self.rng.random() + self.transform()


class Flip:
    def __init__(self) -> None:
        self.dice = random.Random(2)

    def __call__(self) -> float:
        return self.dice.random()


class Changed(Points):
    """A transform of a list of a pipeline, in a dict; closures and the like of generators that it holds."""

    def __init__(self) -> None:
        noise, dice = np.random.RandomState(1), random.Random(2)
        both = [Flip(), functools.partial(lambda rng: rng.random(), dice), Flip().__call__, lambda: 1 + noise.rand()]
        self.transforms = {"train": SimpleNamespace(steps=[SimpleNamespace(inner=one) for one in both])}

    def __getitem__(self, index: int) -> Any:
        return index + sum(step.inner() for step in self.transforms["train"].steps)


class MadeLate(Points):
    """Makes its generator with the first sample of each process, and seeds it with what differs there."""

    rng: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.rng is None:
            self.rng = np.random.default_rng()
        return index + self.rng.random()


class MadeLateAtOnce(MadeLate):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Rows(Points):
    def __getitem__(self, index: int) -> Any:
        return {"index": index}


class Masks:
    """A collator with a generator, made late or at once; takes its rows apart."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __call__(self, rows: list[Any]) -> torch.Tensor:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(42)
        indices = torch.tensor([row.pop("index") for row in rows])
        return indices + torch.rand(len(rows), generator=self.generator)


def own_generator(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.rng = np.random.default_rng(info.seed)


class PerClass(Sampler[int]):
    """Lists of each class that are shuffled in place, a few of each, as metric learning wants them."""

    def __init__(self, rng: Any = random) -> None:
        self.of_class = {label: list(range(label, SIZE, 4)) for label in range(4)}
        self.classes, self.rng = list(self.of_class), rng

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        chosen: list[int] = []
        while len(chosen) < SIZE:
            self.rng.shuffle(self.classes)
            for label in self.classes[:2]:
                self.rng.shuffle(self.of_class[label])
                chosen += self.of_class[label][:2]
        return iter(chosen)


class ShufflesLate(Sampler[int]):
    """Makes its generator when it is asked for its first order."""

    generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = seeded(11)
        yield from torch.randperm(SIZE, generator=self.generator).tolist()

    def __len__(self) -> int:
        return SIZE


class Buckets(Sampler[list[int]]):
    """Batches of like lengths, made anew for each epoch by a generator that goes on from epoch to epoch."""

    def __init__(self, shuffle: Callable[[list[Any]], None]) -> None:
        self.shuffle = shuffle

    def __len__(self) -> int:
        return SIZE // 4

    def __iter__(self) -> Iterator[list[int]]:
        batches = []
        for start in range(0, SIZE, 8):
            bucket = list(range(start, start + 8))
            self.shuffle(bucket)
            batches += [bucket[:4], bucket[4:]]
        self.shuffle(batches)
        return iter(batches)


class Own:
    """A generator of somebody's own kind, in an attribute."""

    def __init__(self) -> None:
        self.number = 7

    def shuffle(self, items: list[Any]) -> None:
        for place in range(len(items) - 1, 0, -1):
            self.number = self.number * 1103515245 % (1 << 31) + 12345
            other = self.number % (place + 1)
            items[place], items[other] = items[other], items[place]


class Ordered(Sampler[int]):
    """Decides the order of all epochs when it is made."""

    def __init__(self, rng: Any) -> None:
        self.orders = [rng.sample(range(SIZE), SIZE) for _ in range(3)]
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(self.orders[self.epoch])


class Cursor(Sampler[int]):
    """Goes on in an endless shuffle where the epoch before has stopped."""

    def __init__(self) -> None:
        self.rng = np.random.RandomState(3)
        self.order: list[int] = []
        self.at = 0

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        for _ in range(16):
            if self.at == len(self.order):
                self.order, self.at = self.rng.permutation(SIZE).tolist(), 0
            self.at += 1
            yield self.order[self.at - 1]


class Buffered(IterableDataset[Any]):
    """A stream through a shuffle buffer; with a generator of its own it goes on from epoch to epoch."""

    def __init__(self, rng: Any = random) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for sample in range(SIZE):
            buffer.append(sample)
            if len(buffer) > 5:
                yield buffer.pop(self.rng.randrange(len(buffer)))
        self.rng.shuffle(buffer)
        yield from buffer


class BuffersLate(Buffered):
    """Makes its generator when it is iterated first; a later process makes another one in a later epoch."""

    def __iter__(self) -> Iterator[Any]:
        if self.rng is random:
            self.rng = random.Random(7)
        yield from super().__iter__()


class Counts(IterableDataset[Any]):
    """Another part of the data in each pass, counted by the data set itself."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(range(100 * self.passes, 100 * self.passes + SIZE))


def twice(generator: torch.Generator) -> Sampler[int]:
    return RandomSampler(Points(), replacement=True, num_samples=SIZE, generator=generator)


def seeded(number: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(number)


EXACT: dict[str, Callable[[], Any]] = {
    "lists shuffled in place": lambda: DataLoader(Points(), 4, sampler=PerClass()),
    "lists shuffled by an own generator": lambda: DataLoader(Points(), 4, sampler=PerClass(random.Random(1))),
    "lists shuffled by NumPy": lambda: DataLoader(Points(), 4, sampler=PerClass(np.random.default_rng(1))),
    "buckets, python": lambda: DataLoader(Points(), batch_sampler=Buckets(random.shuffle)),
    "buckets, NumPy": lambda: DataLoader(Points(), batch_sampler=Buckets(np.random.shuffle)),
    "orders made ahead": lambda: DataLoader(Points(), 4, sampler=Ordered(random.Random(2))),
    "an own generator made late": lambda: DataLoader(Points(), 4, sampler=ShufflesLate()),
    "an endless shuffle": lambda: DataLoader(Points(), 4, sampler=Cursor()),
    "weighted": lambda: DataLoader(
        Points(), 4, sampler=WeightedRandomSampler(torch.arange(1.0, SIZE + 1), SIZE, generator=seeded())),
    "weighted, not seeded": lambda: DataLoader(Points(), 4, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "with replacement": lambda: DataLoader(Points(), 4, sampler=twice(seeded())),
    "subset": lambda: DataLoader(Points(), 4, sampler=SubsetRandomSampler(range(SIZE), generator=seeded())),
    "batches of batches": lambda: DataLoader(Points(), batch_sampler=BatchSampler(PerClass(), 4, drop_last=True)),
    "the loader's generator": lambda: DataLoader(Points(), 4, shuffle=True, generator=seeded()),
    "augmentation by own generators": lambda: DataLoader(Jittered(), 4, shuffle=True),
    "transforms of a part of a data set": lambda: DataLoader(Subset(Changed(), range(SIZE)), 4, shuffle=True),
    "a generator made late": lambda: DataLoader(MadeLate(), 4, shuffle=True),
    "a generator made late, batches at once": lambda: DataLoader(MadeLateAtOnce(), 4, shuffle=True),
    "a generator of each worker": lambda: DataLoader(
        MadeLate(), 4, shuffle=True, num_workers=2, worker_init_fn=own_generator),
    "masks of a collator": lambda: DataLoader(Rows(), 4, shuffle=True, collate_fn=Masks(seeded())),
    "masks of a collator, made late": lambda: DataLoader(Rows(), 4, shuffle=True, collate_fn=Masks()),
    "masks of a collator, made late by workers": lambda: DataLoader(
        Rows(), 4, shuffle=True, collate_fn=Masks(), num_workers=2),
    "a stream through a buffer": lambda: DataLoader(Buffered(), 4),
    "a stream through a buffer, generator made late": lambda: DataLoader(BuffersLate(), 4),
    "a stream through a buffer, own generator": lambda: DataLoader(Buffered(random.Random(1)), 4),
}  # fmt: skip
SAID: dict[str, Callable[[], Any]] = {
    "lists shuffled by a generator of the module": lambda: DataLoader(Points(), 4, sampler=PerClass(Hides(SHARED))),
    "buckets, a generator of the module": lambda: DataLoader(Points(), batch_sampler=Buckets(SHARED.shuffle)),
    "buckets, a generator of an own kind": lambda: DataLoader(Points(), batch_sampler=Buckets(Own().shuffle)),
    "orders made ahead, not seeded": lambda: DataLoader(Points(), 4, sampler=Ordered(SHARED)),
    "a stream through a buffer, a generator of the module": lambda: DataLoader(Buffered(Hides(SHARED)), 4),
    "a stream that counts its passes": lambda: DataLoader(Counts(), 4),
}


class Hides:
    """Holds a generator where nobody looks."""

    __slots__ = ("rng",)

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rng, name)


def begin(make: Callable[[], Any]) -> Any:
    """Return a loader of a script that seeds what there is to seed."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    return make()


def trained(path: Path, make: Callable[[], Any]) -> list[Any]:
    """Train three epochs: killed in the second one, stopped at its end, killed in the third one."""
    seen: list[Any] = []
    for save_at, until in ((8, 10), (12, 12), (15, 17), (STEPS, STEPS)):
        drawn = life(path, begin(make), until=until, save_at=save_at, epochs=3)
        seen += drawn[: save_at - len(seen)]
    return [batch.tolist() for batch in seen]


QUICK = (
    "lists shuffled in place", "buckets, NumPy", "orders made ahead", "an endless shuffle",
    "a stream through a buffer, own generator", "transforms of a part of a data set", "a generator made late",
    "masks of a collator, made late",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in EXACT]
)
def test_what_strangers_write_goes_on_exactly(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Over kills in two epochs and a stop between them the batches are those of one life, and no alarm is given."""
    make = EXACT[name]
    whole = life(tmp_path / "whole", begin(make), until=STEPS, save_at=STEPS, epochs=3)
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert trained(tmp_path / "parts", make) == [batch.tolist() for batch in whole]
    assert [text for text in caplog.messages if "has no state_dict" not in text] == []


@pytest.mark.parametrize("name", SAID)
def test_what_cannot_be_made_exact_is_said(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where the batches are others than those of one life, an error or a warning says so before they are trained."""
    make = SAID[name]
    life(tmp_path, begin(make), until=10, save_at=8, epochs=3)
    with caplog.at_level(logging.WARNING, "holdfast"):
        try:
            life(tmp_path, begin(make), until=9, epochs=3)
        except hf.StateMismatchError as error:
            said = str(error)
        else:
            said = "".join(caplog.messages)
    assert "step 9, epoch 1: " in said


def test_a_list_that_is_shuffled_anew_is_told_by_what_is_drawn_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a stop in order no batch comes again; those drawn once more, to be dropped, are others."""
    numbers = list(range(SIZE))
    for shuffled, until in ((numbers, 8), (numbers[::-1], 9)):
        batches = [torch.tensor(shuffled[first : first + 2]) for first in range(0, SIZE, 2)]
        with caplog.at_level(logging.WARNING, "holdfast"):
            life(tmp_path, batches, until=until, save_at=until)
    assert "step 9, epoch 0: batch 0 of 'train' was drawn again to get back to the position" in caplog.text


def test_a_data_set_that_is_changed_under_workers_that_stay_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Persistent workers do not see what the script changes, those of a resume do: one warning in the second epoch."""
    data = Points()
    loader = DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)
    with hf.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=None) as ck:
        for epoch in ck.epochs(3):
            data.difficulty = epoch
            for _ in ck.batches(loader):
                ck.step()
    told = [text for text in caplog.messages if "persistent workers" in text]
    assert len(told) == 1
    assert "epoch 1: " in told[0]
    assert "(difficulty)" in told[0]


def test_a_loader_of_a_run_is_freed_with_the_run(tmp_path: Path) -> None:
    """No cycle keeps it, and its workers, for the garbage collector, beneath which torch waits 5 s for each of them."""

    def left(path: Path) -> weakref.ref[Any]:
        loader = DataLoader(Points(), batch_size=4, num_workers=1, persistent_workers=True)
        with hf.Checkpointer(path, {}) as ck:
            for _ in ck.batches(loader):
                ck.step()
                break
        return weakref.ref(loader)

    left(tmp_path / "first")  # modules of torch keep tracebacks of their import, and with them who began it
    gc.disable()
    try:
        assert left(tmp_path / "second")() is None
    finally:
        gc.enable()


class Twenty2(Points):
    def __len__(self) -> int:
        return 22


@pytest.mark.parametrize("until", range(4, 8))
def test_a_last_batch_that_is_smaller_is_where_a_run_may_stop(tmp_path: Path, until: int) -> None:
    """22 samples by 4, weighted: a save after each of the last batches of an epoch, and after the first of the next."""

    def loader() -> Any:
        weights = torch.arange(1.0, 23.0)
        return DataLoader(Twenty2(), batch_size=4, sampler=Own22(WeightedRandomSampler(weights, 22)))

    whole = life(tmp_path / "whole", loader(), until=14)
    begun = life(tmp_path / "run", loader(), until=until, save_at=until)
    rest = life(tmp_path / "run", loader(), until=14)
    assert [batch.tolist() for batch in begun + rest] == [batch.tolist() for batch in whole]


class Own22(Sampler[int]):
    """A sampler of somebody's own around another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.inner))
