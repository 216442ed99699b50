"""Places and agents on a Ray cluster: placement groups hold the places, an actor on each node is its agent.

Pure functions decide which groups to ask for and to give back (`plan_changes`), and on which spare nodes an agent gets
ready (`choose_spares`).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from holdfast._log import get_logger
from holdfast.errors import ConfigError, HoldfastError

from ..engine import node_name
from .agent import AgentCall
from .agents import AgentFailed, NodeEvent, NodePlace, PlacesChanged, Refused, missing_module
from .ray_api import NodeFacts, RayApi

_LOG = get_logger("trainers.function")
_ONE_OF = re.compile(r"in\((.*)\)")
T = TypeVar("T")
_LOOK_S = 0.25
_IDLE_S = 1.0  # when all places are known
_CLOSE_S = 10.0
_PATIENCE_S = 30.0
_BACK_S = 0.2  # for a node that did not answer
_BUSY_S = 60.0
_APART = "STRICT_SPREAD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A placement group.

    Attributes:
        first: number of its first place.
        size: number of its places.
        nodes: node of each place that has one now, by its index in the group.
        group: of Ray.
    """

    first: int
    size: int
    nodes: Mapping[int, str] = field(default_factory=dict)
    group: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What to do about the reservations.

    Attributes:
        give_back: indices of reservations to give back.
        ask: sizes of reservations to ask for.
        usable: numbers of the places that workers may be started on.
        extra: numbers of usable places that are given back once they are not in use.
    """

    give_back: tuple[int, ...]
    ask: tuple[int, ...]
    usable: frozenset[int]
    extra: frozenset[int] = frozenset()


def plan_changes(
    held: Sequence[Reservation],
    *,
    most: int,
    alive: Set[str],
    out: Set[str],
    used: Set[int],
    strategy: str,
    keep: Set[str] = frozenset(),
    can_exclude: bool = True,
) -> Changes:
    """Decide what to ask for and to give back, so that ``most`` places are there or about to come.

    A place on a node that is not alive counts: Ray places it again by itself. A place on a node of ``out`` does not:
    Ray does not know that it is unusable. Groups of several places are given back whole or not at all, never in use.

    Args:
        held: the reservations now.
        most: places that are wanted.
        alive: nodes that the cluster holds alive.
        out: nodes that do not answer, are about to go, or cannot run workers.
        used: numbers of the places that a group of workers has.
        strategy: of Ray's placement groups; with STRICT_SPREAD a second place on a node does not count.
        keep: nodes of ``out`` whose places are not given back, as Ray would choose them again.
        can_exclude: whether a place can be asked for that is on none of certain nodes.
    """
    spread = strategy == "STRICT_SPREAD"
    usable, waiting = _count(held, alive=alive, out=out, used=used, spread=spread)
    lacking = most - len(usable) - sum(waiting)
    numbers = [set(range(entry.first, entry.first + entry.size)) for entry in held]
    idle = [not numbers[index] & used for index in range(len(held))]
    lost = [index for index in range(len(held)) if not waiting[index] and not numbers[index] & usable]
    alone = strategy != "STRICT_PACK" and (can_exclude or not spread or not usable)
    ask: list[int] = []
    give_back: list[int] = []
    for index in lost:
        size = held[index].size
        if size <= lacking and (size > 1 or alone or not usable):
            ask.append(size)
            lacking -= size
        elif lacking > 0:
            continue  # nothing replaces it
        if idle[index] and keep.isdisjoint(held[index].nodes.values()):
            give_back.append(index)
    if alone:
        ask += [1] * max(0, lacking)
    # Too many: of unused reservations those that Ray has not placed yet go first, then the newest.
    extra: set[int] = set()
    others = [index for index in range(len(held)) if index not in lost]
    for index in sorted(others, key=lambda index: (not idle[index], -waiting[index], -held[index].first)):
        if held[index].size <= -lacking:
            lacking += held[index].size
            if idle[index]:
                give_back.append(index)
            else:
                extra |= numbers[index]
    gone = {number for index in give_back for number in numbers[index]}
    return Changes(
        give_back=tuple(sorted(give_back)),
        ask=tuple(ask),
        usable=frozenset(usable - gone),
        extra=frozenset(extra & usable),
    )


def _count(
    held: Sequence[Reservation], *, alive: Set[str], out: Set[str], used: Set[int], spread: bool
) -> tuple[set[int], list[int]]:
    """Return the numbers of the usable places, and how many of each reservation Ray has yet to place."""
    found = [
        (entry.first + bundle, node)
        for entry in held
        for bundle, node in entry.nodes.items()
        if node in alive and node not in out
    ]
    usable: set[int] = set()
    taken: set[str] = set()
    for number, node in sorted(found, key=lambda item: (item[0] not in used, item[0])):
        if not spread or node not in taken:
            usable.add(number)
            taken.add(node)
    waiting = [entry.size - sum(1 for node in entry.nodes.values() if node in alive) for entry in held]
    return usable, waiting


def choose_spares(count: int, *, known: Sequence[str], able: Set[str], free: Set[str]) -> tuple[str, ...]:
    """Choose the spare nodes on which an agent gets ready.

    Args:
        count: at most so many.
        known: nodes chosen before; they stay as long as they are able.
        able: nodes that may be chosen.
        free: nodes with room for a worker now.
    """
    kept = [node for node in known if node in able][:count]
    new = sorted(able & free - set(kept))[: count - len(kept)]
    return tuple(sorted(kept + new))


def matches(selector: Mapping[str, str] | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector of Ray selects a node with these labels."""
    return all(_is_meant(wanted, labels.get(name)) for name, wanted in (selector or {}).items())


def _is_meant(wanted: str, value: str | None) -> bool:
    if wanted.startswith("!"):
        return not _is_meant(wanted[1:], value)
    several = _ONE_OF.fullmatch(wanted)
    return value in ([label.strip() for label in several[1].split(",")] if several else [wanted])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a run needs of the cluster.

    Attributes:
        least: fewest workers.
        most: most workers.
        resources: of each worker, amounts by name.
        strategy: of Ray's placement groups.
        labels: of nodes that may be used; None: all.
        spares: nodes at most on which an agent gets ready for a place that is lost; none where an autoscaler would
            remove such a node.
    """

    least: int
    most: int
    resources: Mapping[str, float]
    strategy: str = "PACK"
    labels: Mapping[str, str] | None = None
    spares: int = 0


@dataclass(slots=True)
class _Slot:
    """The actor that holds a bundle's accelerator."""

    actor: Any
    ref: Any
    node: str
    gpus: tuple[str, ...] | None = None


class RayNodes:
    """Implements `holdfast.trainers.function.engines.agents.Nodes`.

    The fewest workers are one placement group: all of them or none. Each further worker is a group of its own, made by
    Ray when there is room. Ray replaces a place whose node dies once it has noticed the death, which takes some 15 s.
    So for a node that does not answer, is about to go or cannot run workers, as many places are requested again at
    once, on other nodes; places too many are given back when no group uses them (`plan_changes`).

    Args:
        api: of the cluster.
        wanted: what the run needs.
        silence_s: a cluster that does not answer for so long is given up, and not before half a minute has passed.
    """

    def __init__(self, api: RayApi, wanted: Wanted, *, silence_s: float = 0.0) -> None:
        self._patience_s = max(_PATIENCE_S, silence_s)
        self._api, self._wanted = api, wanted
        self.host = api.host
        self._post: Callable[[NodeEvent], Any] = lambda _: None
        self._groups: list[Reservation] = []
        self._num_places = 0  # ever asked for
        self._doubted: list[str] = []
        self._refused: set[str] = set()  # nodes that cannot run workers
        self._used: frozenset[int] = frozenset()
        self._leaving: set[int] = set()  # first numbers of groups that are announced no more
        self._spares: tuple[str, ...] = ()
        self._has_spares = False
        self._busy_since: dict[str, float] = {}
        self._gone: set[str] = set()  # nodes that do not answer, while Ray holds them alive
        self._slots: dict[int, _Slot] = {}
        self._lock = threading.Lock()
        self._launches: list[tuple[str, AgentCall]] = []
        self._agents: dict[int, tuple[str, Any, Any]] = {}  # number -> node, actor, reference to its end
        self._ends: list[int] = []
        self._announced: PlacesChanged | None = None
        self._rounds, self._trouble = 0, ""
        self._stop, self._poke = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="holdfast-ray", daemon=True)

    def open(self, post: Callable[[NodeEvent], Any]) -> None:
        """Begin to look for places."""
        self._post = post
        self._thread.start()
        threading.Thread(target=self._watch, name="holdfast-ray-watch", daemon=True).start()

    def launch(self, node: str, call: AgentCall) -> None:
        """Start an agent on a node."""
        with self._lock:
            self._launches.append((node, call))
        self._poke.set()

    def doubt(self, node: str) -> None:
        """Check whether a node still answers."""
        with self._lock:
            self._doubted.append(node)
        self._poke.set()

    def refuse(self, node: str) -> None:
        """Replace the places on this node by others."""
        self._refused.add(node)
        self._poke.set()

    def use(self, numbers: frozenset[int]) -> None:
        """Note which places a group has."""
        self._used = numbers
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
            for size in [self._wanted.least] + [1] * (self._wanted.most - self._wanted.least):
                self._reserve_group(size)
            self._has_spares = self._wanted.spares > 0 and not self._api.shrinks()
            while not self._stop.is_set():
                try:
                    self._round()
                    self._rounds, self._trouble = self._rounds + 1, ""
                except HoldfastError:
                    raise
                except Exception as error:  # noqa: BLE001 - Ray's own; `_watch` says when it has been too long
                    self._trouble = f" ({type(error).__name__}: {_words(error)})"
                    _LOG.debug("the cluster did not answer: %s", error)
                waits = self._announced is None or self._announced.missing
                self._poke.wait(_LOOK_S if waits else _IDLE_S)
                self._poke.clear()
        except HoldfastError as error:
            self._post(Refused(error=error))
        except Exception as error:  # noqa: BLE001 - a thread edge: without the cluster the run cannot begin
            self._trouble = f" ({type(error).__name__}: {_words(error)})"
            self._post(Refused(error=self._silence("has refused to answer")))
        finally:
            self._give_back()

    def _watch(self) -> None:
        """Refuse the cluster when it has not answered for too long. A call of Ray may wait much longer than that.

        Time in which this process itself did not run (it was stopped, say) is not silence: it counts as one poll.
        """
        seen, silent_s = self._rounds, 0.0
        while not self._stop.wait(_IDLE_S):
            seen, silent_s = self._rounds, silent_s + _IDLE_S if seen == self._rounds else 0.0
            if silent_s >= self._patience_s:
                self._post(Refused(error=self._silence(f"has not answered for {self._patience_s:.0f} s")))
                return

    def _silence(self, what: str) -> HoldfastError:
        return HoldfastError(
            f"the Ray cluster {what}{self._trouble}: its head node is gone, or this machine is cut off from it. What "
            "was saved is safe; start the cluster, then the same script again: it goes on from the newest checkpoint"
        )

    def _reserve_group(self, size: int, *, avoid: Collection[str] = (), near: str | None = None) -> None:
        wanted = self._wanted
        bundles = [wanted.resources] * size
        try:
            group = self._api.reserve(bundles, wanted.strategy, wanted.labels, avoid=avoid, near=near)
        except ValueError as error:
            raise ConfigError(f"ScalingConfig: Ray cannot reserve {bundles[0]} for each worker: {error}") from error
        self._groups.append(Reservation(first=self._num_places, size=size, group=group))
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
        draining = {node: left for node, left in self._api.draining().items() if node in nodes}
        placed = self._api.bundles([reserved.group for reserved in self._groups])
        held = [replace(reserved, nodes=nodes) for reserved, nodes in zip(self._groups, placed, strict=True)]
        changes = self._balance(held, nodes, self._gone | self._refused | draining.keys())
        self._tell_places(held, nodes, changes, draining)

    def _each(self, waiting: list[T]) -> Iterator[T]:
        """Yield and remove each waiting item; an item at which a call of Ray fails stays for the next round."""
        while waiting:
            yield waiting[0]
            with self._lock:
                del waiting[0]

    def _balance(self, held: Sequence[Reservation], nodes: Mapping[str, NodeFacts], out: Set[str]) -> Changes:
        """Ask for missing places, give back those that are too many; return the decision.

        Places to give back are not announced for a round before that: a group may be about to take them.
        """
        changes = plan_changes(
            held,
            most=self._wanted.most,
            alive=nodes.keys(),
            out=out,
            used=self._used,
            strategy=self._wanted.strategy,
            keep=frozenset() if self._api.can_exclude else self._refused,
            can_exclude=self._api.can_exclude,
        )
        mine = {node for reservation in held for node in reservation.nodes.values()}
        self._choose_spares(nodes, nodes.keys() - out - mine)
        leaving = {self._groups[index].first for index in changes.give_back}
        for reserved in [group for group in self._groups if group.first in leaving & self._leaving]:
            self._groups.remove(reserved)
            self._give_group_back(reserved)
        self._leaving = leaving
        spread = mine if self._wanted.strategy == _APART else set()
        ready = [node for node in self._spares if any(where == node for where, _, _ in self._agents.values())]
        for size in changes.ask:
            self._reserve_group(size, avoid=out | spread, near=ready.pop() if ready else None)
        return changes

    def _choose_spares(self, nodes: Mapping[str, NodeFacts], able: Set[str]) -> None:
        """Choose spare nodes; drop a node that other jobs have filled for long."""
        if not self._has_spares:
            return
        wanted, now = self._wanted.resources, time.monotonic()
        able = {
            node
            for node in able
            if matches(self._wanted.labels, nodes[node].labels) and _fits(wanted, nodes[node].resources)
        }
        room = self._api.free()
        free = {node for node in able if _fits(wanted, room.get(node, {}))}
        self._busy_since = {node: self._busy_since.get(node, now) for node in able - free}
        able -= {node for node, since in self._busy_since.items() if now > since + _BUSY_S}
        self._spares = choose_spares(self._wanted.spares, known=self._spares, able=able, free=free)

    def _see_ended(self) -> None:
        for ref in self._api.ended([ref for _, _, ref in self._agents.values()]):
            number = next(number for number, (_, _, end) in self._agents.items() if end == ref)
            del self._agents[number]
            try:
                why = f"its agent ended: {self._api.outcome(ref)}"
            except Exception as error:  # noqa: BLE001 - Ray's own, and whatever the agent raised
                why = _words(error)
            self._post(AgentFailed(number=number, why=why, module=missing_module(why)))

    def _tell_places(
        self,
        held: Sequence[Reservation],
        nodes: Mapping[str, NodeFacts],
        changes: Changes,
        draining: Mapping[str, float],
    ) -> None:
        places = []
        left = {reserved.first for reserved in self._groups}
        for reservation in held:
            for bundle, node in reservation.nodes.items():
                number = reservation.first + bundle
                # A group may still run on a place that is about to go: the seconds of its node are announced too.
                if number in changes.usable or (node in draining and node not in self._gone | self._refused):
                    gpus = self._gpus(number, reservation.group, bundle, node) if reservation.first in left else None
                    if gpus is not None:
                        where = {"node": node, "address": nodes[node].address}
                        extra = number in changes.extra
                        places.append(NodePlace(**where, number=number, gpus=gpus, extra=extra))
        alive = {node: facts for node, facts in nodes.items() if node not in self._gone}
        missing = self._missing(alive) if len(changes.usable) < self._wanted.most else ""
        news = PlacesChanged(places=tuple(places), missing=missing, draining=draining, spares=self._spares)
        # Seconds that have passed since are not news.
        known = self._announced
        if known is None or replace(news, draining=known.draining) != known or draining.keys() != known.draining.keys():
            self._announced = news
            self._post(news)

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
                _LOG.debug("the actor of place %d on %s failed: %s", number, node_name(node), _words(error))
                del self._slots[number]
        return slot.gpus

    def _missing(self, alive: Mapping[str, NodeFacts]) -> str:
        names = self._wanted.resources
        each = ", ".join(f"{name} {amount:g}" for name, amount in names.items())
        resources = "; ".join(
            f"{node_name(node, facts.address)}: {', '.join(f'{n} {facts.resources.get(n, 0):g}' for n in names)}"
            for node, facts in sorted(alive.items())
        )
        chosen = f", on nodes with the labels {dict(self._wanted.labels)}" if self._wanted.labels else ""
        return f"each worker needs {each}{chosen} (strategy {self._wanted.strategy}); the cluster has {resources}"

    def _give_back(self) -> None:
        for actor in [actor for _, actor, _ in self._agents.values()] + [slot.actor for slot in self._slots.values()]:
            self._kill(actor)
        for reserved in self._groups:
            self._give_group_back(reserved)
        try:
            self._api.close()
        except Exception as error:  # noqa: BLE001 - as above
            _LOG.debug("the owner of the placement groups was not ended: %s", error)

    def _give_group_back(self, reserved: Reservation) -> None:
        try:
            self._api.release(reserved.group)
        except Exception as error:  # noqa: BLE001 - the cluster may be gone; the group goes with this driver
            _LOG.debug("a placement group was not given back: %s", error)

    def _kill(self, actor: Any) -> None:
        try:
            self._api.kill(actor)
        except Exception as error:  # noqa: BLE001 - it may be dead
            _LOG.debug("an actor was not ended: %s", error)


def _fits(wanted: Mapping[str, float], resources: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in wanted.items())


def _words(error: BaseException) -> str:
    """Return the cause in an error of Ray, for people: what the actor raised, or why it is dead.

    The text of a RayTaskError is a traceback that begins with the name of the actor and ends with the exception; that
    of a RayActorError says that the actor died, then facts, indented, then why.
    """
    text = str(error)
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException) and str(cause).strip():
        found = [f"{type(cause).__name__}: {cause}"]
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        indented = [at for at, line in enumerate(lines) if line[0].isspace()]
        if any(line.lstrip().startswith('File "') for line in lines):
            lines = lines[indented[-1] + 1 :] or lines[-1:]
        found = [line for line in lines if not line[0].isspace()] or lines
    if "No module named" in text and "No module named" not in " ".join(found):
        found = [line for line in text.splitlines() if "No module named" in line]
    return " ".join(" ".join(found).split())[:500] or type(error).__name__
