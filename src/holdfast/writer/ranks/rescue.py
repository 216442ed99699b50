"""Which snapshot is rescued where several ranks save together: a pure object, for rank 0's writer.

A writer whose trainer has died, or has left its body with an error, *offers* the snapshots that it holds, sealed: the
trainer changes none of them any more. Once all ranks have offered, the newest one that all of them hold is chosen; each
stores its part, as of any save, and then it is committed. Ranks that train together are at most one step apart, and
each holds its newest two: so all hold the newest one of the rank that is behind.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["RescueAgreement"]


class RescueAgreement:
    """One choice in the life of a group of ranks.

    Args:
        world_size: number of ranks.

    Attributes:
        chosen: id of the save that all ranks store; "" if none is; None before that is decided.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._offers: dict[int, Mapping[str, int]] = {}
        self._stored: set[int] = set()
        self.chosen: str | None = None

    def offered(self, rank: int, held: Mapping[str, int]) -> None:
        """Note the steps of the snapshots that a rank holds, by the ids of their saves."""
        self._offers[rank] = held

    def decide(self, committed: int) -> bool:
        """Choose, if all ranks have offered; True if that was decided just now.

        Args:
            committed: newest step that is committed; nothing older is chosen.
        """
        if self.chosen is not None or len(self._offers) < self._world_size:
            return False
        first, *others = self._offers.values()
        common = {save: step for save, step in first.items() if all(other.get(save) == step for other in others)}
        save = max(common, key=common.__getitem__, default="")
        self.chosen = save if save and common[save] > committed else ""
        return True

    def refuse(self) -> bool:
        """Note that a rank offers nothing; True if it was not decided before."""
        undecided = self.chosen is None
        self.chosen = self.chosen or ""
        return undecided

    def stored(self, rank: int) -> bool:
        """Note that a rank has stored its part; True when that was the last one."""
        before = len(self._stored)
        self._stored.add(rank)
        return before < len(self._stored) == self._world_size

    def needs(self, rank: int) -> bool:
        """Tell whether the part of a rank is still to come."""
        return bool(self.chosen) and rank not in self._stored
