"""What saving cost: blocked time, and the time lost to the writing in the background."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Stats", "StepClock"]


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
