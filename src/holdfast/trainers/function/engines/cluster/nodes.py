"""What the cluster engine needs of a cluster: places for workers, and an agent on each node.

Which rank runs in which place, and the variables it gets for that, are decided here as well (pure functions).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from holdfast.trainers.function.engine import GroupSpec, Placed

__all__ = [
    "AgentCall",
    "AgentFailed",
    "NodeEvent",
    "NodePlace",
    "Nodes",
    "PlacesChanged",
    "Refused",
    "arrange",
    "missing_module",
    "rank_environment",
]

_LOOPBACK = ("127.", "::1", "localhost")
_MISSING = re.compile(r"No module named '([^']+)'")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """Room for one worker.

    Attributes:
        node: id of the node.
        address: of the node, for people.
        number: of the place among all; two places never share a number.
        gpus: ids of its accelerators on that node.
        extra: given back when no group uses it, for there are enough others.
    """

    node: str
    address: str = ""
    number: int = 0
    gpus: tuple[str, ...] = ()
    extra: bool = False


def arrange(places: Iterable[NodePlace], num_workers: int) -> list[tuple[NodePlace, Placed]] | None:
    """Choose a place for each rank; None if there are too few.

    Ranks follow the ids of nodes and then the lowest accelerator, so that ranks of a node are neighbours and the same
    places always get the same ranks. With places to spare, those that are not extra come first, then nodes that have
    more of them.
    """
    given = list(places)
    lasting = [place for place in given if not place.extra]
    by_node: dict[str, list[NodePlace]] = {}
    for place in lasting if len(lasting) >= num_workers else given:
        by_node.setdefault(place.node, []).append(place)
    chosen: list[NodePlace] = []
    for _, members in sorted(by_node.items(), key=lambda item: (-len(item[1]), item[0])):
        chosen += sorted(members, key=_within)[: num_workers - len(chosen)]
    if len(chosen) < num_workers:
        return None
    chosen.sort(key=lambda place: (place.node, *_within(place)))
    nodes = sorted({place.node for place in chosen})
    seen = dict.fromkeys(nodes, 0)
    found = []
    for rank, place in enumerate(chosen):
        size = sum(1 for other in chosen if other.node == place.node)
        placed = Placed(
            rank=rank,
            node=place.node,
            address=place.address,
            local_rank=seen[place.node],
            local_size=size,
            node_rank=nodes.index(place.node),
        )
        seen[place.node] += 1
        found.append((place, placed))
    return found


def rank_environment(
    spec: GroupSpec, placed: Placed, *, master: tuple[str, int], gpus: Iterable[str]
) -> dict[str, str]:
    """Return the variables of a worker that its node cannot know.

    Args:
        spec: the group.
        placed: where the rank runs.
        master: host and port where rank 0 listens.
        gpus: ids of the accelerators that all workers of this node have, in the order of their ranks.
    """
    host, port = master
    environment: Mapping[str, str] = {
        "RANK": str(placed.rank),
        "WORLD_SIZE": str(spec.num_workers),
        "LOCAL_RANK": str(placed.local_rank),
        "LOCAL_WORLD_SIZE": str(placed.local_size),
        "GROUP_RANK": str(placed.node_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus) if spec.use_gpu else "",
    }
    # Between machines gloo finds the interface by itself; where all run on this machine its name need not resolve.
    lo = {"GLOO_SOCKET_IFNAME": "lo"} if host.startswith(_LOOPBACK) else {}
    return {**lo, **environment, **spec.environment.get(placed.rank, {})}


def _within(place: NodePlace) -> tuple[int, str, int]:
    first = min(place.gpus, key=lambda gpu: (len(gpu), gpu), default="")
    return len(first), first, place.number


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """The arguments of an agent; `holdfast.trainers.function.engines.cluster.agent.run_agent` takes it.

    Attributes:
        host: where the driver listens.
        port: of the driver.
        token: proves that agent and driver belong together.
        number: of this agent among all that were ever started.
        silence_s: a driver that says nothing for so long is gone.
    """

    host: str
    port: int
    token: str = field(repr=False)
    number: int
    silence_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacesChanged:
    """The places for workers now.

    Attributes:
        places: all of them.
        missing: why there are not more, for people.
        draining: nodes that are about to go: seconds until then, when that was seen. Nothing is started there any more.
        spares: nodes without a place, on which an agent may get ready for a place that comes later.
    """

    places: Sequence[NodePlace]
    missing: str = ""
    draining: Mapping[str, float] = field(default_factory=dict)
    spares: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFailed:
    """An agent could not be started, or has ended; if it was connected, the connection ends too.

    Attributes:
        number: of the agent.
        why: for people.
        module: name of a module that cannot be imported on its node; "" where that is not the cause.
    """

    number: int
    why: str
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No worker can run on this cluster at all."""

    error: BaseException


NodeEvent: TypeAlias = PlacesChanged | AgentFailed | Refused


class Nodes(Protocol):
    """Finds places and starts agents. `post` is called from any thread; no method waits for long."""

    @property
    def host(self) -> str:
        """Address of this machine that nodes can connect to."""

    def open(self, post: Callable[[NodeEvent], Any]) -> None:
        """Begin to look for places; PlacesChanged comes first of all, and whenever they change."""

    def launch(self, node: str, call: AgentCall) -> None:
        """Start an agent on a node. It connects by itself, or AgentFailed comes."""

    def doubt(self, node: str) -> None:
        """Check whether a node still answers: the connection to its agent has ended."""

    def refuse(self, node: str) -> None:
        """Replace the places on this node by others: no worker can run there."""

    def use(self, numbers: frozenset[int]) -> None:
        """Note the places of the running group; others may be given back if they are too many."""

    def end(self, number: int) -> None:
        """End an agent, whatever it does. Idempotent."""

    def close(self) -> None:
        """End all agents and give all places back. Idempotent, bounded."""


def missing_module(words: str) -> str:
    """Return the module that could not be imported, from an error's text; "" if it has another cause."""
    found = _MISSING.findall(words)
    return found[-1] if found else ""
