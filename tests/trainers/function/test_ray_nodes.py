"""What is asked of Ray when nodes are lost, drained, unfit or too many: `RayNodes` on a cluster that is a table."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.trainers.function.engines import ray_nodes
from holdfast.trainers.function.engines.agent import AgentCall
from holdfast.trainers.function.engines.agents import NodeEvent, PlacesChanged, Refused
from holdfast.trainers.function.engines.ray_api import NodeFacts, RayApi
from holdfast.trainers.function.engines.ray_nodes import RayNodes, Wanted

LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(NodeFacts):
    deaf: set[str] = field(default_factory=set)

    def answers(self, timeout_s: float = 1.0) -> bool:
        return self.address not in self.deaf


@dataclass(eq=False)
class Group:
    size: int
    avoid: set[str]
    near: str | None
    nodes: dict[int, str] = field(default_factory=dict)


class Table:
    """Stands in for `RayApi`: nodes with one CPU each; a group is placed at once if there is room."""

    host, can_exclude = "127.0.0.1", True

    def __init__(self, *nodes: str) -> None:
        self.alive, self.deaf = list(nodes), set[str]()
        self.going: dict[str, float] = {}
        self.groups: list[Group] = []
        self.given_back: list[Group] = []
        self.autoscales = False
        self.hangs = threading.Event()
        self.goes_on = threading.Event()

    def nodes(self) -> dict[str, NodeFacts]:
        if self.hangs.is_set():
            self.goes_on.wait(LIMIT_S)
        return {node: Facts(address=node, port=1, resources={"CPU": 1.0}, deaf=self.deaf) for node in self.alive}

    def draining(self) -> dict[str, float]:
        return dict(self.going)

    def shrinks(self) -> bool:
        return self.autoscales

    def free(self) -> dict[str, Mapping[str, float]]:
        taken = {node for group in self.groups for node in group.nodes.values()}
        return {node: {"CPU": 0.0 if node in taken else 1.0} for node in self.alive}

    def reserve(
        self,
        bundles: Sequence[Any],
        strategy: str,
        labels: Any,
        *,
        avoid: Collection[str] = (),
        near: str | None = None,
    ) -> Group:
        group = Group(len(bundles), set(avoid), near)
        self.groups.append(group)
        self.place(group)
        return group

    def place(self, group: Group) -> None:
        free = [node for node, left in self.free().items() if left["CPU"] and node not in group.avoid]
        free.sort(key=lambda node: node != group.near)
        if len(free) >= group.size:
            group.nodes = dict(enumerate(free[: group.size]))

    def bundles(self, groups: Sequence[Group]) -> list[dict[int, str]]:
        return [dict(group.nodes) for group in groups]

    def release(self, group: Group) -> None:
        self.groups.remove(group)
        self.given_back.append(group)

    def start_agent(self, node: str) -> str:
        return node

    def serve(self, actor: str, call: Mapping[str, Any]) -> tuple[str, int]:
        return actor, call["number"]

    def ended(self, refs: Sequence[Any]) -> list[Any]:
        return []

    def kill(self, actor: str) -> None:
        pass

    def close(self) -> None:
        pass


class Seen:
    """What a `RayNodes` has said."""

    def __init__(self, table: Table, *, autoscales: bool = False, **wanted: Any) -> None:
        self.table = table
        table.autoscales = autoscales
        told = {"least": 2, "most": 2, "resources": {"CPU": 1.0}, "spares": 1, **wanted}
        self.nodes = RayNodes(table, Wanted(**told))  # type: ignore[arg-type]
        self._events: queue.Queue[NodeEvent] = queue.Queue()
        self.nodes.open(self._events.put)

    def until(self, met: Callable[[Any], bool]) -> Any:
        while not met(event := self._events.get(timeout=LIMIT_S)):
            pass
        return event

    def places(self, *wanted: str) -> PlacesChanged:
        """Wait until the places are on these nodes."""
        event: PlacesChanged = self.until(
            lambda event: isinstance(event, PlacesChanged) and sorted(p.node for p in event.places) == sorted(wanted)
        )
        return event

    def use(self, told: PlacesChanged) -> None:
        self.nodes.use(frozenset(place.number for place in told.places))


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Seen]]:
    for name in ("_LOOK_S", "_IDLE_S"):
        monkeypatch.setattr(ray_nodes, name, 0.02)
    made: list[Seen] = []

    def begin(*nodes: str, **wanted: Any) -> Seen:
        made.append(Seen(Table(*nodes), **wanted))
        return made[-1]

    yield begin
    for seen in made:
        seen.table.goes_on.set()
        seen.nodes.close()
        assert seen.table.groups == []


def call(number: int) -> AgentCall:
    return AgentCall(host="127.0.0.1", port=1, token="t", number=number)


def test_a_node_that_does_not_answer(begin: Callable[..., Seen]) -> None:
    """Its place is asked for on the spare node that has an agent; what Ray finds again goes when no group has it."""
    seen = begin("a", "b", "c", "d")
    first = seen.places("a", "b")
    seen.use(first)
    assert first.spares == ("c",)
    seen.nodes.launch("c", call(1))
    seen.table.deaf.add("a")
    seen.nodes.doubt("a")
    second = seen.places("b", "c")
    assert (seen.table.groups[1].near, seen.table.groups[1].avoid) == ("c", {"a"})
    assert second.spares == ("d",)
    seen.use(second)
    seen.table.alive.remove("a")
    seen.table.groups[0].nodes[0] = "d"  # Ray knows of the death now, and places the share again
    third = seen.places("b", "c", "d")
    assert [place.node for place in third.places if place.extra] == ["c"]
    assert seen.table.given_back == []
    seen.nodes.use(frozenset())
    seen.places("b", "d")
    seen.use(PlacesChanged(places=[place for place in third.places if not place.extra]))
    while not seen.table.given_back:
        threading.Event().wait(0.01)
    assert [group.size for group in seen.table.given_back] == [1]


def test_a_cluster_that_autoscales(begin: Callable[..., Seen]) -> None:
    """No agent gets ready on a node that is not used: the autoscaler removes that node."""
    seen = begin("a", "b", "c", autoscales=True)
    first = seen.places("a", "b")
    assert first.spares == ()
    seen.use(first)
    seen.table.alive.append("d")
    seen.table.going["b"] = 30.0
    assert seen.until(lambda event: getattr(event, "draining", None)).spares == ()


@pytest.mark.parametrize("config", [RuntimeError("the cluster is busy"), SimpleNamespace(node_group_configs=[None])])
def test_a_cluster_that_does_not_tell_whether_it_autoscales(config: Any) -> None:
    """The run does not need to know: whatever goes wrong with the question, it goes on without an answer."""

    def get_cluster_config() -> Any:
        if isinstance(config, Exception):
            raise config
        return config

    state = SimpleNamespace(state=SimpleNamespace(get_cluster_config=get_cluster_config))
    ray = SimpleNamespace(
        _private=SimpleNamespace(state=state),
        remote=lambda **_: lambda actor: actor,
        get_runtime_context=lambda: None,
        WORKER_MODE=1,
    )
    assert not RayApi(ray).shrinks()


def test_a_node_that_is_drained(begin: Callable[..., Seen]) -> None:
    """A place is asked for elsewhere while a group still runs there."""
    seen = begin("a", "b", "c", spares=0)
    seen.use(seen.places("a", "b"))
    seen.table.going["b"] = 30.0
    told = seen.places("a", "b", "c")
    assert told.draining == {"b": 30.0}
    assert seen.table.groups[1].avoid == {"b"}
    assert told.spares == ()


def test_a_node_that_cannot_run_workers(begin: Callable[..., Seen]) -> None:
    """Its places are found elsewhere, and it is neither a place nor a spare any more."""
    seen = begin("a", "b", "c", "d", least=1, most=2)
    seen.use(seen.places("a", "b"))
    seen.nodes.use(frozenset())
    seen.nodes.refuse("b")
    told = seen.places("a", "c")
    assert told.spares == ("d",)
    while not seen.table.given_back:
        threading.Event().wait(0.01)
    assert [group.nodes for group in seen.table.given_back] == [{0: "b"}]


def test_places_of_their_own_keep_apart(begin: Callable[..., Seen]) -> None:
    """STRICT_SPREAD: what is asked for in place of a lost one is on none of the nodes that have a place."""
    seen = begin("a", "b", "c", strategy="STRICT_SPREAD", spares=0)
    seen.use(seen.places("a", "b"))
    seen.table.deaf.add("a")
    seen.nodes.doubt("a")
    seen.places("b", "c")
    assert seen.table.groups[1].avoid == {"a", "b"}


def test_a_cluster_that_does_not_answer(begin: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, although the call that waits for it has not come back."""
    monkeypatch.setattr(ray_nodes, "_PATIENCE_S", 0.2)
    seen = begin("a", "b")
    seen.places("a", "b")
    seen.table.hangs.set()
    refused = seen.until(lambda event: isinstance(event, Refused))
    assert "the Ray cluster has not answered for" in str(refused.error)
    assert "it goes on from the newest checkpoint" in str(refused.error)
