"""Places and agents on a Ray cluster: placement groups hold the places, an actor on each node is its agent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import ConfigError, HoldfastError

from .nodes import AgentCall, AgentFailed, NodeEvent, PlacesChanged, Refused
from .places import NodePlace, short
from .ray_api import NodeFacts, RayApi

__all__ = ["RayNodes", "Wanted"]

_LOG = get_logger("runtime")
_LOOK_S = 0.25
_IDLE_S = 1.0  # where all places are there already
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked of the cluster.

    Attributes:
        least: fewest workers.
        most: most workers.
        resources: of each worker, amounts by name.
        strategy: of Ray's placement groups.
        labels: of nodes that may be used; None: all.
    """

    least: int
    most: int
    resources: Mapping[str, float]
    strategy: str = "PACK"
    labels: Mapping[str, str] | None = None


@dataclass(slots=True)
class _Slot:
    """The actor that holds a bundle's accelerator."""

    actor: Any
    ref: Any
    node: str
    gpus: tuple[str, ...] | None = None


class RayNodes:
    """Implements `holdfast.trainers.function.engines.cluster.nodes.Nodes`.

    The fewest workers are one placement group: all of them or none. Each one more is a group of its own, which Ray
    makes when there is room. A bundle whose node dies is placed again by Ray; the others stay.

    Args:
        api: of the cluster.
        wanted: what is asked of it.
    """

    def __init__(self, api: RayApi, wanted: Wanted) -> None:
        self._api, self._wanted = api, wanted
        self.host = api.host
        self._post: Callable[[NodeEvent], Any] = lambda _: None
        self._groups: list[tuple[Any, int]] = []  # with the number of its first place
        self._slots: dict[int, _Slot] = {}
        self._lock = threading.Lock()
        self._launches: list[tuple[str, AgentCall]] = []
        self._agents: dict[int, tuple[str, Any, Any]] = {}  # number -> node, actor, what its end will be
        self._ends: list[int] = []
        self._told: PlacesChanged | None = None
        self._stop, self._poke = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="holdfast-ray", daemon=True)

    def open(self, post: Callable[[NodeEvent], Any]) -> None:
        """Begin to look for places."""
        self._post = post
        self._thread.start()

    def launch(self, node: str, call: AgentCall) -> None:
        """Start an agent on a node."""
        with self._lock:
            self._launches.append((node, call))
        self._poke.set()

    def end(self, number: int) -> None:
        """End an agent."""
        with self._lock:
            self._ends.append(number)
        self._poke.set()

    def close(self) -> None:
        """End all agents and give all places back. Idempotent, bounded."""
        self._stop.set()
        self._poke.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    # ---- the thread that talks to Ray

    def _work(self) -> None:
        try:
            self._reserve()
            while not self._stop.is_set():
                self._round()
                waits = self._told is None or self._told.missing
                self._poke.wait(_LOOK_S if waits else _IDLE_S)
                self._poke.clear()
        except HoldfastError as error:
            self._post(Refused(error=error))
        except Exception as error:  # noqa: BLE001 - a thread edge: without the cluster the run cannot go on
            if not self._stop.is_set():
                _LOG.debug("the cluster failed", exc_info=error)
                lost = HoldfastError(f"the Ray cluster does not answer any more: {type(error).__name__}: {error}")
                self._post(Refused(error=lost))
        finally:
            self._give_back()

    def _reserve(self) -> None:
        wanted = self._wanted
        sizes = [wanted.least] + [1] * (wanted.most - wanted.least)
        first = 0
        for size in sizes:
            group = self._api.reserve([wanted.resources] * size, wanted.strategy, wanted.labels)
            self._groups.append((group, first))
            first += size

    def _round(self) -> None:
        with self._lock:
            launches, self._launches = self._launches, []
            ends, self._ends = self._ends, []
        for number in ends:
            if number in self._agents:
                self._kill(self._agents.pop(number)[1])
        for node, call in launches:
            actor = self._api.start_agent(node)
            self._agents[call.number] = (node, actor, self._api.serve(actor, asdict(call)))
        self._see_ended()
        self._tell_places()

    def _see_ended(self) -> None:
        for ref in self._api.ended([ref for _, _, ref in self._agents.values()]):
            number = next(number for number, (_, _, one) in self._agents.items() if one == ref)
            node, _, _ = self._agents.pop(number)
            try:
                why = f"its agent ended: {self._api.outcome(ref)}"
            except Exception as error:  # noqa: BLE001 - Ray's own, and whatever the agent raised
                why = _words(error)
                if "No module named" in why:
                    text = f"{short(node)}: {why}; every node needs the packages of the driver"
                    self._post(Refused(error=ConfigError(text)))
            self._post(AgentFailed(number=number, why=why))

    def _tell_places(self) -> None:
        alive = self._api.nodes()
        places = []
        for (group, first), bundles in zip(
            self._groups, self._api.bundles([group for group, _ in self._groups]), strict=True
        ):
            for bundle, node in bundles.items():
                if node in alive:
                    gpus = self._gpus(first + bundle, group, bundle, node)
                    if gpus is not None:
                        address = alive[node].address
                        places.append(NodePlace(node=node, address=address, number=first + bundle, gpus=gpus))
        missing = self._missing(alive) if len(places) < self._wanted.most else ""
        draining = {node: left for node, left in self._api.draining().items() if node in alive}
        told = PlacesChanged(places=tuple(places), missing=missing, draining=draining)
        # Seconds that go by are no news.
        known = self._told
        if known is None or (told.places, missing, set(draining)) != (known.places, known.missing, set(known.draining)):
            self._told = told
            self._post(told)

    def _gpus(self, number: int, group: Any, bundle: int, node: str) -> tuple[str, ...] | None:
        """Return the accelerators of a place; None: not known yet."""
        if not self._wanted.resources.get("GPU"):
            return ()
        slot = self._slots.get(number)
        if slot is None or slot.node != node:
            actor, ref = self._api.start_slot(group, bundle, self._wanted.resources)
            slot = self._slots[number] = _Slot(actor, ref, node)
        if slot.gpus is None and self._api.ended([slot.ref]):
            try:
                slot.gpus = tuple(self._api.outcome(slot.ref))
            except Exception as error:  # noqa: BLE001 - Ray's own
                _LOG.debug("the actor of place %d on %s failed: %s", number, short(node), _words(error))
                del self._slots[number]
        return slot.gpus

    def _missing(self, alive: Mapping[str, NodeFacts]) -> str:
        names = self._wanted.resources
        each = ", ".join(f"{name} {amount:g}" for name, amount in names.items())
        there = "; ".join(
            f"{short(node, facts.address)}: {', '.join(f'{n} {facts.resources.get(n, 0):g}' for n in names)}"
            for node, facts in sorted(alive.items())
        )
        chosen = f", on nodes with the labels {dict(self._wanted.labels)}" if self._wanted.labels else ""
        return f"each worker needs {each}{chosen} (strategy {self._wanted.strategy}); the cluster has {there}"

    def _give_back(self) -> None:
        for actor in [actor for _, actor, _ in self._agents.values()] + [slot.actor for slot in self._slots.values()]:
            self._kill(actor)
        for group, _ in self._groups:
            try:
                self._api.release(group)
            except Exception as error:  # noqa: BLE001 - the cluster may be gone; the group goes with this driver
                _LOG.debug("a placement group was not given back: %s", error)

        try:
            self._api.close()
        except Exception as error:  # noqa: BLE001 - as above
            _LOG.debug("the owner of the placement groups was not ended: %s", error)

    def _kill(self, actor: Any) -> None:
        try:
            self._api.kill(actor)
        except Exception as error:  # noqa: BLE001 - it may be dead
            _LOG.debug("an actor was not ended: %s", error)


def _words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "No module named" in line]
    return (telling or lines or [type(error).__name__])[0][:500]
