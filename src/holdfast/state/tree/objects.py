"""Objects that keep their state themselves, behind ``state_dict``.

All ranks call ``state_dict`` in the order of the objects' names: ``state_dict`` and ``load_state_dict`` may use
collectives, as in wrappers around sharded models, and ranks whose dicts have another order would wait for each other
for ever. torch.distributed.checkpoint sorts keys for that reason.

Metrics of torchmetrics are read past their ``state_dict``, which is empty unless every state is declared persistent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.errors import UnsupportedStateError

from .optimizers import is_plain
from .values import PerRank

__all__ = ["ask_in_order", "has_objects", "is_metric", "metric_state", "restore_metric", "state_of"]

_PLAIN = (torch.Tensor, int, float, str, bytes, type(None))
_Asked = dict[str, tuple[Any, Any]]


def ask_in_order(state: Mapping[Any, Any], takes: Callable[[str], bool] | None = None) -> _Asked:
    """Return by name each object that keeps its state itself, with what its ``state_dict`` gave.

    Args:
        state: the state of this rank; other ranks call this with theirs.
        takes: tells by the name of an object whether to ask it; default: all are asked, to be saved.

    Raises:
        UnsupportedStateError: an object is of a kind that cannot be asked on all ranks.
    """
    objects = {name: item for name, item in _objects(state, "", ()) if takes is None or takes(name)}
    for name, item in objects.items() if takes is None else ():
        if type(item).__name__ == "ZeroRedundancyOptimizer":
            raise UnsupportedStateError(
                f"{name}: a ZeroRedundancyOptimizer gathers its state only when it is asked to: give an object whose "
                "state_dict() calls consolidate_state_dict(to=0) on all ranks, and returns the optimizer's "
                "state_dict() on rank 0 and {} on the others, and whose load_state_dict() is the optimizer's"
            )
    return {name: (objects[name], objects[name].state_dict()) for name in sorted(objects)}


def has_objects(value: Any) -> bool:
    """Tell whether there are objects in a value that keep their state themselves."""
    return next(_objects(value, "", ()), None) is not None


def state_of(value: Any, asked: _Asked, name: str) -> Any:
    """Return the state of an object: what `ask_in_order` got from it, else its ``state_dict()``."""
    known = asked.pop(name, None)
    return known[1] if known is not None and known[0] is value else value.state_dict()


def _objects(value: Any, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield objects with their names: neither modules nor optimizers, which are taken apart."""
    if isinstance(value, (Mapping, list, tuple)):
        if id(value) in above:
            return  # a cycle: it is refused, with its place, when the state is taken apart
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            if not isinstance(item, _PLAIN):
                yield from _objects(item, f"{name}/{key}" if name else str(key), (*above, id(value)))
    elif not isinstance(value, (type, nn.Module, torch.Tensor, PerRank)) and hasattr(value, "state_dict"):
        if isinstance(value, torch.optim.Optimizer) and is_plain(value):
            return
        if callable(value.state_dict) and callable(getattr(value, "load_state_dict", None)):
            yield name, value


def is_metric(value: Any) -> bool:
    """Tell whether ``value`` is a torchmetrics ``Metric`` or ``MetricCollection``, without importing torchmetrics."""
    return _is_single(value) or (isinstance(value, nn.ModuleDict) and hasattr(value, "_enable_compute_groups"))


def metric_state(metric: Any) -> dict[str, Any]:
    """Return states, buffers and update count of a metric and of every metric inside it, by module path."""
    if isinstance(metric, nn.ModuleDict):
        # Metrics of a compute group share the states of their first metric; iterating refreshes the others.
        list(metric.items(keep_base=True, copy_state=False))  # type: ignore[call-arg]
    return {path: _state(part) for path, part in _singles(metric)}


def restore_metric(metric: Any, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Put back what `metric_state` took; returns a line for each part that has no place."""
    parts = dict(_singles(metric))
    problems = [f"{path or 'metric'}: no such metric now" for path in state if path not in parts]
    for path, part in parts.items():
        if path not in state:
            problems.append(f"{path or 'metric'}: the checkpoint has no such metric; it starts empty")
            part.reset()
            continue
        held = {**vars(part), **part._buffers, **part._defaults}
        attributes = {name for name, value in held.items() if not callable(value)}
        for name, value in state[path].items():
            if name == "_update_count":
                part._update_count = value
            elif name not in attributes or name.startswith("_"):
                # An unknown name could hide a method: names in a checkpoint are not trusted.
                problems.append(f"{path or 'metric'}: it has no state {name!r} now")
            elif isinstance(value, torch.Tensor):
                # A copy: metrics of a compute group share one stored tensor, and some add to it in place.
                setattr(part, name, value.to(part.device, copy=True))
            else:
                setattr(part, name, [item.to(part.device) for item in value])
        part._computed = None
    return problems


def _state(metric: Any) -> dict[str, Any]:
    # Wrappers such as MinMaxMetric keep what they have seen in buffers or plain attributes.
    kept = {**metric._buffers, **vars(metric)}
    loose = {name: item for name, item in kept.items() if isinstance(item, torch.Tensor) and not name.startswith("_")}
    declared = {name: getattr(metric, name) for name in metric._defaults}
    return {**loose, **declared, "_update_count": metric._update_count}


def _singles(metric: Any) -> list[tuple[str, Any]]:
    return [(path, part) for path, part in metric.named_modules() if _is_single(part)]


def _is_single(value: Any) -> bool:
    return hasattr(value, "_defaults") and hasattr(value, "_reductions") and hasattr(value, "_update_count")
