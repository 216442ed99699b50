"""The history of a run as the loop trainer writes it: what each life went on from, its metrics, and how it ended.

Only folders of directories are runs. The rest of the package knows them by the same records as those of `Checkpointer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from holdfast.checkpointer.metrics import MetricLog
from holdfast.checkpointer.run_session import RunSession

from ..callbacks import LoggerDestination
from ..state import State

__all__ = ["HistoryLogger"]


class HistoryLogger(LoggerDestination):
    """Passes the numbers that are logged to the history of the run that a later life goes on from.

    Tensors are copied on their device and read when something is saved. What is no number is for other loggers.

    Args:
        state: of the trainer.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._log: MetricLog | None = None
        self._sessions: tuple[RunSession, ...] = ()

    def begin(self, session: RunSession | None, others: Iterable[RunSession] = ()) -> None:
        """Write to a run from now on; None: to none.

        Args:
            session: of the run.
            others: of all runs that training saves to: each knows how far it has come.
        """
        self._log = None if session is None or not session.leads else MetricLog(session)
        self._sessions = tuple(others)
        self.stepped()

    def stepped(self) -> None:
        """Tell the runs how many batches are trained."""
        for session in self._sessions:
            session.note_step(self._state.timestamp.count("batch"))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep a row."""
        self.stepped()  # the loop logs its losses right after each batch
        if self._log is None:
            return
        stamp = self._state.timestamp
        numbers = {name: value for name, value in metrics.items() if _is_number(value)}
        if numbers:
            self._log.add(stamp.count("batch") if step is None else step, stamp.count("epoch"), numbers)

    def flush(self) -> None:
        """Send what is kept."""
        if self._log is not None:
            self._log.flush(self._state.timestamp.count("batch"))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float, str))
