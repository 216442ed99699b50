"""Which placement groups are asked for and given back, and which nodes are spare."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.trainers.function.engines.ray_nodes import Changes, Reservation, choose_spares, matches, plan_changes


def group(first: int, *nodes: str, size: int = 0) -> Reservation:
    return Reservation(first=first, size=size or len(nodes), nodes=dict(enumerate(nodes)))


def plan(*held: Reservation, **more: Any) -> Changes:
    told = {"most": 2, "alive": set("abcdef"), "out": set(), "used": frozenset(), "strategy": "PACK", **more}
    return plan_changes(held, **told)


def changes(
    usable: set[int], *, give_back: tuple[int, ...] = (), ask: tuple[int, ...] = (), extra: frozenset[int] = frozenset()
) -> Changes:
    return Changes(give_back=give_back, ask=ask, usable=frozenset(usable), extra=extra)


def test_nothing_is_lacking_or_too_much() -> None:
    """What is there, or about to come, is left alone."""
    assert plan(group(0, "a", "b")) == changes({0, 1})
    assert plan(group(0, size=2)) == changes(set())
    assert plan(group(0, "a", "b"), group(2, size=1), group(3, "c"), most=4) == changes({0, 1, 3})


def test_a_node_does_not_answer() -> None:
    """As many places as it had are asked for, once; what is asked for counts although Ray has not placed it."""
    assert plan(group(0, "a", "b"), out={"a"}, used={0, 1}) == changes({1}, ask=(1,))
    assert plan(group(0, "a", "b"), group(2, size=1), out={"a"}) == changes({1})
    assert plan(group(0, "a", "b"), group(2, "c"), out={"a"}) == changes({1, 2})


def test_what_ray_finds_again_is_too_many() -> None:
    """Ray places a dead node's share again: what waits goes first, and what a group uses does not go."""
    dead = {"alive": set("bcdef")}
    assert plan(group(0, "a", "b"), group(2, size=1), **dead) == changes({1}, give_back=(1,))
    assert plan(group(0, "a", "b"), group(2, "c"), used={1, 2}, **dead) == changes({1, 2}, extra=frozenset({2}))
    assert plan(group(0, "d", "b"), group(2, "c"), used={1, 2}) == changes({0, 1, 2}, extra=frozenset({2}))
    assert plan(group(0, "d", "b"), group(2, "c")) == changes({0, 1}, give_back=(1,))
    idle_and_used = [group(0, "d", "b"), group(2, "c"), group(3, "e")]
    assert plan(*idle_and_used, used={1, 3}) == changes({0, 1, 3}, give_back=(1,), extra=frozenset({3}))


def test_a_node_that_answers_again() -> None:
    """What was asked for in its place goes back."""
    assert plan(group(0, "a", "b"), group(2, "c"), used={0, 1}) == changes({0, 1}, give_back=(1,))


def test_a_whole_group_is_lost() -> None:
    """It is asked for again as a whole and given back, but for one that is in use."""
    assert plan(group(0, "a", "a"), out={"a"}) == changes(set(), give_back=(0,), ask=(2,))
    strict = {"out": {"a"}, "strategy": "STRICT_PACK"}
    assert plan(group(0, "a", "a"), used={0, 1}, **strict) == changes(set(), ask=(2,))
    assert plan(group(0, "a", "a"), group(2, "b", "b"), used={0, 1}, **strict) == changes({2, 3})
    assert plan(group(0, "a", "a"), group(2, "b", "b"), **strict) == changes({2, 3}, give_back=(0,))


def test_a_place_of_its_own_for_each() -> None:
    """STRICT_SPREAD: a second place on a node does not count; without labels of nodes nothing can be asked for."""
    apart = {"strategy": "STRICT_SPREAD", "used": {1, 2}}
    assert plan(group(0, "c", "b"), group(2, "c"), **apart) == changes({1, 2})
    assert plan(group(0, "a", "b"), out={"a"}, strategy="STRICT_SPREAD") == changes({1}, ask=(1,))
    assert plan(group(0, "a", "b"), out={"a"}, strategy="STRICT_SPREAD", can_exclude=False) == changes({1})


def test_a_node_that_cannot_run_workers_where_ray_knows_no_labels() -> None:
    """Its place is kept, or Ray would choose it again, and another one is asked for once."""
    refused = {"most": 1, "out": {"c"}, "keep": {"c"}}
    assert plan(group(0, "c"), **refused) == changes(set(), ask=(1,))
    assert plan(group(0, "c"), group(1, size=1), **refused) == changes(set())


def test_spares() -> None:
    """Those that are known stay; new ones have room; there are never more than asked for."""
    assert choose_spares(2, known=(), able={"a", "b", "c"}, free={"b", "c"}) == ("b", "c")
    assert choose_spares(2, known=("a",), able={"a", "b", "c"}, free={"b", "c"}) == ("a", "b")
    assert choose_spares(1, known=("a",), able={"b"}, free={"b"}) == ("b",)
    assert choose_spares(1, known=("a",), able={"a", "b"}, free={"b"}) == ("a",)
    assert choose_spares(0, known=(), able={"a"}, free={"a"}) == ()


@pytest.mark.parametrize(
    ("selector", "meant"),
    [
        (None, True),
        ({"zone": "x"}, True),
        ({"zone": "y"}, False),
        ({"zone": "!y"}, True),
        ({"zone": "in(x, y)"}, True),
        ({"zone": "!in(x, y)"}, False),
        ({"rack": "1"}, False),
        ({"rack": "!1"}, True),
        ({"zone": "x", "rack": "1"}, False),
    ],
)
def test_labels(selector: dict[str, str] | None, meant: bool) -> None:
    """A label selector means what it means to Ray."""
    assert matches(selector, {"zone": "x"}) is meant
