"""Is there room for what a run will save? Free space is compared with the size of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast._units import format_bytes
from holdfast.config import Keep
from holdfast.errors import StorageFullError
from holdfast.storage.base import Storage

__all__ = ["check_room"]

_MARGIN = 16 << 20
# State tensors of parameter size that an optimizer will create with its first step; others are taken for one.
_SLOTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "SparseAdam": 2, "Adadelta": 2, "SGD": 1}


def check_room(
    storage: Storage,
    free_bytes: int | None,
    needs: Sequence[list[Any]],
    state: Mapping[Any, Any],
    *,
    keep: Keep | None = None,
    num_there: int = 0,
) -> str:
    """Compare free space with the size of a checkpoint.

    Args:
        storage: where saves go, of rank 0.
        free_bytes: what a probe (`WriterClient.probe`) has found free there; None if nobody knows.
        needs: of each rank the machine, the bytes of its part, and what is free there. Where all ranks save to one
            place, machine and free space are not named; else each machine has to hold the parts of its own ranks.
        state: of rank 0.
        keep: rules of retention.
        num_there: checkpoints that the run has already.

    Returns:
        A line about size and space.
    """
    future = _future_optimizer_bytes(state.values())
    least = free_bytes
    for machine in dict.fromkeys(name for name, _, _ in needs):
        first, parts = [one[0] for one in needs].index(machine), [one[1:] for one in needs if one[0] == machine]
        expected = sum(own for own, _ in parts) + future * len(parts) // len(needs)
        frees = [its for _, its in parts if its is not None]
        free = min(frees, default=free_bytes if first == 0 else None)
        if free is not None and free < expected + _MARGIN:
            whose = f" on the machine of rank {first}" if machine else ""
            what = f"the parts of {len(parts)} of {len(needs)} ranks take" if whose else "one checkpoint takes"
            raise StorageFullError(
                f"{storage.uri}{whose} has {format_bytes(free)} free and {what} about {format_bytes(expected)} (and "
                f"{format_bytes(_MARGIN)} to spare): free some space or choose another place; nothing was trained"
            )
        least = free if least is None or free is None else min(least, free)
    size = sum(own for _, own, _ in needs) + future
    line = f"one checkpoint takes about {format_bytes(size)}"
    if least is None:
        return line
    line += f"; {format_bytes(least)} are free"
    at_most = _most_kept(keep)
    # A new checkpoint is whole before an old one goes: there is one more than retention keeps, for a moment.
    missing = 0 if at_most is None else max(0, at_most + 1 - num_there) * size - least
    if missing > 0:
        line += (
            f"\n  NOT enough for keep={keep!r}: {at_most} are kept and one more is written before the oldest goes, "
            f"which takes {format_bytes(missing)} more; a save that finds no space is lost, older ones are safe"
        )
    return line


def _most_kept(keep: Keep | None) -> int | None:
    """Return how many checkpoints retention keeps at most; None without a bound."""
    if keep is None or keep.every is not None or (keep.last is None and keep.best is None):
        return None
    return (keep.last or 0) + (keep.best or 0)


def _future_optimizer_bytes(values: Any) -> int:
    """Estimate the optimizer state that does not exist before the first step."""
    total = 0
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            slots = _SLOTS.get(type(value).__name__, 1)
            if type(value).__name__ == "SGD" and not any(group.get("momentum") for group in value.param_groups):
                slots = 0
            total += slots * sum(
                param.numel() * param.element_size()
                for group in value.param_groups
                for param in group["params"]
                if param.requires_grad and param not in value.state
            )
        elif isinstance(value, Mapping):
            total += _future_optimizer_bytes(value.values())
        elif isinstance(value, (list, tuple)):
            total += _future_optimizer_bytes(value)
    return total
