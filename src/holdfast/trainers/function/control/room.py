"""Waiting for room: how many workers the cluster can hold now, for how long too few, and the messages about it."""

from __future__ import annotations

from holdfast.errors import TrainingError

from ..engine import Capacity
from .plan import RunSpec
from .policy import growth_pause_s

__all__ = ["Room"]

_QUIET_S = 2.0  # a wait as short as this is not mentioned


class Room:
    """How much room an engine says that it has; one machine, which says nothing, has room for every worker.

    Args:
        plan: of the run.

    Attributes:
        num_workers: how many workers there is room for; None: not known yet.
    """

    def __init__(self, plan: RunSpec) -> None:
        self._plan, self._policy = plan, plan.scaling
        self.num_workers: int | None = None if plan.finds_places else plan.num_workers
        self._num_ready: int | None = None
        self._detail = "nothing is known of the cluster yet"
        self._since = 0.0
        self._waiting_since: float | None = None
        self._said: str | None = None

    def update(self, event: Capacity, now: float) -> None:
        """Take in what the engine says."""
        if event.num_workers != self.num_workers:
            self._since = now
        self.num_workers, self._num_ready, self._detail = event.num_workers, event.num_ready, event.detail

    def wait(self, now: float) -> None:
        """Begin to wait for the start of a group; a wait that was not `satisfied` goes on."""
        if self._waiting_since is None:
            self._waiting_since, self._said = now, None

    def satisfied(self) -> None:
        """Note that a group runs."""
        self._waiting_since = None

    def size(self, now: float) -> int | None:
        """Return the size of the group to start; None: there is too little room, or its size still changes."""
        return None if self.num_workers is None else self._policy.size(self.num_workers, now - self._since)

    def deadline(self) -> float | None:
        """Return when `size`, `words` or `error` changes if nothing happens; None: never."""
        if self._waiting_since is None:
            return None
        times = [self._waiting_since + self._plan.limits.place_s]
        if self._said is None:
            times.append(self._waiting_since + _QUIET_S)
        if self.num_workers is not None and self._policy.least <= self.num_workers < self._policy.most:
            times.append(self._since + self._policy.settle_s)
        return min(times)

    def words(self, now: float) -> str | None:
        """Return what the run waits for, once, and again when it changes; else None."""
        if self._waiting_since is None or now < self._waiting_since + _QUIET_S or self._said == self._detail:
            return None
        self._said = self._detail
        until = self._waiting_since + self._plan.limits.place_s
        return f"waiting for room for {self._wanted}, for {max(0.0, until - now):.0f} s at most: {self._detail}"

    def error(self, now: float) -> TrainingError | None:
        """Return the error that ends the run if the wait was too long, else None."""
        limit = self._plan.limits.place_s
        if self._waiting_since is None or now < self._waiting_since + limit:
            return None
        return TrainingError(
            f"there was no room for {self._wanted} within {limit:g} s (HOLDFAST_PLACEMENT_TIMEOUT_S): {self._detail}. "
            "Add nodes, end what else runs there, or ask for less in ScalingConfig; the same command again goes on"
        )

    def growth(self, size: int, running_since: float, growth_s: float) -> float | None:
        """Return when a group of ``size`` that runs since ``running_since`` should grow; None: it should not.

        It trains on until workers start at once in the new places. ``growth_s``: see `growth_pause_s`.
        """
        room = None if self.num_workers is None else min(self.num_workers, self._policy.most)
        if room is None or room <= size or (self._num_ready is not None and self._num_ready < room):
            return None
        limits = self._plan.limits
        pause_s = growth_pause_s(limits.grow_after_s, growth_s)
        return max(self._since + limits.settle_capacity_s, running_since + pause_s)

    @property
    def _wanted(self) -> str:
        least, most = self._policy.least, self._policy.most
        return f"{most} worker{'s' if most > 1 else ''}" if least == most else f"{least} to {most} workers"
