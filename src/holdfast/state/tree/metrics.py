"""torchmetrics: what a metric has gathered. Its ``state_dict`` is empty unless every state is declared persistent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["is_metric", "metric_state", "restore_metric"]


def is_metric(value: Any) -> bool:
    """Tell whether ``value`` is a torchmetrics ``Metric`` or ``MetricCollection``, without importing torchmetrics."""
    return _is_single(value) or (isinstance(value, nn.ModuleDict) and hasattr(value, "_enable_compute_groups"))


def metric_state(metric: Any) -> dict[str, Any]:
    """Return states, buffers and update count of a metric and of every metric inside it, by module path."""
    if isinstance(metric, nn.ModuleDict):
        # Metrics of one compute group share the states of their first one; looking at them refreshes the others.
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
