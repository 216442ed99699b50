"""An epoch is dealt out to any chain of numbers of ranks with every sample once, whatever the sampler."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loader_cases import Augmented, Ids, N, as_list, flat, run
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.errors import ConfigError
from holdfast.state.data import batches as data_batches
from holdfast.state.data.batches import ResumableBatches
from holdfast.state.data.order import DealtSampler, Split, split_of

# -- the arithmetic, against torch and against sets


@given(length=st.integers(0, 60), num=st.integers(1, 9), drop=st.booleans())
def test_a_whole_epoch_is_dealt_as_torch_does_it(length: int, num: int, drop: bool) -> None:
    """From the start, each rank's part is DistributedSampler's, also where there are more ranks than samples."""
    for rank in range(num):
        sampler = DistributedSampler(range(length), num_replicas=num, rank=rank, shuffle=False, drop_last=drop)
        split = Split(rank=rank, num_ranks=num, drop_uneven=drop)
        # torch refuses some of the data sets smaller than the number of ranks
        if length and not (drop and length < num):
            assert list(split.share(range(length), 0)) == list(sampler)
        assert len(split.share(range(length), 0)) == split.num_left(length, 0)


@given(length=st.integers(0, 60), start=st.integers(0, 70), num=st.integers(1, 9), drop=st.booleans())
def test_known_and_drawn_orders_are_dealt_alike(length: int, start: int, num: int, drop: bool) -> None:
    """Sequences, tensors and iterators give the same parts, of equal sizes, and together the rest."""
    order = random.Random(length).sample(range(length), length)
    parts = []
    for rank in range(num):
        split = Split(rank=rank, num_ranks=num, drop_uneven=drop)
        part = list(split.deal(iter(order), start))
        assert part == list(split.share(order, start)) == list(map(int, split.share(torch.tensor(order), start)))
        assert len(part) == split.num_left(length, start)
        parts.append(part)
    together = [sample for turn in zip(*parts, strict=True) for sample in turn]
    rest = order[start:]
    kept = len(rest) - len(rest) % num if drop else len(rest)
    assert together[: len(rest)] == rest[:kept]
    assert together[len(rest) :] == list(itertools.islice(itertools.cycle(order or [0]), max(0, len(together) - kept)))


class Backwards(Sampler):
    """A sampler of somebody's own, over all samples, that draws from a global generator too."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        random.random()
        return iter(range(self.length - 1, -1, -1))

    def __len__(self) -> int:
        return self.length


Make = Callable[[int, int, int, int, bool], DataLoader]


def plain(length: int, rank: int, world: int, batch: int, drop: bool) -> DataLoader:
    return DataLoader(Ids(length), batch_size=batch, shuffle=True, drop_last=drop)


def in_order(length: int, rank: int, world: int, batch: int, drop: bool) -> DataLoader:
    return DataLoader(Ids(length), batch_size=batch, drop_last=drop)


def distributed(length: int, rank: int, world: int, batch: int, drop: bool) -> DataLoader:
    data = Ids(length)
    # torch itself fails at fewer samples than ranks here
    uneven = drop and length >= world
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, drop_last=uneven, seed=3)
    return DataLoader(data, batch_size=batch, sampler=sampler, drop_last=drop)


def sampled(length: int, rank: int, world: int, batch: int, drop: bool) -> DataLoader:
    return DataLoader(Ids(length), batch_size=batch, sampler=Backwards(length), drop_last=drop)


def dealt(length: int, rank: int, world: int, batch: int, drop: bool) -> DataLoader:
    sampler = DealtSampler(Backwards(length), rank=rank, num_replicas=world)
    return DataLoader(Ids(length), batch_size=batch, sampler=sampler, drop_last=drop)


MAKES = [plain, in_order, distributed, sampled, dealt]


def life(make: Make, length: int, world: int, batch: int, position: Any, *, stop: int | None, drop: bool = False):
    """Live one life of all ranks: what they drew step by step, and the position, equal on all of them."""
    parts = [
        run(make(length, rank, world, batch, drop), position, stop=stop, rank=rank, world_size=world, split=True)
        for rank in range(world)
    ]
    positions = {json.dumps(one) for _, one in parts}
    assert len(positions) == 1, "the position differs between ranks"
    assert len({len(drawn) for drawn, _ in parts}) == 1, "ranks make different numbers of steps"
    return [drawn for drawn, _ in parts], json.loads(positions.pop())


worlds = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(make=st.sampled_from(MAKES), length=st.integers(1, 45), lives=worlds, drop=st.booleans())
@example(make=distributed, length=43, lives=[(4, 2, 2), (2, 2, 3), (3, 2, 0)], drop=False)
def test_every_sample_once_over_any_chain_of_worlds(
    make: Make, length: int, lives: list[tuple[int, int, int]], drop: bool
) -> None:
    """(world, batch size, steps) in any chain: each sample once; only the last round of the epoch may fill or drop."""
    position, seen = None, Counter()
    for number, (world, batch, steps) in enumerate(lives):
        last = number == len(lives) - 1
        drawn, position = life(make, length, world, batch, position, stop=None if last else steps, drop=drop)
        seen.update(index for part in drawn for index in flat(part))
    assert position["done"]
    # An epoch that an earlier life came to the end of was filled up by that one.
    filled = sum(seen.values()) - len(seen)
    if drop:
        assert filled < (max(one for one, _, _ in lives) if make in (distributed, dealt) else 1)
        assert length - len(seen) < max(world * batch + world for world, batch, _ in lives)
    else:
        assert set(seen) == set(range(length))
        assert filled < max(one for one, _, _ in lives)
        assert position["samples"] == sum(seen.values())


@pytest.mark.parametrize("make", MAKES)
def test_four_two_three_ranks_in_one_epoch(make: Make) -> None:
    """48 samples, 4 -> 2 -> 3 ranks: each comes exactly once, and the next epoch is whole again."""
    position, seen = None, []
    for world, stop in ((4, 3), (2, 3), (3, None)):
        drawn, position = life(make, 48, world, 2, position, stop=stop)
        seen += [index for part in drawn for index in flat(part)]
    assert sorted(seen) == list(range(48))
    parts = [
        run(make(48, rank, 3, 2, False), position, epoch=1, rank=rank, world_size=3, split=True)[0] for rank in range(3)
    ]
    assert sorted(index for part in parts for index in flat(part)) == list(range(48))


@pytest.mark.parametrize("make", MAKES)
def test_the_same_ranks_go_on_bit_for_bit_also_after_a_change(make: Make) -> None:
    """Stopped once more at the same number of ranks, the rest after a change is the one that was not stopped."""
    _, position = life(make, N, 4, 2, None, stop=2)
    whole, _ = life(make, N, 3, 2, position, stop=None)
    head, position = life(make, N, 3, 2, position, stop=2)
    tail, _ = life(make, N, 3, 2, position, stop=None)
    assert [one + other for one, other in zip(head, tail, strict=True)] == whole


def test_one_rank_and_several_share_an_order() -> None:
    """From one rank to a DistributedSampler and back the epoch is finished in the order it was begun with."""
    for chain in ((plain, 1), (distributed, 3)), ((distributed, 3), (plain, 1)), ((distributed, 2), (plain, 4)):
        (first, before), (second, after) = chain
        whole, _ = life(first, 48, before, 4, None, stop=None)
        _, position = life(first, 48, before, 4, None, stop=2)
        tail, _ = life(second, 48, after, 4, position, stop=None)
        order = [sample for turn in zip(*map(flat, whole), strict=True) for sample in turn]
        rest = [sample for turn in zip(*map(flat, tail), strict=True) for sample in turn]
        done = position["samples"]
        assert order[done:] == rest[: 48 - done]
        assert set(rest[48 - done :]) <= set(order[:after])


def test_augmentation_does_not_depend_on_the_number_of_ranks() -> None:
    """A sample's random numbers are the same on 1, 3 and 2 ranks, draws with replacement included."""
    for make in (
        lambda: DataLoader(Augmented(), batch_size=2, shuffle=True, collate_fn=as_list),
        lambda: DataLoader(
            Augmented(), batch_size=2, collate_fn=as_list,
            sampler=RandomSampler(range(9), replacement=True, num_samples=36),
        ),
    ):  # fmt: skip
        alone = flat(run(make())[0])
        position, seen = None, []
        for world, stop in ((3, 2), (2, None)):
            parts = [run(make(), position, stop=stop, rank=r, world_size=world, split=True) for r in range(world)]
            seen += [sample for drawn, _ in parts for sample in flat(drawn)]
            position = parts[0][1]
        assert set(seen) == set(alone)
        assert len(set(seen)) == len(alone)


def test_len_counts_the_batches_left_for_this_rank() -> None:
    """After a change the number of steps left follows from the samples left and the batch size."""
    _, position = life(distributed, 48, 4, 2, None, stop=2)
    for world, left in ((4, 4), (2, 8), (3, 6), (1, 16)):
        loader = distributed(48, 0, world, 2, False)
        assert len(ResumableBatches(loader, position, seed=7, epoch=0, world_size=world)) == left


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("length", [48, 43])
def test_batches_are_counted_in_the_new_layout(make: Make, length: int) -> None:
    """After other ranks or batch sizes: those that count as done and those that come make the length of the epoch."""
    _, position = life(make, length, 4, 2, None, stop=2)
    for world, batch in ((4, 2), (2, 2), (3, 2), (1, 4), (4, 3)):
        loader = make(length, 0, world, batch, False)
        options: Any = {"seed": 7, "epoch": 0, "world_size": world, "split": True}
        rest, whole = ResumableBatches(loader, position, **options), ResumableBatches(loader, None, **options)
        assert rest.batches + len(list(rest)) == len(whole)


# -- who splits


def test_a_sampler_that_knows_its_rank_is_respected() -> None:
    """A split over two data-parallel ranks in a world of four is left as it is, and counted as two."""
    for rank in range(4):
        sampler = DistributedSampler(range(40), num_replicas=2, rank=rank // 2, shuffle=False)
        drawn, position = run(DataLoader(Ids(40), batch_size=4, sampler=sampler), stop=2, world_size=4, split=True)
        assert drawn == [[*range(rank // 2, 8, 2)], [*range(8 + rank // 2, 16, 2)]]
        assert position["samples"] == 16


def test_a_split_over_a_part_of_the_ranks() -> None:
    """(rank, num_ranks) for meshes with tensor parallelism: ranks of one pair get the same samples."""
    loaders = [DataLoader(Ids(40), batch_size=4, shuffle=True) for _ in range(4)]
    parts = [
        run(one, rank=rank, world_size=4, split=(rank // 2, 2), stop=3)[0] for rank, one in enumerate(loaders)
    ]  # fmt: skip
    assert parts[0] == parts[1] != parts[2] == parts[3]
    assert not set(flat(parts[0])) & set(flat(parts[2]))


def test_split_takes_what_it_says() -> None:
    """True, False or a pair of ranks."""
    assert split_of(True, rank=1, world_size=3) == Split(rank=1, num_ranks=3)
    assert split_of(True, rank=0, world_size=1) is None
    assert split_of(False, rank=1, world_size=3) is None
    assert split_of((1, 2), rank=3, world_size=4) == Split(rank=1, num_ranks=2)
    for wrong in (2, (1,), (True, 2), "yes"):
        with pytest.raises(ConfigError, match="split="):
            split_of(wrong, rank=0, world_size=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="outside of 2"):
        split_of((2, 2), rank=0, world_size=2)


class Pairs(Sampler):
    def __iter__(self):
        return iter([[0, 1], [2, 3]])


def test_batches_of_somebody_else_are_not_split_in_the_dark() -> None:
    """A batch sampler that knows nothing of ranks is refused with the way out; split=False takes it as it is."""
    with pytest.raises(ConfigError, match=r"Pairs.*split=False"):
        run(DataLoader(Ids(), batch_sampler=Pairs()), world_size=2, split=True)
    assert run(DataLoader(Ids(), batch_sampler=Pairs()), world_size=2)[0] == [[0, 1], [2, 3]]


# -- what is said


@pytest.fixture
def said(caplog):
    data_batches.said.clear()
    caplog.set_level(logging.WARNING, "holdfast.data")
    return caplog


def test_a_new_split_is_said_by_rank_zero(said) -> None:
    """One line with the numbers; nothing when nothing changed."""
    _, position = life(plain, 48, 4, 2, None, stop=2)
    life(plain, 48, 4, 2, position, stop=1)
    assert not said.records
    life(plain, 48, 2, 2, position, stop=1)
    assert [record.getMessage() for record in said.records] == [
        "holdfast: data: the rest of epoch 0 after 16 samples is split over 2 rank(s), was 4"
    ]


class Strided(DistributedSampler):
    """Splits by a rule of its own."""

    def __iter__(self):
        share = len(self.dataset) // self.num_replicas  # type: ignore[arg-type]
        return iter(range(self.rank * share, (self.rank + 1) * share))


def test_a_split_of_somebody_else_cannot_be_changed_exactly_and_that_is_said(said) -> None:
    """Where a sampler divides by its own rule nobody knows what is left: said, with what helps."""

    def make(length: int, rank: int, world: int, batch: int, drop: bool) -> DataLoader:
        return DataLoader(Ids(length), batch_size=batch, sampler=Strided(range(length), world, rank))

    _, position = life(make, 48, 4, 2, None, stop=2)
    life(make, 48, 2, 2, position, stop=None)
    assert "Strided splits epoch 0 over the ranks by itself (2 now, 4 before)" in said.text


def test_a_loader_with_its_own_state_begins_the_epoch_anew(said) -> None:
    """States of four loaders do not fit two: no sample is left out, and it is said; the next epoch is as usual."""
    loader = StatefulDataLoader(Ids(), batch_size=4)
    _, position = run(loader, stop=3, world_size=4)
    again, end = run(StatefulDataLoader(Ids(), batch_size=4), position, world_size=2)
    assert flat(again) == list(range(N))
    assert "one for each of 4 rank(s), which cannot be split again over 2: epoch 0 begins anew" in said.text
    assert end["samples"] == 2 * N
    # A finished epoch stays finished, and its end state is nobody's start.
    assert run(StatefulDataLoader(Ids(), batch_size=4), end, world_size=3)[0] == []
    assert flat(run(StatefulDataLoader(Ids(), batch_size=4), end, epoch=1, world_size=3)[0]) == list(range(N))


class Elastic:
    """Knows how many samples all ranks have had, as streaming data sets do."""

    elastic = True

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.had = rank, world, 0

    def __iter__(self):
        while self.had < 48:
            self.had += self.world
            yield [self.had - self.world + self.rank]

    def state_dict(self) -> dict:
        return {"had": self.had}

    def load_state_dict(self, state: dict) -> None:
        self.had = state["had"]


def test_a_loader_that_says_it_is_elastic_gets_its_state_on_any_number_of_ranks(said) -> None:
    """Its state is the same on all ranks and it splits the rest by itself: every sample once."""
    parts = [run(Elastic(rank, 4), stop=3, rank=rank, world_size=4) for rank in range(4)]
    seen = [index for drawn, _ in parts for index in flat(drawn)]
    rest = [run(Elastic(rank, 3), parts[0][1], rank=rank, world_size=3) for rank in range(3)]
    seen += [index for drawn, _ in rest for index in flat(drawn)]
    assert sorted(seen) == list(range(48))
    assert "epoch 0 goes on with 3 rank(s), was 4: its loader is elastic" in said.text


def test_a_stream_goes_on_after_as_many_samples_of_all_ranks(said) -> None:
    """Every n-th sample for rank r: the rest is exact, here 4 -> 2 ranks; that it depends on this is said."""

    def stream(rank: int, world: int):
        return ([index] for index in range(rank, 48, world))

    parts = [run(stream(rank, 4), stop=4, rank=rank, world_size=4) for rank in range(4)]
    seen = [index for drawn, _ in parts for index in flat(drawn)]
    for rank in range(2):
        seen += flat(run(stream(rank, 2), parts[0][1], rank=rank, world_size=2)[0])
    assert sorted(seen) == list(range(48))
    assert "cannot be split again from 4 to 2" in said.text


def test_ranks_of_a_part_augment_differently_without_seed_samples() -> None:
    """With seed_samples=False workers of different ranks draw different numbers, of the same part the same."""

    def numbers(split, rank):
        loader = DataLoader(Augmented(), batch_size=2, num_workers=1, collate_fn=as_list)
        drawn, _ = run(loader, rank=rank, world_size=2, split=split, seed_samples=False)
        return [sample[1:] for sample in flat(drawn)]

    assert numbers(True, 0) != numbers(True, 1)
    assert numbers(False, 0) == numbers(False, 1)


class OwnSplit(Sampler[int]):
    """Divides the samples by itself."""

    def __init__(self, length: int, rank: int, num_replicas: int) -> None:
        self.length, self.rank, self.num_replicas = length, rank, num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.length, self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, self.length, self.num_replicas))


def test_a_sampler_that_divides_by_itself_goes_on_at_a_whole_round() -> None:
    """20 samples of four ranks are no whole number of rounds of three: ranks would be at different places."""

    def at(rank: int, world: int, position: Any = None) -> ResumableBatches:
        loader = DataLoader(range(60), batch_size=5, sampler=OwnSplit(60, rank, world))
        return ResumableBatches(loader, position, seed=1, epoch=0, rank=rank, world_size=world)

    first = at(0, 4)
    next(iter(first))
    assert first.samples == 20
    for rank in range(3):
        assert at(rank, 3, first.state_dict()).samples == 18
