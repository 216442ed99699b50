"""Turn a decoded tree with placeholders into plain Python values, once the tensors have been read."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from . import arrays
from .values import ObjectNode, PerRankNode, TensorRef

__all__ = ["fill"]

_DONE = (torch.Tensor, int, float, str)  # nothing to fill in


def fill(value: Any, per_rank: dict[str, Any] | None) -> Any:
    """Return ``value`` with every placeholder replaced: tensors by what was read, objects by their state.

    Containers keep their type; a value of another rank than this one becomes None.
    """
    if isinstance(value, TensorRef):
        return _tensor(value)
    if isinstance(value, ObjectNode):
        return fill(value.state, per_rank)
    if isinstance(value, PerRankNode):
        own = (per_rank or {}).get(value.key)
        return fill(own["rng"] if value.rng and own is not None else own, per_rank)
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(item, _DONE):
                value[key] = fill(item, per_rank)
        return value
    if isinstance(value, (list, deque)):
        for number, item in enumerate(value):
            if not isinstance(item, _DONE):
                value[number] = fill(item, per_rank)
        return value
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [fill(item, per_rank) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if type(value) in (set, frozenset) and any(isinstance(item, (TensorRef, ObjectNode)) for item in value):
        return type(value)(fill(item, per_rank) for item in value)
    return value


def _tensor(ref: TensorRef) -> Any:
    if ref.kind == "array":
        return arrays.array_from_tensor(ref.value, ref.extra)
    if ref.kind == "parameter" and isinstance(ref.value, torch.Tensor):
        return torch.nn.Parameter(ref.value, requires_grad=bool(ref.extra.get("rg", 1)))
    return ref.value
