"""`Tracker`: hears of committed checkpoints wherever they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.announce import Announcer
from holdfast.trainers.loop.callbacks import Callback

__all__ = ["Tracker", "finite", "numbers"]


class Tracker(Callback):
    """Override `record`; it is called with each committed checkpoint, one after the other, on another thread.

    For ``Checkpointer(on_commit=...)``, for ``RunConfig(callbacks=[...])`` of the function trainer (it works in the
    process that calls `fit`), and for ``callbacks`` of the loop trainer.
    """

    def __init__(self) -> None:
        self._announcer = Announcer([self.record])

    def record(self, checkpoint: Checkpoint) -> None:
        """Take note of a checkpoint. What this raises is logged, and training goes on."""
        raise NotImplementedError

    def wait(self, timeout_s: float = 60.0) -> None:
        """Wait until everything has been recorded."""
        self._announcer.wait(timeout_s)

    def __call__(self, checkpoint: Checkpoint) -> None:
        """Hear of a checkpoint of a `Checkpointer`."""
        self._announcer.tell(checkpoint)

    def after_report(self, context: Any, metrics: Any, checkpoint: Checkpoint | None) -> None:
        """Hear of a report in the function trainer."""
        if checkpoint is not None:
            self._announcer.tell(checkpoint)

    def checkpoint_committed(self, checkpoint: Checkpoint) -> None:
        """Hear of a checkpoint of the loop trainer."""
        self._announcer.tell(checkpoint)

    def post_close(self) -> None:
        """Wait, when the loop trainer is closed."""
        self.wait()


def numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in (nested) metrics, by names joined with "/"."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{name}"] = float(value)
    return found


def finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return (nested) metrics for JSON, which knows neither NaN nor infinity: these become text."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found[name] = finite(value)
        else:
            found[name] = repr(value) if isinstance(value, float) and not math.isfinite(value) else value
    return found
