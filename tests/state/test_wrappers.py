"""Tensors of classes that wrap others: quantized weights, the state of 8-bit optimizers, layers of bitsandbytes."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from mesh_kit import Layout, load_ranks, save_ranks
from packed_kit import Compact, Noted, Packed
from torch import nn
from torch.distributed.tensor import DTensor

import holdfast as hf
from holdfast.interop.arithmetic import average
from holdfast.state.load.restore import load_state
from holdfast.state.tree.arrays import bare


class Mode:
    """What a class of another library is told, and JSON cannot hold."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"Mode({self.name})"


class Base(nn.Module):
    """A frozen quantized layer with a trained one beside it."""

    def __init__(self, seed, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Parameter(Packed.of(torch.randn(4, 8), **options), requires_grad=False)
        self.trained = nn.Linear(8, 4)


@contextlib.contextmanager
def not_imported():
    """Give the class another name than the one in the checkpoint."""
    Packed.__qualname__ = "Another"
    try:
        yield
    finally:
        Packed.__qualname__ = "Packed"


def same(left, right):
    return torch.equal(left.codes, right.codes) and torch.equal(left.scale, right.scale)


def steps(weight, optimizer, *numbers):
    for number in numbers:
        weight.grad = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        optimizer.step()


def test_quantized_weights_come_back_into_the_live_ones(tmp_path):
    """Codes and scales are read into the memory that the module uses, and what is frozen is known as such."""
    first, other = Base(0), Base(1)
    hf.save(tmp_path / "one", {"model": first})
    codes = other.frozen.codes
    hf.load(tmp_path / "one", {"model": other})
    assert same(first.frozen, other.frozen)
    assert other.frozen.codes is codes
    assert torch.equal(first.trained.weight, other.trained.weight)


def test_it_comes_back_as_a_tensor_of_its_class(tmp_path):
    """Without a live state too, as its class is imported here; whatever dtype is asked for, its parts keep theirs."""
    value = Packed.of(torch.randn(4, 8))
    hf.save(tmp_path / "one", {"w": value, "more": [value]})
    loaded = hf.load(tmp_path / "one", dtype=torch.bfloat16)
    assert type(loaded["w"]) is Packed
    assert same(loaded["w"], value)
    assert same(loaded["more"][0], value)


def test_where_its_class_is_not_imported_its_parts_come_back(tmp_path):
    """No class is imported by the name that a checkpoint has."""
    hf.save(tmp_path / "one", {"w": Packed.of(torch.randn(4, 8))})
    with not_imported():
        loaded = hf.load(tmp_path / "one")
    assert sorted(loaded["w"]) == ["__tensor__", "codes", "scale"]


@pytest.mark.parametrize("is_warm", [False, True], ids=["new", "after a step"])
def test_the_state_of_an_8_bit_optimizer_goes_on_exactly(tmp_path, is_warm):
    """An optimizer that has made no step gets tensors of the class that was saved."""
    weight = nn.Parameter(torch.ones(4, 8))
    optimizer = Compact([weight])
    steps(weight, optimizer, 1, 2, 3)
    hf.save(tmp_path / "one", {"weight": weight, "optimizer": optimizer})
    steps(weight, optimizer, 4, 5)
    again = nn.Parameter(torch.zeros(4, 8))
    resumed = Compact([again])
    if is_warm:
        steps(again, resumed, 9)
    hf.load(tmp_path / "one", {"weight": again, "optimizer": resumed})
    steps(again, resumed, 4, 5)
    assert torch.equal(again, weight)


def test_an_optimizer_is_not_given_parts_for_a_tensor(tmp_path):
    """The load is refused, before anything changes, where the class is not there."""
    weight = nn.Parameter(torch.ones(4, 8))
    optimizer = Compact([weight])
    steps(weight, optimizer, 1)
    hf.save(tmp_path / "one", {"weight": weight, "optimizer": optimizer})
    again = nn.Parameter(torch.zeros(4, 8))
    with (
        not_imported(),
        pytest.raises(hf.StateMismatchError, match=r"no such class is imported: import it before the load"),
    ):
        hf.load(tmp_path / "one", {"weight": again, "optimizer": Compact([again])})
    assert not again.any()


@pytest.mark.parametrize(
    ("live", "what"),
    [
        (lambda: nn.Parameter(torch.zeros(4, 8), requires_grad=False), "a Parameter in the state, a Packed"),
        (
            lambda: nn.Parameter(Packed.of(torch.zeros(4, 8), signed=False), False),
            r"\(False, \[1, 127\]\) in the state",
        ),
        (lambda: nn.Parameter(Packed.of(torch.zeros(4, 9)), False), r"\[4, 9\].* in the state, of \[4, 8\]"),
    ],
    ids=["plain", "made otherwise", "shape"],
)
def test_another_kind_of_tensor_does_not_fit(tmp_path, live, what):
    """A weight that is not quantized now, or in another way, is refused; nothing was changed."""
    hf.save(tmp_path / "one", {"model": Base(0)})
    model = Base(1)
    model.frozen = live()
    before = model.trained.weight.clone()
    with pytest.raises(hf.StateMismatchError, match=what):
        hf.load(tmp_path / "one", {"model": model})
    assert torch.equal(model.trained.weight, before)


def test_a_plain_weight_does_not_fit_a_quantized_one(tmp_path):
    """The module is given its weights first, and quantized then."""
    plain = Base(0)
    plain.frozen = nn.Parameter(torch.ones(4, 8), requires_grad=False)
    hf.save(tmp_path / "one", {"model": plain})
    model = Base(1)
    before = model.trained.weight.clone()
    with pytest.raises(hf.StateMismatchError, match=r"model/frozen: a Packed in the state, a tensor in the checkpoint"):
        hf.load(tmp_path / "one", {"model": model})
    assert torch.equal(model.trained.weight, before)


def test_what_json_cannot_hold_is_compared_as_text(tmp_path):
    """A context with objects of another library: into a live tensor that was made in the same way, no other."""
    first, alike, other = Base(0, mode=Mode("row")), Base(1, mode=Mode("row")), Base(1, mode=Mode("block"))
    hf.save(tmp_path / "one", {"model": first})
    hf.load(tmp_path / "one", {"model": alike})
    assert same(first.frozen, alike.frozen)
    with pytest.raises(hf.StateMismatchError, match=r"Mode\(block\)\) in the state, of .*Mode\(row\)\)"):
        hf.load(tmp_path / "one", {"model": other})


def test_a_context_whose_words_hold_an_address_is_still_one(tmp_path):
    """An address is another in each process, so it is no difference; what had a context is not made anew without it."""

    class Scheme:  # its repr is that of every object: <...Scheme object at 0x...>
        pass

    first, alike = Base(0, mode=Scheme()), Base(1, mode=Scheme())
    hf.save(tmp_path / "one", {"model": first})
    hf.load(tmp_path / "one", {"model": alike})
    assert same(first.frozen, alike.frozen)
    assert sorted(hf.load(tmp_path / "one")["model"]["frozen"]) == ["__tensor__", "codes", "scale"]


def test_parts_that_its_class_refuses_are_damage(tmp_path, monkeypatch):
    """What another library raises over them is no crash without a word of which tensor it is."""
    hf.save(tmp_path / "one", {"w": Packed.of(torch.randn(4, 8))})
    monkeypatch.setattr(Packed, "__tensor_unflatten__", lambda inner, *_: inner["zero_point"])
    with pytest.raises(hf.CorruptCheckpointError, match=r"Packed cannot be made of its parts: 'zero_point'"):
        hf.load(tmp_path / "one")


def test_parts_are_not_averaged(tmp_path):
    """The mean of codes and the mean of scales are no mean of what they stand for."""
    for number in range(2):
        hf.save(tmp_path / f"{number}", {"model": Base(number)})
    sources = [hf.Checkpoint(tmp_path / f"{number}") for number in range(2)]
    with pytest.raises(hf.ConfigError, match=r"model/frozen is stored in parts"):
        average(sources, hf.Checkpoint(tmp_path / "mean"))
    average(sources, hf.Checkpoint(tmp_path / "mean"), only=["model/trained.*"])


class Quantized(nn.Module):
    """A layer that shows in its ``state_dict`` how its weight was quantized, and cannot load that (bitsandbytes)."""

    def __init__(self, weight, **_):
        super().__init__()
        self.scale = weight.abs().amax()
        self.register_buffer("codes", (weight / self.scale * 127).round().to(torch.int8))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}codes.scale"] = self.scale
        destination[f"{prefix}codes.how"] = torch.tensor(list(b'{"bits": 8}'), dtype=torch.uint8)


def test_what_a_layer_shows_and_cannot_load_has_to_be_the_same(tmp_path):
    """The same weights quantized again: the rest is loaded. Other weights: refused before their codes are mixed up."""
    torch.manual_seed(0)
    weight = torch.randn(4, 8)
    first, again = (nn.Sequential(Quantized(weight), nn.Linear(8, 2)) for _ in range(2))
    hf.save(tmp_path / "one", {"model": first})
    hf.load(tmp_path / "one", {"model": again})
    assert torch.equal(again[1].weight, first[1].weight)
    other = nn.Sequential(Quantized(weight * 2), nn.Linear(8, 2))
    other[0].codes.zero_()
    with pytest.raises(hf.StateMismatchError, match=r"model/0\.codes\.scale: the module has no code to load it"):
        hf.load(tmp_path / "one", {"model": other})
    assert not other[0].codes.any()


def spread(weight):
    """Spread a parameter over the rows of a mesh of all ranks; with what its optimizer keeps for it in 8 bits."""
    param = nn.Parameter(Layout((dist.get_world_size(),), (0,)).shard(weight))
    sizes = {"shape": weight.shape, "stride": weight.stride()}
    kept = DTensor.from_local(
        Packed.of(param.to_local() / 2), param.device_mesh, param.placements, run_check=False, **sizes
    )
    return {"weight": param, "optimizer": Compact([param])}, kept


def of_ranks(weight, *, with_state=True):
    """Return what makes the state of a rank."""

    def make(_rank):
        state, kept = spread(weight)
        if with_state:
            state["optimizer"].state[state["weight"]] = {"momentum": kept}
        return state

    return make


@pytest.mark.parametrize("with_state", [False, True], ids=["new", "after a step"])
def test_what_ranks_hold_of_an_8_bit_state_comes_back_to_each(with_state):
    """Sharded as its parameter is, by FSDP2: each rank has stored its codes, and gets them again."""
    weight = torch.randn(6, 8)
    storage = save_ranks(2, of_ranks(weight))

    def check(rank, state):
        kept = state["optimizer"].state[state["weight"]]["momentum"]
        mine = weight[3 * rank : 3 * rank + 3]
        assert type(kept) is DTensor
        assert kept.shape == (6, 8)
        assert torch.equal(state["weight"].to_local(), mine)
        assert same(kept.to_local(), Packed.of(mine / 2))

    load_ranks(storage, 2, of_ranks(torch.ones(6, 8), with_state=with_state), check)


def test_what_ranks_hold_of_an_8_bit_state_fits_as_many_ranks():
    """Codes with a scale for each row or block cannot be cut anew: another number of ranks is refused, by name."""
    storage = save_ranks(2, of_ranks(torch.randn(6, 8)))
    with pytest.raises(hf.StateMismatchError, match=r"each rank has stored what it held: it fits 2 ranks"):
        load_ranks(storage, 3, of_ranks(torch.ones(6, 8), with_state=False), None)
    weight = nn.Parameter(torch.ones(6, 8))
    with pytest.raises(hf.StateMismatchError, match=r"each rank has stored what it held: it fits 2 ranks"):
        load_state(storage, {"weight": weight, "optimizer": Compact([weight])})
    one = Compact([weight])
    one.state[weight] = {"momentum": Packed.of(weight.detach())}
    with pytest.raises(hf.StateMismatchError, match=r"each rank has stored what it held") as caught:
        load_state(storage, {"weight": weight, "optimizer": one})
    assert len(caught.value.problems) == 1, "it is named once"


@pytest.mark.parametrize("is_noted", [(True, False), (False, True), (True, True)], ids=["from", "into", "both"])
def test_a_wrapper_that_only_says_how_a_weight_is_used_is_the_weight(tmp_path, is_noted):
    """Weights that FSDP2 gathers in float8: a checkpoint of them fits the bare model, and the other way round."""
    models = [nn.Linear(3, 2, bias=False) for _ in is_noted]
    for model, noted in zip(models, is_noted, strict=True):
        if noted:
            model.weight = nn.Parameter(Noted(torch.randn(2, 3), Mode("float8")))
    hf.save(tmp_path / "one", {"model": models[0]})
    hf.load(tmp_path / "one", {"model": models[1]})
    first, second = (bare(model.weight.detach()) for model in models)
    assert torch.equal(first, second)
    assert type(hf.load(tmp_path / "one")["model"]["weight"]) is torch.Tensor
    assert type(models[1].weight) is (Noted if is_noted[1] else nn.Parameter)


def test_such_a_weight_is_spread_over_any_number_of_ranks():
    """Two ranks with it save, three without it load."""
    weight = torch.randn(6, 8)

    def noted(_rank):
        plain = Layout((2,), (0,)).shard(weight)
        sizes = {"shape": weight.shape, "stride": weight.stride()}
        local = Noted(plain.to_local(), "float8")
        return {"weight": DTensor.from_local(local, plain.device_mesh, plain.placements, run_check=False, **sizes)}

    def check(rank, state):
        assert torch.equal(state["weight"].to_local(), weight[2 * rank : 2 * rank + 2])

    load_ranks(save_ranks(2, noted), 3, lambda _: {"weight": Layout((3,), (0,)).shard(torch.ones(6, 8))}, check)
