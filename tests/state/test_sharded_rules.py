"""What is refused, who writes a box that several ranks hold, and what becomes of ties, metas and fresh optimizers."""

import weakref

import pytest
import torch
from mesh_kit import Layout, load_ranks, make_mesh, playing, save_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import holdfast as hf
from holdfast.format.commit import read_manifest
from holdfast.format.index import Index
from holdfast.state.load.restore import load_state
from holdfast.state.load.stored import open_stored
from holdfast.state.save.plan import plan, signature
from holdfast.state.tree.arrays import local_tensor
from holdfast.state.tree.flatten import flatten
from holdfast.storage import MemoryStorage

ROWS = Layout((4,), (0,))
HYBRID = Layout((2, 2), ("R", 0))


class Tied(nn.Module):
    """An embedding whose weight is the head's as well; six rows leave a fourth rank without any."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.wte = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.wte.weight


def sharded(module, world):
    """Shard a module; every rank made it alike."""
    fully_shard(module, mesh=make_mesh(world))
    return module


def test_a_sum_that_nobody_added_up_is_refused():
    """Partial is an UnsupportedStateError with the path, and dropped where that is asked for."""
    with playing(1, 2):
        mesh = make_mesh(2)
        state = {"a": {"terms": DTensor.from_local(torch.ones(3), mesh, [Partial()]), "b": torch.ones(2)}}
        with pytest.raises(hf.UnsupportedStateError, match=r"state\['a'\]\['terms'\]: .*redistribute"):
            flatten(state, rank=1, shared=True)
        flat = flatten(state, rank=1, shared=True, unsupported="drop")
        assert (flat.dropped, flat.names) == (["state['a']['terms']"], ["a/b"])
        with pytest.raises(hf.UnsupportedStateError, match=r"state\['x'\]: .*redistribute"):
            flatten({"x": state["a"]["terms"]}, rank=1, shared=True)


def test_what_cannot_be_right_is_refused():
    """A part that is saved alone, PerRank around a DTensor, meshes of some ranks, local tensors of other sizes."""
    values = torch.ones(8, 2)
    with playing(1, 4):
        state = {"w": ROWS.shard(values)}
        with pytest.raises(hf.UnsupportedStateError, match=r"'w' and 0 more are spread over 4 ranks.*alone"):
            plan(signature(flatten(state)))
        with pytest.raises(hf.UnsupportedStateError, match=r"state\['w'\]: a DTensor .*out of PerRank"):
            flatten({"w": hf.PerRank(state["w"])}, rank=1, shared=True)
        with pytest.raises(hf.UnsupportedStateError, match=r"4 ranks, where this is rank 1, but 8 ranks save"):
            plan(signature(flatten(state, rank=1, shared=True)), rank=1, num_ranks=8)
        mesh = make_mesh(4)
        odd = DTensor.from_local(
            torch.ones(5, 2), mesh, [Shard(0)], run_check=False, shape=values.shape, stride=values.stride()
        )
        with pytest.raises(hf.UnsupportedStateError, match=r"state\['odd'\]: .* has \[2, 2\] .* is \[5, 2\]"):
            flatten({"odd": odd}, rank=1, shared=True)
        pair = DeviceMesh("cpu", [0, 1])
        some = DTensor.from_local(torch.ones(4, 2), pair, [Shard(0)], run_check=False)
        with pytest.raises(hf.UnsupportedStateError, match=r"mesh of 2 ranks.*one mesh of all"):
            plan(signature(flatten({"some": some}, rank=1, shared=True)), rank=1, num_ranks=4)


def test_one_of_the_ranks_that_hold_a_box_writes_it():
    """Of replicas of shards each writes about half, every element is written once, and nobody had to ask."""
    torch.manual_seed(0)
    values = {f"w{number}": torch.randn(8, 3 + number) for number in range(12)}
    layouts = []
    storage = save_ranks(
        4, lambda _: {"model": {name: HYBRID.shard(value) for name, value in values.items()}}, keep=layouts
    )
    sizes = [layout.tensor_bytes for layout in layouts]
    whole = sum(value.nbytes for value in values.values())
    assert sum(sizes) == whole
    assert max(sizes) - min(sizes) <= max(value.nbytes for value in values.values()) / 2
    assert len({(one.division.num_ranks, one.division.structure) for one in layouts}) == 1
    found = load_state(storage).state["model"]
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_parts_of_a_mesh_of_all_ranks():
    """A mesh sliced out of another one: the ranks along its other dimension hold the same, and it is written once."""
    values, layouts = torch.randn(6, 4), []

    def make(_):
        root = make_mesh(2, 2)
        mesh = root[root.mesh_dim_names[1]]
        local = values[:, :2] if mesh.get_local_rank() == 0 else values[:, 2:]
        whole = DTensor.from_local(values.clone(), mesh, [Replicate()], run_check=False)
        return {"w": DTensor.from_local(local, mesh, [Shard(1)], run_check=False), "all": whole}

    storage = save_ranks(4, make, keep=layouts)
    assert sum(layout.tensor_bytes for layout in layouts) == 2 * values.nbytes
    found = load_state(storage).state
    assert torch.equal(found["w"], values)
    assert torch.equal(found["all"], values)


def test_replicas_that_differ_fail_the_save():
    """A box that two ranks hold differently is found by its samples, and named."""
    values = torch.randn(8, 3)

    def make(rank):
        one = HYBRID.shard(values)
        if rank == 2:
            local_tensor(one).add_(1)
        return {"w": one}

    with pytest.raises(hf.CheckpointError, match=r"rank 2 and rank 0 hold different values of 'w\[0, 0\]'"):
        save_ranks(4, make)


def test_ranks_that_lay_a_tensor_out_differently_fail_the_save():
    """Local shapes differ between ranks of one layout; another layout is another structure."""
    with pytest.raises(hf.CheckpointError, match="rank 1 has another structure"):
        save_ranks(2, lambda rank: {"w": Layout((2,), (rank,)).shard(torch.randn(4, 4))})


def test_tied_sharded_weights_are_stored_once_and_tied_again():
    """Also where a rank has no row of them and cannot see the tie."""
    layouts = []
    module = Tied()
    storage = save_ranks(4, lambda _: {"model": sharded(Tied(), 4)}, keep=layouts)
    assert sum(one.tensor_bytes for one in layouts) == module.wte.weight.nbytes + 4 * 3 * 4 + 8
    found = load_state(storage).state["model"]
    assert found["head.weight"] is found["wte.weight"]
    assert torch.equal(found["wte.weight"], module.wte.weight)
    plain = Tied(seed=3)
    load_state(storage, {"model": plain})
    assert plain.head.weight is plain.wte.weight
    assert torch.equal(plain.wte.weight, module.wte.weight)

    def check(rank, state):
        rows = local_tensor(state["model"].wte.weight)
        assert torch.equal(rows, module.wte.weight.detach()[3 * rank : 3 * rank + 3])

    load_ranks(storage, 2, lambda _: {"model": sharded(Tied(seed=5), 2)}, check)


def test_global_shapes_are_compared():
    """Another shape of the whole is a mismatch, even where this rank's part would fit."""
    storage = save_ranks(2, lambda _: {"w": Layout((2,), (0,)).shard(torch.ones(4, 2))})
    with playing(0, 4):
        live = ROWS.shard(torch.zeros(8, 2))
        with pytest.raises(hf.StateMismatchError, match=r"w: shape \(8, 2\) in the state, \(4, 2\) in the checkpoint"):
            load_state(storage, {"w": live})
        assert not local_tensor(live).any()


@pytest.mark.parametrize("damage", ["missing", "twice"])
def test_boxes_that_do_not_make_up_a_tensor_are_corruption(damage):
    """An index whose box is gone, or that has another rank's box, is found before anything is read."""
    storage = save_ranks(2, lambda _: {"w": Layout((2,), (0,)).shard(torch.ones(4, 2))})
    stored = open_stored(storage)
    entry = stored.entries["w"]
    first, second = entry.pieces
    pieces = (first,) if damage == "missing" else (first, second._replace(box_start=first.box_start))
    stored.entries["w"] = entry._replace(pieces=pieces)
    from holdfast.state.load.targets import Targets

    with pytest.raises(hf.CorruptCheckpointError, match=damage):
        Targets(stored).add("w", torch.empty(4, 2))


def test_the_index_has_boxes_and_every_rank_one():
    """Each rank lists the box it wrote; a rank with nothing has an index all the same."""
    storage = save_ranks(4, lambda _: {"w": ROWS.shard(torch.ones(3, 2))})
    manifest = read_manifest(storage, "")
    rows = []
    for entry in manifest.with_role("index"):
        index = Index.from_bytes(storage.read(entry.path))
        rows.append([(piece.box_start, piece.box_shape) for one in index.tensors.values() for piece in one.pieces])
    assert rows == [[((0, 0), (1, 2))], [((1, 0), (1, 2))], [((2, 0), (1, 2))], []]


def test_a_meta_module_gets_memory_once_and_its_optimizer_goes_on():
    """Parameters stay the objects they were; a buffer that is not stored is told; the state lands on the right rank."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.wte(torch.tensor([[1, 2]])).sum().backward()
    model.norm(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    storage = save_ranks(1, lambda _: {"model": model, "optimizer": optimizer})

    def make(_):
        with torch.device("meta"):
            live = Tied()
            live.register_buffer("cache", torch.empty(3), persistent=False)
        sharded(live, 2)
        return {"optimizer": torch.optim.AdamW(live.parameters()), "model": live}

    for rank in range(2):
        with playing(rank, 2):
            state = make(rank)
            params = list(state["model"].parameters())
            loaded = load_state(storage, state, rank=rank)
            assert [path for path, why in loaded.not_restored if "meta device" in why] == ["model/cache"]
            assert all(one is other for one, other in zip(state["model"].parameters(), params, strict=True))
            assert state["model"].head.weight is state["model"].wte.weight
            rows = slice(3 * rank, 3 * rank + 3)
            assert torch.equal(local_tensor(state["model"].wte.weight), model.wte.weight.detach()[rows])
            kept = state["optimizer"].state[state["model"].wte.weight]
            assert kept["exp_avg"].placements == (Shard(0),)
            assert torch.equal(local_tensor(kept["exp_avg"]), optimizer.state[model.wte.weight]["exp_avg"][rows])
            assert type(kept["step"]) is torch.Tensor


def test_a_plain_meta_module_and_map_location():
    """Without a mesh the device that is asked for is taken; a meta tensor that nothing gives memory is a mismatch."""
    storage = MemoryStorage("plain-meta")
    hf.save("memory://plain-meta/one", {"model": nn.Linear(2, 2)})
    with torch.device("meta"):
        live, loose = nn.Linear(2, 2), torch.empty(2, 2)
    optimizer = torch.optim.SGD(live.parameters(), lr=1.0)
    load_state(storage.child("one"), {"model": live}, map_location="cpu")
    assert live.weight.device.type == "cpu"
    assert optimizer.param_groups[0]["params"][0] is live.weight
    with torch.device("meta"):
        held = nn.Linear(2, 2)
    keep = weakref.ref(held.weight)  # torch cannot change this object
    load_state(storage.child("one"), {"model": held})
    assert held.weight.device.type == "cpu"
    assert keep() is not held.weight
    with pytest.raises(hf.StateMismatchError, match="meta device"):
        load_state(storage.child("one"), {"model": {"weight": loose, "bias": torch.empty(2)}})


class Average:
    """An object of the user's own that keeps a DTensor, and copies as torch does: layouts must be alike."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"kept": [{"value": self.value}], "steps": 3}

    def load_state_dict(self, state):
        self.value.copy_(state["kept"][0]["value"])


def test_objects_get_tensors_laid_out_as_their_own():
    """What an object's state_dict has spread over ranks comes back spread in the same way."""
    values = torch.randn(5, 2)
    storage = save_ranks(4, lambda _: {"ema": Average(ROWS.shard(values))})
    assert torch.equal(load_state(storage).state["ema"]["kept"][0]["value"], values)

    def check(rank, state):
        assert torch.equal(local_tensor(state["ema"].value), values[:, rank : rank + 1])

    load_ranks(storage, 2, lambda _: {"ema": Average(Layout((2,), (1,)).shard(torch.zeros(5, 2)))}, check)


def test_names_after_an_evaluation():
    """A forward pass alone leaves gathered parameters in place; the optimizer's are found by name all the same."""
    with playing(0, 2):
        model = sharded(nn.Linear(4, 4), 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(1, 4))
        assert not any(isinstance(one, DTensor) for one in model.parameters())
        names = flatten({"m": model, "o": optimizer}, shared=True).names
    assert "o/state/m/weight/momentum_buffer" in names
