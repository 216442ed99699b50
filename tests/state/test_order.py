"""The order of a map-style loader is a function of (seed, epoch), whatever its sampler."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loader_cases import (
    Augmented,
    Ids,
    N,
    as_list,
    assert_same_generators,
    flat,
    lives,
    run,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from holdfast.frameworks.huggingface import PreparedLoader
from holdfast.state.data import batches
from holdfast.state.data.batches import ResumableBatches
from holdfast.state.tree import rng


def test_order_is_a_function_of_seed_and_epoch_only():
    """Other states of the global generators give the same order, another seed another one."""
    torch.manual_seed(1)
    first, _ = run(DataLoader(Ids(), batch_size=4, shuffle=True))
    torch.manual_seed(2)
    assert run(DataLoader(Ids(), batch_size=4, shuffle=True))[0] == first
    assert run(DataLoader(Ids(), batch_size=4, shuffle=True), seed=8)[0] != first


def test_an_epoch_keeps_the_seed_it_was_begun_with(caplog):
    """A position made with another seed finishes its epoch in its own order, and says so."""
    whole, _ = run(DataLoader(Ids(), batch_size=4, shuffle=True))
    head, position = run(DataLoader(Ids(), batch_size=4, shuffle=True), stop=4)
    with caplog.at_level(logging.WARNING, "holdfast.data"):
        tail, _ = run(DataLoader(Ids(), batch_size=4, shuffle=True), position, seed=8)
    assert head + tail == whole
    assert "begun with data seed 7" in caplog.text


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_drop_last_and_given_batch_samplers_are_honoured(drop_last, given):
    """The last short batch is there or not as asked for, with torch's BatchSampler passed in or made by the loader."""

    def make():
        if given:
            return DataLoader(Ids(), batch_sampler=BatchSampler(RandomSampler(range(N)), 4, drop_last))
        return DataLoader(Ids(), batch_size=4, shuffle=True, drop_last=drop_last)

    whole, _ = run(make())
    assert [len(batch) for batch in whole] == [4] * 10 + ([] if drop_last else [3])
    assert lives(make) == whole


def test_loaders_that_do_not_batch_resume_by_the_sample():
    """batch_size=None yields samples; the position counts them."""

    def make():
        return DataLoader(Ids(), batch_size=None, shuffle=True)

    whole, _ = run(make())
    assert sorted(whole) == list(range(N))
    assert lives(make) == whole


def test_sampler_that_yields_lists_of_indices_without_auto_batching():
    """The documented pattern of a batch sampler passed as sampler with batch_size=None resumes as well."""

    class Whole(Dataset):
        def __len__(self) -> int:
            return N

        def __getitem__(self, indices: list[int]) -> tuple[list[int], float]:
            return list(indices), random.random()

    def make():
        sampler = BatchSampler(RandomSampler(range(N)), 4, False)
        return DataLoader(Whole(), batch_size=None, sampler=sampler, collate_fn=as_list)

    whole, _ = run(make())
    assert sorted(flat(ids for ids, _ in whole)) == list(range(N))
    assert lives(make) == whole


def test_distributed_sampler_splits_and_resumes_on_each_rank():
    """Two ranks draw each sample once together, in orders that differ by epoch; the position counts both ranks."""

    def make(rank):
        sampler = DistributedSampler(range(40), num_replicas=2, rank=rank)
        return DataLoader(Ids(40), batch_size=4, sampler=sampler)

    for epoch in range(2):
        both = []
        for rank in range(2):
            options = {"epoch": epoch, "rank": rank, "world_size": 2}
            whole, _ = run(make(rank), **options)
            assert lives(lambda rank=rank: make(rank), stops=(2, 1), **options) == whole
            both.append(flat(whole))
        assert sorted(both[0] + both[1]) == list(range(40))
    assert run(make(0), stop=3, world_size=2)[1]["samples"] == 24
    assert flat(run(make(1), rank=1, world_size=2)[0]) != both[1]


@pytest.mark.parametrize("worlds", [(2, 1), (1, 4), (4, 2)])
def test_an_epoch_is_split_again_over_another_number_of_ranks(worlds):
    """With the global batch kept, ranks before and after the change draw each sample exactly once."""

    def make(rank, world):
        sampler = DistributedSampler(range(48), num_replicas=world, rank=rank)
        return DataLoader(Ids(48), batch_size=8 // world, sampler=sampler)

    before, after = worlds
    parts = [run(make(rank, before), stop=3, rank=rank, world_size=before) for rank in range(before)]
    assert len({json.dumps(position) for _, position in parts}) == 1
    ids = [index for drawn, _ in parts for index in flat(drawn)]
    for rank in range(after):
        ids += flat(run(make(rank, after), parts[0][1], rank=rank, world_size=after)[0])
    assert sorted(ids) == list(range(48))


def test_ranks_without_a_split_are_warned(caplog, monkeypatch):
    """A warning says once that every rank draws the same samples."""
    monkeypatch.setattr(batches, "said", set())  # another test of this process may have caused the same warning
    with caplog.at_level(logging.WARNING, "holdfast.data"):
        for _ in range(2):
            _, position = run(DataLoader(Ids(), batch_size=4, shuffle=True), stop=2, world_size=2)
        run(DataLoader(Ids(), batch_size=4, shuffle=True), stop=2, world_size=4, split=(0, 1))  # stages of one pipeline
    assert caplog.text.count("every rank gets the same samples") == 1
    assert position["samples"] == 8


def test_what_is_said_of_a_prepared_loader_names_that_one(caplog):
    """Not the class of ours that stands for it."""

    class Shard:
        def __iter__(self):
            return iter(range(8))

    _, position = run(PreparedLoader(Shard()), stop=3)
    with caplog.at_level(logging.WARNING, "holdfast.data"):
        run(PreparedLoader(Shard()), position)
    assert "Shard has no state_dict: drawing 3 batches again" in caplog.text
    assert "PreparedLoader" not in caplog.text


def test_a_sampler_of_one_part_is_meant(caplog, monkeypatch):
    """As in a group of tensor-parallel ranks: nobody is told to give a DistributedSampler who has given one.

    Nor who has asked for no split.
    """
    monkeypatch.setattr(batches, "said", set())
    sampler = DistributedSampler(range(48), num_replicas=1, rank=0)
    with caplog.at_level(logging.WARNING, "holdfast.data"):
        run(DataLoader(Ids(48), batch_size=4, sampler=sampler), stop=2, world_size=2)
        run(DataLoader(Ids(48), batch_size=4), stop=2, world_size=2, split=False)
    assert caplog.text == ""


def test_ranks_that_get_the_same_samples_count_once(caplog):
    """What is said of another split are data-parallel ranks: two before, one now, of four ranks in both."""
    loader = DataLoader(Ids(), batch_size=4, shuffle=True)
    _, position = run(loader, stop=2, rank=0, world_size=4, split=(0, 2))
    with caplog.at_level(logging.WARNING, "holdfast.data"):
        run(loader, position, rank=0, world_size=4, split=(0, 1))
    assert "is split over 1 rank(s), was 2" in caplog.text


class GlobalShuffle(Sampler):
    """A sampler of somebody's own that draws from python's and NumPy's global generators, and from its own."""

    def __init__(self, endless: bool = False) -> None:
        self.generator = torch.Generator()
        self.endless = endless

    def __iter__(self):
        while True:
            order = list(range(N))
            random.shuffle(order)
            for index in order:
                yield (index + np.random.randint(3) * int(torch.randint(2, (1,), generator=self.generator))) % N
            if not self.endless:
                return


class PairsByLength(Sampler):
    """A custom batch sampler with batches of several sizes."""

    def __iter__(self):
        left = torch.randperm(N).tolist()
        while left:
            size = random.randint(1, 5)
            yield left[:size]
            left = left[size:]


class Repeating(Sampler):
    """A custom batch sampler that draws few indices again and again."""

    def __iter__(self):
        return iter([[number % 3, (number + 1) % 3] for number in range(12)])


class OwnShuffle(Sampler):
    """A sampler that keeps a generator under a name of its own, and so remembers the epochs it has given."""

    def __init__(self, dice: object) -> None:
        self.dice = dice

    def __iter__(self):
        if isinstance(self.dice, torch.Generator):
            return iter(torch.randperm(N, generator=self.dice).tolist())
        order = list(range(N))
        self.dice.shuffle(order)
        return iter(order)


CUSTOM = [
    *(
        pytest.param(lambda make=make: {"sampler": OwnShuffle(make()), "batch_size": 4}, id=f"own {name}")
        for name, make in {
            "torch.Generator": torch.Generator,
            "numpy.Generator": np.random.default_rng,
            "numpy.RandomState": np.random.RandomState,
            "random.Random": random.Random,
        }.items()
    ),
    pytest.param(lambda: {"sampler": WeightedRandomSampler([1.0] * N, 50), "batch_size": 4}, id="weighted"),
    pytest.param(lambda: {"sampler": GlobalShuffle(), "batch_size": 4}, id="global generators"),
    pytest.param(lambda: {"batch_sampler": PairsByLength()}, id="batch sampler"),
    pytest.param(lambda: {"batch_sampler": Repeating()}, id="repeating batch sampler"),
    pytest.param(lambda: {"sampler": range(0, N, 2), "batch_size": 4}, id="plain range"),
]


@pytest.mark.parametrize("options", CUSTOM)
def test_custom_samplers_repeat_their_order_and_are_skipped_by_index(options):
    """The order of a sampler of unknown kind depends on (seed, epoch) only, moves no generator, and seeks for free."""

    def make(dataset=None):
        return DataLoader(dataset if dataset is not None else Augmented(), collate_fn=as_list, **options())

    before = rng.capture()
    whole, _ = run(make())
    assert lives(make) == whole
    assert_same_generators(before)
    _, position = run(make(), stop=5)
    dataset = Ids()
    ids = flat(run(make(dataset), position)[0])
    assert ids == [sample[0] for sample in flat(whole[5:])]
    assert sum(dataset.called()) == len(ids)


@pytest.mark.parametrize("make", [torch.Generator, np.random.default_rng, np.random.RandomState, random.Random])
def test_a_sampler_that_has_given_other_epochs_gives_the_same_order(make):
    """What a sampler has drawn in earlier epochs of this life decides nothing: a resume has not drawn it."""
    sampler = OwnShuffle(make())
    used, fresh = DataLoader(range(N), sampler=sampler), DataLoader(range(N), sampler=OwnShuffle(make()))
    for epoch in (0, 1):
        before = run(used, epoch=epoch)[0]
    assert run(fresh, epoch=1)[0] == before != run(fresh, epoch=0)[0]


def test_a_samplers_own_generator_is_left_as_it_was():
    """A generator the user gave to a sampler decides nothing and is not moved."""
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    sampler = WeightedRandomSampler([1.0] * N, N, generator=generator)
    first, _ = run(DataLoader(Ids(), batch_size=4, sampler=sampler))
    assert torch.equal(generator.get_state(), before)
    generator.manual_seed(6)
    assert run(DataLoader(Ids(), batch_size=4, sampler=sampler))[0] == first


def test_an_endless_sampler_works():
    """A sampler that never ends is drawn from as needed, and resumes."""

    def make():
        return DataLoader(Ids(), batch_size=4, sampler=GlobalShuffle(endless=True))

    whole, _ = run(make(), stop=40)
    head, position = run(make(), stop=17)
    tail, _ = run(make(), position, stop=23)
    assert head + tail == whole


def test_set_epoch_of_a_custom_sampler_is_called():
    """A sampler that orders by its own epoch is told the epoch."""

    class ByEpoch(SequentialSampler):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self):
            return iter([(index + self.epoch) % N for index in range(N)])

    assert flat(run(DataLoader(Ids(), sampler=ByEpoch(range(N)), batch_size=4), epoch=3)[0])[:2] == [3, 4]


class _Remembers(Sampler[int]):
    """Shuffles its own list in place, counts passes, draws from a generator in a list; the script sets its length."""

    def __init__(self, length: int = 20) -> None:
        self.order, self.passes, self.dice, self.length = list(range(20)), 0, [random.Random(3)], length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        self.dice[0].shuffle(self.order)
        self.order.append(self.order.pop(self.passes % 20))
        return iter(self.order[: self.length])


class _RemembersBatches(_Remembers):
    """Yields batches of such an order."""

    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        return iter([order[start : start + 4] for start in range(0, len(order), 4)])


def _epochs(loader: Any, position: Any, *, first: int, stop: int = -1) -> tuple[list[list[int]], Any]:
    """Draw the epochs from ``first`` to 3; a curriculum sets the length before each. Stop after so many batches."""
    seen: list[list[int]] = []
    owner = loader.sampler if isinstance(loader.sampler, _Remembers) else loader.batch_sampler
    for epoch in range(first, 4):
        owner.length = 20 - 4 * (epoch % 2)
        batches = ResumableBatches(loader, position, seed=5, epoch=epoch)
        for batch in batches:
            seen.append(batch.tolist())
            if len(seen) == stop:
                return seen, batches.state_dict()
        position = batches.state_dict(is_over=True)
    return seen, position


@pytest.mark.parametrize("make", ["sampler", "batch sampler"])
@pytest.mark.parametrize("stop", [2, 5, 7, 9, 12])
def test_a_sampler_with_a_memory_is_given_back_what_it_held(make: str, stop: int) -> None:
    """In the middle of an epoch and at its end a new process draws the order that an uninterrupted one draws."""

    def loader() -> DataLoader[int]:
        data = list(range(20))
        if make == "sampler":
            return DataLoader(data, 4, sampler=_Remembers())  # type: ignore[arg-type]
        return DataLoader(data, batch_sampler=_RemembersBatches())  # type: ignore[arg-type]

    whole, _ = _epochs(loader(), None, first=0)
    begun, position = _epochs(loader(), None, first=0, stop=stop)
    position = copy.deepcopy(position)
    rest, _ = _epochs(loader(), position, first=position["epoch"])
    assert begun + rest == whole


def test_a_sampler_that_draws_another_order_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """What a sampler hides (a generator of its module) cannot be given back: the indices that come first tell it."""
    order = random.Random(1)

    class Hides(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(order.sample(range(20), 20))

        def __len__(self) -> int:
            return 20

    def loader() -> DataLoader[int]:
        return DataLoader(list(range(20)), 4, sampler=Hides())  # type: ignore[arg-type]

    batches = ResumableBatches(loader(), None, seed=5, epoch=0)
    next(iter(batches))
    list(ResumableBatches(loader(), batches.state_dict(), seed=5, epoch=0))
    assert "Hides does not give the order again in which it was begun: 4 samples" in caplog.text
    with pytest.raises(ZeroDivisionError):
        list(ResumableBatches(loader(), batches.state_dict(), seed=5, epoch=0, mismatch=lambda text: 1 // 0))


class Noise(Dataset):
    """Ten samples, each of them random."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, torch.rand(1).item()


@pytest.mark.parametrize("replacement", [True, False])
def test_a_sample_that_comes_again_is_drawn_anew(replacement):
    """Several rounds over few samples: all draws come, and each has random numbers of its own, after a resume too."""
    sampler = RandomSampler(Noise(), replacement=replacement, num_samples=25)
    loader = DataLoader(Noise(), batch_size=5, sampler=sampler)
    begun = ResumableBatches(loader, None, seed=1, epoch=0)
    made = [(indices.tolist(), noise.tolist()) for indices, noise in begun]
    drawn = Counter(index for indices, _ in made for index in indices)
    assert sum(drawn.values()) == 25
    if not replacement:
        assert {*drawn.values()} == {2, 3}
    assert len({one for _, noise in made for one in noise}) == 25
    half = ResumableBatches(loader, None, seed=1, epoch=0)
    for _ in zip(range(3), half, strict=False):
        pass
    rest = ResumableBatches(loader, half.state_dict(), seed=1, epoch=0)
    assert [(indices.tolist(), noise.tolist()) for indices, noise in rest] == made[half.batches :]
