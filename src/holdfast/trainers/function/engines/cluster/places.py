"""Which rank runs where, and which variables it gets for that: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.trainers.function.engine import GroupSpec, Placed

__all__ = ["NodePlace", "arrange", "rank_environment"]

_LOOPBACK = ("127.", "::1", "localhost")


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
