"""What saving cost: blocked time, and the time lost to the writing in the background."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["SaveCosts", "Stats", "StepClock"]

_TOLD_EVERY_S = 1.0  # a snapshot of each step would be a message of each step


@dataclass(slots=True)
class Stats:
    """Totals of one `Checkpointer`.

    Attributes:
        saves: checkpoints committed.
        skipped: saves that were due and left out (writer busy, storage full), or dropped (a tensor changed).
        bytes_written: bytes that went to the storage.
        bytes_reused: bytes shared with the checkpoint before instead of written.
        seconds_blocked: time `step` and `save` held the loop.
        seconds_lost: blocked time, plus what steps took longer while a save was being written than usual.
        seconds_to_durable: time from each save's start to its commit.
        last_durable_step: newest step that is safe; -1 before the first. In a mirrored run: on the local disk.
        last_remote_step: newest step that the remote of a mirrored run has; -1 before the first, and without a mirror.
        remote_behind: checkpoints on the local disk that wait for their upload.
        seconds_since_remote: age of the newest checkpoint at the remote.
    """

    saves: int = 0
    skipped: int = 0
    bytes_written: int = 0
    bytes_reused: int = 0
    seconds_blocked: float = 0.0
    seconds_lost: float = 0.0
    seconds_to_durable: list[float] = field(default_factory=list)
    last_durable_step: int = -1
    last_remote_step: int = -1
    remote_behind: int = 0
    seconds_since_remote: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the totals as plain data."""
        return asdict(self)


class StepClock:
    """Separates quiet steps from steps that ran while a save was being written.

    The lost time of a drain is the sum over its steps of what each took longer than the median quiet step.
    """

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=64)
        self._draining: list[float] = []

    def step(self, seconds: float, *, draining: bool) -> None:
        """Record one step, without the time it was held."""
        (self._draining if draining else self._quiet).append(seconds)

    def take_lost(self) -> float:
        """Return the time lost by the steps of the last drain, and forget them."""
        steps, self._draining = self._draining, []
        if len(self._quiet) < 3 or not steps:
            return 0.0
        usual = statistics.median(self._quiet)
        return max(0.0, sum(seconds - usual for seconds in steps))


class SaveCosts:
    """Divides the held and lost time of a run: each save pays for itself, and snapshots are counted together.

    Args:
        stats: has the totals of both.

    Example:
        >>> costs = SaveCosts(Stats())
        >>> costs.held(0.5)
        >>> costs.kept(0.25, step=7)
        >>> costs.of_save()
        (0.5, 0.5)
        >>> costs.of_save(), costs.take_snapshots()["held_s"]
        ((0.0, 0.0), 0.25)
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._counted = (0.0, 0.0)  # seconds blocked and lost that are told, or are those of snapshots
        self._snapshots_s = 0.0
        self._untold: dict[str, Any] = {}
        self._next_telling = 0.0

    def held(self, seconds: float) -> None:
        """Take in that a save has held the loop."""
        self._stats.seconds_blocked += seconds
        self._stats.seconds_lost += seconds

    def kept(self, seconds: float, *, step: int) -> None:
        """Take in that a snapshot of ``step`` has just held the loop: no save pays for it."""
        self.held(seconds)
        held, lost = self._counted
        self._counted = held + seconds, lost + seconds
        self._snapshots_s += seconds
        self._untold = {"step": step, "time": time.time(), "held_s": self._snapshots_s}

    def of_save(self) -> tuple[float, float]:
        """Return the seconds held and lost since the save before, which the one that has just ended pays for."""
        before, self._counted = self._counted, (self._stats.seconds_blocked, self._stats.seconds_lost)
        return self._counted[0] - before[0], self._counted[1] - before[1]

    def take_snapshots(self, *, is_end: bool = False) -> dict[str, Any]:
        """Return, for the journal, the last snapshot and what all have cost; nothing twice, nor twice in a second.

        Args:
            is_end: no more come, so there is no waiting for the second to be over.
        """
        now = time.monotonic()
        if not self._untold or (now < self._next_telling and not is_end):
            return {}
        told, self._untold, self._next_telling = self._untold, {}, now + _TOLD_EVERY_S
        return told
