"""Batches go on exactly where the last life stopped, and training's generators stay untouched."""

from __future__ import annotations

import gc
import logging
import random

import numpy as np
import pytest
import torch
from loader_cases import (
    WORKERS,
    Augmented,
    AugmentedInOneCall,
    Ids,
    N,
    as_list,
    assert_same_generators,
    flat,
    lives,
    masked,
    run,
)
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.errors import StateMismatchError
from holdfast.state.data.batches import ResumableBatches
from holdfast.state.tree import rng


def sweep(workers, number):
    """Leave a kind of workers to the sweep: that a test beside this one has it is enough for every day."""
    return [
        pytest.param(*one.values, id=one.id, marks=pytest.mark.slow if at == number else ())
        for at, one in enumerate(workers)
    ]


@pytest.mark.parametrize("workers", sweep(WORKERS, 2))
def test_three_resumes_in_one_epoch_give_every_sample_once(workers):
    """Ids over four lives of a shuffled epoch equal those of one life: each sample once, in the same batches."""

    def make():
        return DataLoader(Ids(), batch_size=4, shuffle=True, **workers)

    whole, _ = run(make())
    assert sorted(flat(whole)) == list(range(N))
    assert flat(whole) != list(range(N))
    assert lives(make) == whole


def test_workers_may_change_between_lives():
    """A position saved with 2 workers goes on with none, and the other way round."""
    whole, _ = run(DataLoader(Augmented(), batch_size=4, shuffle=True, collate_fn=as_list))
    position, drawn = None, []
    for stop, workers in ((3, 2), (2, 0), (None, 2)):
        loader = DataLoader(Augmented(), batch_size=4, shuffle=True, collate_fn=as_list, num_workers=workers)
        part, position = run(loader, position, stop=stop)
        drawn += part
    assert drawn == whole


@pytest.mark.parametrize("workers", sweep(WORKERS, 1))
def test_epochs_differ_in_order_and_have_full_length_also_after_a_resume(workers):
    """One loader object gives complete epochs in different orders, resumed in the first or not."""

    def epochs(loader, position):
        return [flat(run(loader, position if epoch == 0 else None, epoch=epoch)[0]) for epoch in range(3)]

    loader = DataLoader(Ids(), batch_size=4, shuffle=True, **workers)
    whole = epochs(loader, None)
    assert all(sorted(ids) == list(range(N)) for ids in whole)
    assert len({tuple(ids) for ids in whole}) == 3
    head, position = run(DataLoader(Ids(), batch_size=4, shuffle=True, **workers), stop=5)
    tail = epochs(DataLoader(Ids(), batch_size=4, shuffle=True, **workers), position)
    assert [flat(head) + tail[0], *tail[1:]] == whole


def test_persistent_workers_stay_the_same_processes_over_epochs():
    """With persistent workers no process is started for a later epoch, also after an epoch left in the middle."""

    class Pids(Ids):
        def __getitem__(self, index: int) -> tuple[int, int]:
            return index, torch.utils.data.get_worker_info().seed

    loader = DataLoader(Pids(), batch_size=4, num_workers=2, persistent_workers=True, collate_fn=as_list)
    seeds = [
        {seed for batch in run(loader, epoch=epoch, stop=stop)[0] for _, seed in batch}
        for epoch, stop in ((0, None), (1, 4), (2, None))
    ]
    assert len(seeds[0]) == 2
    assert seeds[1] <= seeds[0]
    assert seeds[2] == seeds[0]


@pytest.mark.parametrize("workers", WORKERS)
def test_samples_before_the_position_are_never_loaded(workers):
    """A resume calls __getitem__ once for each sample left and not at all for those trained."""
    head, position = run(DataLoader(Ids(), batch_size=4, shuffle=True), stop=6)
    dataset = Ids()
    run(DataLoader(dataset, batch_size=4, shuffle=True, **workers), position)
    done = set(flat(head))
    assert dataset.called() == [0 if index in done else 1 for index in range(N)]


def test_prepared_batches_do_not_count():
    """With workers far ahead, the position is after the batch that was yielded last."""
    loader = DataLoader(Ids(), batch_size=4, num_workers=2, prefetch_factor=4)
    batches = ResumableBatches(loader, None, seed=7, epoch=0)
    iterator = iter(batches)
    for number in range(1, 4):
        next(iterator)
        state = batches.state_dict()
        assert (state["batches"], state["samples"], state["done"]) == (number, 4 * number, False)


@pytest.mark.parametrize("dataset", [Augmented, AugmentedInOneCall])
def test_augmentation_is_the_same_for_any_workers_and_after_resumes(dataset):
    """Random numbers drawn in __getitem__ and in collate_fn are equal for 0 and 2 workers and over four lives."""

    def make(workers):
        return DataLoader(dataset(), batch_size=4, shuffle=True, num_workers=workers, collate_fn=masked)

    whole, _ = run(make(0))
    assert run(make(2))[0] == whole
    assert lives(lambda: make(0)) == whole
    assert lives(lambda: make(2)) == whole
    numbers = [sample[1:] for samples, _ in whole for sample in samples]
    assert len({number for sample in numbers for number in sample}) == 3 * N
    assert run(make(0), epoch=1)[0] != whole


def test_augmentation_does_not_depend_on_the_batch_size():
    """A sample's random numbers belong to the sample, through a Subset as well."""
    subset = Subset(Augmented(), list(range(10)))
    small, _ = run(DataLoader(subset, batch_size=2, collate_fn=as_list))
    large, _ = run(DataLoader(subset, batch_size=5, collate_fn=as_list))
    assert flat(small) == flat(large)


def test_a_sample_drawn_again_is_augmented_anew():
    """Draws with replacement repeat indices in an epoch; each draw has random numbers of its own, resumed or not."""

    def make():
        sampler = RandomSampler(range(5), replacement=True, num_samples=40)
        return DataLoader(Augmented(), batch_size=4, sampler=sampler, collate_fn=as_list)

    whole, _ = run(make())
    assert len({sample[0] for sample in flat(whole)}) <= 5
    assert len(set(flat(whole))) == 40
    assert lives(make) == whole


@pytest.mark.parametrize("seed_samples", [True, False])
@pytest.mark.parametrize("workers", WORKERS)
def test_iterating_moves_no_global_generator(workers, seed_samples):
    """The generators training draws from are the same before, between and after batches."""
    loader = DataLoader(Augmented() if seed_samples else Ids(), batch_size=4, shuffle=True, **workers)
    random.gauss(0, 1)
    before = rng.capture()
    for _ in ResumableBatches(loader, None, seed=7, epoch=0, seed_samples=seed_samples):
        assert_same_generators(before)
    assert_same_generators(before)


def test_an_error_in_a_sample_leaves_the_generators_alone():
    """When __getitem__ raises in the training process, its seeding does not stay behind."""

    class Broken(Ids):
        def __getitem__(self, index: int) -> int:
            raise KeyError(index)

    before = rng.capture()
    with pytest.raises(KeyError):
        run(DataLoader(Broken(), batch_size=4))
    assert_same_generators(before)


def test_without_seed_samples_the_users_generators_are_used():
    """seed_samples=False neither seeds nor puts back: numbers come from the generators as they are."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    drawn, _ = run(DataLoader(Augmented(), batch_size=4, collate_fn=as_list), seed_samples=False, stop=2)
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    assert flat(drawn) == [Augmented()[index] for index in range(8)]


def test_without_seed_samples_ids_are_exact():
    """Ids do not depend on seed_samples."""

    def make():
        return DataLoader(Ids(), batch_size=4, shuffle=True)

    assert lives(make, seed_samples=False) == run(make())[0]


def test_position_of_another_kind_of_loader_is_refused():
    """A position of a map-style loader cannot seek in a stream."""
    _, position = run(DataLoader(Ids(), batch_size=4), stop=2)
    with pytest.raises(StateMismatchError, match="kind 'map'"):
        run(iter(range(9)), position)


def test_a_data_set_of_another_length_is_said(caplog):
    """Another length gives another order, so exactly-once cannot hold: this is logged."""
    _, position = run(DataLoader(Ids(), batch_size=4, shuffle=True), stop=2)
    with caplog.at_level(logging.WARNING, "holdfast.data"):
        run(DataLoader(Ids(N + 1), batch_size=4, shuffle=True), position)
    assert f"dataset_length is {N + 1}, was {N}" in caplog.text


@pytest.mark.parametrize("make", [
    lambda: DataLoader(Ids(), batch_size=4, shuffle=True),
    lambda: DataLoader(Ids(), batch_size=4, sampler=WeightedRandomSampler([1.0] * N, N)),
    lambda: StatefulDataLoader(Ids(), batch_size=4),
])  # fmt: skip
def test_length_is_the_number_of_batches_left(make):
    """len() at the start, after a resume and at the end, where the loader knows it; else TypeError as usual."""
    batches = ResumableBatches(make(), None, seed=7, epoch=0)
    assert len(batches) == 11
    iterator = iter(batches)
    next(iterator)
    next(iterator)
    assert len(batches) == 9
    assert len(ResumableBatches(make(), batches.state_dict(), seed=7, epoch=0)) == 9
    assert len(list(iterator)) == 9
    assert len(batches) == 0
    assert batches.done
    with pytest.raises(TypeError):
        len(ResumableBatches(iter(range(9)), None, seed=7, epoch=0))


def test_the_end_of_an_epoch_is_only_done_once_it_was_reached():
    """After its last batch an epoch is not done until the loop asked for more, so a resume still closes it."""
    batches = ResumableBatches(DataLoader(Ids(), batch_size=N), None, seed=7, epoch=0)
    iterator = iter(batches)
    next(iterator)
    position = batches.state_dict()
    assert not position["done"]
    assert run(DataLoader(Ids(), batch_size=N), position)[0] == []
    assert list(iterator) == []
    assert batches.state_dict()["done"]
    assert run(DataLoader(Ids(), batch_size=N), batches.state_dict())[0] == []


def test_worker_init_fn_reaches_the_users_dataset():
    """worker_init_fn sees the attributes of the user's dataset and sets them there."""

    class Opened(Ids):
        handle = 0

        def __getitem__(self, index: int) -> int:
            return self.handle + index

    def open_it(_: int) -> None:
        dataset = torch.utils.data.get_worker_info().dataset
        assert dataset.length == N
        dataset.handle = 100

    loader = DataLoader(Opened(), batch_size=4, num_workers=2, worker_init_fn=open_it)
    assert sorted(flat(run(loader)[0])) == list(range(100, 100 + N))


def test_spawned_workers_receive_what_they_need():
    """The wrapped dataset and its keys travel to workers that share nothing with this process."""
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="spawn",
                        collate_fn=as_list)  # fmt: skip
    assert (
        run(loader, stop=3)[0]
        == run(DataLoader(Augmented(), batch_size=4, shuffle=True, collate_fn=as_list), stop=3)[0]
    )


def test_a_loader_subclass_with_its_own_iterator_is_not_taken_apart():
    """Only a loader that iterates as torch's does is cloned; another one is iterated as it is."""

    class Doubled(DataLoader):
        def __iter__(self):
            return (2 * batch for batch in super().__iter__())

    drawn, position = run(Doubled(Ids(), batch_size=4))
    assert position["kind"] == "count"
    assert flat(drawn) == list(range(0, 2 * N, 2))


@pytest.mark.parametrize("stop", [None, 3])
def test_workers_end_with_their_loader(stop):
    """The clone that keeps persistent workers is dropped with the loader it belongs to, also within an epoch."""
    from holdfast.state.data.loaders import _clones

    loader = DataLoader(Ids(), batch_size=4, num_workers=1, persistent_workers=True)
    gc.disable()  # a cycle would be collected some time, and torch then waits 5 s for each worker
    try:
        run(loader, stop=stop)
        assert loader in _clones
        (clone,) = _clones[loader].values()
        worker = clone.loader._iterator._workers[0]
        assert worker.is_alive()
        del loader, clone
        worker.join(timeout=20)
        assert not worker.is_alive()
    finally:
        gc.enable()


class Finishing(DataLoader):
    """Makes its batches of what comes from its workers, as the loaders of torch_geometric do."""

    def _get_iterator(self):
        return Finished(super()._get_iterator(), self.finish)

    def finish(self, batch: torch.Tensor) -> list[tuple[int, float]]:
        return [(index, random.random()) for index in batch.tolist()]


class Finished:
    def __init__(self, inner, finish):
        self.inner, self.finish = inner, finish

    def __iter__(self):
        return self

    def __next__(self):
        return self.finish(next(self.inner))


@pytest.mark.parametrize("options", WORKERS[:2])
def test_a_loader_that_finishes_its_batches_in_its_own_iterator_does_so_here_too(options):
    """What its iterator gives is what the script is given, and comes again after a resume."""

    def make():
        return Finishing(Ids(), 4, shuffle=True, **options)

    whole, _ = run(make())
    assert sorted(index for batch in whole for index, _ in batch) == list(range(N))
    random.seed(1)
    whole, _ = run(make())
    random.seed(1)
    assert lives(make) == whole
