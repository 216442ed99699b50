"""Plain values of a run come back into the mapping given, in place where they can be, and the block lists them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.state.load.restore import put_back


def save(path: Any, state: Any, **options: Any) -> None:
    with hf.Checkpointer(path, state, every=None, **options) as ck:
        ck.step()


def resumed(path: Any, state: Any, **options: Any) -> hf.Checkpointer:
    with hf.Checkpointer(path, state, every=None, **options) as ck:
        return ck


def plain() -> dict[str, Any]:
    return {
        "lr": 0.5, "none": None, "name": "a", "when": (1, 2), "history": [1.0, 2.0], "seen": {1, 2},
        "last": deque([1, 2], maxlen=4), "count": Counter(a=2), "by": defaultdict(list, {"x": [1]}),
        "order": OrderedDict(b=1, a=2), "nested": {"deep": {"list": [1, [2]]}, 3: "three"},
    }  # fmt: skip


def fresh() -> dict[str, Any]:
    return {
        "lr": 0.1, "none": 7, "name": "", "when": (), "history": [], "seen": set(), "last": deque(maxlen=4),
        "count": Counter(), "by": defaultdict(list), "order": OrderedDict(), "nested": {"deep": {"list": [0, []]}},
    }  # fmt: skip


def test_every_kind_comes_back_into_the_mapping_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers are assigned, containers keep their identity down to nested ones; the block names them all."""
    save(tmp_path, plain())
    live = fresh()
    before = {name: live[name] for name in ("history", "seen", "last", "count", "by", "order", "nested")}
    inner = live["nested"]["deep"]["list"]
    capsys.readouterr()
    ck = resumed(tmp_path, live)
    assert ck.state is live
    assert live == plain()
    assert [type(live[name]) for name in live] == [type(value) for value in plain().values()]
    assert all(live[name] is value for name, value in before.items())
    assert live["nested"]["deep"]["list"] is inner
    listed = "  restored into ck.state: lr, none, name, when, history, seen, last, count and 3 more"
    assert listed in capsys.readouterr().err.splitlines()


def test_plain_values_beside_objects_and_tensors(tmp_path: Path) -> None:
    """In a mapping with a model, arrays, a tensor and a value of each rank all come back, each in its way."""

    def state(factor: float) -> dict[str, Any]:
        model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(model.weight, factor)
        own = {"model": model, "best": factor, "log": [factor]}
        return {
            "own": own, "array": np.full(2, factor), "tensor": torch.full((2,), factor),
            "rank": hf.PerRank({"mine": factor}), "pair": [model, factor], "frozen": (torch.full((1,), factor), factor),
        }  # fmt: skip

    save(tmp_path, state(4.0))
    live = state(0.0)
    log, array, rank = live["own"]["log"], live["array"], live["rank"].value
    resumed(tmp_path, live)
    assert (live["own"]["best"], log, live["pair"][1], live["frozen"][1], rank) == (4.0, [4.0], 4.0, 4.0, {"mine": 4.0})
    assert live["array"] is array
    assert array.tolist() == live["tensor"].tolist() == [4.0, 4.0]
    assert live["pair"][0].weight.tolist() == [[4.0, 4.0]]
    assert live["frozen"][0].item() == 4.0


def test_a_list_that_contains_itself_is_refused_at_the_start(tmp_path: Path) -> None:
    """By its path, before the first step."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(hf.UnsupportedStateError, match=r"state\['log'\]\[0\]: this list contains itself"):
        save(tmp_path, {"log": endless})


class Move(NamedTuple):
    state: list[int]
    reward: float

    def doubled(self) -> float:
        return 2 * self.reward


def test_a_named_tuple_is_one_of_the_script_again(tmp_path: Path) -> None:
    """It has the class of the value that it replaces, with its methods, also within a list."""
    save(tmp_path, {"last": Move([1], 2.0), "all": [Move([2], 3.0)]})
    live = {"last": Move([], 0.0), "all": [Move([], 0.0)]}
    resumed(tmp_path, live)
    assert live == {"last": Move([1], 2.0), "all": [Move([2], 3.0)]}
    assert (live["last"].doubled(), live["all"][0].doubled()) == (4.0, 6.0)


@pytest.mark.parametrize("length", [2, None])
def test_a_deque_of_another_length_is_refilled_too(tmp_path: Path, length: int | None) -> None:
    """Who holds it sees what was loaded; how long it may get is what the script says now."""
    save(tmp_path, {"last": deque([1, 2, 3], maxlen=4)})
    last: deque[int] = deque(maxlen=length)
    live = {"last": last}
    resumed(tmp_path, live)
    assert live["last"] is last
    assert (list(last), last.maxlen) == ([1, 2, 3][-(length or 3) :], length)


def test_a_value_of_each_rank_that_has_grown_is_refilled(tmp_path: Path) -> None:
    """Tensors that were put into a `PerRank` during training, and attributes in one, come back into what is there."""
    hook = SimpleNamespace(iter=5, errors={0: torch.ones(2)})
    replay = deque([(torch.full((1,), 4.0), 7)], maxlen=3)
    save(tmp_path, {"replay": hf.PerRank(replay), "hook": hf.PerRank(hf.attrs(hook, "iter", "errors"))})
    mine, other = deque(maxlen=3), SimpleNamespace(iter=0, errors={})
    resumed(tmp_path, {"replay": hf.PerRank(mine), "hook": hf.PerRank(hf.attrs(other, "iter", "errors"))})
    assert [(value.item(), number) for value, number in mine] == [(4.0, 7)]
    assert (other.iter, other.errors[0].tolist()) == (5, [1.0, 1.0])


def test_attributes_of_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`attrs` saves attributes, tensors and modules among them, and sets them again; the object stays the same."""
    net = torch.nn.Linear(1, 1)
    trainer = SimpleNamespace(lr=0.5, log=[1], weight=torch.ones(2), net=net)
    names = ("lr", "log", "weight", "net")
    save(tmp_path, {"trainer": hf.attrs(trainer, *names)})
    log, weight = [], torch.zeros(2)
    other = SimpleNamespace(lr=0.1, log=log, weight=weight, net=torch.nn.Linear(1, 1), more=3)
    resumed(tmp_path, {"trainer": hf.attrs(other, *names)})
    assert (other.lr, log, weight.tolist(), other.more) == (0.5, [1], [1.0, 1.0], 3)
    assert other.log is log
    assert torch.equal(other.net.weight, net.weight)
    assert "restored into ck.state: trainer/lr, trainer/log" in capsys.readouterr().err


def test_load_sets_attributes_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of `hf.load` as of a resume: a list stays the same object, what is skipped stays, what cannot be set is said."""

    class Fixed:
        kept = property(lambda self: [7])

    def make(number: int) -> tuple[SimpleNamespace, dict[str, Any]]:
        owner = SimpleNamespace(best=number, history=[number], weight=torch.full((1,), float(number)), lr=number)
        attrs = hf.attrs(owner, "best", "history", "weight", "lr")
        return owner, {"deep": {"owner": attrs}, "fixed": hf.attrs(Fixed(), "kept")}

    hf.save(tmp_path / "one", make(3)[1])
    owner, state = make(0)
    history = owner.history
    hf.load(tmp_path / "one", state, skip="deep/owner/lr")
    assert (owner.best, owner.history, owner.weight.item(), owner.lr) == (3, [3], 3.0, 0)
    assert owner.history is history
    assert "NOT restored: fixed/kept (cannot be assigned: AttributeError" in caplog.text


def test_a_property_that_gives_copies(tmp_path: Path) -> None:
    """The state of a bit generator of NumPy, and what holds tensors, is a copy when asked for: it is assigned."""

    class Owner:
        def __init__(self, number: float) -> None:
            self._held = {"weight": torch.full((2,), number), "count": number}

        held = property(
            lambda self: {**self._held, "weight": self._held["weight"].clone()},
            lambda self, value: setattr(self, "_held", dict(value)),
        )

    rng, owner = np.random.default_rng(0), Owner(4.0)
    rng.random(3)
    save(tmp_path, {"rng": hf.attrs(rng.bit_generator, "state"), "owner": hf.attrs(owner, "held")})
    again, other = np.random.default_rng(1), Owner(0.0)
    resumed(tmp_path, {"rng": hf.attrs(again.bit_generator, "state"), "owner": hf.attrs(other, "held")})
    assert again.random() == rng.random()
    assert (other.held["count"], other.held["weight"].tolist()) == (4.0, [4.0, 4.0])


def test_attributes_that_are_not_there_are_refused() -> None:
    """A misspelt name, or none at all, is a ConfigError that says what to write."""
    with pytest.raises(hf.ConfigError, match="has no attribute 'best'"):
        hf.attrs(SimpleNamespace(lr=1), "lr", "best")
    with pytest.raises(hf.ConfigError, match="no names"):
        hf.attrs(SimpleNamespace(lr=1))


def test_what_came_into_the_state_on_the_way_comes_back(tmp_path: Path) -> None:
    """`ck.state["best"] = tensor` after entering: a script that begins without it gets it back, life after life."""
    for life in range(3):
        with hf.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=None) as ck:
            assert ck.state.get("best", torch.tensor(0.0)).item() == ck.state.get("lives", 0) == life
            ck.state["best"] = torch.tensor(life + 1.0)
            ck.state["lives"] = life + 1
            ck.step()


def test_a_tensor_that_was_given_and_is_not_any_more_is_refused(tmp_path: Path) -> None:
    """Only what came on the way may be missing: a tensor of the script that is gone stays a mismatch."""
    save(tmp_path, {"w": torch.zeros(1), "gone": torch.zeros(1)})
    with pytest.raises(hf.StateMismatchError, match="gone"):
        resumed(tmp_path, {"w": torch.zeros(1)})


def test_a_mapping_that_cannot_change_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A read-only mapping keeps its numbers, and the block says NOT restored and why."""
    save(tmp_path, {"lr": 0.5})
    resumed(tmp_path, MappingProxyType({"lr": 0.1}))
    assert "NOT restored  lr: a mappingproxy cannot be changed: give the state as a dict" in capsys.readouterr().err


def test_a_state_is_extended_renamed_and_cut_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The four arguments do on a run what they do for load; the same script may be started again with them."""
    save(tmp_path, {"net": torch.nn.Linear(1, 1), "old": 1, "lr": 0.5})
    for _ in range(2):
        state = {"model": torch.nn.Linear(1, 1), "new": 7, "lr": 0.1}
        options: dict[str, Any] = {"rename": {"net": "model"}, "allow_missing": ["new"], "skip": ["lr", "old"]}
        with hf.Checkpointer(tmp_path, state, every=None, **options) as ck:
            assert (ck.state["new"], ck.state["lr"], ck.global_step > 0) == (7, 0.1, True)
            assert "old" not in ck.state
            ck.step()
        assert "lr" not in capsys.readouterr().err.partition("into ck.state")[2].splitlines()[:1]


def test_what_does_not_fit_is_refused_with_advice_that_works(tmp_path: Path) -> None:
    """The mismatch names arguments that `Checkpointer` takes; strict=False takes what fits."""
    save(tmp_path, {"a": torch.zeros(2)})
    with pytest.raises(hf.StateMismatchError, match=r"allow_missing=\[\.\.\.\]"):
        resumed(tmp_path, {"b": torch.zeros(2)})
    assert resumed(tmp_path, {"b": torch.zeros(2)}, strict=False).global_step == 1


def test_unsupported_values_may_be_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """unsupported="drop" saves the rest and says what is left out; "raise" ends the start."""
    state = {"w": torch.zeros(1), "odd": object()}
    with pytest.raises(hf.UnsupportedStateError, match="odd"):
        save(tmp_path, state)
    save(tmp_path, state, unsupported="drop")
    assert "NOT saved" in caplog.text
    assert resumed(tmp_path, {"w": torch.ones(1)}).state["w"].item() == 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resume": True}, "Use resume='auto'"),
        ({"strict": 1}, "strict=1"),
        ({"rename": ["a"]}, "give a dict"),
        ({"skip": "holdfast"}, "the run's own step"),
        ({"skip": [3]}, "names or globs"),
        ({"unsupported": "leave"}, "'raise', 'drop'"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Refused at construction, with what to write instead."""
    with pytest.raises(hf.ConfigError, match=words):
        hf.Checkpointer(tmp_path, {}, **options)


def test_what_is_put_back_and_what_is_left_alone() -> None:
    """A container gets the loaded content and no more, and stays the same object; what was not asked for stays."""
    weights, seen = torch.zeros(2), {"old": 1}
    live = {"w": weights, "seen": seen, "n": 1, "kept": [1]}
    loaded = {"w": weights, "seen": {"new": 2}, "n": 5, "kept": [2]}
    done = put_back(live, loaded, takes=lambda path: path != "kept")
    assert live["seen"] is seen
    assert (seen, live["n"], live["kept"]) == ({"new": 2}, 5, [1])
    assert (sorted(done.restored), done.lost) == (["n", "seen"], [])
