"""Who writes what: disjoint, complete, balanced, and the same on every rank without a word between them.

Fingerprints of what all hold alike: the same for the same values however they lie in memory, others for others.
"""

import random
import time
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parts_kit import Tied, train

from holdfast.state.save.plan import divide, plan, share_of, signature
from holdfast.state.save.staging import fingerprints
from holdfast.state.tree.flatten import flatten

sizes_and_ranks = st.tuples(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 9))


@given(sizes_and_ranks, st.data())
def test_every_tensor_has_one_rank_and_the_load_is_even(given_sizes, data):
    """No two ranks are further apart than the largest tensor, in all and in what trains."""
    sizes, num_ranks = given_sizes
    last = frozenset(data.draw(st.sets(st.sampled_from(range(len(sizes))))) if sizes else ())
    names = [f"t{number}" for number in range(len(sizes))]
    owners = divide(names, sizes, num_ranks, last=last)
    assert len(owners) == len(sizes)
    assert all(0 <= owner < num_ranks for owner in owners)
    for places in (range(len(sizes)), [place for place in range(len(sizes)) if place not in last]):
        loads = [0] * num_ranks
        for place in places:
            loads[owners[place]] += sizes[place]
        assert max(loads) - min(loads) <= max((sizes[place] for place in places), default=0)


@given(sizes_and_ranks, st.randoms(use_true_random=False))
def test_the_order_of_discovery_does_not_matter(given_sizes, rng):
    """Names and sizes alone decide: a rank that found the tensors in another order comes to the same."""
    sizes, num_ranks = given_sizes
    names = [f"t{number}" for number in range(len(sizes))]
    first = dict(zip(names, divide(names, sizes, num_ranks), strict=True))
    pairs = list(zip(names, sizes, strict=True))
    rng.shuffle(pairs)
    shuffled = [name for name, _ in pairs]
    second = dict(zip(shuffled, divide(shuffled, [size for _, size in pairs], num_ranks), strict=True))
    assert first == second


def test_one_large_tensor_is_balanced_by_many_small_ones():
    """By bytes, not by number: a rank that has the embedding gets nothing else until the others have as much."""
    owners = divide([f"t{number}" for number in range(101)], [100] + [1] * 100, 2)
    assert sum(owner == owners[0] for owner in owners) == 1


def test_division_is_nearly_linear():
    """Eight times the tensors take nowhere near 64 times as long."""

    def seconds(count):
        rng = random.Random(count)
        names = [f"model/layers.{number}.weight" for number in range(count)]
        sizes = [rng.randrange(1 << 20) for _ in range(count)]
        best = float("inf")
        for _ in range(3):
            begin = time.thread_time()
            divide(names, sizes, 64)
            best = min(best, time.thread_time() - begin)
        return best

    assert seconds(80_000) < 24 * seconds(10_000)


def share(state, rank, num_ranks):
    sig = signature(flatten(state, rank=rank, shared=True))
    sizes = [dtype.itemsize * shape.numel() for dtype, shape in zip(sig.dtypes, sig.shapes, strict=True)]
    return sig, share_of(sig, sizes, rank=rank, num_ranks=num_ranks)


def trained(**arguments):
    torch.manual_seed(0)
    model = Tied(**arguments)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer, "loose": torch.ones(5), "step": 3}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 30])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_is_written_once(num_ranks, frozen):
    """Over all ranks each tensor is written by one and each tie told by one; all ranks derive the same division."""
    state = trained(frozen=frozen)
    found = [share(state, rank, num_ranks) for rank in range(num_ranks)]
    sig = found[0][0]
    written = sorted(number for _, one in found for number in one.writes)
    assert written == [number for number in range(len(sig.names)) if number not in sig.aliases]
    told = [number for _, one in found for number in one.aliases]
    assert told == list(sig.aliases) == [sig.names.index("model/head.weight")]
    assert len({(one.division.structure, one.division.num_ranks, one.sampled) for _, one in found}) == 1


def test_only_parameters_and_their_optimizer_state_are_divided():
    """Buffers, loose tensors, and an optimizer's state of parameters that no module has, come from rank 0."""
    lonely = torch.nn.Parameter(torch.ones(3))
    state = trained()
    other = torch.optim.SGD([lonely, state["model"].wte.weight], lr=torch.tensor(0.1), momentum=0.9)
    lonely.grad = torch.ones(3)
    other.step()
    other.state["seen"] = torch.ones(3)  # of no parameter: who says that it is the same on all ranks?
    state["other"] = other
    sig, _ = share(state, 0, 2)
    replicated = {sig.names[number] for number in sig.replicated}
    model = state["model"]
    parameters = {f"model/{name}" for name, _ in model.named_parameters(remove_duplicate=False)}
    adam = {name for name in sig.names if name.startswith("optimizer/state/")}
    assert replicated == parameters | adam | {"other/state/model/wte.weight/momentum_buffer"}
    rest = set(sig.names) - replicated
    assert {"loose", "model/body.1.running_mean", "other/state/param.0/momentum_buffer"} < rest
    assert "other/other_state/seen" in rest
    # What ranks hold otherwise of these is said.
    said = {"other/other_state/seen", "other/state/param.0/momentum_buffer", "other/param_groups/0/lr"}
    assert said < {sig.names[one] for one in sig.alone}
    assert any(name.startswith("other/param_groups/0/lr") for name in rest)
    changed_by_steps = flatten(state).optimized
    assert ("other/other_state/seen" in changed_by_steps, adam <= changed_by_steps) == (False, True)


def test_a_plain_dict_of_weights_is_no_module():
    """What `state_dict()` gave is plain data of tensors: nobody knows that it is the same on all ranks."""
    sig, one = share({"model": trained()["model"].state_dict()}, 0, 3)
    assert sig.replicated == []
    assert len(one.writes) == len(sig.names) - 1


def test_frozen_tensors_do_not_take_the_place_of_those_that_change():
    """What changes is even by itself, however large the frozen ones are: only it is written at most saves."""
    state = {f"t{number}": torch.nn.Linear(10, 10, bias=False) for number in range(8)}
    state["big"] = torch.nn.Linear(1000, 10, bias=False).requires_grad_(False)
    for rank in range(4):
        sig, one = share(state, rank, 4)
        assert sum(sig.names[number].startswith("t") for number in one.writes) == 2


def test_ranks_lay_out_the_same_files():
    """The files of a rank are those of the whole state that it has something for; the others take no place."""
    state = trained()
    layouts = [plan(signature(flatten(state, rank=rank, shared=True)), rank=rank, num_ranks=3) for rank in range(3)]
    whole = plan(signature(flatten(state)))
    assert sum(one.tensor_bytes for one in layouts) == whole.tensor_bytes
    for rank, layout in enumerate(layouts):
        stems = {file.stem for file in layout.files}
        assert stems <= {f"{name}-{rank:05d}" for name in ("model", "state", "index")}
        assert layout.arena_bytes < whole.arena_bytes


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_ties_are_kept_together(data):
    """However tensors are tied, each memory is written once and every name is in exactly one rank's part."""
    count = data.draw(st.integers(1, 12))
    names = [f"t{number:02d}" for number in range(count)]
    memory = [torch.ones(data.draw(st.integers(1, 5))) for _ in range(data.draw(st.integers(1, count)))]
    tensors = [data.draw(st.sampled_from(memory)) for _ in names]
    own = data.draw(st.sets(st.sampled_from(range(count))))
    replicated = data.draw(st.sets(st.sampled_from(range(count)))) - own
    num_ranks = data.draw(st.integers(2, 4))
    flat = flatten(dict(zip(names, tensors, strict=True)))
    flat.own, flat.replicated = sorted(own), sorted(replicated)
    sig = signature(flat)
    sizes = [tensor.nbytes for tensor in tensors]
    shares = [share_of(sig, sizes, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for rank, one in enumerate(shares):
        assert not one.writes & one.aliases.keys()
        assert all(head in one.writes and tensors[head] is tensors[number] for number, head in one.aliases.items())
        assert own <= one.writes | one.aliases.keys()
        addresses = [tensors[number].data_ptr() for number in one.writes - own]
        assert len(addresses) == len(set(addresses)), rank
    common = [number for one in shares for number in (*one.writes, *one.aliases) if number not in own]
    assert sorted(common) == sorted(set(range(count)) - own)


DTYPES = ["bool", "uint8", "int16", "uint16", "uint32", "int64", "uint64", "bfloat16", "float16", "float32", "float64"]
DTYPES += ["float8_e4m3fn", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_every_dtype_and_layout(dtype):
    """Strides do not matter; one other element that is looked at does."""
    raw = torch.arange(6 * dtype.itemsize).reshape(2, -1).remainder(2 if dtype is torch.bool else 50)
    value = raw.to(torch.uint8).view(dtype)
    turned = value.t().clone(memory_format=torch.contiguous_format).t()
    first, second, short = fingerprints([value, turned, value[:1]])
    assert first == second != short
    other = value.clone()
    other.view(torch.uint8)[-1, -1] ^= 1
    assert fingerprints([other]) != [first]


def test_bits_are_compared_not_values():
    """0.0 and -0.0, two NaNs, a number and its conjugate are told apart; lazy conjugates are what they mean."""
    zero = torch.zeros(3)
    assert fingerprints([zero]) != fingerprints([-zero])
    value = torch.randn(4, 4, dtype=torch.complex64)
    assert fingerprints([value.conj()]) == fingerprints([value.conj().resolve_conj()]) != fingerprints([value])
    assert fingerprints([value.conj().imag]) == fingerprints([value.conj().imag.clone()])


def test_only_a_few_elements_are_read():
    """A tensor of any size costs the same; scalars, parameters and expanded tensors work."""
    large = torch.empty(1, 1).expand(1 << 20, 1 << 20)
    assert len(set(fingerprints([large, torch.tensor(2.0), torch.nn.Parameter(torch.ones(1, 3))]))) == 3
    assert fingerprints([]) == []


def test_objects_are_asked_once_in_the_order_of_their_names():
    """In a named tuple too: a `state_dict` may use collectives, and the dicts of other ranks have another order."""
    asked, kind = [], namedtuple("Kind", "z a")

    class Keeper:
        def __init__(self, name):
            self.name = name

        def state_dict(self):
            asked.append(self.name)
            return {"name": self.name}

        def load_state_dict(self, state):
            pass

    flatten({"b": kind(z=Keeper("b/z"), a=Keeper("b/a")), "a": [1, Keeper("a/1")]}, shared=True)
    assert asked == ["a/1", "b/a", "b/z"]
