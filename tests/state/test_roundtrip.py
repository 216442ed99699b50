"""What goes into `save` comes out of `load` with its type and bits."""

import datetime
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_kit import assert_same, bits, memory_uri, roundtrip
from torch import nn

import holdfast as hf

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip
Point = namedtuple("Point", "x y")
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def from_bytes(data, dtype, shape):
    """Return a tensor of random bits: any NaN payload, any denormal."""
    count = math.prod(shape)
    raw = torch.frombuffer(bytearray(data.ljust(16, b"\1") * (count + 1)), dtype=torch.uint8)[: count * dtype.itemsize]
    if dtype is torch.bool:
        raw = raw % 2
    return raw.clone().view(dtype).view(shape)


@st.composite
def tensors(draw):
    """Give tensors of any dtype, shape and strides."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = from_bytes(draw(st.binary(min_size=1, max_size=64)), dtype, shape)
    for how in draw(st.lists(st.sampled_from(["t", "slice", "expand", "offset"]), max_size=2)):
        if how == "t" and tensor.dim() >= 2:
            tensor = tensor.transpose(0, -1)
        elif how == "slice" and tensor.dim() >= 1:
            tensor = tensor[::2]
        elif how == "expand":
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
        elif how == "offset" and tensor.dim() >= 1:
            tensor = tensor[1:]
    return tensor


keys = st.one_of(st.text(max_size=5), st.integers(), st.tuples(st.integers(), st.text(max_size=3)))
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=True), st.complex_numbers(), st.text(),
    st.binary(), st.sampled_from([10**700, -(10**700), "\ud83d\ude00",
                                  "\ud800", Path("a/b"), datetime.timedelta(3, 4, 5), datetime.datetime(2024, 1, 2),
                                  torch.float8_e5m2, torch.device("cuda", 3), torch.Size([2, 0]), np.float32(1.5),
                                  np.datetime64("2020-01-01"), np.bool_(True), frozenset({"a"})]),
)  # fmt: skip


def nested(inner):
    """Give every container of api.md around ``inner``."""
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5)),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda items: defaultdict(list, items)),
    )


states = st.dictionaries(st.text(max_size=6), st.recursive(plain | tensors(), nested, max_leaves=6), max_size=4)


@FEW
@given(states)
def test_any_state_comes_back_in_memory(state):
    """A state of any tensors and plain data in any containers comes back with the same types and bits."""
    where = memory_uri()
    hf.save(where, state)
    assert_same(hf.load(where), state)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(state=states)
def test_any_state_comes_back_from_disk(tmp_path, state):
    """The same holds through the writer process and a local directory."""
    hf.save(tmp_path / "checkpoint", state, overwrite=True)
    assert_same(hf.load(tmp_path / "checkpoint"), state)


@FEW
@given(tensors(), st.booleans())
def test_any_tensor_is_restored_in_place(tensor, flip):
    """A load into live memory fills that memory, whatever its dtype and strides, and keeps the object."""
    if flip and tensor.dim() > 1:
        live = torch.zeros(tuple(reversed(tensor.shape)), dtype=torch.uint8).to(tensor.dtype)
        live = live.permute(*reversed(range(tensor.dim())))
    else:
        live = torch.empty(tensor.shape, dtype=tensor.dtype)
    where = memory_uri()
    hf.save(where, {"value": tensor})
    back = hf.load(where, {"value": live})["value"]
    assert back is live
    assert bits(live) == bits(tensor)


def test_nan_payloads_survive():
    """Each of the NaNs of a float32 keeps its own bits."""
    patterns = torch.tensor([0x7FC00000, 0x7FC00001, -0x3FFFFF, 0x7F800001], dtype=torch.int32)
    assert bits(roundtrip(patterns.view(torch.float32))) == bits(patterns)


def test_lazy_conjugate_and_negative_views_are_stored_as_what_they_mean():
    """A conjugated or negated view is stored with the values one sees."""
    base = torch.tensor([1 + 2j, 3 - 4j])
    assert roundtrip(base.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert roundtrip(base.conj().imag).tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("form", ["dict", "mixed", "rows", "list", "object"])
def test_a_leaf_that_trains_comes_back_as_one(form):
    """A tensor with requires_grad that is no Parameter, as SAC's log_alpha; what was computed has no gradient."""
    leaf = torch.zeros(1, requires_grad=True)
    values = {"leaf": leaf, "plain": torch.ones(1), "computed": leaf * 2}
    given = {
        "dict": values, "mixed": {**values, "n": 1}, "rows": {"row": values}, "list": [*values.values()],
        "object": values,
    }[form]  # fmt: skip
    place = memory_uri()
    if form == "object":
        scheduler = Holder(given)
        hf.save(place, {"x": scheduler})
        hf.load(place, {"x": scheduler})
        found = scheduler.found
    else:
        hf.save(place, {"x": given})
        found = hf.load(place)["x"]
    found = found["row"] if form == "rows" else found
    tensors = found if form == "list" else [found[key] for key in values]
    assert [one.requires_grad for one in tensors] == [True, False, False]
    assert tensors[0].is_leaf


class Holder:
    """Keeps what it is given."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.found = state


def test_parameter_stays_a_parameter():
    """A bare Parameter comes back as one, with its requires_grad."""
    back = roundtrip([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)])
    assert [type(one) for one in back] == [nn.Parameter, nn.Parameter]
    assert [one.requires_grad for one in back] == [True, False]


ARRAYS = {
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "big-endian": np.arange(4, dtype=">f8"),
    "dates": np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    "spans": np.array([1, 2], dtype="timedelta64[ns]"),
    "bool": np.array([[True, False]]),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "0-dim": np.array(3.5),
    "0-dim big-endian": np.array(3.5, dtype=">f4"),
    "empty": np.zeros((0, 3), dtype=np.int16),
    "reversed": np.arange(6)[::-2],
    "half": np.array([1.5], dtype=np.float16),
    "uint64": np.array([2**64 - 1], dtype=np.uint64),
    "complex": np.array([1 + 2j], dtype=np.complex64),
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_keep_dtype_and_bytes(name):
    """A NumPy array comes back as a writable array of the same dtype, shape and bytes."""
    array = ARRAYS[name]
    back = roundtrip(array)
    assert type(back) is np.ndarray
    assert back.dtype.str == array.dtype.str
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


@pytest.mark.parametrize("name", sorted(ARRAYS.keys() - {"broadcast"}))
def test_arrays_are_restored_in_place(name):
    """A load fills the live array and returns it."""
    array = ARRAYS[name]
    live = np.zeros_like(array)
    where = memory_uri()
    hf.save(where, {"value": array})
    assert hf.load(where, {"value": live})["value"] is live
    assert live.tobytes() == array.tobytes()


def test_read_only_array_is_replaced():
    """A live array that cannot be written is left alone; the loaded one is returned."""
    live = np.broadcast_to(np.zeros(1), (3,))
    where = memory_uri()
    hf.save(where, {"value": np.arange(3.0)})
    assert hf.load(where, {"value": live})["value"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()], dtype=object),
        np.zeros(2, dtype=[("a", "i4")]),
        np.ma.masked_array([1], mask=[True]),
    ],
    ids=["objects", "records", "masked"],
)
def test_arrays_without_bytes_of_their_own_are_refused(value):
    """Object, structured and masked arrays are refused with the path and advice, not pickled."""
    with pytest.raises(hf.UnsupportedStateError, match=r"state\['value'\]: .*(field|asarray)"):
        roundtrip(value)


def test_generators_come_back_and_are_restored_in_place():
    """A torch.Generator continues its sequence, as a new object or in the live one."""
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    where = memory_uri()
    hf.save(where, {"g": generator})
    ahead = torch.rand(4, generator=generator)
    live = torch.Generator()
    assert hf.load(where, {"g": live})["g"] is live
    assert torch.equal(torch.rand(4, generator=live), ahead)
    assert torch.equal(torch.rand(4, generator=hf.load(where)["g"]), ahead)


def test_random_states_are_plain_data():
    """States of python, NumPy and torch generators round-trip with their types."""
    state = {
        "python": random.Random(3).getstate(),
        "numpy": np.random.RandomState(4).get_state(),
        "default": np.random.default_rng(4).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    back = roundtrip(state)
    assert_same(back, state)
    random.Random().setstate(back["python"])


def test_plain_types_keep_their_exact_type():
    """Each plain type of the contract comes back as itself, not as its JSON cousin."""
    value = {
        "counter": Counter("aab"),
        "set": {1, 2},
        "frozen": frozenset({"x"}),
        1: "int key",
        "1": "text key",
        (1, "a"): "tuple key",
        "$": "dollar",
        "inf": [math.inf, -math.inf, math.nan, -0.0],
        "nested": [[[(1,)]]],
        "size": torch.Size([1, 2]),
    }
    assert_same(roundtrip(value), value)


def test_tensors_below_odd_containers_and_keys():
    """Tensors in sets, under non-text keys and under keys with slashes and quotes keep apart."""
    tensors_ = [torch.full((2,), float(number)) for number in range(7)]
    value = {
        1: tensors_[0],
        "1": tensors_[1],
        "a/b": tensors_[2],
        "a": {"b": tensors_[3]},
        'it\'s ["x"].y': tensors_[4],
        "point": Point(tensors_[5], 1),
        ("k", 2): deque([tensors_[6]]),
    }
    back = roundtrip(value)
    assert_same(back, value)
    (inner,) = roundtrip({torch.ones(1)})
    assert inner.tolist() == [1.0]


@pytest.mark.parametrize("kind", [OrderedDict, lambda items: defaultdict(int, items)], ids=["ordered", "default"])
def test_top_level_may_be_any_dict(kind):
    """A state that is an OrderedDict or a defaultdict keeps its type, fresh and with ``into``."""
    state = kind({"w": torch.ones(2), "n": 3})
    where = memory_uri()
    hf.save(where, state)
    assert_same(hf.load(where), state)
    assert type(hf.load(where, kind({"w": torch.zeros(2), "n": 0}))) is type(state)


def test_containers_with_live_tensors_are_filled_in_place():
    """Tensors in named tuples, deques and nested lists of the live state are the ones that are filled."""
    state = {"p": Point(torch.ones(2), 1), "d": deque([torch.ones(2)], maxlen=3), "l": [[torch.ones(2)], 5]}
    live = {"p": Point(torch.zeros(2), 0), "d": deque([torch.zeros(2)], maxlen=3), "l": [[torch.zeros(2)], 0]}
    where = memory_uri()
    hf.save(where, state)
    back = hf.load(where, live)
    assert back["p"].x is live["p"].x
    assert back["d"][0] is live["d"][0]
    assert back["l"][0][0] is live["l"][0][0]
    assert (type(back["p"]), back["p"].y, back["d"].maxlen, back["l"][1]) == (Point, 1, 3, 5)
    assert live["p"].x.tolist() == live["d"][0].tolist() == live["l"][0][0].tolist() == [1, 1]


def test_expanded_live_tensor_takes_what_fits():
    """An expanded live tensor is filled if the stored entries are equal along it, and refused otherwise."""
    where = memory_uri()
    hf.save(where, {"same": torch.full((3, 2), 7.0), "apart": torch.arange(6.0).view(3, 2)})
    live = torch.zeros(1, 2).expand(3, 2)
    hf.load(where, {"same": live}, only="same")
    assert live.tolist() == [[7, 7]] * 3
    with pytest.raises(hf.StateMismatchError, match="its elements share memory in the state"):
        hf.load(where, {"apart": live}, only="apart")
    hf.load(where, {"apart": live}, only="apart", strict=False)
    assert live.tolist() == [[7, 7]] * 3


def test_rng_and_per_rank():
    """RNG captures and restores the generators; a PerRank value comes back as this rank's."""
    torch.manual_seed(3)
    random.seed(3)
    where = memory_uri()
    hf.save(where, {"rng": hf.RNG, "mine": hf.PerRank({"t": torch.ones(2), "n": 4})})
    ahead = (torch.rand(3).tolist(), random.random())
    live = torch.zeros(2)
    back = hf.load(where, {"rng": hf.RNG, "mine": hf.PerRank({"t": live, "n": 0})})
    assert (torch.rand(3).tolist(), random.random()) == ahead
    assert back["mine"].value["t"] is live
    assert (live.tolist(), back["mine"].value["n"]) == ([1, 1], 4)


def test_what_a_rank_s_own_value_has_gained_is_loaded():
    """Tensors that the live `PerRank` does not have yet, and attributes of an object in it."""
    where = memory_uri()
    saved = SimpleNamespace(iter=5, errors={0: torch.ones(2)})
    grown = [(torch.full((2,), 3.0), "a")]
    hf.save(where, {"replay": hf.PerRank(grown), "hook": hf.PerRank(hf.attrs(saved, "iter", "errors"))})
    hook = SimpleNamespace(iter=0, errors={})
    back = hf.load(where, {"replay": hf.PerRank([]), "hook": hf.PerRank(hf.attrs(hook, "iter", "errors"))})
    ((tensor, text),) = back["replay"].value
    assert (tensor.tolist(), text) == ([3.0, 3.0], "a")
    assert (hook.iter, hook.errors[0].tolist()) == (5, [1.0, 1.0])
