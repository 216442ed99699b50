"""Pipelines of `torchdata.nodes` resume within an epoch, at the end of its last batch, and between epochs."""

from __future__ import annotations

import random

import pytest
import torch
from loader_cases import N, assert_same_generators, run
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from torchdata.nodes import Batcher, Loader, Mapper, MultiNodeWeightedSampler, ParallelMapper, SamplerWrapper

from holdfast.errors import StateMismatchError
from holdfast.state.tree import rng


class Shuffling(Sampler):
    """A sampler of somebody's own that draws from the generators of the process."""

    def __iter__(self):
        return iter(random.sample(range(N), N))

    def __len__(self):
        return N


def shuffled(sampler=None):
    return Batcher(SamplerWrapper(RandomSampler(range(N)) if sampler is None else sampler), 4)


def jitter(sample):
    return sample + random.random()


def mixed():
    """Two sources; the smaller one begins anew, in another order, until the larger one is over."""
    sources = {"large": SamplerWrapper(RandomSampler(range(N))), "small": SamplerWrapper(RandomSampler(range(5)))}
    return Batcher(MultiNodeWeightedSampler(sources, {"large": 0.5, "small": 0.5}), 4)


PIPELINES = {
    "shuffled": shuffled,
    "own sampler": lambda: shuffled(Shuffling()),
    "given generator": lambda: shuffled(RandomSampler(range(N), generator=torch.Generator().manual_seed(1))),
    "batch sampler": lambda: SamplerWrapper(BatchSampler(RandomSampler(range(N)), 4, drop_last=False)),
    "random map": lambda: Batcher(Mapper(SamplerWrapper(RandomSampler(range(N))), jitter), 4),
    "mixed": mixed,
}


@pytest.mark.parametrize("begins_anew", [True, False])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_of_nodes_resume_anywhere(name, begins_anew):
    """A stop in the middle, behind the last batch of an epoch, or at its end is followed by what one life draws."""

    def fresh():
        torch.manual_seed(4)
        random.seed(4)
        return Loader(PIPELINES[name](), restart_on_stop_iteration=begins_anew)

    loader = fresh()
    before = rng.capture()
    first, end = run(loader)
    second, _ = run(loader, end, epoch=1)
    assert_same_generators(before)
    assert first != second
    for stop in (3, len(first)):
        begun, position = run(fresh(), None, stop=stop)
        rest, done = run(fresh(), position)
        assert begun + rest == first
        assert done["done"]
    again, position = run(fresh(), end, epoch=1, stop=4)
    rest, _ = run(fresh(), position, epoch=1)
    assert again + rest == second


def test_a_pipeline_that_was_asked_for_its_state_before_goes_on_all_the_same():
    """Asking makes an iterator, with which torchdata would go on from the begin."""
    begun, position = run(Loader(shuffled()), stop=3)
    loader = Loader(shuffled())
    loader.state_dict()
    rest, _ = run(loader, position)
    assert begun + rest == run(Loader(shuffled()))[0]


def test_a_state_of_a_pipeline_that_counts_other_batches_is_said():
    """What the state counts is compared with what the run was given."""

    def refuse(text: str) -> None:
        raise StateMismatchError(text)

    _, position = run(Loader(shuffled()), stop=3)
    position["inner"]["loader"]["num_yielded"] = 1
    with pytest.raises(StateMismatchError, match="says that it has given 1 batches of it, and this run was given 3"):
        run(Loader(shuffled()), position, mismatch=refuse)


def test_the_order_that_a_thread_asks_for_is_that_of_the_epoch():
    """A thread that maps draws from no global generator: the second epoch is the same from a checkpoint on."""
    loader = Loader(ParallelMapper(shuffled(), tuple, num_workers=1))
    _, end = run(loader)
    second, _ = run(loader, end, epoch=1)
    torch.manual_seed(5)
    assert run(Loader(ParallelMapper(shuffled(), tuple, num_workers=1)), end, epoch=1)[0] == second
