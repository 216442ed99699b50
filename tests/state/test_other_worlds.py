"""What each rank has for itself, loaded by another number of ranks than have saved it."""

import json
import logging
import random

import numpy as np
import pytest
import torch
from parts_kit import load_rank, save_parts

import holdfast as hf
from holdfast.state.load.selection import Fit
from holdfast.state.save.snapshot import Snapshotter
from holdfast.state.tree import arrays, rng
from holdfast.storage import LocalStorage


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


@pytest.fixture(autouse=True)
def _generators_put_back():
    before = rng.capture()
    yield
    rng.restore(before)


def test_a_rank_that_did_not_exist_keeps_what_it_has(storage, caplog):
    """In a larger world the new rank's PerRank values stay, listed as not restored; the others get theirs."""
    save_parts(storage, "one", [{"mine": hf.PerRank([rank]), "more": hf.PerRank(rank)} for rank in (0, 1)])
    for rank, expected in ((0, ([0], 0)), (1, ([1], 1)), (2, ([9], 7))):
        live = {"mine": hf.PerRank([9]), "more": hf.PerRank(7)}
        loaded = load_rank(storage, "one", live, rank=rank, world_size=3)
        assert (loaded.state["mine"].value, loaded.state["more"].value) == expected
        gone = "there was no rank 2, saved by 2: it keeps what it has"
        assert loaded.not_restored == ([("mine", gone), ("more", gone)] if rank == 2 else [])
        assert loaded.notes[0] == "mine: a value for each of 2 rank(s), 3 now: new ranks keep what they have"
    caplog.set_level(logging.WARNING)
    assert load_rank(storage, "one", rank=2).state["mine"] == [0]  # nothing is there to keep
    assert "it is given the PerRank values of rank 0" in caplog.text


def test_values_of_ranks_that_are_gone_are_said(storage):
    """In a smaller world each rank gets its own value; that nobody gets the others is said."""
    save_parts(storage, "one", [{"mine": hf.PerRank(torch.full((rank + 1,), 1.0 * rank))} for rank in range(4)])
    for rank in range(2):
        live = {"mine": hf.PerRank(torch.zeros(rank + 1))}
        loaded = load_rank(storage, "one", live, rank=rank, world_size=2)
        assert torch.equal(live["mine"].value, torch.full((rank + 1,), 1.0 * rank))
        assert loaded.not_restored == []
        assert loaded.notes == ["mine: a value for each of 4 rank(s), 2 now: those of ranks 2 to 3 go to nobody"]


class Sums:
    """An object with a tensor."""

    def __init__(self, value):
        self.total = torch.tensor([value])

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def test_plain_data_and_small_objects_of_ranks_are_those_of_rank_zero_elsewhere(storage):
    """Another number of ranks has no claim to them; what differs is named, once, and what does not is not."""
    states = [
        {"n": rank, "nan": float("nan"), "same": [1, {"a": 2}], "deep": {"w": torch.ones(1), "list": [rank]},
         "sums": Sums(1.0 * rank), "alike": Sums(5.0)}
        for rank in range(3)
    ]  # fmt: skip
    save_parts(storage, "one", states)
    for rank, world in ((0, 2), (1, 2), (3, 4)):
        live = {**states[0], "n": 9, "sums": Sums(9.0), "alike": Sums(9.0)}
        loaded = load_rank(storage, "one", live, rank=rank, world_size=world)
        assert (loaded.state["n"], loaded.state["deep"]["list"]) == (0, [0])
        assert (live["sums"].total.item(), live["alike"].total.item()) == (0.0, 5.0)
        said = f"deep/list, n, sums: other values on other ranks when 3 saved; {world} go on, each with that of rank 0"
        assert loaded.notes == [said]
    assert load_rank(storage, "one", live, rank=0, world_size=2, fit=Fit(only=["alike", "deep/w"])).notes == []
    assert load_rank(storage, "one", live, rank=2, world_size=3).notes == []
    assert live["sums"].total.item() == 2.0


class Keeper:
    """An object whose state holds something that differs between ranks, a tensor in it."""

    def __init__(self, rank=0):
        self.mine = torch.full((3,), float(rank))

    def state_dict(self):
        return {"mine": hf.PerRank({"t": self.mine, "n": 1})}

    def load_state_dict(self, state):
        self.mine = state["mine"]["t"]


def test_tensors_of_one_rank_within_the_state_of_an_object(storage):
    """What `state_dict` marks as PerRank comes to `load_state_dict` as the value of this rank, tensors included."""
    save_parts(storage, "one", [{"keeper": Keeper(rank)} for rank in range(2)])
    for rank in range(2):
        live = Keeper(9)
        load_rank(storage, "one", {"keeper": live}, rank=rank, world_size=2)
        assert live.mine.tolist() == [rank] * 3


# -- generators on another number of ranks


class Noisy:
    """An object whose state holds a generator."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self):
        return {"generator": self.generator}

    def load_state_dict(self, state):
        self.generator = state["generator"]


def noises(seed):
    """Make a state with generators at three places."""
    return {"noise": torch.Generator().manual_seed(seed), "plain": [1, torch.Generator().manual_seed(seed + 50)],
            "object": Noisy(seed + 90)}  # fmt: skip


def drawn(state):
    """Return the next numbers of the generators of `noises`."""
    generators = (state["noise"], state["plain"][1], state["object"].generator)
    return [torch.rand(1, generator=generator).item() for generator in generators]


def test_each_rank_has_its_generators_back(storage):
    """A generator as a value is stored for each rank, with no PerRank; a load without a state gives that of a rank."""
    save_parts(storage, "one", [noises(rank) for rank in range(3)])
    for rank in range(3):
        live = noises(9)
        loaded = load_rank(storage, "one", live, rank=rank)
        assert (loaded.notes, loaded.not_restored) == ([], [])
        assert drawn({**loaded.state, "object": live["object"]}) == drawn(noises(rank))
        fresh = load_rank(storage, "one", rank=rank).state
        assert torch.rand(1, generator=fresh["noise"]).item() == drawn(noises(rank))[0]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_own_generators_are_derived_for_another_number_of_ranks(storage, world):
    """No two ranks draw alike, each resume draws the same, and that is said; those in step stay in step."""
    save_parts(storage, "one", [{**noises(rank), "step": torch.Generator().manual_seed(7)} for rank in range(3)])
    after = []
    for rank in [*range(world)] * 2:
        live = {**noises(9), "step": torch.Generator()}
        loaded = load_rank(storage, "one", live, rank=rank, world_size=world)
        assert loaded.not_restored == []
        assert loaded.notes == [
            f"{name}: a generator for each of 3 rank(s): derived for {world}"
            for name in ("noise", "plain/1", "object/generator")
        ]
        after.append(tuple(drawn(loaded.state)))
        seven = torch.Generator().manual_seed(7)
        assert torch.rand(1, generator=live["step"]).item() == torch.rand(1, generator=seven).item()
    assert after[:world] == after[world:]
    before = [tuple(drawn(noises(rank))) for rank in range(3)]
    assert len({number for row in before + after for number in row}) == 3 * (3 + world)


def test_a_reader_that_knows_of_no_other_ranks_gets_the_generator_of_rank_0(storage):
    """In the structure it stands as ever: older versions read it there."""
    save_parts(storage, "one", [noises(rank) for rank in range(2)])
    (state,) = (storage.local_root / "one").glob("state-*.json")
    node = json.loads(state.read_bytes())["noise"]
    assert node.pop("own") == "noise"
    assert arrays.encode_torch_value(noises(0)["noise"]) == node


def save_generators(storage, seeds):
    """Save the generators of as many ranks, each seeded for itself; (seed of torch and NumPy, seed of python)."""

    class Seeded(Snapshotter):
        def submit(self, *args, **more):
            seed, own = seeds[self.rank]
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(own)
            return super().submit(*args, **more)

    snapshotters = [Seeded(rank=rank, world_size=len(seeds)) for rank in range(len(seeds))]
    save_parts(storage, "one", [{"rng": hf.RNG} for _ in seeds], snapshotters=snapshotters)
    for one in snapshotters:
        one.close()


def draws(storage, rank, world):
    """Return what a rank draws after a resume, and what is said."""
    loaded = load_rank(storage, "one", {"rng": hf.RNG}, rank=rank, world_size=world)
    assert loaded.not_restored == []
    assert loaded.restored == ["rng"]
    return (random.random(), float(np.random.random()), torch.rand(1).item()), loaded.notes


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_generators_are_derived_for_another_number_of_ranks(storage, world):
    """No two ranks draw alike, nobody draws what a rank of the old world would have, and each resume draws the same."""
    save_generators(storage, [(rank, rank) for rank in range(4)])
    before = [draws(storage, rank, 4) for rank in range(4)]
    assert all(notes == [] for _, notes in before)
    after = [draws(storage, rank, world) for rank in range(world)]
    assert after == [draws(storage, rank, world) for rank in range(world)]
    assert {tuple(notes) for _, notes in after} == {
        (f"random generators: derived for {world} rank(s) (the checkpoint has 4)",)
    }
    for numbers in zip(*(drawn for drawn, _ in before + after), strict=True):
        assert len(set(numbers)) == 4 + world


def test_generators_that_were_in_step_stay_in_step(storage):
    """One seed for python on all ranks, for decisions they take together: still one; torch's differ as before."""
    save_generators(storage, [(rank, 11) for rank in range(4)])
    expected = draws(storage, 0, 4)[0]
    after = [draws(storage, rank, 3) for rank in range(3)]
    assert [drawn[0] for drawn, _ in after] == [expected[0]] * 3
    assert len({drawn[2] for drawn, _ in after} | {expected[2]}) == 4
    assert after[0][1][0].endswith("(the checkpoint has 4); those in step on all ranks go on in step: python")


def test_generators_in_step_within_groups_only_are_derived(storage):
    """Ranks 0 and 1 draw alike, as tensor-parallel ones do, and ranks 2 and 3: nobody else may draw as they do."""
    save_generators(storage, [(rank // 2, rank // 2) for rank in range(4)])
    after = [draws(storage, rank, 3) for rank in range(3)]
    assert all("; ranks 0 and 1 drew alike, and not as the last rank: seed groups" in notes[0] for _, notes in after)
    assert len({number for drawn, _ in after for number in drawn}) == 9


def test_generators_of_one_process_are_derived_for_several(storage):
    """From one rank to two, and with NumPy on another bit generator."""
    bits = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        state = rng.capture()
        save_parts(storage, "one", [{"rng": hf.RNG}])
        after = [draws(storage, rank, 2)[0] for rank in range(2)]
        assert len({number for drawn in after for number in drawn}) == 6
        assert rng.restore(state) == []
    finally:
        np.random.set_bit_generator(bits)
