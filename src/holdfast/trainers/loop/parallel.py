"""A model on several ranks: gradients averaged by DDP, or a model that the user has sharded already."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...state.sharded import is_spread
from .ranks import Ranks

__all__ = ["Parallel", "bare", "is_sharded"]


def bare(model: nn.Module) -> nn.Module:
    """Return the user's own module out of a `DistributedDataParallel`."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(model: nn.Module) -> bool:
    """Tell whether ranks hold parts of this model, so that they have to go through it together."""
    return any(is_spread(one) for one in model.parameters())


class Parallel:
    """How a model is called in training. `state.model` stays the bare module: names and methods are those of the user.

    Args:
        given: what the user passed; a `DistributedDataParallel` is used as it is.
        ranks: the processes that train.
    """

    def __init__(self, given: nn.Module, ranks: Ranks) -> None:
        self._given, self._ranks = given, ranks
        self._wrapped: nn.Module | None = given if isinstance(given, DistributedDataParallel) else None

    def ready(self, model: nn.Module, device: torch.device) -> None:
        """Wrap the model, if several ranks train and nobody did; all ranks begin with the weights of rank 0."""
        if self._ranks.world_size == 1 or (self._wrapped is not None and bare(self._wrapped) is model):
            return
        self._wrapped = None
        if is_sharded(model) or not any(one.requires_grad for one in model.parameters()):
            return
        ids = [device] if device.type == "cuda" else None
        # Buffers are shared after the step, see `settle`. The argument has another name from torch 2.13 on.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers: Any = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
        self._wrapped = DistributedDataParallel(model, device_ids=ids, **buffers)

    def callable(self, model: nn.Module) -> Any:
        """Return what is called with a training batch."""
        return model if self._wrapped is None else self._wrapped

    def gathering(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context of one part of a batch: gradients are averaged with the last one only."""
        if isinstance(self._wrapped, DistributedDataParallel) and not last:
            return self._wrapped.no_sync()
        if self._ranks.world_size > 1 and callable(getattr(model, "set_requires_gradient_sync", None)):
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()

    def settle(self, model: nn.Module) -> None:
        """Give all ranks the buffers of rank 0 after a step: they evaluate, average and save one state."""
        if self._ranks.world_size > 1:
            self._ranks.share([one for one in model.buffers() if not is_spread(one)])
