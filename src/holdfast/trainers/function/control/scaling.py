"""How many workers the next group has: a decision without side effects."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ScalingPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """Between two sizes, as many workers as there is room for.

    Attributes:
        least: fewer are not started.
        most: more are not started.
        settle_s: how long room for fewer than ``most`` has to be unchanged before it is taken: nodes come and go one
            after another.
    """

    least: int
    most: int
    settle_s: float = 0.0

    @property
    def is_elastic(self) -> bool:
        """Whether groups may differ in size."""
        return self.least < self.most

    def size(self, room: int, unchanged_s: float) -> int | None:
        """Choose the size of the group to start now; None: wait.

        Args:
            room: number of workers that there are places for.
            unchanged_s: for how long that has been so.
        """
        if room >= self.most:
            return self.most
        return room if room >= self.least and unchanged_s >= self.settle_s else None
