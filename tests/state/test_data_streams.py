"""Loaders with a state of their own and loaders with none resume too."""

from __future__ import annotations

import gc
import logging
import random
import weakref

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
    masked,
    run,
)
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.errors import StateMismatchError
from holdfast.state.data import seeding
from holdfast.state.data.batches import ResumableBatches
from holdfast.state.data.stated import StatedPosition, whole_state
from holdfast.state.tree import rng


class Counting(IterableDataset):
    """A stream with state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        step = info.num_workers if info is not None else 1
        start = info.id if info is not None else 0
        if self.at == 0:
            self.at = start
        while self.at < N:
            self.at += step
            yield self.at - step
        self.at = 0

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


def shuffled_stream():
    """A plain generator with a shuffle of its own."""
    order = list(range(N))
    random.shuffle(order)
    yield from ([index, float(np.random.random())] for index in order)


class Stream(IterableDataset):
    """An iterable dataset without state; its order comes from the generators of the process that runs it."""

    def __iter__(self):
        return shuffled_stream()


class Shuffling(Sampler):
    """A sampler without a state that draws its order at once, from the generators of the process."""

    def __iter__(self):
        order = list(range(N))
        random.shuffle(order)
        return iter(order)

    def __len__(self):
        return N


class Buckets(Shuffling):
    """A batch sampler without a state that draws while it goes on, and makes batches of different sizes."""

    def __iter__(self):
        order = torch.randperm(N).tolist()
        while order:
            size = 1 + order[0] % 5
            yield order[:size]
            order = order[size:]


class Stated(Sampler):
    """Batches of a sampler that keeps its position itself, and one of them comes twice."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < 9:
            self.at += 1
            yield [0, 1, 0] if self.at == 5 else [self.at, 2 * self.at]
        self.at = 0

    def __len__(self):
        return 9

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


class Jittered(Ids):
    """Augmentation from a generator of the data set."""

    def __init__(self) -> None:
        self.length, self.rng = N, np.random.default_rng(1)

    def __getitem__(self, index: int) -> float:
        return index + self.rng.random()


def augmented(data=Augmented, **options):
    def make():
        made = {name: value() if value is Stated else value for name, value in options.items()}
        return StatefulDataLoader(data(), **{"batch_size": 4, "collate_fn": as_list, **made})

    return make


def over(**options):
    return lambda: StatefulDataLoader(Ids(), **options)


STATEFUL = [
    pytest.param(lambda: StatefulDataLoader(Ids(), batch_size=4, shuffle=True), True, id="map"),
    pytest.param(
        lambda: StatefulDataLoader(Ids(), batch_size=4, shuffle=True, num_workers=2), True, id="map 2 workers",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda: StatefulDataLoader(Augmented(), batch_size=4, shuffle=True, collate_fn=as_list), True, id="aug"
    ),
    pytest.param(augmented(shuffle=True, num_workers=2), True, id="aug 2 workers"),
    pytest.param(
        augmented(shuffle=True, num_workers=1, persistent_workers=True), True, id="aug persistent worker"
    ),
    pytest.param(augmented(shuffle=True, num_workers=1, snapshot_every_n_steps=4), True, id="aug snapshots"),
    pytest.param(augmented(batch_size=None, shuffle=True, collate_fn=None), True, id="aug without batches"),
    pytest.param(
        augmented(batch_size=1, batch_sampler=Stated, num_workers=1), True, id="aug, a batch sampler with a state"
    ),
    pytest.param(augmented(batch_size=1, sampler=Stated, num_workers=1), True, id="aug, a sampler with a state"),
    pytest.param(augmented(Jittered, shuffle=True), True, id="a generator of the data set"),
    pytest.param(augmented(Ids, collate_fn=masked), True, id="a random collate_fn"),
    pytest.param(
        lambda: StatefulDataLoader(Ids(), 4, shuffle=True, generator=torch.Generator().manual_seed(1)), True,
        id="generator",
    ),
    pytest.param(lambda: StatefulDataLoader(Counting(), batch_size=4), False, id="stream"),
    pytest.param(lambda: StatefulDataLoader(Counting(), batch_size=4, num_workers=2), False, id="stream 2 workers"),
    pytest.param(
        lambda: StatefulDataLoader(Stream(), batch_size=4, collate_fn=as_list), True, id="stream that is only counted"
    ),
    pytest.param(over(batch_size=4, sampler=Shuffling()), True, id="sampler"),
    pytest.param(over(batch_size=None, sampler=Shuffling()), True, id="sampler without batches"),
    pytest.param(over(batch_sampler=BatchSampler(Shuffling(), 4, False)), True, id="batch sampler"),
    pytest.param(over(batch_sampler=Buckets()), True, id="buckets"),
    pytest.param(over(batch_sampler=Buckets(), num_workers=2), True, id="buckets 2 workers", marks=pytest.mark.slow),
    pytest.param(
        over(batch_sampler=BatchSampler(Shuffling(), 4, False), num_workers=2, persistent_workers=True), True,
        id="batch sampler 2 persistent workers",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "shuffled"), STATEFUL)
def test_stateful_loaders_resume_in_the_middle_and_between_epochs(make, shuffled):
    """Three resumes in one epoch, and one at its end, repeat what one life draws over two epochs."""

    def fresh():
        torch.manual_seed(4)  # what a training script does before it makes its loader
        return make()

    loader = fresh()
    before = rng.capture()
    first, end = run(loader)
    second, _ = run(loader, end, epoch=1)
    assert_same_generators(before)
    assert (second != first) == shuffled
    assert lives(fresh) == first
    position, drawn = None, []
    for stop in (3, None):
        part, position = run(fresh(), position, stop=stop)
        drawn += part
    assert drawn == first
    resumed, position = run(fresh(), position, epoch=1, stop=4)
    rest, _ = run(fresh(), position, epoch=1)
    assert resumed + rest == second


def test_stateful_position_is_that_of_yielded_batches():
    """Asking between any two batches gives the position after the last yielded one, and asking moves nothing."""
    loader = StatefulDataLoader(Ids(), batch_size=4, num_workers=2)
    batches = ResumableBatches(loader, None, seed=7, epoch=0)
    before = rng.capture()
    assert batches.state_dict()["inner"] is None
    for number, batch in enumerate(batches, 1):
        position = batches.state_dict()
        assert position["batches"] == number == StatedPosition.of(loader, position["inner"]["loader"]).batches
        if number in (1, 5, 10):
            rest, _ = run(StatefulDataLoader(Ids(), batch_size=4, num_workers=0), stop=0)
            rest, _ = run(StatefulDataLoader(Ids(), batch_size=4, num_workers=2), position)
            assert flat(rest) == list(range(int(batch[-1]) + 1, N))
    assert_same_generators(before)


def test_a_state_of_torchdatas_own_is_taken():
    """One that was saved before entries carried seeds."""
    loader = StatefulDataLoader(Ids(), batch_size=4)
    _, position = run(loader, stop=3)
    plain = StatefulDataLoader(Ids(), batch_size=4)
    iterator = iter(plain)
    begun = [next(iterator).tolist() for _ in range(3)]
    position["inner"]["loader"] = plain.state_dict()
    rest, _ = run(loader, position)
    assert flat(begun + rest) == list(range(N))


def test_a_loader_is_gone_with_its_batches():
    """No cycle keeps it for the garbage collector, beneath which its workers take torch 5 s each to end."""
    gc.disable()
    try:
        loader = StatefulDataLoader(Ids(), batch_size=4)
        run(loader, stop=2)
        seen = weakref.ref(loader)
        del loader
        assert seen() is None
    finally:
        gc.enable()


class Restless:
    """A loader that draws from a global generator, also when it is asked for its state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < 9:
            self.at += 1
            yield self.at + random.random()

    def state_dict(self) -> dict:
        random.random()
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        random.random()
        self.at = state["at"]


def test_asking_a_loader_for_its_state_moves_no_generator():
    """Positions taken after every batch change neither training's numbers nor those the loader draws."""
    whole, _ = run(Restless())
    batches = ResumableBatches(Restless(), None, seed=7, epoch=0)
    before = rng.capture()
    drawn = []
    for batch in batches:
        drawn.append(batch)
        batches.state_dict()
        assert_same_generators(before)
    assert drawn == whole
    assert lives(Restless) == whole


class Restarting:
    """An iterable without state."""

    def __iter__(self):
        return shuffled_stream()


COUNT = [
    pytest.param(shuffled_stream, id="generator"),
    pytest.param(Restarting, id="iterable"),
    pytest.param(lambda: DataLoader(Stream(), batch_size=4, collate_fn=as_list), id="iterable dataset"),
    pytest.param(lambda: DataLoader(Stream(), batch_size=4, collate_fn=as_list, num_workers=2), id="2 workers"),
]


@pytest.mark.parametrize("make", COUNT)
def test_iterables_without_state_are_replayed_by_count_and_it_is_said(make, caplog):
    """Lives over a plain iterable line up, randomness in it included; each replay is logged with its length."""
    before = rng.capture()
    whole, _ = run(make())
    with caplog.at_level(logging.WARNING, "holdfast.data"):
        assert lives(make) == whole
    assert_same_generators(before)
    said = [record.getMessage() for record in caplog.records]
    assert ["drawing 2 batches" in said[0], "drawing 3 batches" in said[1], "drawing 6 batches" in said[2]] == [
        True
    ] * 3
    assert len(said) == 3


def test_a_replay_that_ends_too_early_is_an_error():
    """Data shorter than the position are other data: said, not passed over."""
    _, position = run(iter(range(20)), stop=9)
    with pytest.raises(StateMismatchError, match="ended after 5 batches"):
        run(iter(range(5)), position)


def test_a_stream_goes_on_where_its_last_entry_stopped():
    """Two entries draw what one would have drawn, of each generator, and the outer ones do not move."""
    own = np.random.default_rng(5)

    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(())), own.random()]

    with seeding.Stream(3, [own]):
        whole = [drawn(), drawn()]
    outer = seeding.Stream(4, [own])
    with outer:
        before = drawn()
    stream = seeding.Stream(3, [own])
    with outer:
        outer.reseed()
        with stream:
            first = drawn()
        assert drawn() == before
        with stream:
            assert [first, drawn()] == whole


class Restarts(StatefulDataLoader):
    """Takes no notice of the state that it is given."""

    def load_state_dict(self, state_dict):
        pass


class Streaming(IterableDataset):
    """Has a state of the form of `datasets`."""

    def __init__(self, state):
        self.state = state

    def __iter__(self):
        return iter(range(N))

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        pass


BEGIN = {"examples_iterable": {"examples_iterable": {"shard_idx": 0}, "previous_states": [None]}, "epoch": 3}
MOVED = {"examples_iterable": {"examples_iterable": {"shard_idx": 0}, "previous_states": [{"at": 7}]}, "epoch": 0}
STATES = {
    "a count that is too small": (lambda: StatefulDataLoader(Ids(), 4), {"_num_yielded": 2}, "it has given 2 batches"),
    "a count that is too large": (lambda: StatefulDataLoader(Counting(), 4), {"_num_yielded": 5}, "given 5 batches"),
    "not taken": (lambda: Restarts(Ids(), 4), {}, "says that it has given 0 batches"),
    "a data set at its begin": (lambda: StatefulDataLoader(Streaming(BEGIN), 4), {}, "given no sample"),
    "a data set that has moved": (lambda: StatefulDataLoader(Streaming(MOVED), 4), {}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_what_a_state_says_of_its_position_is_compared_with_the_own_count(name):
    """A disagreement is said before the first batch is drawn, whether or not anybody knows what should come."""
    make, changed, text = STATES[name]
    _, position = run(make(), stop=3)
    position["inner"]["loader"].update(changed)
    said = []
    for _ in ResumableBatches(make(), position, seed=7, epoch=0, mismatch=said.append):
        said.append("drawn")
        break
    assert said[-1] == "drawn"
    assert len(said) == 1 + bool(text)
    assert text in said[0]


def test_what_the_states_of_workers_say():
    """Batches are counted over all workers; a data set is at its begin if it is in each of them, since a snapshot."""

    def of_workers(*states, steps=(4, 0)):
        workers = {str(number): {"dataset_state": each, "fetcher_state": None} for number, each in enumerate(states)}
        snapshot = {"_snapshot_step": steps[0], "_worker_snapshots": workers}
        loader = StatefulDataLoader(Streaming(None), 4, num_workers=len(states))
        return StatedPosition.of(loader, {"_snapshot": snapshot, "_steps_since_snapshot": steps[1]})

    assert of_workers(BEGIN, BEGIN) == StatedPosition(batches=4, is_at_begin=True)
    assert of_workers(BEGIN, MOVED, steps=(4, 1)) == StatedPosition(batches=5)
    assert of_workers(BEGIN, BEGIN, steps=(0, 3)) == StatedPosition(batches=3)
    assert of_workers(None, None) == StatedPosition(batches=4, only_counts=True)
    assert StatedPosition.of(object(), BEGIN) == StatedPosition(is_at_begin=True)
    loader = StatefulDataLoader(Ids(), 4)
    for unknown in ({}, None, {"_num_yielded": 3}, {"_snapshot": 3}):
        assert StatedPosition.of(loader, unknown) == StatedPosition()


def test_a_state_has_the_place_of_each_worker_also_of_those_that_had_no_turn_yet():
    """Such a worker says that it is at the begin: it is where it was resumed, or begins anew."""
    loader = StatefulDataLoader(Streaming(None), 4, num_workers=2)
    further = {"examples_iterable": {"shard_idx": 2, "bit_generator_state": {"inc": 5}}, "epoch": 0}

    def of_workers(step, *states):
        workers = {str(number): {"dataset_state": each, "fetcher_state": None} for number, each in enumerate(states)}
        return {"_snapshot": {"_snapshot_step": step, "_worker_snapshots": workers}, "_steps_since_snapshot": 0}

    begun = of_workers(4, MOVED, MOVED)
    mixed = {"examples_iterable": {"shard_idx": 0, "bit_generator_state": {"inc": 5}}, "epoch": 0}
    for begin in (BEGIN, mixed):
        assert whole_state(loader, of_workers(5, further, begin), begun=begun) == of_workers(5, further, MOVED)
        assert whole_state(loader, of_workers(4, begin, begin), begun=begun) == of_workers(4, MOVED, MOVED)
        assert whole_state(loader, of_workers(1, MOVED, begin), begun=None) == of_workers(1, MOVED, None)
    for wrong in (of_workers(6, further, BEGIN), of_workers(5, BEGIN, BEGIN), {"_num_yielded": 3}, None):
        assert whole_state(loader, wrong, begun=begun) == wrong


class Passes(IterableDataset):
    """Counts its passes, and with them shuffles: no state, so nobody can give that back."""

    def __init__(self):
        self.passes = self.at = 0

    def __iter__(self):
        self.passes += 1
        self.at = 0
        for index in random.Random(self.passes).sample(range(N), N):
            self.at += 3
            yield index


def lived(data, position, epoch, stop=None):
    """Draw one epoch in "another process"; return what came and the position at its end."""
    batches = ResumableBatches(DataLoader(data, batch_size=4), position, seed=7, epoch=epoch)
    drawn = []
    for batch in batches:
        drawn.append(batch.tolist())
        if len(drawn) == stop:
            break
    return drawn, batches.state_dict(is_over=stop is None)


@pytest.mark.parametrize("stop", [None, 3], ids=["at an end", "within"])
def test_a_stream_that_counts_its_passes_anew_is_said(caplog, stop):
    """After an epoch and within one; not in the same process, nor with its count in the state."""
    twin = Passes()
    _, position = lived(twin, None, 0)
    wanted, later = lived(twin, position, 1, stop)
    assert not caplog.records, "the same process goes on"
    epoch, position = (1, position) if stop is None else (1, later)
    anew, _ = lived(Passes(), position, epoch)
    assert anew != wanted
    assert [record.message for record in caplog.records if "'passes' is 0, was 1" in record.message]
    assert "'at'" not in caplog.text, "a position is no count"
    caplog.clear()
    restored = Passes()
    restored.passes = 1
    assert lived(restored, position, epoch)[0] == (wanted if stop is None else lived(twin_at(1), None, 1)[0][3:])
    assert "counts its own passes" not in caplog.text


class MakesItsGenerator(Passes):
    """Makes it anew in each pass, which is begun twice, then."""

    def __iter__(self):
        self.passes += 1
        self.dice = random.Random(self.passes)
        yield from self.dice.sample(range(N), N)


def test_a_count_of_passes_that_are_begun_twice_is_said(caplog):
    """A pass that makes a generator is begun once more with it seeded, and is counted once more."""
    _, position = lived(MakesItsGenerator(), None, 0)
    lived(MakesItsGenerator(), position, 1)
    assert "MakesItsGenerator counts its own passes, and has begun anew: 'passes' is 0, was 2" in caplog.text


def twin_at(passes):
    made = Passes()
    made.passes = passes
    return made


def test_a_stream_that_does_not_count_is_not_accused(caplog):
    """Nothing is said of a position, of a number that the script sets, or of a stream with one batch."""

    class Healthy(IterableDataset):
        def __init__(self):
            self.at = self.epoch = 0

        def __iter__(self):
            self.at = 0
            while self.at < N:
                yield self.at
                self.at += 1

    data = Healthy()
    _, position = lived(data, None, 0)
    data.epoch = 1
    _, position = lived(data, position, 1)
    lived(Healthy(), position, 2)
    assert "counts its own passes" not in caplog.text


class OneWaits(IterableDataset):
    """The first worker gives nothing before the second one has given something."""

    def __init__(self):
        self.has_given = torch.multiprocessing.get_context("fork").Event()

    def __iter__(self):
        if torch.utils.data.get_worker_info().id == 0:
            assert self.has_given.wait(60)
            yield 0
        else:
            yield 1
            self.has_given.set()  # asked for the second one, behind the first

    def __len__(self):
        return 2


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_take_turns_whatever_the_loader_says(kind, caplog, monkeypatch):
    """With in_order=False time decides what is given first: states, and replays by count, would not fit."""
    monkeypatch.setattr("holdfast.state.data.batches.said", set())
    loader = kind(OneWaits(), batch_size=1, collate_fn=as_list, num_workers=2, in_order=False)
    assert run(loader)[0] == [[0], [1]]
    assert loader.in_order is False
    assert [record for record in caplog.records if "in_order=False is not used" in record.message]


@pytest.mark.parametrize(("workers", "stop", "says"), [(2, 3, True), (0, 3, False), (2, None, False)])
def test_what_workers_draw_in_a_stream_is_said_to_be_in_no_state(workers, stop, says, caplog, monkeypatch):
    """In an epoch that goes on, from a loader whose samples do; a new epoch has workers that are seeded for it."""
    monkeypatch.setattr("holdfast.state.data.batches.said", set())
    _, position = run(StatefulDataLoader(Counting(), batch_size=4, num_workers=workers), stop=stop)
    run(StatefulDataLoader(Counting(), batch_size=4, num_workers=workers), position, epoch=int(stop is None), stop=1)
    assert (
        bool([record for record in caplog.records if "in a stream (a map, an augmentation)" in record.message]) is says
    )
