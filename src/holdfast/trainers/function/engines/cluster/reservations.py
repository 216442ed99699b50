"""Which placement groups to request, which to give back, on which spare nodes an agent gets ready: pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

__all__ = ["Changes", "Reservation", "choose_spares", "matches", "plan_changes"]

_ONE_OF = re.compile(r"in\((.*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A placement group as it is now.

    Attributes:
        first: number of its first place.
        size: number of its places.
        nodes: node of each place that has one, by its index in the group.
    """

    first: int
    size: int
    nodes: Mapping[int, str]


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
