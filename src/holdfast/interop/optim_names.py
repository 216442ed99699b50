"""The names of parameters whose state an optimizer has stored by position, where they are certain.

``Optimizer.state_dict`` numbers parameters in the order in which the script gave them. The file names that order
(``param_names``, or names in place of numbers), or it does not matter, because each state has a different shape that
exactly one parameter of the model has. A wrong guess would mix up states silently, so all other state stays by
position: an optimizer made in the same way takes it unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["is_optimizer", "named"]


def is_optimizer(value: Any) -> bool:
    """Tell whether a value looks like a result of ``Optimizer.state_dict``."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in value["param_groups"])
    )


def named(optimizer: Mapping[str, Any], model: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    """Return the same state keyed by parameter name (``prefix`` and the name in the model); None if uncertain."""
    groups, states = optimizer["param_groups"], optimizer["state"]
    keys = [key for group in groups for key in group["params"]]
    listed = [name for group in groups for name in group.get("param_names", ())]
    if len(listed) == len(keys) and keys:
        names: list[str] | None = listed if all(name in model for name in listed) else None
    elif keys and all(isinstance(key, str) for key in keys):  # FSDP, torch.distributed.checkpoint.state_dict
        names = keys if all(key in model for key in keys) else None
    else:
        names = _by_shape([_shape(states.get(key)) for key in keys], _parameters(model))
    if names is None or not states.keys() <= set(keys):
        return None
    name_of = dict(zip(keys, names, strict=True))
    if not all(isinstance(kept, Mapping) for kept in states.values()):
        return None
    return {
        "state": {prefix + name_of[key]: kept for key, kept in states.items()},
        "param_groups": [{**group, "params": [prefix + name_of[key] for key in group["params"]]} for group in groups],
    }


def _parameters(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return shapes of what may be parameters in a ``state_dict``: floating tensors, tied tensors once."""
    shapes = {}
    seen = set()
    for name, value in model.items():
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        memory = (value.data_ptr(), value.shape, value.stride())
        if memory[0] and memory in seen:  # 0: no memory at all (empty, or only the shape is known)
            continue
        seen.add(memory)
        shapes[name] = tuple(value.shape)
    return shapes


def _shape(kept: Any) -> tuple[int, ...] | None:
    """Return the shape that an optimizer's state gives to its parameter; None if no state tensor has a shape."""
    tensors = [value for value in kept.values() if isinstance(value, torch.Tensor)] if isinstance(kept, Mapping) else []
    return next((tuple(value.shape) for value in tensors if value.dim()), None)


def _by_shape(wanted: list[tuple[int, ...] | None], shapes: Mapping[str, tuple[int, ...]]) -> list[str] | None:
    """Return the parameter of each wanted shape; None unless each shape belongs to exactly one parameter."""
    homes: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        homes.setdefault(shape, []).append(name)
    candidates = [homes.get(shape, []) if shape is not None else [] for shape in wanted]
    if len(set(wanted)) != len(wanted) or any(len(names) != 1 for names in candidates):
        return None
    return [names[0] for names in candidates]
