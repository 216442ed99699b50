"""Loaders and data sets that behave as those of litdata (0.2.76), mosaicml-streaming (0.13) and others: stand-ins."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from loader_cases import as_list, lives, run
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.state.data.batches import ResumableBatches
from holdfast.state.data.seeding import generators_within, objects_within

EPOCHS, N = 3, 43


class Numbers(IterableDataset):
    """All that is asked of the data set is its length."""

    def __iter__(self):
        raise AssertionError("its loader has them")

    def __len__(self) -> int:
        return N


class Combined(Numbers):
    """Several that are combined until all have ended: right after one resume, not after the second."""

    _iterate_over_all = True


class ByWeights(Numbers):
    """Several that are combined by weights: without a length, and without the generators of its workers in a state."""

    _iterate_over_all = False

    def __len__(self) -> int:
        raise TypeError


class Litdatas(DataLoader):
    """Counts each batch as full, and takes a state with all samples for the begin of the next epoch.

    Two workers had 22 and 21 samples: a batch of 2 comes before the last one of 1.
    """

    SIZES = (10, 10, 10, 10, 2, 1)
    __module__ = "litdata.streaming.dataloader"

    def __init__(self, dataset: IterableDataset) -> None:
        super().__init__(dataset, batch_size=None, num_workers=2)  # that are never begun
        self.restore, self.current_epoch, self.given = False, 0, 0
        self.worker_epoch = 1  # of the data set in this process, whose workers count on in theirs
        self.num_resumes = 0

    def __iter__(self):
        if not self.restore:
            self.given, self.num_resumes, self.worker_epoch = 0, 0, self.current_epoch + 1
            self.current_epoch += 1
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)  # as each of torch's iterators does
        order = random.Random(self.worker_epoch).sample(range(N), N)
        by_weights = getattr(self.dataset, "_iterate_over_all", True) is False
        if by_weights or (self.num_resumes > 1 and hasattr(self.dataset, "_iterate_over_all")):
            order = random.Random(self.given if self.restore and by_weights else self.worker_epoch).sample(range(N), N)
        if self.num_resumes > 1 and not by_weights and hasattr(self.dataset, "_iterate_over_all"):
            order.reverse()
        for number in range(self.given // 10, len(self.SIZES)):
            start = sum(self.SIZES[:number])
            self.given += 10
            yield order[start : start + self.SIZES[number]], torch.rand(1).item()
        self.restore = False

    def state_dict(self) -> dict:
        epoch = 1 if self.restore else self.worker_epoch
        counts = {"current_epoch": self.current_epoch, "given": self.given, "num_resumes": self.num_resumes}
        return {**counts, "dataset": {"current_epoch": epoch}}

    def load_state_dict(self, state: dict) -> None:
        self.current_epoch, self.given = state["current_epoch"], state["given"]
        self.worker_epoch, self.num_resumes = state["dataset"]["current_epoch"], state["num_resumes"] + 1
        self.restore = 0 < self.given < N or getattr(self.dataset, "_iterate_over_all", True) is False


class Mosaics(DataLoader):
    """Takes a state with all samples for the rest of that epoch, also where the next one is asked for."""

    __module__ = "streaming.base.dataloader"

    def __init__(self, dataset: IterableDataset) -> None:
        super().__init__(dataset, batch_size=None)
        self.num_samples_yielded = self.following = 0
        self.resumed: dict = {"epoch": -1}

    def _begun(self, epoch: int) -> tuple[int, int]:
        resumed = self.resumed
        return (epoch, 0) if resumed["epoch"] < epoch else (resumed["epoch"], resumed["sample_in_epoch"])

    def __iter__(self):
        epoch, offset = self._begun(self.following)
        self.following, self.num_samples_yielded = epoch + 1, 0
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        order = random.Random(epoch).sample(range(N), N)
        for start in range(offset, N, 10):
            batch = order[start : start + 10]
            self.num_samples_yielded += len(batch)
            yield batch, torch.rand(1).item()

    def state_dict(self) -> dict:
        epoch, offset = self._begun(self.following - 1)
        return {"epoch": epoch, "sample_in_epoch": offset + self.num_samples_yielded}

    def load_state_dict(self, state: dict) -> None:
        self.resumed = state


class Stage:
    """A stage of a pipeline that counts its passes, as webdataset's ``detshuffle`` does."""

    def __init__(self) -> None:
        self.epoch = -1


class Turns:
    """A transform, whose last random number has happened to grow by one."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, sample: int) -> int:
        raise AssertionError("nothing is asked of it")


class Pipeline(IterableDataset):
    """Shuffles with what its second stage counts."""

    def __init__(self) -> None:
        self.pipeline = [Stage(), Stage(), Turns()]

    def __iter__(self):
        self.pipeline[2].number += 1
        self.pipeline[1].epoch += 1
        return iter(random.Random(self.pipeline[1].epoch).sample(range(N), N))


class Pool:
    """As grain's: seeds its generators itself, in the threads that use them."""

    __module__ = "grain._src.python.dataset.transformations.map"

    def __init__(self) -> None:
        self._generator_cache = [np.random.default_rng(1)]

    def acquire_rng(self, index: int) -> np.random.Generator:
        raise AssertionError("nobody asks")


def life(make, dataset, begun=None, stop=None):
    """Train epochs in "another process" until a number of batches in all; return them and (epoch, position) then."""
    loader, (epoch, position), drawn = make(dataset()), begun or (0, None), []
    for at in range(epoch, EPOCHS):
        batches = ResumableBatches(loader, position, seed=1, epoch=at)
        iterator = iter(batches)
        while len(drawn) != stop:
            if (batch := next(iterator, None)) is None:
                break
            drawn.append((at, *batch))
        position = batches.state_dict()
        if len(drawn) == stop:
            return drawn, (at, position)
    return drawn, (EPOCHS, position)


@pytest.mark.parametrize(
    ("make", "dataset"),
    [(Litdatas, Numbers), (Litdatas, Combined), (Litdatas, ByWeights), (Mosaics, Numbers)],
    ids=["lit", "all", "weights", "mosaic"],
)
def test_two_resumes_at_any_batch_train_what_one_life_trains(make, dataset):
    """The same samples and random numbers, also behind the last batch of an epoch and between two epochs."""
    twin, _ = life(make, dataset)
    assert len({epoch for epoch, *_ in twin}) == EPOCHS
    for stop in range(1, len(twin)):
        first, begun = life(make, dataset, stop=stop)
        second, begun = life(make, dataset, begun, stop=2)
        third, _ = life(make, dataset, begun)
        assert first + second + third == twin, stop


@pytest.mark.parametrize("make", [Litdatas, Mosaics])
def test_an_epoch_that_was_ended_before_a_resume_is_not_begun_again(make):
    """The position is that of a whole epoch, whose end was drawn."""
    twin, _ = life(make, Numbers)
    per_epoch = len(twin) // EPOCHS
    batches = ResumableBatches(make(Numbers()), None, seed=1, epoch=0)
    assert len(list(batches)) == per_epoch
    assert batches.done
    assert life(make, Numbers, (1, batches.state_dict()))[0] == twin[per_epoch:]


def test_an_epoch_that_is_left_after_a_resume_is_not_resumed_once_more():
    """The loader of litdata keeps the place it was given until a pass has ended."""
    begun = life(Litdatas, Numbers, stop=2)[1]
    loader = Litdatas(Numbers())
    rest = ResumableBatches(loader, begun[1], seed=1, epoch=0)
    next(iter(rest))
    following = ResumableBatches(loader, rest.state_dict(is_over=True), seed=1, epoch=1)
    assert [tuple(batch) for batch in following] == [batch[1:] for batch in life(Litdatas, Numbers)[0] if batch[0] == 1]


class InMemory(IterableDataset):
    """Counts its epochs where its workers see it, and has a state that a plain loader does not ask for."""

    def __init__(self) -> None:
        self.next_epoch = 0

    def __iter__(self):
        self.next_epoch += 1
        return iter(range(8))

    def state_dict(self) -> dict:
        raise AssertionError("nobody asks")


def test_a_plain_loader_over_a_stream_that_counts_its_epochs_is_said(caplog):
    """A state of the data set does not help where the loader has none."""
    batches = ResumableBatches(DataLoader(InMemory(), 2), None, seed=1, epoch=0)
    list(batches)
    list(ResumableBatches(DataLoader(InMemory(), 2), batches.state_dict(), seed=1, epoch=1))
    assert "InMemory counts its own passes, and has begun anew: 'next_epoch' is 0, was 1" in caplog.text


def test_a_stage_of_a_pipeline_that_counts_its_passes_is_said_at_the_begin_of_an_epoch(caplog):
    """There nothing is drawn again, and no batch is known that could be compared."""
    batches = ResumableBatches(DataLoader(Pipeline(), 2), None, seed=1, epoch=0)
    list(batches)
    list(ResumableBatches(DataLoader(Pipeline(), 2), batches.state_dict(), seed=1, epoch=1))
    assert "Pipeline counts its own passes, and has begun anew: 'Stage2.epoch' is -1, was 0." in caplog.text
    assert "Stage1" not in caplog.text
    assert "Turns" not in caplog.text


def test_the_generators_of_grains_threads_are_left_alone():
    """Seeding them here makes numbers of chance of what grain draws by the place of a sample."""
    own = np.random.default_rng(2)
    assert generators_within({"pool": Pool(), "own": own}) == [own]


class OfAClass:
    """Draws from the generator that its class has, as a transform of MONAI that nobody has seeded."""

    R = np.random.RandomState()

    def __call__(self, number: int) -> float:
        return number + float(self.R.rand())


class OfItsOwn(OfAClass):
    """Has a generator of its own."""

    def __init__(self) -> None:
        self.R = np.random.RandomState()


class Cached(Dataset):
    """Holds its records before its transforms, which are many."""

    def __init__(self, num_records: int) -> None:
        self.records = [{"image": torch.tensor(n), "meta": [{"n": n}, [n]]} for n in range(num_records)]
        self.chain = {"transforms": [[OfAClass(), OfItsOwn()] for _ in range(20)]}

    def __getitem__(self, index: int) -> tuple[float, ...]:
        number = int(self.records[index]["image"])
        return tuple(one(number) for pair in self.chain["transforms"] for one in pair)

    def __len__(self) -> int:
        return len(self.records)


@pytest.mark.parametrize("workers", [0, 2])
def test_transforms_behind_many_records_draw_the_same_after_resumes(workers):
    """Generators of transforms, and of their class, are seeded for each sample, however much the data set holds."""

    def make():
        return DataLoader(Cached(250), batch_size=25, shuffle=True, num_workers=workers, collate_fn=as_list)

    whole, _ = run(make())
    assert lives(make) == whole
    assert run(make())[0] == whole


def test_records_are_not_in_the_way_of_what_holds_generators():
    """Neither a tensor nor a record is looked at before an object that a short list holds."""
    data = Cached(250)
    pair = data.chain["transforms"][19]
    assert {id(held) for held in generators_within(data)} >= {id(OfAClass.R), id(pair[1].R)}
    assert not any(isinstance(held, torch.Tensor) for held in objects_within(data))
