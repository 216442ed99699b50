"""Metrics of a run: kept as they come, read and sent when something is written anyway."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import ConfigError

from .identity import plain_at_once, plain_metrics, take_metrics
from .run_session import RunSession

__all__ = ["MetricLog", "NoLog"]

_LOG = get_logger("checkpointer")
_MAX_ROWS = 1000
_EVERY_S, _EVERY_FAR_S = 5.0, 60.0  # between rows that nothing else sends; at a store each time is a request
_EMPTY: dict[str, Any] = {}


class MetricLog:
    """Rows of metrics on their way to the run's history.

    They are sent when a save or a report happens, every few seconds, and when 1 000 have gathered; until then they lie
    in memory that the writer has too (`StepMemory`), so that a kill does not take them. Tensors of a device are copied
    there and kept, not read, because reading waits for the device: rows with such values are sent at the next save or
    report only, and a kill takes those since.

    Args:
        session: the run; failures surface in its `settle`.
    """

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._rows: list[tuple[int, int, float, dict[str, Any]]] = []
        self._current_step, self._current = -1, _EMPTY
        self._num_late = 0  # rows with values that only a device has
        self._every_s = _EVERY_S if session.root.local_root is not None else _EVERY_FAR_S
        self._due = time.time() + self._every_s

    def add(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:
        """Keep the metrics of a step.

        Raises:
            ConfigError: a value is no metric.
        """
        metrics, now = take_metrics(metrics, step=step), time.time()
        plain = plain_at_once(metrics)
        # Not between two rows of a step: a save of it is about to name it.
        if now >= self._due and not self._num_late and step != self._current_step:
            self._send(None)
        if plain is None:
            self._num_late += 1
        else:
            memory = self._session.memory
            if not memory.add_row(step, epoch, now, plain) and not self._num_late:
                self._send(None)
                memory.add_row(step, epoch, now, plain)
        rows = self._rows
        rows.append((step, epoch, now, metrics))
        if self._current_step == step:
            self._current = {**self._current, **metrics}
        else:
            self._current_step, self._current = step, metrics
        if len(rows) >= _MAX_ROWS:
            self._send(None)

    def of_step(self, step: int) -> dict[str, Any]:
        """Return everything reported for ``step`` so far, as numbers."""
        return _readable(self._current, step) if self._current_step == step else {}

    def bind(self, metrics: Mapping[str, Any]) -> None:
        """Attach metrics to the checkpoint of this step, which is saved or being saved."""
        session = self._session
        name, found = session.last_name, _readable(metrics, session.last_step)
        session.note("metrics", about=name, name=name, metrics=found)

    def flush(self, step: int, *, name: str | None = None) -> None:
        """Read and send all rows.

        Args:
            step: the current step.
            name: of the checkpoint that is being made of this step.
        """
        if name is None and self._session.last_step == step:
            name = self._session.last_name
        self._send(name, step)

    def complain(self, error: Exception) -> None:
        """Log an error that must not replace the error already being raised."""
        _LOG.error("while the run was ending with an error, a save failed too: %s", error)

    def _send(self, checkpoint: str | None, step: int = -1) -> None:
        self._due = time.time() + self._every_s
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        self._num_late = 0
        found = [
            {
                "attempt": self._session.opened.attempt,
                "step": at,
                "epoch": epoch,
                "time": when,
                "metrics": _readable(metrics, at),
                "checkpoint": checkpoint if at == step else None,
            }
            for at, epoch, when, metrics in rows
        ]
        self._session.note("report", about=checkpoint, rows=found)
        self._session.memory.clear_rows()


class NoLog(MetricLog):
    """The metrics of a rank other than 0: not recorded, and costing nothing."""

    def __init__(self) -> None:
        pass

    def add(self, *_: Any) -> None:
        """Forget them."""

    def of_step(self, step: int) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def bind(self, *_: Any) -> None:
        """Bind nothing."""

    def flush(self, *_: Any, **__: Any) -> None:
        """Send nothing."""


def _readable(metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Read metrics; a value that is no metric is left out and logged: it must not cost the others, nor a save."""
    try:
        return plain_metrics(metrics)
    except ConfigError:
        found: dict[str, Any] = {}
        for name, value in metrics.items():
            try:
                found |= plain_metrics({name: value})
            except ConfigError as error:
                _LOG.error("a metric of step %d is NOT recorded: %s", step, error)
        return found
