"""What the cluster engine needs of a cluster: places for workers, and an agent on each node."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from .places import NodePlace

__all__ = ["AgentCall", "AgentFailed", "NodeEvent", "Nodes", "PlacesChanged", "Refused", "missing_module"]

_MISSING = re.compile(r"No module named '([^']+)'")


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
