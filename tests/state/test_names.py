"""Names that survive wrappers, and tensors that are tied."""

import os

import pytest
import torch
import torch.distributed as dist
from state_kit import assert_same, memory_uri, net, train
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import holdfast as hf
from holdfast.state.load.stored import open_stored
from holdfast.state.tree.flatten import flatten
from holdfast.state.tree.objects import canonical_keys, parameter_names, unwrap


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Give a process group of one."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    before = dict(os.environ)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def compiled(module):
    return torch.compile(module, backend="eager")


def inner_compiled(module):
    module[0] = torch.compile(module[0], backend="eager")
    return module


def inner_checkpointed(module):
    module[0] = checkpoint_wrapper(module[0])
    return module


def inner_parallel(module):
    module[0] = nn.DataParallel(module[0])
    return module


def inner_stack(module):
    module[0] = checkpoint_wrapper(nn.DataParallel(compiled(module[0])))
    return module


WRAPPERS = {
    "plain": lambda module: module,
    "ddp": nn.parallel.DistributedDataParallel,
    "compile": compiled,
    "ddp(compile)": lambda module: nn.parallel.DistributedDataParallel(compiled(module)),
    "compile(ddp)": lambda module: compiled(nn.parallel.DistributedDataParallel(module)),
    "data parallel": nn.DataParallel,
    "checkpoint_wrapper": checkpoint_wrapper,
    "compiled submodule": inner_compiled,
    "checkpointed submodule": inner_checkpointed,
    "parallel submodule": inner_parallel,
    "stack in submodule": inner_stack,
}


@pytest.fixture(scope="module")
def saved(group):
    """Save a network and its optimizer from each wrapper."""
    places = {}
    for name, wrap in WRAPPERS.items():
        model = wrap(net(1))
        optimizer = torch.optim.AdamW(model.parameters())
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, number + 1.0)
        optimizer.step()
        places[name] = memory_uri()
        hf.save(places[name], {"model": model, "optimizer": optimizer})
    return places


def test_every_wrapper_stores_the_same_names_and_bits(saved):
    """What is stored does not tell which wrapper the model had."""
    expected = hf.load(saved["plain"])
    assert set(expected["model"]) == set(net().state_dict())
    for place in saved.values():
        assert_same(hf.load(place), expected)


@pytest.mark.parametrize("target", WRAPPERS)
def test_every_wrapper_loads_what_every_other_saved(saved, target):
    """Model and optimizer of any wrapper load into any other, bit for bit."""
    expected = hf.load(saved["plain"])
    for place in saved.values():
        bare = net(2)
        model = WRAPPERS[target](bare)
        optimizer = torch.optim.AdamW(model.parameters())
        hf.load(place, {"model": model, "optimizer": optimizer})
        flat = flatten({"model": model, "optimizer": optimizer})
        found = dict(zip(flat.names, flat.tensors, strict=True))
        for key, value in expected["model"].items():
            assert torch.equal(found[f"model/{key}"], value)
        for name, state in expected["optimizer"]["state"].items():
            assert torch.equal(found[f"optimizer/state/{name}/exp_avg"], state["exp_avg"])
        assert unwrap(model) is bare or target == "checkpoint_wrapper"


def test_own_attribute_called_module_is_kept():
    """A submodule that the user named ``module`` is no wrapper: its name stays."""
    holder = nn.Module()
    holder.module = nn.Linear(2, 2)
    assert canonical_keys(holder, holder.state_dict()) == ["module.weight", "module.bias"]


def test_parameters_are_named_by_the_module_that_holds_them_first():
    """A parameter shared by two modules has the name of the first, wherever in the state the modules are."""
    first = nn.Linear(2, 2)
    second = nn.Sequential(first)
    names = parameter_names({"deep": [{"a": first}], "b": second})
    assert names[id(first.weight)] == "deep/0/a/weight"


class Tied(nn.Module):
    """A language model's tied embedding."""

    def __init__(self, tie=True):
        super().__init__()
        self.wte = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.wte.weight


def opened(place):
    checkpoint = hf.Checkpoint(place)
    return open_stored(checkpoint.storage.child(checkpoint.directory))


class Loss(nn.Module):
    """Shows its optimizer a part of its parameters, in a method without torch's newer arguments (as torchrl's do)."""

    def __init__(self, seed):
        super().__init__()
        self.online, self.target = net(seed), net(seed + 1).requires_grad_(False)

    def named_parameters(self, prefix="", recurse=True):
        named = super().named_parameters(prefix=prefix, recurse=recurse)
        return ((name, parameter) for name, parameter in named if not name.startswith("target"))


def test_a_module_that_shows_a_part_of_its_parameters():
    """All that its ``state_dict`` has is saved under its name, and loaded in place."""
    loss, other = Loss(0), Loss(5)
    place = memory_uri()
    hf.save(place, {"loss": loss, "optimizer": torch.optim.Adam(loss.parameters())})
    held = other.target[0].weight
    hf.load(place, {"loss": other, "optimizer": torch.optim.Adam(other.parameters())})
    assert_same(other.state_dict(), loss.state_dict())
    assert other.target[0].weight is held


def test_tied_tensors_are_stored_once():
    """A tied weight takes the bytes of one, and the index names the other an alias."""
    place = memory_uri()
    hf.save(place, {"model": Tied()})
    stored = opened(place)
    assert stored.aliases == {"model/head.weight": "model/wte.weight"}
    assert list(stored.entries) == ["model/wte.weight"]


def test_tied_tensors_are_tied_again():
    """They are one memory after a load, in live modules and in fresh tensors."""
    place = memory_uri()
    model = Tied()
    hf.save(place, {"model": model, "again": [model.wte.weight.data]})
    live = Tied()
    hf.load(place, {"model": live}, only="model")
    assert live.head.weight is live.wte.weight
    assert torch.equal(live.wte.weight, model.wte.weight)
    fresh = hf.load(place)
    pointers = {fresh["model"]["wte.weight"].data_ptr(), fresh["model"]["head.weight"].data_ptr()}
    assert pointers == {fresh["again"][0].data_ptr()}


def test_tied_tensors_load_into_untied_ones():
    """Live tensors that are apart each get the whole value of a tied one, however large."""
    place = memory_uri()
    value = torch.randn(700_000)
    hf.save(place, {"a": value, "b": value, "c": value})
    live = {"a": torch.zeros(700_000), "b": torch.zeros(700_000), "c": torch.zeros(2, 700_000)[:, ::2].reshape(-1)}
    live["c"] = torch.zeros(1_400_000)[::2]
    hf.load(place, live)
    assert all(torch.equal(live[name], value) for name in "abc")


def test_live_tied_but_stored_apart_is_a_mismatch():
    """Two stored values cannot both go into one live tensor: refused before anything changes."""
    place = memory_uri()
    hf.save(place, {"model": Tied(tie=False)})
    live = Tied()
    before = live.wte.weight.detach().clone()
    with pytest.raises(hf.StateMismatchError, match="tied in the state"):
        hf.load(place, {"model": live})
    assert torch.equal(live.wte.weight, before)


def test_a_view_of_a_tensor_is_not_a_tie():
    """A slice that starts where its base starts is another tensor: both are stored and both come back."""
    base = torch.arange(12.0).view(4, 3)
    state = {"base": base, "head": base[:2], "square": base[:3], "turned": base[:3].t()}
    place = memory_uri()
    hf.save(place, state)
    assert opened(place).aliases == {}
    live = torch.zeros(4, 3)
    hf.load(place, {"base": live, "head": live[:2], "square": live[:3]}, skip="turned")
    assert torch.equal(live, base)
    assert torch.equal(hf.load(place)["turned"], base[:3].t())


def test_tied_parameters_train_on_after_resume():
    """Optimizer state of a tied parameter is kept under its first name and comes back."""
    model = net(0)
    model[2].bias = model[2].bias
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    other = net(3)
    again = torch.optim.Adam(other.parameters())
    hf.load(place, {"model": other, "optimizer": again})
    train(model, optimizer)
    train(other, again)
    assert_same(other.state_dict(), model.state_dict())


def test_dictionaries_of_tensors() -> None:
    """What optimizers keep is taken apart in one go: as it would be one by one, and no name is there twice."""
    rows = {"a": {"x": torch.ones(2), "y": torch.ones(1)}, "b": {"x": torch.ones(2)}}
    whole, single = flatten({"o": rows}), flatten({"o": {**rows, "c": 1}})
    assert (whole.names, whole.files) == (single.names, single.files) == (["o/a/x", "o/a/y", "o/b/x"], ["o"] * 3)
    assert {**whole.tree["o"], "c": 1} == single.tree["o"]
    meeting = flatten({"o": {"a": {"b/x": torch.ones(2)}, "a/b": {"x": torch.ones(2)}}})
    assert meeting.names == ["o/a/b/x", "o/a/b/x~2"]


class Growing(nn.Module):
    """Makes a part of itself when it is asked for its state, and freezes another one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)

    def state_dict(self, *args, **kwargs):
        if not hasattr(self, "later"):
            self.later = nn.Linear(2, 2).requires_grad_(False)
            self.first.bias = nn.Parameter(torch.zeros(2), requires_grad=False)
        return super().state_dict(*args, **kwargs)


def test_parameters_that_state_dict_makes_or_replaces() -> None:
    """What trains and what all ranks hold is said of the parameters that are stored, not of those before."""
    flat = flatten({"m": Growing()}, shared=True)
    assert {flat.names[number] for number in flat.frozen} == {"m/first.bias", "m/later.weight", "m/later.bias"}
    assert flat.replicated == [0, 1, 2, 3]


def test_items_whose_names_look_alike_on_the_disk(tmp_path) -> None:
    """Each has a file of its own, also where only case, or characters that no file name can have, tell them apart.

    Disks of macOS and Windows keep one file for "G" and "g".
    """
    names = ("a b", "a_b", "model.frozen", "A_B", "MODEL.Frozen", "a_b.8", "State")
    state = {name: {"w": torch.full((1 << 18,), float(number))} for number, name in enumerate(names)}
    hf.save(tmp_path / "c", state)
    files = {path.name.lower() for path in (tmp_path / "c").glob("*.safetensors")}
    assert len(files) == len(state)
    for name, value in hf.load(tmp_path / "c").items():
        assert torch.equal(value["w"], state[name]["w"])
