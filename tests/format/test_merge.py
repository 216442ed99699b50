"""Structures of ranks that hold different things are united by key; the first one counts where they differ."""

from __future__ import annotations

import pytest

from holdfast.format.contents import merged


def tensors(at, *keys, ordered=0):
    return {"$": "tensors", "at": at, "k": list(keys), "o": ordered}


def tensor(name):
    return {"$": "tensor", "n": name}


def thing(kind, state, name="Net"):
    return {"$": "object", "type": name, "kind": kind, "state": state}


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": 1, "c": {"x": 1}}, {"a": 2, "c": {"y": 2}}, {"a": 1, "c": {"x": 1, "y": 2}}),
        ({"a": [1]}, {"a": [1, 2]}, {"a": [1]}),
        ({"a": [tensor("a/0")]}, {"a": [tensor("a/0"), tensor("a/1")]}, {"a": [tensor("a/0"), tensor("a/1")]}),
        ({"a": 1}, {"a": {"b": 1}}, {"a": 1}),
        (tensors("", "a", "b"), tensors("", "b", "c"), tensors("", "a", "b", "c")),
        (
            {**tensors("", "a", "b"), "rg": ["b"]},
            {**tensors("", "c"), "rg": ["c"]},
            {**tensors("", "a", "b", "c"), "rg": ["b", "c"]},
        ),
        ({"x": 1}, {**tensors("m/", "a"), "rg": ["a"]}, {"x": 1, "a": {**tensor("m/a"), "rg": 1}}),
        (tensors("m/", "a", ordered=1), {"x": 1}, {"$": "odict", "v": [["a", tensor("m/a")], ["x", 1]]}),
        ({"x": 1}, tensors("m/", "a"), {"x": 1, "a": tensor("m/a")}),
        ({"$": "odict", "v": [["a", 1]]}, {"b": 2}, {"$": "odict", "v": [["a", 1], ["b", 2]]}),
        ({"$": "dict", "v": [[1, 1]]}, {"1": 2}, {"$": "dict", "v": [[1, 1], ["1", 2]]}),
        ({"$": "set", "v": [1]}, {"$": "set", "v": [2]}, {"$": "set", "v": [1]}),
        (
            thing("module", tensors("m/", "a", ordered=1)),
            thing("module", tensors("m/", "b", ordered=1), "Other"),
            thing("module", tensors("m/", "a", "b", ordered=1)),
        ),
        (thing("module", {}), thing("optimizer", {"state": {}}), thing("module", {})),
    ],
)
def test_two_structures(one, other, both):
    """Neither of them is changed."""
    before = repr((one, other))
    assert merged([one, other]) == both
    assert repr((one, other)) == before
    assert merged([one]) is one


def test_groups_of_optimizers_that_are_alike_are_one():
    """By what they hold but for their parameters; groups that differ stay apart, and no parameter is in two."""

    def optimizer(*groups):
        state = {name: tensors(f"o/state/{name}/", "exp_avg") for _, names in groups for name in names}
        return {"state": state, "param_groups": [{"lr": lr, "params": names} for lr, names in groups]}

    one, other = optimizer((0.1, ["a"]), (0.2, ["b"])), optimizer((0.2, ["c", "b"]), (0.3, ["d"]))
    for wrap in (lambda tree: tree, lambda tree: thing("optimizer", tree, "Adam")):
        united = merged([wrap(one), wrap(other)])
        state = united.get("state", {}) if "$" not in united else united["state"]["state"]
        groups = united["param_groups"] if "$" not in united else united["state"]["param_groups"]
        assert list(state) == ["a", "b", "c", "d"]
        assert [(group["lr"], group["params"]) for group in groups] == [(0.1, ["a"]), (0.2, ["b", "c"]), (0.3, ["d"])]
    mine, theirs = one | {"other_state": {"k": 1}}, other | {"other_state": {"k": 2, "m": 3}}
    assert merged([mine, theirs])["other_state"] == {"k": 1, "m": 3}
    assert merged([one, theirs])["other_state"] == {"k": 2, "m": 3}
    by_position = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    assert merged([by_position, by_position | {"more": 1}])["param_groups"] == by_position["param_groups"]
