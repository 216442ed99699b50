"""Metrics of a run: kept as they come, read and sent when something is written anyway.

Metrics on an accelerator are read by another thread, behind an event: reading one makes a thread wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast._log import get_logger
from holdfast.errors import ConfigError
from holdfast.state.accelerator import has_streams

from .identity import plain_metrics, take_metrics
from .run_session import RunSession

__all__ = ["MetricLog", "NoLog"]

_LOG = get_logger("checkpointer")
_MAX_ROWS = 1000
_EMPTY: dict[str, Any] = {}


class MetricLog:
    """Rows of metrics on their way to the run's history.

    Tensors are copied on their own device and kept, not read: reading a tensor waits for its device. `flush` has them
    read when a save or a report happens or 1 000 rows have gathered. Rows of a life that dies before that are void
    anyway, because the next life goes on from a checkpoint before them.

    Args:
        session: the run; failures surface in its `settle`.
    """

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._rows: list[tuple[int, int, float, dict[str, Any]]] = []
        self._current_step, self._current = -1, _EMPTY

    def add(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:
        """Keep the metrics of a step.

        Raises:
            ConfigError: a value is no metric.
        """
        metrics = take_metrics(metrics, step=step)
        rows = self._rows
        rows.append((step, epoch, time.time(), metrics))
        if self._current_step == step:
            self._current = {**self._current, **metrics}
        else:
            self._current_step, self._current = step, metrics
        if len(rows) >= _MAX_ROWS:
            self._send(None)

    def of_step(self, step: int) -> Callable[[], dict[str, Any]]:
        """Return what gives everything reported for ``step`` so far, as numbers; it may wait for a device."""
        current = self._current if self._current_step == step else _EMPTY
        read = _reader([current])
        if read is None:
            return lambda: _readable(current, step)
        return lambda: _readable(read()[0], step)

    def bind(self, metrics: Mapping[str, Any]) -> None:
        """Attach metrics to the checkpoint of this step, which is saved or being saved."""
        session = self._session
        name, step = session.last_name, session.last_step
        metrics = take_metrics(metrics, step=step)
        read = _reader([metrics])
        if read is None:
            session.note("metrics", about=name, name=name, metrics=_readable(metrics, step))
        else:
            session.note("metrics", about=name, name=name, late=lambda: {"metrics": _readable(read()[0], step)})

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
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        attempt = self._session.opened.attempt

        def records(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
            return [
                {
                    "attempt": attempt,
                    "step": at,
                    "epoch": epoch,
                    "time": when,
                    "metrics": _readable(metrics, at),
                    "checkpoint": checkpoint if at == step else None,
                }
                for (at, epoch, when, _), metrics in zip(rows, values, strict=True)
            ]

        values = [metrics for *_, metrics in rows]
        read = _reader(values)
        if read is None:
            self._session.note("report", about=checkpoint, rows=records(values))
        else:
            self._session.note("report", about=checkpoint, late=lambda: {"rows": records(read())})


class NoLog(MetricLog):
    """The metrics of a rank other than 0: not recorded, and costing nothing."""

    def __init__(self) -> None:
        pass

    def add(self, *_: Any) -> None:
        """Forget them."""

    def of_step(self, step: int) -> Callable[[], dict[str, Any]]:
        """Return what gives nothing."""
        return dict

    def bind(self, *_: Any) -> None:
        """Bind nothing."""

    def flush(self, *_: Any, **__: Any) -> None:
        """Send nothing."""


def _reader(values: Sequence[Mapping[str, Any]]) -> Callable[[], list[dict[str, Any]]] | None:
    """Return what gives the same values with those of accelerators in host memory; None if there are none of these.

    It is for another thread: it waits until the device has done what the current streams have to do by now.
    """
    devices = {tensor.device for value in values for tensor in _on_devices(value)}
    if not devices:
        return None
    events: list[Any] = []
    for device in devices:
        module = torch.get_device_module(device)
        event = module.Event()
        event.record(module.current_stream(device))
        events.append(event)

    def read() -> list[dict[str, Any]]:
        for event in events:
            event.synchronize()
        numbers: dict[int, Any] = {}
        for device in devices:
            module = torch.get_device_module(device)
            # On a stream of its own: on that of the training it would come behind all that was queued since.
            with module.stream(module.Stream(device)):
                groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
                for value in values:
                    for tensor in _on_devices(value):
                        if tensor.device == device:
                            groups.setdefault((tensor.dtype, tensor.shape), []).append(tensor)
                for group in groups.values():  # one copy for the losses of a thousand steps
                    together = torch.stack(group).cpu()
                    numbers.update(zip(map(id, group), together.unbind(), strict=True))
        return [{name: _replaced(item, numbers) for name, item in value.items()} for value in values]

    return read


def _on_devices(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a metric, or in a mapping of them, that another thread can read.

    Not those of subclasses: reading a DTensor is a call of all ranks.
    """
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if has_streams(value.device):
            yield value
    elif isinstance(value, (Mapping, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _on_devices(item)


def _replaced(value: Any, numbers: Mapping[int, Any]) -> Any:
    if id(value) in numbers:
        return numbers[id(value)]
    if isinstance(value, Mapping):
        return {key: _replaced(item, numbers) for key, item in value.items()}
    return [_replaced(item, numbers) for item in value] if isinstance(value, list) else value


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
