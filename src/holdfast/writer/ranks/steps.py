"""How ranks agree on a step without waiting for each other: rank 0's side, as a pure object. Events in, messages out.

A proposal names a step S that nobody has done yet. Each rank shows it to its trainer and acknowledges, unless the
trainer was at S already; then another S is tried, further away. When all have acknowledged, S is armed. A trainer that
comes to S before that waits for the word: so no rank acts at a step that another one has passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["RankStanding", "StepAgreement"]

Sent = tuple[int | None, dict[str, Any]]  # (rank, or None for all; message)
# From "settle" on each does what those before it do, but for the last, which leaves a state that is not to be saved.
# A snapshot waits for nothing: where it is left out for something else, it is asked for again.
_URGENCY = {"keep": 0, "settle": 1, "save": 2, "stop": 3, "rollback": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding:
    """Where one rank is, by what its board says.

    Attributes:
        done: steps its trainer has done.
        acted: last agreed step it has acted at.
        target: step it has been shown, None for none.
        armed: whether that step is armed there.
        kind: what for.
    """

    done: int
    acted: int = -1
    target: int | None = None
    armed: bool = False
    kind: str = "save"


class StepAgreement:
    """Proposes steps, one at a time; what is wanted meanwhile comes next.

    Every message about a step that is not the current one is old and counts for nothing.

    Args:
        world_size: number of ranks.
        margin: how far beyond the last known step the first proposal is. In step with each other, ranks are at most
            one step apart, so 2 is the nearest that works.

    Attributes:
        step: the step proposed or armed, None while there is none.
        kind: what all ranks do at it: "save", "stop" (save and leave), "settle" (raise what failed), "keep" (a
            snapshot in memory), "rollback" (leave).
        armed: whether all ranks know.
    """

    def __init__(self, world_size: int, *, margin: int = 2) -> None:
        self._world_size, self._margin = world_size, margin
        self.step: int | None = None
        self.kind = "save"
        self.armed = False
        self._standing: dict[int, RankStanding] = {}  # as they joined, until all have
        self._gathered = False
        self._done = dict.fromkeys(range(world_size), -1)
        self._waiting: set[int] = set()  # ranks that have not acknowledged; once armed: not acted
        self._next: str | None = None
        self._highest = -1
        self._broken = False

    @property
    def gathered(self) -> bool:
        """Whether all ranks have joined (this writer of rank 0) once."""
        return self._gathered

    def wants(self, kind: str) -> bool:
        """Tell whether a wish of this kind waits, or is being carried out."""
        return self._next == kind or (self.step is not None and self.kind == kind)

    def want(self, kind: str, rank: int | None = None) -> list[Sent]:
        """A rank, or the server itself (None), wants all ranks to do ``kind`` at a step.

        Wishes of a kind that is on its way count once. A rank that has acted at the armed step means another one: the
        others may be on their way to it still. What the server wants may be news to those who have acted, so it counts
        as a wish for another step as well.
        """
        if self._broken:
            return []
        if self.step is None and self._gathered:
            return self._propose(kind)
        if self.step is not None and not self.armed and _URGENCY[kind] > _URGENCY[self.kind]:
            return self._propose(kind)
        is_under_way = self.step is not None and (not self.armed or rank in self._waiting)
        known = [other for other in (self.kind if is_under_way else None, self._next) if other is not None]
        if all(_URGENCY[kind] > _URGENCY[other] for other in known):
            self._next = kind
        return []

    def joined(self, rank: int, standing: RankStanding) -> list[Sent]:
        """A rank has joined, or joined again after it was cut off."""
        self._done[rank] = max(self._done[rank], standing.done)
        if not self._gathered:
            self._standing[rank] = standing
            return self._gather() if len(self._standing) == self._world_size else []
        if self.step is None:
            return [(rank, {"do": "withdraw"})] if standing.target is not None else []
        if standing.acted >= self.step:
            return self.acted(rank, self.step)
        if standing.target != self.step:
            return [(rank, self._proposal())]
        if not self.armed:
            return self.acknowledged(rank, self.step)
        return [] if standing.armed else [(rank, {"do": "arm", "step": self.step})]

    def acknowledged(self, rank: int, step: int) -> list[Sent]:
        """A rank has shown the proposal to its trainer in time."""
        if step != self.step:
            return []
        if self.armed:  # it was cut off, and has seen the armed proposal again
            return [(rank, {"do": "arm", "step": step})]
        self._waiting.discard(rank)
        if self._waiting:
            return []
        self.armed = True
        self._waiting = set(range(self._world_size))
        return [(None, {"do": "arm", "step": step})]

    def passed(self, rank: int, step: int, done: int) -> list[Sent]:
        """A rank's trainer had done the proposed step already: try one further away."""
        self._done[rank] = max(self._done[rank], done)
        if step != self.step or self.armed:
            return []
        self._margin *= 2
        return self._propose(self.kind)

    def acted(self, rank: int, step: int) -> list[Sent]:
        """A rank has come to the armed step and acts."""
        self._done[rank] = max(self._done[rank], step)
        if step != self.step or not self.armed:
            return []
        self._waiting.discard(rank)
        if self._waiting:
            return []
        self.step, self.armed = None, False
        kind, self._next = self._next, None
        return [] if kind is None else self._propose(kind)

    def at(self, rank: int, done: int) -> None:
        """Learn how far a rank is; any message may tell."""
        self._done[rank] = max(self._done[rank], done)

    def broken(self) -> list[Sent]:
        """A rank is gone for good: an open proposal is taken back, an armed one stands, nothing new is proposed."""
        if self._broken:
            return []
        self._broken = True
        self._next = None
        out: list[Sent] = []
        if self.step is not None and not self.armed:
            self.step = None
            out.append((None, {"do": "withdraw"}))
        return [*out, (None, {"do": "broken"})]

    def _gather(self) -> list[Sent]:
        """All ranks are there for the first time (of this writer): take over what an earlier one had armed."""
        self._gathered = True
        standings, self._standing = self._standing, {}
        self._highest = max(
            (standing.target for standing in standings.values() if standing.target is not None), default=-1
        )
        armed = {
            standing.target: standing.kind
            for standing in standings.values()
            if standing.armed and standing.target is not None
        }
        open_ = {step for step in armed if any(standing.acted < step for standing in standings.values())}
        if open_:
            self.step = max(open_)
            self.kind, self.armed = armed[self.step], True
            self._waiting = {rank for rank, one in standings.items() if one.acted < self.step}
            return [(rank, {"do": "arm", "step": self.step}) for rank in sorted(self._waiting)]
        out: list[Sent] = [(rank, {"do": "withdraw"}) for rank, one in standings.items() if one.target is not None]
        kind, self._next = self._next, None
        return out if kind is None else [*out, *self._propose(kind)]

    def _propose(self, kind: str) -> list[Sent]:
        self.kind, self.armed = kind, False
        # Never a step that was proposed before: words about it may still be on their way.
        self.step = self._highest = max(max(self._done.values()) + self._margin, self._highest + 1)
        self._waiting = set(range(self._world_size))
        return [(None, self._proposal())]

    def _proposal(self) -> dict[str, Any]:
        return {"do": "propose", "step": self.step, "kind": self.kind}
