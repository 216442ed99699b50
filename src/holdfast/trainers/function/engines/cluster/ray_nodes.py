"""Places and agents on a Ray cluster: placement groups hold the places, an actor on each node is its agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from holdfast._log import get_logger
from holdfast.errors import ConfigError, HoldfastError

from .nodes import AgentCall, AgentFailed, NodeEvent, PlacesChanged, Refused
from .places import NodePlace, short
from .ray_api import NodeFacts, RayApi

__all__ = ["RayNodes", "Wanted"]

_LOG = get_logger("runtime")
T = TypeVar("T")
_LOOK_S = 0.25
_IDLE_S = 1.0  # where all places are there already
_CLOSE_S = 10.0
_PATIENCE_S = 60.0
_BACK_S = 0.2  # for a node that did not answer


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


@dataclass(frozen=True, slots=True)
class _Reserved:
    """A placement group.

    Attributes:
        group: of Ray.
        first: number of its first place.
        size: number of its places.
    """

    group: Any
    first: int
    size: int


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
    makes when there is room. A bundle whose node dies is placed again by Ray, once it has noticed the death, which
    takes some 15 s. So for a node that has lost its agent and does not answer, as many places are asked for again at
    once; what Ray places again later is spare, and given back with the rest.

    Args:
        api: of the cluster.
        wanted: what is asked of it.
    """

    def __init__(self, api: RayApi, wanted: Wanted) -> None:
        self._api, self._wanted = api, wanted
        self.host = api.host
        self._post: Callable[[NodeEvent], Any] = lambda _: None
        self._groups: list[_Reserved] = []
        self._num_places = 0  # ever asked for
        self._doubted: list[str] = []
        self._gone: set[str] = set()  # nodes that do not answer, while Ray holds them alive
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

    def doubt(self, node: str) -> None:
        """Look whether a node is still there."""
        with self._lock:
            self._doubted.append(node)
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
            failing: float | None = None
            while not self._stop.is_set():
                try:
                    self._round()
                    failing = None
                except HoldfastError:
                    raise
                except Exception as error:
                    failing = failing or time.monotonic()
                    if time.monotonic() - failing > _PATIENCE_S:
                        raise
                    _LOG.debug("the cluster did not answer: %s", error)
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
        for size in [self._wanted.least] + [1] * (self._wanted.most - self._wanted.least):
            self._reserve_group(size)

    def _reserve_group(self, size: int) -> None:
        wanted = self._wanted
        group = self._api.reserve([wanted.resources] * size, wanted.strategy, wanted.labels)
        self._groups.append(_Reserved(group, self._num_places, size))
        self._num_places += size

    def _round(self) -> None:
        for number in self._each(self._ends):
            if number in self._agents:
                self._kill(self._agents.pop(number)[1])
        for node, call in self._each(self._launches):
            actor = self._api.start_agent(node)
            self._agents[call.number] = (node, actor, self._api.serve(actor, asdict(call)))
        self._see_ended()
        nodes = self._api.nodes()
        self._gone = {node for node in self._gone & nodes.keys() if not nodes[node].answers(_BACK_S)}
        for node in self._each(self._doubted):
            if node in nodes.keys() - self._gone and not nodes[node].answers():
                self._gone.add(node)
                self._replace_places_on(node)
        self._tell_places({node: facts for node, facts in nodes.items() if node not in self._gone})

    def _each(self, waiting: list[T]) -> Iterator[T]:
        """Give what waits, one after another; what the cluster has failed at stays for the next round."""
        while waiting:
            yield waiting[0]
            with self._lock:
                del waiting[0]

    def _replace_places_on(self, node: str) -> None:
        """Ask for as many places as a lost node had."""
        if self._wanted.strategy.startswith("STRICT"):
            return  # what is asked for alone would not keep to it
        lost = [
            reserved
            for reserved, bundles in zip(self._groups, self._bundles(), strict=True)
            for where in bundles.values()
            if where == node
        ]
        for reserved in lost:
            if reserved.size == 1:  # nothing else is in it: Ray need not place it again
                self._groups.remove(reserved)
                self._give_group_back(reserved)
            self._reserve_group(1)

    def _bundles(self) -> list[dict[int, str]]:
        return self._api.bundles([reserved.group for reserved in self._groups])

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

    def _tell_places(self, alive: Mapping[str, NodeFacts]) -> None:
        places = []
        for reserved, bundles in zip(self._groups, self._bundles(), strict=True):
            for bundle, node in bundles.items():
                if node in alive:
                    number = reserved.first + bundle
                    gpus = self._gpus(number, reserved.group, bundle, node)
                    if gpus is not None:
                        places.append(NodePlace(node=node, address=alive[node].address, number=number, gpus=gpus))
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
        for reserved in self._groups:
            self._give_group_back(reserved)
        try:
            self._api.close()
        except Exception as error:  # noqa: BLE001 - as above
            _LOG.debug("the owner of the placement groups was not ended: %s", error)

    def _give_group_back(self, reserved: _Reserved) -> None:
        try:
            self._api.release(reserved.group)
        except Exception as error:  # noqa: BLE001 - the cluster may be gone; the group goes with this driver
            _LOG.debug("a placement group was not given back: %s", error)

    def _kill(self, actor: Any) -> None:
        try:
            self._api.kill(actor)
        except Exception as error:  # noqa: BLE001 - it may be dead
            _LOG.debug("an actor was not ended: %s", error)


def _words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "No module named" in line]
    return (telling or lines or [type(error).__name__])[0][:500]
