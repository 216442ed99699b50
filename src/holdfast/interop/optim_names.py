"""Whose state is what an optimizer has stored by position: names, where they can be known.

``Optimizer.state_dict`` numbers parameters in the order of its groups. With one group that is nearly always the order
of the model's ``state_dict``, of which they are a part (the rest are buffers and frozen parameters). If the shapes of
the states leave only one way to find that part, it is taken. Anything else is left by position: an optimizer made in
the same way takes it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["is_optimizer", "named"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def is_optimizer(value: Any) -> bool:
    """Tell whether a value looks like what ``Optimizer.state_dict`` gives."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in value["param_groups"])
    )


def named(optimizer: Mapping[str, Any], model: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    """Return the same state keyed by parameter name (``prefix`` and the name in the model); None if not known."""
    groups, states = optimizer["param_groups"], optimizer["state"]
    keys = [key for group in groups for key in group["params"]]
    told = [name for group in groups for name in group.get("param_names", ())]
    if len(told) == len(keys) and keys:
        names: list[str] | None = told if all(name in model for name in told) else None
    else:
        shapes = [_shape(states.get(key)) for key in keys]
        names = _only_way(shapes, _parameters(model)) if len(groups) == 1 else None
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
    """Return what may be parameters of a model's ``state_dict``: floating, no known buffers, tied ones once."""
    found = {}
    seen = set()
    for name, value in model.items():
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        if name.rpartition(".")[2] in _BUFFERS:
            continue
        memory = (value.data_ptr(), value.shape, value.stride())
        if memory[0] and memory in seen:  # 0: no memory at all (empty, or only the shape is known)
            continue
        seen.add(memory)
        found[name] = tuple(value.shape)
    return found


def _shape(kept: Any) -> tuple[int, ...] | None:
    """Return the shape that an optimizer's state gives to its parameter; None if it says nothing."""
    tensors = [value for value in kept.values() if isinstance(value, torch.Tensor)] if isinstance(kept, Mapping) else []
    return next((tuple(value.shape) for value in tensors if value.dim()), None)


def _only_way(wanted: list[tuple[int, ...] | None], there: Mapping[str, tuple[int, ...]]) -> list[str] | None:
    """Find ``wanted`` in the same order among the shapes that are there; None if not at all, or in several ways."""
    rows = list(there.items())
    first = _embed(wanted, rows)
    last = _embed(wanted[::-1], rows[::-1])
    # The earliest and the latest way are the same exactly if there is no other.
    return first if first is not None and last is not None and first == last[::-1] else None


def _embed(wanted: list[tuple[int, ...] | None], rows: list[tuple[str, tuple[int, ...]]]) -> list[str] | None:
    at, found = 0, []
    for shape in wanted:
        while at < len(rows) and shape is not None and rows[at][1] != shape:
            at += 1
        if at == len(rows):
            return None
        found.append(rows[at][0])
        at += 1
    return found
