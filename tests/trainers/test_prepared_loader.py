"""`PreparedLoader`: epochs, positions inside of them, and what a resume gives."""

from __future__ import annotations

import itertools
import random
from collections import namedtuple
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

import holdfast as hf
from holdfast.state.data.batches import ResumableBatches
from holdfast.state.tree.values import PerRank
from holdfast.torch import PreparedLoader, prepare_data_loader
from holdfast.trainers.torch_helpers import Transfer


class Noisy(Dataset):
    """Items are (index, a random number): what augmentation is made of."""

    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random() + float(torch.rand(()))


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def prepared(*, shuffle: bool = True, seed: int = 3, **options) -> PreparedLoader:
    return prepare_data_loader(DataLoader(Noisy(), batch_size=2, shuffle=shuffle, **options), seed=seed)


def plain(batches) -> list:
    return [(indices.tolist(), noise.tolist()) for indices, noise in batches]


def train(loader, epochs: int, *, stop: tuple[int, int] | None = None) -> tuple[list, dict]:
    """Train like a user, from the epoch the loader is in; ``stop``: (epoch, batches) after which the life ends."""
    seen, state = [], {}
    for epoch in range(loader.epoch, epochs):
        for number, batch in enumerate(loader, start=1):
            seen.append((epoch, plain([batch])))
            if stop == (epoch, number):
                return seen, loader.state_dict()
        state = loader.state_dict()
    return seen, state


def test_each_iteration_is_another_epoch_of_the_same_data() -> None:
    """Orders differ between epochs, hold all samples, and two loaders with one seed agree."""
    one, two = train(prepared(), 3)[0], train(prepared(), 3)[0]
    assert one == two
    orders = [[i for epoch, batch in one if epoch == number for i in batch[0][0]] for number in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert train(prepared(seed=4), 3)[0] != one


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [(0, 1), (0, 5), (1, 3), (2, 4)])
def test_a_resume_gives_the_batches_that_are_missing(stop: tuple[int, int], workers: int) -> None:
    """Indices and augmentation after a resume are those of the uninterrupted run, from any batch on."""
    whole, _ = train(prepared(num_workers=0), 3)
    first, state = train(prepared(num_workers=workers), 3, stop=stop)
    again = prepared(num_workers=workers, seed=99)  # the seed comes from the state
    again.load_state_dict(state)
    rest, _ = train(again, 3)
    assert first + rest == whole


def test_a_state_taken_between_epochs_begins_the_next_one() -> None:
    """After the last batch of an epoch nothing of it is left."""
    whole, _ = train(prepared(), 3)
    loader = prepared()
    _, state = train(loader, 2)
    again = prepared()
    again.load_state_dict(state)
    assert again.epoch == 2
    assert train(again, 3)[0] == [item for item in whole if item[0] == 2]


def test_the_position_goes_through_a_checkpoint(tmp_path) -> None:
    """In a state like a model: saved, and restored in place."""
    whole, _ = train(prepared(), 2)
    loader = prepared()
    seen = []
    for batch in loader:
        seen.append((0, plain([batch])))
        if len(seen) == 2:
            hf.save(tmp_path / "a", {"data": loader, "epoch": 0})
            break
    again = prepared()
    assert hf.load(tmp_path / "a", {"data": again, "epoch": 0})["epoch"] == 0
    assert seen + train(again, 2)[0] == whole


def test_an_epoch_left_early_is_over() -> None:
    """After `break` the next iteration, also in a new life, is the next epoch, and not the rest of the old one."""
    whole, _ = train(prepared(), 2)
    loader = prepared()
    for number, _ in enumerate(loader):
        if number == 2:
            break
    again = prepared()
    again.load_state_dict(loader.state_dict())
    for one in (loader, again):
        assert one.epoch == 1
        assert [(1, plain([batch])) for batch in one] == [item for item in whole if item[0] == 1]


def test_a_look_at_a_batch_does_not_use_up_the_position_of_a_resume() -> None:
    """`next(iter(loader))` in front of the loop changes nothing about where training goes on."""
    whole, _ = train(prepared(), 2)
    first, state = train(prepared(), 2, stop=(1, 2))
    again = prepared()
    again.load_state_dict(state)
    next(iter(again))
    assert again.state_dict() == state
    assert first + train(again, 2)[0] == whole


def test_a_look_after_the_end_of_an_epoch_does_not_use_up_the_next_one() -> None:
    """A resume between two epochs, and `next(iter(loader))` before the loop: later epochs have the order they had."""
    whole, _ = train(prepared(), 3)
    loader = prepared()
    first, state = train(loader, 1)
    again = prepared()
    again.load_state_dict(state)
    for _ in range(2):
        next(iter(again))
        assert again.state_dict() == state
    assert first + train(again, 3)[0] == whole


class InPlace(Sampler[int]):
    """Shuffles its own list in place: each order follows from the one before."""

    def __init__(self) -> None:
        self.order = list(range(10))

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        random.Random(3).shuffle(self.order)
        return iter(list(self.order))


@pytest.mark.parametrize("how", ["look", "same process"])
def test_a_sampler_that_remembers_goes_back_with_its_loader(how: str) -> None:
    """A state is loaded: the next epoch has its order whatever the sampler was asked since, also in a notebook."""

    def make() -> PreparedLoader:
        return prepare_data_loader(DataLoader(Noisy(), batch_size=2, sampler=InPlace()), seed=3)

    whole, _ = train(make(), 4)
    loader = make()
    first, state = train(loader, 2)
    if how == "same process":
        train(loader, 4, stop=(2, 3))
    else:
        loader = make()
    loader.load_state_dict(state)
    if how == "look":
        next(iter(loader))
    assert first + train(loader, 4)[0] == whole


def test_one_batch_that_is_saved_was_no_look() -> None:
    """A life that trains a single batch after its resume, and saves: the next one goes on behind it."""
    whole, _ = train(prepared(), 2)
    seen, state = train(prepared(), 2, stop=(1, 2))
    for batches in (3, 4):  # lives of one batch; each is left with the epoch counted as done
        again = prepared()
        again.load_state_dict(state)
        for batch in again:
            seen.append((1, plain([batch])))
            state = again.state_dict()
            break
        assert state["position"]["batches"] == batches
        assert again.epoch == 2
    last = prepared()
    last.load_state_dict(state)
    assert seen + train(last, 2)[0] == whole


def test_a_loop_within_the_loop_leaves_the_outer_position(caplog: pytest.LogCaptureFixture) -> None:
    """Something is computed over all data in the middle of an epoch: a save after that knows where the epoch is."""

    def run(loader: PreparedLoader, stop: int | None = None) -> tuple[list, dict]:
        seen = []
        for epoch in range(loader.epoch, 3):
            for number, batch in enumerate(loader):
                seen.append((epoch, plain([batch])))
                if number == 1:
                    seen.append((epoch, [plain(loader)]))
                if len(seen) == stop:
                    return seen, loader.state_dict()
        return seen, loader.state_dict()

    whole, _ = run(prepared())
    assert {epoch for epoch, _ in whole} == {0, 1, 2}
    first, state = run(prepared(), stop=4)
    again = prepared()
    again.load_state_dict(state)
    assert (again.epoch, state["position"]["batches"]) == (0, 3)
    rest = [row for epoch in range(3) for batch in again for row in [(epoch, plain([batch]))]]
    assert first[:2] + first[3:] + rest == train(prepared(), 3)[0]
    assert "inside of its own loop" not in caplog.text
    run(prepared(), stop=3)
    loader = prepared()
    for number, _ in enumerate(loader):
        if number == 1:
            next(iter(loader))
            loader.state_dict()
    assert "inside of its own loop" in caplog.text


def test_an_error_in_the_loop_ends_the_epoch_too() -> None:
    """A caught exception keeps the old iterator alive; the next loop is the next epoch all the same."""
    loader = prepared()
    kept = []
    try:
        for _ in loader:
            raise RuntimeError("boom")
    except RuntimeError as error:
        kept.append(error)
    assert [(1, plain([batch])) for batch in loader] == [item for item in train(prepared(), 2)[0] if item[0] == 1]


def test_set_epoch_of_the_user_decides() -> None:
    """The habit of Ray Train scripts: the order is that of the epoch that was set, in this life and the next."""
    whole, _ = train(prepared(), 4)
    loader = prepared()
    loader.set_epoch(3)
    assert [(3, plain([batch])) for batch in loader] == [item for item in whole if item[0] == 3]
    assert loader.epoch == 4
    sampler = DistributedSampler(Noisy(), num_replicas=1, rank=0, seed=3)
    loader = prepare_data_loader(DataLoader(Noisy(), batch_size=2, sampler=sampler), seed=3)
    epochs = []
    for epoch in (5, 6):
        loader.sampler.set_epoch(epoch)
        epochs.append(plain(loader))
        assert sampler.epoch == epoch
    assert epochs[1] == plain(loader_at(sampler, 6))
    assert plain(loader) == plain(loader_at(sampler, 7))  # by itself


def loader_at(sampler: DistributedSampler, epoch: int) -> PreparedLoader:
    copy = DistributedSampler(Noisy(), num_replicas=1, rank=0, seed=sampler.seed)
    loader = prepare_data_loader(DataLoader(Noisy(), batch_size=2, sampler=copy), seed=3)
    loader.set_epoch(epoch)
    return loader


def test_a_position_survives_set_epoch_of_the_same_epoch_and_no_other(caplog) -> None:
    """A resumed script sets the epoch it is in: the position stays. Another epoch begins at its start, said aloud."""
    whole, _ = train(prepared(), 3)
    first, state = train(prepared(), 3, stop=(1, 2))
    again = prepared()
    again.load_state_dict(state)
    again.set_epoch(1)
    assert first + train(again, 2)[0] == [item for item in whole if item[0] < 2]
    again.load_state_dict(state)
    again.set_epoch(2)
    assert [(2, plain([batch])) for batch in again] == [item for item in whole if item[0] == 2]
    assert "set_epoch(2)" in caplog.text


def test_everything_else_is_that_of_the_loader_inside() -> None:
    """Length, data set, batch size; unknown names are unknown."""
    loader = prepared()
    assert (len(loader), len(loader.dataset), loader.batch_size) == (5, 10, 2)
    assert isinstance(loader.loader, DataLoader)
    with pytest.raises(AttributeError):
        _ = loader.no_such_thing


def test_training_draws_are_left_alone() -> None:
    """Iterating moves no global generator."""
    torch.manual_seed(1)
    random.seed(1)
    before = (torch.get_rng_state().tolist(), random.getstate())
    for _ in prepared():
        pass
    assert (torch.get_rng_state().tolist(), random.getstate()) == before


def test_the_seed_follows_torch_unless_one_is_given() -> None:
    """With one worker `torch.manual_seed` decides the order, as users expect of a shuffling loader."""
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loader = prepare_data_loader(DataLoader(Noisy(), batch_size=2, shuffle=True))
        orders.append(plain(loader))
    assert orders[0] == orders[1] != orders[2]


def test_iterable_data_sets_are_replayed() -> None:
    """An IterableDataset has no indices: the position counts batches."""
    loader = prepare_data_loader(DataLoader(Counting(), batch_size=2))
    batches = iter(loader)
    next(batches)
    again = prepare_data_loader(DataLoader(Counting(), batch_size=2))
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5], [6]]
    assert len(list(again)) == 4


def test_loaders_with_their_own_state_keep_it_for_each_rank() -> None:
    """A StatefulDataLoader goes on by itself; with several ranks what it remembers is stored per rank."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make(world_size: int) -> PreparedLoader:
        inner = torchdata.StatefulDataLoader(Noisy(), batch_size=2)
        return PreparedLoader(inner, seed=1, world_size=world_size)

    for world_size in (1, 2):
        loader = make(world_size)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        assert isinstance(state["position"]["inner"], PerRank) == (world_size == 2)
        again = make(world_size)
        again.load_state_dict(state)
        assert [batch[0].tolist() for batch in again] == [[2, 3], [4, 5], [6, 7], [8, 9]]
        assert [batch[0].tolist() for batch in again] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def on_rank(rank: int, world_size: int, *, split: bool = True) -> PreparedLoader:
    """A loader as `prepare_data_loader` makes it on one of several ranks; a single one shuffles by itself."""
    data = Noisy(48)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, seed=3) if split else None
    inner = DataLoader(data, batch_size=2, shuffle=not split, sampler=sampler)
    return PreparedLoader(inner, seed=3, rank=rank, world_size=world_size)


def test_the_rest_of_an_epoch_is_split_over_other_ranks() -> None:
    """4 -> 2 -> 1 -> 3 ranks in one epoch: every sample once with its random numbers, then whole epochs."""
    state, seen = None, []
    for world_size, stop in ((4, 2), (2, 3), (1, 1), (3, None)):
        states = []
        for rank in range(world_size):
            loader = on_rank(rank, world_size, split=world_size > 1)
            if state is not None:
                loader.load_state_dict(state)
            part, after = train(loader, 1, stop=None if stop is None else (0, stop))
            seen += [sample for _, ((indices, noise),) in part for sample in zip(indices, noise, strict=True)]
            states.append(after)
        assert all(one == states[0] for one in states)
        state = states[0]
    assert sorted(index for index, _ in seen) == list(range(48))
    alone = train(on_rank(0, 1), 1)[0]
    assert set(seen) == {sample for _, ((indices, noise),) in alone for sample in zip(indices, noise, strict=True)}
    assert state is not None
    assert state["epoch"] == 1


def test_within_the_batches_of_a_checkpointer_it_is_split_again_too() -> None:
    """A prepared loader given to `ck.batches` goes on by itself on other ranks."""
    position, seen = None, []
    for world_size, stop in ((4, 2), (2, None)):
        positions = []
        for rank in range(world_size):
            batches = ResumableBatches(
                on_rank(rank, world_size), position, seed=9, epoch=0, rank=rank, world_size=world_size, split=True
            )
            iterator = iter(batches)  # kept: one that is dropped has left the epoch
            seen += [index for indices, _ in itertools.islice(iterator, stop) for index in indices.tolist()]
            positions.append(batches.state_dict())
        position = positions[0]
    assert sorted(seen) == list(range(48))


def test_an_epoch_that_begins_anew_can_be_left(caplog) -> None:
    """A stateful loader on other ranks starts the epoch again, said; left by `break` after some batches it is over."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make(world_size: int) -> PreparedLoader:
        return PreparedLoader(torchdata.StatefulDataLoader(Noisy(), batch_size=2), seed=1, world_size=world_size)

    loader = make(2)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    again = make(3)
    again.load_state_dict(loader.state_dict())
    for number, (indices, _) in enumerate(again):
        assert indices.tolist() == [2 * number, 2 * number + 1]
        if number == 2:
            break
    assert again.epoch == 1
    assert "cannot be split again over 3: epoch 0 begins anew" in caplog.text


def test_a_state_per_rank_goes_through_a_checkpoint(tmp_path) -> None:
    """What `state_dict` marks as per rank comes back as it was."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    loader = PreparedLoader(torchdata.StatefulDataLoader(Noisy(), batch_size=2), seed=1, world_size=2)
    batches = iter(loader)
    next(batches)
    hf.save(tmp_path / "a", {"data": loader})
    again = PreparedLoader(torchdata.StatefulDataLoader(Noisy(), batch_size=2), seed=1, world_size=2)
    hf.load(tmp_path / "a", {"data": again})
    assert [batch[0].tolist() for batch in again] == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_what_is_no_data_loader_is_refused() -> None:
    """A list, and a loader that is prepared already."""
    with pytest.raises(hf.ConfigError, match="not list"):
        prepare_data_loader([1, 2])  # type: ignore[arg-type]
    with pytest.raises(hf.ConfigError, match="already"):
        prepare_data_loader(prepared())  # type: ignore[arg-type]


Pair = namedtuple("Pair", ["x", "y"])


class Frozen(Mapping):
    """A mapping that cannot be made from another one."""

    def __init__(self, *, inner: dict) -> None:
        self._inner = inner

    def __getitem__(self, key):
        return self._inner[key]

    def __iter__(self):
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


def test_every_tensor_of_a_batch_moves() -> None:
    """Through lists, tuples, named tuples, dicts, other mappings and things with `to`; the rest stays."""
    move = Transfer(torch.device("meta"))
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {
        "t": torch.ones(1), "l": [torch.ones(1), "text"], "p": Pair(torch.ones(1), 3), "n": None,
        "u": (torch.ones(1), 1.5), "f": Frozen(inner={"a": torch.ones(1)}),
    }  # fmt: skip
    moved = move(batch)
    tensors = [moved["t"], moved["l"][0], moved["p"].x, moved["u"][0], moved["f"]["a"]]
    assert all(one.device.type == "meta" for one in tensors)
    assert (moved["l"][1], moved["p"].y, moved["n"], moved["u"][1]) == ("text", 3, None, 1.5)
    assert type(moved["p"]) is Pair
    assert Transfer(torch.device("cpu"))(packed).data.tolist() == packed.data.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_gpu_intact() -> None:
    """The copy beside the computation gives the same numbers, also while the loop keeps the device busy."""
    data = torch.arange(4096 * 256, dtype=torch.float32).reshape(4096, 256)
    loader = prepare_data_loader(DataLoader(torch.utils.data.TensorDataset(data), batch_size=256, pin_memory=True))
    load = torch.ones(2048, 2048, device="cuda")
    for number, (batch,) in enumerate(loader):
        assert batch.device.type == "cuda"
        for _ in range(3):
            load = (load @ load).clamp(-1, 1)
        assert torch.equal(batch.cpu(), data[number * 256 : (number + 1) * 256])


def test_weighted_samplers_stay_with_one_worker() -> None:
    """Nothing is replaced where nothing has to be split."""
    weights = [0.0] * 9 + [1.0]
    loader = prepare_data_loader(DataLoader(Noisy(), batch_size=2, sampler=WeightedRandomSampler(weights, 4)))
    assert [index for indices, _ in plain(loader) for index in indices] == [9] * 4
