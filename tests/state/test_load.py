"""The arguments of `load`, and what it refuses."""

import logging

import numpy as np
import pytest
import torch
from state_kit import assert_same, memory_uri, net, snapshot
from torch import nn

import holdfast as hf


@pytest.fixture
def saved():
    """Save a model, an optimizer and some plain data; gives (place, model)."""
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer, "cfg": {"a": 1, "b": [2]}, "epoch": 3})
    return place, model


def test_only_and_skip_without_into(saved):
    """Globs over joined paths choose what comes back; containers stay where something in them is wanted."""
    place, _ = saved
    assert set(hf.load(place)) == {"model", "optimizer", "cfg", "epoch"}
    assert set(hf.load(place, only="model")) == {"model"}
    assert set(hf.load(place, only=["model/0.*", "epoch"])["model"]) == {"0.weight", "0.bias"}
    assert hf.load(place, only=["cfg/b"]) == {"cfg": {"b": [2]}}
    assert set(hf.load(place, skip=["model", "opt*"])) == {"cfg", "epoch"}
    assert hf.load(place, skip=["cfg/b"], only=["cfg", "epoch"]) == {"cfg": {"a": 1}, "epoch": 3}
    assert "0.weight" not in hf.load(place, skip=["*.weight"])["model"]


def test_only_and_skip_with_into(saved):
    """With a live state everything not chosen keeps its value, plain data in a dict included."""
    place, model = saved
    other = net(1)
    before = snapshot(other)
    live = {"model": other, "cfg": {"a": 0, "b": 0}, "epoch": 0}
    back = hf.load(place, live, only=["model/0.weight", "cfg/b"])
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[2].weight, before["2.weight"])
    assert back == {"model": other, "cfg": {"a": 0, "b": [2]}, "epoch": 0}
    back = hf.load(place, live, skip=["cfg/b", "optimizer", "model/2.*"])
    assert back == {"model": other, "cfg": {"a": 1, "b": 0}, "epoch": 3}
    assert torch.equal(other[2].weight, before["2.weight"])
    assert torch.equal(other[1].running_var, model[1].running_var)


@pytest.mark.parametrize(
    "arguments",
    [
        {"only": "modle"},
        {"only": ["model", "optimiser/*"]},
        {"rename": {"backbone.*": "model.*"}},
        {"skip": ["optimizer", "optimzer"]},
        {"skip": ["optimizer", "optimizer/param_groups/0/lr"]},
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(saved, arguments):
    """A misspelt name would load nothing and say nothing: it is an error that says what there is."""
    place, model = saved
    with pytest.raises(hf.ConfigError, match=r"it holds .*model"):
        hf.load(place, **arguments)
    with pytest.raises(hf.ConfigError, match=r"it holds .*model"):
        hf.load(place, {"model": model}, **arguments)


def test_skip_may_name_what_only_the_state_has(saved):
    """A pattern of `skip` is of use if it leaves something of the live state out, or would if that had any state."""
    place, model = saved
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": plain, "list": [torch.ones(1), 4]})
    live = {"model": net(1), "new": torch.nn.Linear(2, 2), "list": [torch.ones(1), 5]}
    optimizer = torch.optim.SGD(live["model"].parameters(), lr=0.1)
    skip = ["new", "list/1", "optimizer/state/model/0.*"]
    assert hf.load(place, {**live, "optimizer": optimizer}, skip=skip)["list"][1] == 5
    assert optimizer.param_groups[0]["lr"] == 0.5


def three_layers(seed):
    torch.manual_seed(seed)
    return nn.ModuleDict({"stem": nn.Linear(3, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})


def test_a_mismatch_lists_everything_and_changes_nothing():
    """Every missing, unexpected, wrong-shape and wrong-dtype entry is listed before a single bit changes."""
    place = memory_uri()
    hf.save(place, {"model": three_layers(0), "n": 1, "extra": torch.ones(1)})
    live = three_layers(1)
    live["head"] = nn.Linear(4, 3)
    live["body"] = nn.Linear(4, 4, dtype=torch.float64)
    live["tail"] = nn.Linear(2, 2)
    del live["stem"]
    before = snapshot(live)
    other = torch.zeros(2)
    with pytest.raises(hf.StateMismatchError) as caught:
        hf.load(place, {"model": live, "n": other, "scheduler": 0})
    assert sorted(caught.value.problems) == [
        "missing: model/tail.bias",
        "missing: model/tail.weight",
        "missing: scheduler",
        "unexpected: extra",
        "unexpected: model/stem.bias",
        "unexpected: model/stem.weight",
        "wrong: model/body.bias: float64 in the state, float32 in the checkpoint",
        "wrong: model/body.weight: float64 in the state, float32 in the checkpoint",
        "wrong: model/head.bias: shape (3,) in the state, (2,) in the checkpoint",
        "wrong: model/head.weight: shape (3, 4) in the state, (2, 4) in the checkpoint",
        "wrong: n: a tensor in the state, a int in the checkpoint",
    ]
    for problem in caught.value.problems:
        assert problem.partition(": ")[2] in str(caught.value)
    assert_same(snapshot(live), before)
    assert other.tolist() == [0, 0]


@pytest.mark.parametrize("direction", ["stored", "live"])
def test_one_prefix_is_found_and_its_advice_works(direction):
    """Where a prefix explains the difference the message says so, and passing what it advises loads."""
    bare, wrapped = {"model": three_layers(0)}, {"model": nn.ModuleDict({"module": three_layers(1)})}
    state, live = (wrapped, bare) if direction == "stored" else (bare, wrapped)
    place = memory_uri()
    hf.save(place, state)
    with pytest.raises(hf.StateMismatchError, match=r"prefix 'module\.'") as caught:
        hf.load(place, live)
    advice = str(caught.value).split("pass rename={")[1].split("}")[0]
    old, new = (part.strip().strip("'") for part in advice.split(": "))
    hf.load(place, live, rename={old: new})
    left = [bits for _, bits in sorted(wrapped["model"].state_dict().items())]
    right = [bits for _, bits in sorted(bare["model"].state_dict().items())]
    assert_same(left, right)


def test_not_strict_takes_what_fits():
    """strict=False restores every entry that fits and leaves the others alone."""
    place = memory_uri()
    model = three_layers(0)
    hf.save(place, {"model": model, "gone": torch.ones(1)})
    live = three_layers(1)
    live["head"] = nn.Linear(4, 3)
    head = live["head"].weight.detach().clone()
    back = hf.load(place, {"model": live, "new": 5}, strict=False)
    assert back["new"] == 5
    assert torch.equal(live["body"].weight, model["body"].weight)
    assert torch.equal(live["head"].weight, head)


def test_allow_missing():
    """Named entries may be absent from the checkpoint; others still may not."""
    place = memory_uri()
    hf.save(place, {"model": nn.ModuleDict({"body": nn.Linear(2, 2)})})
    live = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    hf.load(place, {"model": live, "ema": torch.zeros(1)}, allow_missing=("model/head.*", "ema"))
    with pytest.raises(hf.StateMismatchError) as caught:
        hf.load(place, {"model": live, "ema": torch.zeros(1)}, allow_missing="ema")
    assert caught.value.problems == ("missing: model/head.bias", "missing: model/head.weight")


def test_rename_for_fine_tuning(saved):
    """Parts of a stored model go to other names: a glob, a whole item, fresh or into a live state."""
    place, model = saved
    net_ = nn.ModuleDict({"encoder": net(1)})
    hf.load(place, {"net": net_}, only="model", rename={"model/*": "net/encoder.*"})
    assert_same(net_["encoder"].state_dict(), model.state_dict())
    other = net(2)
    hf.load(place, {"backbone": other}, only="model", rename={"model": "backbone"})
    assert_same(other.state_dict(), model.state_dict())
    fresh = hf.load(place, only=["model"], rename={"model": "backbone", "model/0.*": "backbone/stem.*"})
    assert "0.weight" in fresh["backbone"]
    fresh = hf.load(place, only=["model"], rename={"model/0.*": "model/stem.*"})
    assert {"stem.weight", "stem.bias", "2.bias"} < set(fresh["model"])
    with pytest.raises(hf.ConfigError, match="another container"):
        hf.load(place, only=["model"], rename={"model/0.*": "elsewhere/x.*"})


class Doubled(nn.Module):
    """`encoder.weight` is 3, `weight` is 7."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(2, 2, bias=False)
        self.weight = nn.Parameter(torch.full((2, 2), 7.0))
        nn.init.constant_(self.encoder.weight, 3.0)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("form", ["module", "dict", "containers", "values"])
def test_two_entries_that_rename_gives_one_name_are_refused(form, fresh):
    """One of them would be gone. `only` and `skip`, with stored names, say which of them it is to be."""
    place = memory_uri()
    first, second = torch.full((2, 2), 3.0), torch.full((2, 2), 7.0)
    state = {
        "module": {"model": Doubled()},
        "dict": {"model": {"encoder.weight": first, "weight": second}},
        "containers": {"ema": {"weight": first}, "model": {"weight": second}},
        "values": {"model": {"a1": first, "weight": second}},
    }[form]
    hf.save(place, state)
    old, new = {"containers": ("ema", "model"), "values": ("model/a1", "model/weight")}.get(
        form, ("model/encoder.*", "model/*")
    )

    def load(**arguments):
        into = None
        if not fresh:
            into = {"model": nn.Linear(2, 2, bias=False) if form == "module" else {"weight": torch.zeros(2, 2)}}
        return hf.load(place, into, rename={old: new}, **arguments)["model"]

    with pytest.raises(hf.ConfigError, match=r"'(ema|model).*' and 'model.*' of the checkpoint would both be 'model"):
        load()
    kept = load(only=old)
    found = kept.weight if isinstance(kept, nn.Module) else kept["weight"]
    assert torch.equal(found, first)


def test_rename_leaves_the_place_to_what_is_not_skipped():
    """Of an average and the model, the one that `skip` does not name comes back."""
    place = memory_uri()
    model, ema = net(0), net(1)
    hf.save(place, {"model": model, "ema": ema})
    options = {"rename": {"ema/*": "model/*"}}
    with pytest.raises(hf.ConfigError, match="would both be"):
        hf.load(place, {"model": net(2)}, **options)
    for arguments, wanted in (({"skip": "ema"}, model), ({"only": "ema"}, ema)):
        live = net(2)
        hf.load(place, {"model": live}, **options, **arguments)
        assert_same(live.state_dict(), wanted.state_dict())


def test_rename_takes_the_optimizer_along():
    """Optimizer state follows a renamed parameter."""
    model = nn.ModuleDict({"old": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model["old"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    live = nn.ModuleDict({"new": nn.Linear(2, 2)})
    again = torch.optim.SGD(live.parameters(), lr=0.1, momentum=0.9)
    hf.load(place, {"model": live, "optimizer": again}, rename={"model/old.*": "model/new.*"})
    assert torch.equal(again.state[live["new"].weight]["momentum_buffer"], torch.ones(2, 2))


def test_dtype_casts_floating_tensors_only():
    """`dtype` casts floating tensors, fresh or live; integers, arrays and counters of steps keep theirs."""
    state = {
        "f": torch.tensor([1.00390625]),
        "i": torch.arange(3),
        "c": torch.ones(1, dtype=torch.complex64),
        "step": torch.tensor(257.0),
    }
    place = memory_uri()
    hf.save(place, state)
    back = hf.load(place, dtype=torch.bfloat16)
    assert [value.dtype for value in back.values()] == [torch.bfloat16, torch.int64, torch.complex64, torch.float32]
    assert back["step"] == 257
    live = {"f": torch.zeros(1, dtype=torch.float64), "i": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(hf.StateMismatchError, match="float64 in the state"):
        hf.load(place, live, skip=["c", "step"])
    hf.load(place, live, skip=["c", "step"], dtype=torch.float64)
    assert live["f"].tolist() == [1.00390625]


def test_dtype_casts_new_optimizer_state_as_torch_does():
    """A training in float32 that goes on in bfloat16 makes its next step; the counter of steps stays exact."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(257):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    live = nn.Linear(2, 2).bfloat16()
    again = torch.optim.AdamW(live.parameters())
    hf.load(place, {"model": live, "optimizer": again}, dtype=torch.bfloat16)
    state = again.state[live.weight]
    assert (state["exp_avg"].dtype, state["step"].dtype, state["step"].item()) == (torch.bfloat16, torch.float32, 257)
    live(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    again.step()


def test_map_location():
    """Fresh tensors go where `map_location` says; arrays stay arrays."""
    place = memory_uri()
    hf.save(place, {"w": torch.ones(2)})
    assert hf.load(place, map_location="cpu")["w"].device.type == "cpu"
    assert hf.load(place, map_location=torch.device("meta"))["w"].is_meta


def test_a_kind_that_changed_is_a_mismatch_not_a_silent_skip():
    """A live module, list or dict with tensors meets something else in the checkpoint: never silently replaced."""
    place = memory_uri()
    hf.save(place, {"a": 1, "b": [torch.ones(1)], "c": "text", "d": torch.ones(1)})
    live = {"a": [net(0)], "b": [torch.zeros(1)] * 2, "c": {"w": torch.zeros(1)}, "d": net(0)}
    with pytest.raises(hf.StateMismatchError) as caught:
        hf.load(place, live)
    assert [problem.split(":")[1].strip() for problem in sorted(caught.value.problems)] == ["a", "b", "c", "d"]


def test_plain_data_of_the_checkpoint_is_returned():
    """Plain data comes back with the stored value and type, extra keys included; the live mapping is not changed."""
    place = memory_uri()
    hf.save(place, {"epoch": 3, "best": (1.5, "x"), "cfg": {"lr": 0.1, "new": None}, "log": [1, 2, 3]})
    live = {"epoch": 0, "best": None, "cfg": {"lr": 0}, "log": []}
    back = hf.load(place, live)
    assert_same(back, {"epoch": 3, "best": (1.5, "x"), "cfg": {"lr": 0.1, "new": None}, "log": [1, 2, 3]})
    assert live == {"epoch": 0, "best": None, "cfg": {"lr": 0}, "log": []}


def test_unknown_checkpoint(tmp_path):
    """Nothing there, and files without a manifest, are two different errors."""
    with pytest.raises(hf.CheckpointNotFoundError, match="nowhere"):
        hf.load(tmp_path / "nowhere")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "model-00000-x.safetensors").write_bytes(b"x")
    with pytest.raises(hf.IncompleteCheckpointError):
        hf.load(tmp_path / "half")


class Config:
    """Something that cannot be saved."""


BAD = {
    "object": (lambda: {"callbacks": [1, {}, {"cfg": Config()}]}, r"state\['callbacks'\]\[2\]\['cfg'\]: Config "),
    "in tuple": (lambda: {"a": (1, {"b": Config()})}, r"state\['a'\]\[1\]\['b'\]: Config "),
    "in int keys": (lambda: {"a": {3: {"b": Config()}}}, r"state\['a'\]\[3\]\['b'\]: Config "),
    "function": (lambda: {"f": memory_uri}, r"state\['f'\]: function memory_uri.*code is not stored"),
    "class": (lambda: {"f": [Config]}, r"state\['f'\]\[0\]: type Config.*code is not stored"),
    "sparse": (lambda: {"a": {"s": torch.eye(2).to_sparse()}}, r"state\['a'\]\['s'\]: Tensor .*to_dense"),
    "meta": (lambda: {"m": [torch.empty(2, device="meta")]}, r"state\['m'\]\[0\]: Tensor .*materialise"),
    "cycle": (lambda: {"l": _cycle()}, r"state\['l'\]\[0\]: this list contains itself"),
    "deep": (lambda: _deep(300), r"nested more than"),
    "own object": (lambda: {"o": [_Holder()]}, r"state\['o'\]\[0\].state_dict\(\)\['cfg'\]: Config "),
}


class _Holder:
    def state_dict(self):
        return {"cfg": Config(), "fine": torch.ones(1)}

    def load_state_dict(self, state):
        self.state = state


def _cycle():
    items = []
    items.append(items)
    return items


def _deep(levels):
    value = torch.ones(1)
    for number in range(levels):
        value = [value] if number % 2 else {"k": value}
    return {"deep": value}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_saved_is_named_before_anything_is_written(tmp_path, name):
    """The error spells the path as Python would, names the type and the remedy; nothing is on the disk."""
    make, expected = BAD[name]
    with pytest.raises(hf.UnsupportedStateError, match=expected):
        hf.save(tmp_path / "checkpoint", {"model": net(0), **make()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_and_nested_tensors_are_refused():
    """Each with what to save instead."""
    for value, advice in (
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "int_repr"),
        (torch.nested.nested_tensor([torch.ones(1)]), r"\['q'\].*unbind"),
    ):
        with pytest.raises(hf.UnsupportedStateError, match=advice):
            hf.save(memory_uri(), {"model": {"q": value}})


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_a_nested_tensor_is_refused(layout):
    """A nested tensor of either layout is refused, with what to save instead, and can be dropped."""
    value = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(hf.UnsupportedStateError, match=r"state\['x'\]: .*unbind"):
        hf.save(memory_uri(), {"x": value})
    assert hf.load(hf.save(memory_uri(), {"x": value, "y": 1}, unsupported="drop")) == {"y": 1}


def test_what_nests_as_deep_as_is_allowed_can_be_read():
    """The deepest state that can be saved can be loaded."""
    place = memory_uri()
    value = _deep(190)
    hf.save(place, value)
    assert_same(hf.load(place), value)


def test_drop_leaves_out_and_says_so(caplog):
    """unsupported='drop' saves the rest, and lists every path that is NOT saved in the log and on the handle."""
    place = memory_uri()
    state = {
        "model": net(0),
        "bad": Config(),
        "list": [torch.ones(1), Config(), {"x": Config(), "y": 1}],
        "own": _Holder(),
        "tensors": {"s": torch.eye(2).to_sparse(), "t": torch.ones(2)},
    }
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        handle = hf.save_async(place, state, unsupported="drop")
    handle.result()
    assert sorted(handle.dropped) == [
        "state['bad']",
        "state['list'][1]",
        "state['list'][2]['x']",
        "state['own'].state_dict()['cfg']",
        "state['tensors']['s']",
    ]
    (record,) = caplog.records
    assert all(path in record.getMessage() for path in handle.dropped)
    assert "NOT saved" in record.getMessage()
    back = hf.load(place)
    assert set(back) == {"model", "list", "own", "tensors"}
    assert (back["list"][1], list(back["own"]), list(back["tensors"])) == ({"y": 1}, ["fine"], ["t"])


def test_a_state_is_a_mapping():
    """Anything but a mapping is refused, with how to wrap it."""
    with pytest.raises(hf.UnsupportedStateError, match=r"\{'model': model\}"):
        hf.save(memory_uri(), [net(0)])


class Transposed(nn.Module):
    """Two weights that are one, the other way round, if ``tied``."""

    def __init__(self, *, tied):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)
        if tied:
            self.decoder.weight = nn.Parameter(self.encoder.weight.data.t())


def shared_memory(kind, *, tied):
    """Two values in memory that they share, if ``tied``; for windows, one value whose elements do."""
    if kind == "transposed":
        return {"model": Transposed(tied=tied)}
    flat = torch.arange(6.0)
    if kind == "windows":
        return {"a": flat.unfold(0, 3, 1) if tied else torch.arange(12.0).view(4, 3)}
    cut = {"begin": slice(0, 3), "offset": slice(2, 5), "one": slice(3, 4), "backwards": slice(None, None, -1)}
    if kind.startswith("array"):
        array = flat.numpy().astype(">f4" if "foreign" in kind else "<f4")
        part = array[cut[kind.split()[-1]]]
        return {"a": array, "b": part if tied else (part + 100).astype(part.dtype)}
    part = flat[cut[kind.split()[-1]]]
    other = part.numpy() if kind.startswith("both") else part
    return {"a": flat, "b": other if tied else other + 100}


@pytest.mark.parametrize(
    "kind",
    [
        "transposed", "windows", "begin", "offset", "one", "both offset", "array begin", "array offset",
        "array backwards", "array foreign one",
    ],
)  # fmt: skip
def test_memory_that_values_share_in_part(caplog, kind):
    """What was stored from such memory comes back; what was stored apart is refused before anything has changed."""
    together, apart = memory_uri(), memory_uri()
    hf.save(together, shared_memory(kind, tied=True))
    hf.save(apart, shared_memory(kind, tied=False))
    live = shared_memory(kind, tied=True)
    for value in live.values():
        value.encoder.weight.data.zero_() if kind == "transposed" else value.__setitem__(..., 0)
    before = hf.load(hf.save(memory_uri(), live))
    with pytest.raises(hf.StateMismatchError, match="memory in the state"):
        hf.load(apart, live)
    assert_same(hf.load(hf.save(memory_uri(), live)), before)
    hf.load(together, live)
    after = hf.load(hf.save(memory_uri(), live))
    assert_same(after, hf.load(together))
    assert caplog.text == ""
    hf.load(apart, live, strict=False)
    assert "memory in the state" in caplog.text
    assert_same(hf.load(hf.save(memory_uri(), live)), after)


def test_an_array_under_two_names(caplog):
    """One array stored once fits into one array; two that were stored apart do not, as with tensors."""
    one, two = memory_uri(), memory_uri()
    array = np.arange(3.0)
    hf.save(one, {"a": array, "b": array})
    hf.save(two, {"a": array, "b": array + 1})
    live = np.zeros(3)
    hf.load(one, {"a": live, "b": live})
    assert live.tolist() == [0, 1, 2]
    for other in (live, torch.from_numpy(live)):
        with pytest.raises(hf.StateMismatchError, match=r"tied in the state to what is|a tensor in the"):
            hf.load(two, {"a": live, "b": other})
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    hf.save(one, {"a": fortran, "b": fortran}, overwrite=True)  # two copies
    live = np.zeros_like(fortran)
    hf.load(one, {"a": live, "b": live})
    assert live.tolist() == fortran.tolist()


@pytest.mark.parametrize("kind", ["empty", "of other types", "array and tensor"])
def test_views_at_one_address_that_a_save_takes_apart(kind):
    """Their memory goes together, though no two of them are one."""

    def make(array):
        if kind == "empty":
            return {"a": array[:0], "b": array[:0], "c": array}
        if kind == "of other types":
            return {"a": array, "b": array.view("<i4"), "c": array.view("<M8[s]")[:1]}
        return {"a": array.view("<i4"), "b": torch.from_numpy(array)}

    place, live = memory_uri(), np.zeros(4, "<f4")
    hf.save(place, make(np.arange(4, dtype="<f4")))
    hf.load(place, make(live))
    assert live.tolist() == [0, 1, 2, 3]


def test_an_array_without_dimensions_that_has_become_a_scalar():
    """NumPy makes a scalar of one that counts (running mean and variance); a new start holds the array again."""

    class Running:
        mean, var = np.zeros(()), np.ones(())

    running, again = Running(), Running()
    running.mean, running.var = running.mean + 0.25, running.var * 3
    place = memory_uri()
    hf.save(place, {"rms": hf.attrs(running, "mean", "var")})
    hf.load(place, {"rms": hf.attrs(again, "mean", "var")})
    assert (again.mean, again.var) == (0.25, 3.0)
    assert type(again.mean) is np.float64
    Running.mean = np.zeros((), np.float32)
    with pytest.raises(hf.StateMismatchError, match="rms/mean: an array in the state, a float64 in the checkpoint"):
        hf.load(place, {"rms": hf.attrs(Running(), "mean", "var")})


def test_an_array_of_another_type_or_shape_is_refused():
    """NumPy would cast without a word."""
    where = memory_uri()
    hf.save(where, {"a": np.arange(4, dtype=np.int64)})
    for live in (np.zeros(4), np.zeros(4, np.int32), np.zeros((2, 2), np.int64)):
        with pytest.raises(hf.StateMismatchError, match="a: array"):
            hf.load(where, {"a": live})
    live = np.zeros(4, np.int64)
    hf.load(where, {"a": live})
    assert live.tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:Sparse")  # of torch: beta, and its checks are off
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_module_with_a_sparse_buffer_that_is_not_saved_is_loaded(tmp_path, layout):
    """The adjacency of a graph network: registered with persistent=False, or left out by unsupported="drop"."""

    def model(*, persistent):
        made = torch.nn.Linear(2, 2)
        made.register_buffer("graph", getattr(torch.eye(2), layout)(), persistent=persistent)
        return made

    for persistent in (False, True):
        saved, live = model(persistent=persistent), model(persistent=persistent)
        dropped = {"unsupported": "drop"} if persistent else {}
        hf.save(tmp_path / "one", {"model": saved}, overwrite=True, **dropped)
        hf.load(tmp_path / "one", {"model": live}, strict=not persistent)
        assert torch.equal(live.weight, saved.weight)
        assert torch.equal(live.graph.to_dense(), torch.eye(2))
