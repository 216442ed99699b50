"""Metrics of a run: kept as they come, read and sent when something is written anyway; what one may be.

Metrics on an accelerator are read by another thread, behind an event: reading one makes a thread wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from holdfast._log import get_logger
from holdfast.errors import ConfigError
from holdfast.format.strict_json import check_length
from holdfast.state.accelerator import has_streams
from holdfast.state.tree.arrays import is_spread, local_tensor

if TYPE_CHECKING:
    from .run_session import RunSession

_LOG = get_logger("checkpointer")
_MAX_ROWS = 1000
_EVERY_S, _EVERY_FAR_S = 5.0, 60.0  # between rows that nothing else sends; at a store each time is a request
_KEPT = "metrics wait in the memory of the writer until they can be written"
_EMPTY: dict[str, Any] = {}
_SHORT = (float, str, bool, type(None))
_PLAIN = (*_SHORT, int)
_USUAL = 1 << 63


class MetricLog:
    """Rows of metrics on their way to the run's history.

    They are sent when a save or a report happens, every few seconds, and when 1 000 have gathered; until then they lie
    in memory that the writer has too (`StepMemory`), so that a kill does not take them. Tensors of a device are copied
    there and kept, not read, because reading waits for the device: a kill takes rows with such values that were not
    sent. Values that only this thread can read are sent at the next save or report.

    Args:
        session: the run; failures surface in its `settle`.
        take: gets the step and the metrics of each row, as plain numbers where nothing has to be waited for.
    """

    def __init__(self, session: RunSession, take: Callable[[int, Mapping[str, Any]], object] | None = None) -> None:
        self._session, self._take = session, take
        self._rows: list[tuple[int, int, float, dict[str, Any]]] = []
        self._current_step, self._current = -1, _EMPTY
        self._num_late = 0  # rows with values whose reading makes this thread wait
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
            self.flush()
        if plain is None:
            self._num_late += any(map(_is_ours_to_read, _flat(metrics)))
        else:
            memory = self._session.memory
            if not memory.add_row(step, epoch, now, plain) and not self._num_late:
                self.flush()
                memory.add_row(step, epoch, now, plain)
        rows = self._rows
        rows.append((step, epoch, now, metrics if plain is None else plain))  # what is read is not read again
        if self._take is not None:
            self._take(step, metrics if plain is None else plain)
        if self._current_step == step:
            self._current = {**self._current, **metrics}
        else:
            self._current_step, self._current = step, metrics
        if len(rows) >= _MAX_ROWS:
            self.flush()

    def of_step(self, step: int) -> Callable[[], dict[str, Any]]:
        """Return what gives everything reported for ``step`` so far, as numbers; it may wait for a device."""
        current = self._current if self._current_step == step else _EMPTY
        if not current:
            return dict
        read = _reader([(step, current)])
        if read is None:
            return lambda: _readable(current, step)
        return lambda: _readable(read()[0], step)

    def bind(self, metrics: Mapping[str, Any]) -> None:
        """Attach metrics to the checkpoint of this step, which is saved or being saved."""
        session = self._session
        name, step = session.saves.last_name, session.saves.last_step
        metrics = take_metrics(metrics, step=step)
        read = _reader([(step, metrics)])
        if read is None:
            session.note("metrics", about=name, name=name, metrics=_readable(metrics, step))
        else:
            session.note("metrics", about=name, name=name, late=lambda: {"metrics": _readable(read()[0], step)})

    def flush(self, step: int = -1, *, name: str | None = None) -> None:
        """Read and send all rows.

        Args:
            step: the current step; -1 where no row is bound to a checkpoint, as between two steps.
            name: of the checkpoint that is being made of this step.
        """
        self._due = time.time() + self._every_s
        if not self._rows:
            return
        session = self._session
        if name is None and step >= 0 and session.saves.last_step == step:
            name = session.saves.last_name
        rows, self._rows = self._rows, []
        self._num_late = 0
        attempt = session.opened.attempt

        def records(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
            return [
                {
                    "attempt": attempt,
                    "step": at,
                    "epoch": epoch,
                    "time": when,
                    "metrics": _readable(metrics, at),
                    "checkpoint": name if at == step else None,
                }
                for (at, epoch, when, _), metrics in zip(rows, values, strict=True)
            ]

        read = _reader([(at, metrics) for at, _, _, metrics in rows])
        if read is None:
            session.note("report", about=name, what=_KEPT, rows=records([metrics for *_, metrics in rows]))
        else:
            session.note("report", about=name, what=_KEPT, late=lambda: {"rows": records(read())})
        session.memory.clear_rows()


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


def _reader(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> Callable[[], list[dict[str, Any]]] | None:
    """Return what gives metrics with those of accelerators in host memory; None if there are none of these.

    It is for another thread: it waits until the device has done what the current streams have to do by now.

    Args:
        rows: steps and their metrics.
    """
    devices = {leaf.device for _, value in rows for leaf in _flat(value) if _is_on_device(leaf)}
    if not devices:
        return None
    values = []
    for step, value in rows:
        ours = {name: item for name, item in value.items() if any(map(_is_ours_to_read, _flat(item)))}
        values.append({**value, **_readable(ours, step)})
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
                    for leaf in _flat(value):
                        if _is_on_device(leaf) and leaf.device == device:
                            groups.setdefault((leaf.dtype, leaf.shape), []).append(leaf)
                for group in groups.values():  # one copy for the losses of a thousand steps
                    together = torch.stack(group).cpu()
                    numbers.update(zip(map(id, group), together.unbind(), strict=True))
        return [{name: _replaced(item, numbers) for name, item in value.items()} for value in values]

    return read


def _flat(value: Any) -> Iterator[Any]:
    """Yield the values in a metric, or in a mapping of them."""
    if type(value) not in _PLAIN and isinstance(value, (Mapping, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _flat(item)
    else:
        yield value


def _is_on_device(value: Any) -> bool:
    """Tell whether a value of `_flat` is one that another thread can read from its device.

    Not those of subclasses: what reading them does is not known.
    """
    return type(value) in (torch.Tensor, torch.nn.Parameter) and has_streams(value.device)


def _is_ours_to_read(value: Any) -> bool:
    """Tell whether a value of `_flat` lies elsewhere, and only the training thread may wait for it."""
    if isinstance(value, torch.Tensor):
        return not value.is_cpu and not _is_on_device(value)
    return is_foreign_array(value)


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


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Turn metric values into plain numbers; tensors are read here, which waits for their device.

    Raises:
        ConfigError: a value is no metric, or this is no mapping.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics={metrics!r}: give a mapping {{name: number}}")
    return {name: _plain(value, name) for name, value in metrics.items()}


def plain_at_once(metrics: dict[str, Any]) -> dict[str, Any] | None:
    """Return metrics of `take_metrics` as plain numbers; None if that would wait for a device, or one is no metric."""
    if all(type(value) in _PLAIN for value in metrics.values()):
        return metrics
    if any(map(_is_far, _flat(metrics))):
        return None
    try:
        return plain_metrics(metrics)
    except ConfigError:  # of a list of a mapping: said when the row is sent
        return None


def _is_far(value: Any) -> bool:
    return value.device.type != "cpu" if isinstance(value, torch.Tensor) else is_foreign_array(value)


def is_foreign_array(value: object) -> bool:
    """Tell whether a value is an array of another library, which may wait for a device when it is read."""
    return callable(getattr(value, "tolist", None)) and not isinstance(value, (np.ndarray, np.generic))


def take_metrics(metrics: Mapping[str, Any], *, step: int) -> dict[str, Any]:
    """Copy metrics that the caller may go on changing; no tensor of a device is read, so that nothing waits for one.

    Raises:
        ConfigError: a value is no metric; it names the metric and its step.
    """
    try:
        return {
            name: value
            if type(value) in _SHORT or (type(value) is int and -_USUAL < value < _USUAL)  # counts, at each step
            else _take(value, name)
            for name, value in metrics.items()
        }
    except ConfigError as error:
        raise ConfigError(f"step {step}: {error}") from None


def _take(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_complex():
        # A loss of the host is read at once, which waits for nothing: half the time of a step with one.
        if type(value) is torch.Tensor and value.numel() == 1 and not _is_far(value):
            return value.item()
        if is_spread(value):
            value = _on_this_rank(value, name)
        # The caller may go on adding to it in place, and a CUDA graph writes to the same tensor each step.
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {str(key): _take(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_take(item, name) for item in value]
    if callable(getattr(value, "tolist", None)) and not isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return value  # of JAX: it cannot be changed, and reading it waits for its device
    return _plain(value, name)


def _on_this_rank(value: Any, name: str) -> torch.Tensor:
    """Return a DTensor that each rank holds as a whole as a plain tensor, without communication.

    Raises:
        ConfigError: other ranks hold parts of it: to read it is a call of all ranks, and rank 0 reads metrics alone.
    """
    places = getattr(value, "placements", None)
    if places is None or not all(
        place.is_replicate() or size == 1 for place, size in zip(places, value.device_mesh.shape, strict=True)
    ):
        raise ConfigError(
            f"metric {name!r} is a {type(value).__name__} of which each rank holds a part ({places}), and rank 0 alone "
            f"reads metrics: give {name}=value.full_tensor(), called on all ranks"
        )
    return local_tensor(value)


def _plain(value: Any, name: str) -> Any:
    check_length(value, name)
    if type(value) in _PLAIN:
        return value
    for kind in (int, float, str):  # subclasses (an enum, numpy.float64) become what they are
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, torch.Tensor):
        return _plain(value.item() if value.numel() == 1 else value.tolist(), name)
    if callable(getattr(value, "tolist", None)):  # NumPy scalars and arrays
        return _plain(value.tolist(), name)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if hasattr(value, "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"metric {name!r} is a {type(value).__name__} that is no number: {error}") from error
    raise ConfigError(f"metric {name!r} is a {type(value).__name__}: give a number, a tensor or a string")
