"""One checkpoint of several ranks: every rank writes its share, any rank of any world loads all of it, bit for bit."""

import copy

import pytest
import torch
from parts_kit import (
    Tied,
    frozen_state,
    load_rank,
    model_only,
    odd_values,
    plain_state,
    save_parts,
    several_optimizers,
)
from state_kit import assert_same, bits, memory_uri
from torch import nn

import holdfast as hf
from holdfast.format.commit import read_manifest
from holdfast.format.contents import unite
from holdfast.format.index import FileNumbers, Index
from holdfast.state.load.selection import Fit
from holdfast.state.save.plan import plan, signature
from holdfast.state.save.snapshot import Snapshotter
from holdfast.state.tree.flatten import flatten
from holdfast.storage import LocalStorage
from holdfast.writer.messages import SaveJob


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


STATES = [plain_state, frozen_state, model_only, several_optimizers, odd_values]


def content(value):
    """Return everything a state holds, as `load` without a live state gives it."""
    return hf.load(hf.save(memory_uri(), value))


def tensor_bytes(manifest, writer=None):
    """Return the bytes of all tensors without headers (small ones here: one block each)."""
    files = manifest.with_role("tensors")
    return sum(entry.size - 4096 for entry in files if writer is None or entry.writer == writer)


@pytest.mark.parametrize("make", STATES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_ranks_together_store_the_state(storage, make, world):
    """Loaded anew and in place, by ranks of this and of other worlds, every bit is there; nothing is stored twice."""
    state = make()
    expected = content(state)
    save_parts(storage, "one", [state] * world)
    manifest = read_manifest(storage, "one", check_sizes=True)
    assert manifest.writers == tuple(range(world))
    for rank in (0, world - 1, 7):
        assert_same(load_rank(storage, "one", rank=rank).state, expected)
    live = make(seed=5)
    assert_same(load_rank(storage, "one", live, rank=world).state.keys(), live.keys())
    assert_same(content(live), expected)
    assert hf.Checkpoint(storage.local_root / "one").verify()
    save_parts(storage, "alone", [state])
    assert tensor_bytes(manifest) == tensor_bytes(read_manifest(storage, "alone"))


def test_each_rank_writes_its_share_only(storage):
    """With four ranks nobody stores more than another by more than the largest tensor, and state files are rank 0's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(10)))
    save_parts(storage, "one", [{"model": model, "n": 1}] * 4)
    manifest = read_manifest(storage, "one")
    sizes = [tensor_bytes(manifest, rank) for rank in range(4)]
    assert sum(sizes) == 10 * 64 * 65 * 4
    assert max(sizes) - min(sizes) <= 64 * 64 * 4
    roles = [sorted(entry.role for entry in manifest.files if entry.writer == rank) for rank in range(4)]
    assert roles == [["digests", "index", "state", "tensors"]] + [["digests", "index", "rank", "tensors"]] * 3


def test_what_differs_between_ranks_comes_from_rank_zero_or_is_kept_for_each(storage):
    """Buffers and loose tensors are rank 0's; plain data and PerRank values come back on their own rank."""

    def state(rank, **changes):
        torch.manual_seed(0)
        model = Tied()
        model.body[1].running_mean.fill_(rank)
        mine = hf.PerRank({"t": torch.full((rank + 1,), float(rank)), "n": rank, "net": nn.Linear(2, rank + 1)})
        return {"model": model, "n": rank, "t": torch.tensor(float(rank)), "mine": mine, **changes}

    saved = [state(rank) for rank in range(3)]
    save_parts(storage, "one", saved)
    for rank in range(3):
        found = load_rank(storage, "one", rank=rank).state
        assert (found["n"], found["t"].item(), found["model"]["body.1.running_mean"][0].item()) == (rank, 0.0, 0.0)
        assert found["mine"]["n"] == rank
        assert torch.equal(found["mine"]["t"], saved[rank]["mine"].value["t"])
        live = state(rank, n=9)
        live["mine"].value["t"].zero_()
        live["mine"].value["net"].weight.data.zero_()
        loaded = load_rank(storage, "one", live, rank=rank)
        assert_same(live["mine"].value["net"].state_dict(), saved[rank]["mine"].value["net"].state_dict())
        assert torch.equal(live["mine"].value["t"], saved[rank]["mine"].value["t"])
        assert loaded.not_restored == []


def test_values_per_rank_whose_paths_spell_alike_are_kept_apart(storage):
    """As "a/b" and "b" in "a", 1 and "1", or names that Holdfast uses itself; the ranks hold them in another order."""

    def state(rank, number=0):
        pairs = [("a/b", 1), ("a", {"b": 2}), (1, 3), ("1", 4), ("own values", 5), ("['a/b']", 6), ("n", 7), ("a~2", 8)]
        marked = {
            key: {"b": hf.PerRank([rank, 2 + number])} if key == "a" else hf.PerRank([rank, value + number])
            for key, value in (pairs if rank == 0 else pairs[::-1])
        }
        return {"deep": marked, **{key: value for key, value in marked.items() if type(key) is str}, "plain": rank}

    save_parts(storage, "one", [state(rank) for rank in range(2)])
    for rank in range(2):
        expected, into = state(rank), state(rank, 90)
        found = load_rank(storage, "one", rank=rank).state
        loaded = load_rank(storage, "one", into, rank=rank).state
        for key in ("a/b", "1", "own values", "['a/b']", "n", "a~2"):
            assert found[key] == found["deep"][key] == loaded[key].value == expected[key].value, key
        assert found["deep"][1] == [rank, 3]
        assert found["a"]["b"] == found["deep"]["a"]["b"] == loaded["deep"]["a"]["b"].value == [rank, 2]
        assert found["plain"] == rank


def test_what_a_rank_has_more_or_less_than_rank_zero(storage):
    """A rank gets back what it gave, however long its list is; where it gave nothing it is given rank 0's."""
    torch.manual_seed(0)
    more = {"weights": torch.ones(2)}
    one = {"net": nn.Linear(1, 1), "sizes": [1, 2, 3], "best": {"epoch": 4, **more}, "only": "zero", "pair": (0, more)}
    two = {"net": one["net"], "sizes": [], "best": {"epoch": 5}, "mine": (1, 2), "pair": (1, more)}
    save_parts(storage, "one", [one, two])
    found = load_rank(storage, "one", rank=1).state
    del found["net"]
    number, kept = found.pop("pair")
    assert (number, kept.keys()) == (0, more.keys())
    assert found == {"sizes": [], "best": {"epoch": 5}, "mine": (1, 2), "only": "zero"}


def test_a_value_with_something_per_rank_in_it_is_taken_at_its_word(storage):
    """Who marks a part of an object as PerRank has said what differs: the rest is that of rank 0; so is a tuple."""

    class Sums:
        def __init__(self, rank):
            self.state = {"total": torch.tensor([rank])}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    class Loader(Sums):
        def __init__(self, rank):
            self.state = {"epoch": rank, "position": hf.PerRank(rank)}

    def make(rank):
        return {"loader": Loader(rank), "sums": Sums(rank), "both": (Sums(rank), rank), "three": (Loader(rank), rank)}

    save_parts(storage, "one", [make(rank) for rank in range(2)])
    live = make(9)
    loaded = load_rank(storage, "one", live, rank=1)
    assert live["loader"].state == live["three"][0].state == {"epoch": 0, "position": 1}
    assert (live["sums"].state["total"].item(), live["both"][0].state["total"].item()) == (1, 0)
    assert (loaded.state["both"][1], loaded.state["three"][1]) == (0, 0)


def test_generators_come_back_on_their_rank(storage):
    """Each rank goes on with its own random numbers."""
    expected = []
    snapshotters = [Snapshotter(rank=rank, world_size=2) for rank in range(2)]
    states = []
    for rank in range(2):
        torch.manual_seed(100 + rank)
        states.append({"model": nn.Linear(1, 1), "rng": hf.RNG})
    torch.nn.init.ones_(states[1]["model"].weight)
    states[1]["model"].load_state_dict(states[0]["model"].state_dict())

    class Seeded(Snapshotter):
        def submit(self, *args, **more):
            torch.manual_seed(self.rank)
            future = super().submit(*args, **more)
            expected.append(torch.rand(3))
            return future

    for one in snapshotters:
        one.__class__ = Seeded
    save_parts(storage, "one", states, snapshotters=snapshotters)
    for rank in range(2):
        torch.manual_seed(77)
        assert load_rank(storage, "one", {"model": nn.Linear(1, 1), "rng": hf.RNG}, rank=rank).not_restored == []
        assert torch.equal(torch.rand(3), expected[rank])
    for one in snapshotters:
        one.close()


def test_a_value_of_its_own_that_shares_memory_with_a_common_one(storage):
    """PerRank buffers of a replicated model: each rank gets its own values back, not rank 0's, in either order."""

    def state(rank, *, first):
        torch.manual_seed(0)
        model = Tied()
        model.body[1].running_mean.fill_(rank + 1.0)
        pair = {"model": model, "mine": hf.PerRank(dict(model.named_buffers()))}
        return dict(sorted(pair.items(), reverse=first))

    for first in (True, False):
        save_parts(storage, f"one{first}", [state(rank, first=first) for rank in range(2)])
        for rank in range(2):
            live = state(5, first=first)
            load_rank(storage, f"one{first}", live, rank=rank)
            assert live["model"].body[1].running_mean.tolist() == [rank + 1.0] * 24


# -- what must not commit, what must not load


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_part_that_is_missing_is_noticed_at_the_commit(storage, lost):
    """A checkpoint of half a state does not commit, and the error names the rank."""
    with pytest.raises(hf.CheckpointError, match=f"part of rank {lost} is missing"):
        save_parts(storage, "one", [plain_state()] * 3, writers={0, 1, 2} - {lost})
    assert not storage.exists("one/manifest.json")


def test_saving_on_rank_zero_alone_is_refused(storage):
    """The habit of ``if rank == 0:``, with a snapshotter that knows of four ranks, does not commit a quarter."""
    with pytest.raises(hf.CheckpointError, match=r"ranks 1, 2, 3 is missing.*All ranks have to save"):
        save_parts(storage, "one", [plain_state()] * 4, writers=(0,))


def test_states_of_other_structure_do_not_commit(storage):
    """One rank with another size, or a parameter more, is named; so is one whose optimizer has not stepped yet."""
    for states, rank in (
        ([{"m": nn.Linear(3, 2)}, {"m": nn.Linear(3, 3)}], 1),
        ([model_only(), model_only(), {**model_only(), "more": nn.Linear(1, 1)}], 2),
        ([{"m": nn.Linear(3, 2)}, {"m": nn.Linear(3, 2).requires_grad_(False)}], 1),
    ):
        with pytest.raises(hf.CheckpointError, match=f"state of rank {rank} has another structure"):
            save_parts(storage, "one", states)
    fresh = plain_state()
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters())
    with pytest.raises(hf.CheckpointError, match="what optimizers keep"):
        save_parts(storage, "one", [fresh, plain_state()])


def test_models_that_are_not_the_same_do_not_commit(storage):
    """A model that every rank trains for itself (no DDP) would come out as a mixture: refused, with the way out."""
    with pytest.raises(hf.CheckpointError, match=r"rank 1 and rank 0 hold different values of 'm.*PerRank"):
        save_parts(storage, "one", [{"m": model_only(seed)["model"]} for seed in (0, 1)])
    states = [{"m": hf.PerRank({key: plain_state(seed)[key] for key in ("model", "optimizer")})} for seed in (0, 1)]
    save_parts(storage, "two", states)
    for rank in range(2):
        live = {key: plain_state(5)[key] for key in ("model", "optimizer")}
        load_rank(storage, "two", {"m": hf.PerRank(live)}, rank=rank)
        assert_same(live["model"].state_dict(), states[rank]["m"].value["model"].state_dict())
        assert_same(live["optimizer"].state_dict(), states[rank]["m"].value["optimizer"].state_dict())


def test_what_only_rank_zero_has_is_no_difference(storage):
    """Other ranks may hold less plain data and fewer loose tensors: these are rank 0's alone."""
    state = plain_state()
    save_parts(storage, "one", [{**state, "best": torch.ones(3), "history": [1, 2]}, state])
    found = load_rank(storage, "one", rank=1).state
    assert found["history"] == [1, 2]
    assert torch.equal(found["best"], torch.ones(3))


def test_a_name_that_could_be_another_rank_s_is_refused(storage):
    """A loose tensor called like rank 1's part of a PerRank value would be taken for it."""
    state = {"x": hf.PerRank(torch.ones(1)), "x@1": torch.zeros(1)}
    with pytest.raises(hf.UnsupportedStateError, match="'x@1'"):
        save_parts(storage, "one", [state] * 2)
    save_parts(storage, "one", [{"x": hf.PerRank(torch.ones(1)), "x@home": torch.zeros(1)}] * 2)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_index_names_its_writer(storage, lost):
    """An index that is gone or damaged is CorruptCheckpointError with the rank, not a state with holes."""
    save_parts(storage, "one", [plain_state()] * 3)
    path = next(entry.path for entry in read_manifest(storage, "one").with_role("index") if entry.writer == lost)
    file = storage.local_root / "one" / path
    data = file.read_bytes()
    file.write_bytes(data[:-2] + b"  ")
    with pytest.raises(hf.CorruptCheckpointError, match=path):
        load_rank(storage, "one")
    file.unlink()
    with pytest.raises(hf.CorruptCheckpointError, match=f"rank {lost}"):
        load_rank(storage, "one", rank=1)


def test_a_manifest_without_a_writer_is_noticed(storage, monkeypatch):
    """Whoever committed it: the indexes say over how many ranks the state was divided."""
    monkeypatch.setattr("holdfast.format.commit.disagreement", lambda parts: None)
    save_parts(storage, "one", [plain_state()] * 3, writers=(0, 2))
    with pytest.raises(hf.CorruptCheckpointError, match="divided over 3 ranks, and the part of rank 1 is missing"):
        load_rank(storage, "one")
    save_parts(storage, "two", [model_only(), model_only(), {**model_only(), "more": nn.Linear(1, 1)}])
    with pytest.raises(hf.CorruptCheckpointError, match="rank 2 has another structure"):
        load_rank(storage, "two")


def test_a_tensor_that_two_ranks_stored_is_damage(storage):
    """Nobody guesses which of the two is right; boxes of one tensor in several indexes are put together."""
    save_parts(storage, "one", [model_only()] * 2)
    manifest = read_manifest(storage, "one")
    indexes = [
        Index.from_bytes(storage.read(f"one/{entry.path}"), save_id="abcd0000-1")
        for entry in manifest.with_role("index")
    ]
    name, entry = next(iter(indexes[0].tensors.items()))
    assert name not in indexes[1].tensors
    indexes[1].tensors[name] = entry
    with pytest.raises(hf.CorruptCheckpointError, match=f"both rank 0 and rank 1 have stored '{name}'"):
        unite(indexes, where="one", files=FileNumbers())
    for start, index in enumerate(indexes):
        piece = entry.pieces[0]._replace(box_start=(start, 0), box_shape=(1, 3))
        index.tensors[name] = entry._replace(pieces=(piece,))
    stored = unite(indexes, where="one", files=FileNumbers())
    assert [piece.box_start for piece in stored.entries[name].pieces] == [(0, 0), (1, 0)]


# -- the snapshotter


def test_one_rank_of_several_does_not_commit_alone(storage):
    """Without ``part`` a rank of several is refused: it holds no whole checkpoint."""
    snapshotter = Snapshotter(rank=1, world_size=2)
    with pytest.raises(hf.ConfigError, match=r"rank 1 of 2.*part=True"):
        job = SaveJob(directory="one", save_id="abcd0000-1")
        snapshotter.submit(model_only(), None, storage, job)
    for rank in (-1, 2):
        with pytest.raises(hf.ConfigError, match=f"rank {rank}"):
            Snapshotter(rank=rank, world_size=2)


def test_the_layout_is_reused_and_follows_the_structure(storage):
    """The share is derived once per structure; a structure that changes (frozen, replicated) is derived anew."""
    states = [plain_state() for _ in range(2)]
    own = [Snapshotter(rank=rank, world_size=2) for rank in range(2)]
    save_parts(storage, "one", states, snapshotters=own)
    layouts = [one.layout for one in own]
    for state in states:
        state["model"].wte.weight.data += 1
    save_parts(storage, "two", states, snapshotters=own)
    assert [one.layout for one in own] == layouts
    assert_same(load_rank(storage, "two").state, content(states[0]))
    for state in states:
        state["model"].body[0].requires_grad_(False)
    save_parts(storage, "three", states, snapshotters=own)
    assert not any(one.layout is before for one, before in zip(own, layouts, strict=True))
    for state in states:
        state["model"] = dict(state["model"].state_dict())
    save_parts(storage, "four", states, snapshotters=own)
    assert_same(load_rank(storage, "four").state["model"], states[0]["model"])
    assert load_rank(storage, "four").state["epoch"] == 3
    for one in own:
        one.close()


def test_values_that_vary_in_the_last_bit_are_seen(storage):
    """-0.0 for 0.0, or another NaN, is another value; a difference in an element that is not looked at is not seen."""
    for changed in (-0.0, float("nan")):
        states = [{"m": nn.Linear(4, 4)} for _ in range(2)]
        for state in states:
            state["m"].weight.data.zero_()
            state["m"].bias.data.zero_()
        states[1]["m"].weight.data[0, 0] = changed
        with pytest.raises(hf.CheckpointError, match=r"different values of 'm/weight'"):
            save_parts(storage, f"s{changed}", states)


def test_states_of_all_ranks_may_be_copies(storage):
    """Ranks of real worlds share no memory."""
    state = several_optimizers()
    save_parts(storage, "one", [state, *(copy.deepcopy(state) for _ in range(2))])
    assert_same(load_rank(storage, "one", rank=2).state, content(state))
    weights = load_rank(storage, "one", fit=Fit(only="nets")).state["nets"][0]
    assert bits(weights["wte.weight"]) == bits(state["nets"][0].wte.weight)


def test_a_share_streams_through_windows(storage):
    """With a bound on memory each rank's part is byte for byte what it is without."""
    torch.manual_seed(0)
    state = {"model": nn.Sequential(*(nn.Linear(700, 700) for _ in range(5))), "rng": hf.PerRank(torch.ones(3))}
    own = [Snapshotter(rank=rank, world_size=2, max_staging_bytes=2 << 20) for rank in range(2)]
    save_parts(storage, "windows", [state] * 2, snapshotters=own)
    assert all(one.arena.size == 2 << 20 for one in own)
    save_parts(storage, "whole", [state] * 2)
    digests = [
        sorted((entry.digest, entry.role) for entry in read_manifest(storage, name).files)
        for name in ("windows", "whole")
    ]
    assert digests[0] == digests[1]
    for one in own:
        one.close()


def test_fingerprints_do_not_make_training_wait():
    """Where copies may be late, tensors of an accelerator are not looked at; those in memory are."""
    snapshotter = Snapshotter(rank=0, world_size=2)
    flat = flatten(model_only(), shared=True)
    layout = plan(signature(flat), num_ranks=2)
    weight = flat.names.index("model/weight")
    assert set(snapshotter._division(flat, layout, wait=True)["samples"]) == {"model/weight", "model/bias"}
    flat.tensors[weight] = torch.empty(2, 3, device="meta")
    assert set(snapshotter._division(flat, layout, wait=False)["samples"]) == {"model/bias"}
    assert snapshotter._division(flat, plan(signature(flat)), wait=True) is None
