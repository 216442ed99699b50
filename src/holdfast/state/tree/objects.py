"""Objects that keep their state themselves, behind ``state_dict``.

They are asked for it in one order on all ranks, that of their names: they may use collectives in ``state_dict`` and
``load_state_dict``, as wrappers around sharded models do, and ranks whose dicts have another order would wait for each
other for ever. torch.distributed.checkpoint sorts keys for that reason.

Metrics of torchmetrics are read past their ``state_dict``, which is empty unless every state is declared persistent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .optimizers import is_plain
from .values import PerRank

__all__ = ["ask_in_order", "is_metric", "metric_state", "restore_metric", "state_of"]

_PLAIN = (torch.Tensor, int, float, str, bytes, type(None))
_Asked = dict[str, tuple[Any, Any]]


def ask_in_order(state: Mapping[Any, Any], takes: Callable[[str], bool] | None = None) -> _Asked:
    """Return by name each object that keeps its state itself, with what its ``state_dict`` gave.

    Args:
        state: of this rank, of several.
        takes: returns by the name of an object whether it is wanted; default: all.
    """
    found = {name: one for name, one in _objects(state, "", ()) if takes is None or takes(name)}
    return {name: (found[name], found[name].state_dict()) for name in sorted(found)}


def state_of(value: Any, asked: _Asked, name: str) -> Any:
    """Return the state of an object, which may have been asked for it before."""
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
    return {path: _state(one) for path, one in _singles(metric)}


def restore_metric(metric: Any, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Put back what `metric_state` took; returns a line for each part that has no place."""
    found = dict(_singles(metric))
    problems = [f"{path or 'metric'}: no such metric now" for path in state if path not in found]
    for path, one in found.items():
        if path not in state:
            problems.append(f"{path or 'metric'}: the checkpoint has no such metric; it starts empty")
            one.reset()
            continue
        there = {name for name, has in {**vars(one), **one._buffers, **one._defaults}.items() if not callable(has)}
        for name, value in state[path].items():
            if name == "_update_count":
                one._update_count = value
            elif name not in there or name.startswith("_"):
                # Set anyway it could hide a method: what a checkpoint names is not to be trusted.
                problems.append(f"{path or 'metric'}: it has no state {name!r} now")
            elif isinstance(value, torch.Tensor):
                # A copy: metrics of a compute group share one stored tensor, and some add to it in place.
                setattr(one, name, value.to(one.device, copy=True))
            else:
                setattr(one, name, [item.to(one.device) for item in value])
        one._computed = None
    return problems


def _state(one: Any) -> dict[str, Any]:
    # Wrappers such as MinMaxMetric keep what they have seen in buffers or plain attributes.
    kept = {**one._buffers, **vars(one)}
    loose = {name: item for name, item in kept.items() if isinstance(item, torch.Tensor) and not name.startswith("_")}
    declared = {name: getattr(one, name) for name in one._defaults}
    return {**loose, **declared, "_update_count": one._update_count}


def _singles(metric: Any) -> list[tuple[str, Any]]:
    return [(path, one) for path, one in metric.named_modules() if _is_single(one)]


def _is_single(value: Any) -> bool:
    return hasattr(value, "_defaults") and hasattr(value, "_reductions") and hasattr(value, "_update_count")
