"""State for objects that keep tensors spread over ranks: read into tensors laid out as the live ones are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..tree.sharded import is_spread
from ..tree.values import ObjectNode, TensorRef
from .match_plan import MatchPlan
from .meta import home_of

__all__ = ["place_alike"]


def place_alike(plan: MatchPlan, saved: Any, live: Any) -> None:
    """Plan reading each stored tensor that the state of an object has spread over ranks; others are left alone."""
    _walk(plan, saved, live)


def _walk(plan: MatchPlan, saved: Any, live: Any) -> None:
    if isinstance(saved, ObjectNode):
        saved = saved.state
    if isinstance(saved, TensorRef):
        if saved.value is None and is_spread(live) and hasattr(live, "to_local"):
            there = torch.empty_like(live, device=home_of(live, plan.device))
            if plan.targets.add(saved.name, there) is None:  # else the object gets the whole, and says what it thinks
                saved.value = there
    elif isinstance(saved, Mapping) and isinstance(live, Mapping):
        for key, item in saved.items():
            if key in live:
                _walk(plan, item, live[key])
    elif isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        for item, other in zip(saved, live, strict=False):
            _walk(plan, item, other)
