"""Objects are asked for their state in one order on all ranks: that of their names.

They may use collectives in ``state_dict`` and ``load_state_dict``, as wrappers around sharded models do. Ranks whose
dicts have another order would wait for each other for ever; torch.distributed.checkpoint sorts keys for that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .optimizers import is_plain
from .values import PerRank

__all__ = ["ask_in_order", "state_of"]

_PLAIN = (torch.Tensor, int, float, str, bytes, type(None))
_Asked = dict[str, tuple[Any, Any]]


def ask_in_order(state: Mapping[Any, Any], takes: Callable[[str], bool] | None = None) -> _Asked:
    """Return by name each object that keeps its state itself, with what its ``state_dict`` gave.

    Args:
        state: of one of several ranks.
        takes: tells by their names which objects are wanted; default: all.
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
