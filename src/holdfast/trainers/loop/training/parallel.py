"""A model on several ranks: gradients averaged by DDP, or a model that the user has sharded already."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import ConfigError
from holdfast.state.accelerator import has_streams
from holdfast.state.gradient_order import fix_or_warn
from holdfast.state.tree.sharded import is_spread

from .ranks import Ranks

__all__ = ["Parallel", "bare", "is_sharded"]

_INSTEAD = "; the trainer gives every rank its own part of the data: use holdfast.Checkpointer in a loop of your own"


def bare(model: nn.Module) -> nn.Module:
    """Return the user's own module out of a `DistributedDataParallel`."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(model: nn.Module) -> bool:
    """Tell whether ranks hold parts of this model, so that they have to go through it together."""
    return any(is_spread(parameter) for parameter in model.parameters())


class Parallel:
    """How a model is called in training. `state.model` stays the bare module: names and methods are those of the user.

    Args:
        given: what the user passed; a `DistributedDataParallel` is used as it is.
        ranks: the processes that train.

    Raises:
        ConfigError: parts of it would not be trained in step.
    """

    def __init__(self, given: nn.Module, ranks: Ranks) -> None:
        self._given, self._ranks = given, ranks
        self._wrapped: nn.Module | None = given if isinstance(given, DistributedDataParallel) else None
        self._plain: list[nn.Parameter] = []  # whole on every rank, in a model that is sharded otherwise
        self._fsdp: list[Any] = []  # what gathers gradients by itself
        if ranks.world_size > 1:
            _check_sharding(bare(given), ranks.world_size)
        _gather_in_evaluations(bare(given))

    def ready(self, model: nn.Module, device: torch.device) -> None:
        """Wrap the model, if several ranks train and nobody did; all ranks begin with the weights of rank 0."""
        if self._ranks.world_size == 1:
            return
        if self._wrapped is not None and bare(self._wrapped) is model:
            self._fix_order()
            return
        self._wrapped, self._plain, self._fsdp = None, [], []
        if is_sharded(model):
            _check_sharding(model, self._ranks.world_size)
            self._ready_sharded(model)
            return
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        ids = [device] if has_streams(device) else None
        # Buffers are shared after the step, see `settle`. The argument has another name from torch 2.13 on.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers: Any = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
        self._wrapped = DistributedDataParallel(model, device_ids=ids, **buffers)
        self._fix_order()

    def _fix_order(self) -> None:
        if isinstance(self._wrapped, DistributedDataParallel):
            fix_or_warn(self._wrapped, leads=self._ranks.leads)

    def _ready_sharded(self, model: nn.Module) -> None:
        """Share the parameters outside of `fully_shard` among the ranks; `average` then averages their gradients."""
        # Frozen parameters may be trained later.
        self._plain = [tensor for tensor in model.parameters() if not is_spread(tensor)]
        self._ranks.share([tensor.detach() for tensor in self._plain])
        self._fsdp = list(_synchronised(model))

    def callable(self, model: nn.Module) -> Any:
        """Return what is called with a training batch."""
        return model if self._wrapped is None else self._wrapped

    def gathering(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context of one part of a batch: gradients are averaged with the last part only."""
        if isinstance(self._wrapped, DistributedDataParallel) and not last:
            return self._wrapped.no_sync()
        for module in self._fsdp:
            module.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def average(self) -> None:
        """Average the gradients that neither DDP nor FSDP has: of plain parameters beside sharded ones."""
        if not self._plain:
            return
        counts = self._ranks.sum([float(parameter.grad is not None) for parameter in self._plain])
        used = [parameter for parameter, count in zip(self._plain, counts, strict=True) if count]
        for parameter in used:
            if parameter.grad is None:  # other ranks went through it with this batch
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout is not torch.strided:  # of rows that differ between ranks
                parameter.grad = parameter.grad.to_dense()
        self._ranks.average([parameter.grad for parameter in used if parameter.grad is not None])

    def settle(self, model: nn.Module) -> None:
        """Give all ranks the buffers of rank 0 after a step: they evaluate, average and save one state."""
        if self._ranks.world_size > 1:
            self._ranks.share([buffer for buffer in model.buffers() if not is_spread(buffer)])


def _synchronised(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules under `fully_shard`: the root may not be among them."""
    if callable(getattr(module, "set_requires_gradient_sync", None)):
        yield module
        return
    for child in module.children():
        yield from _synchronised(child)


def _gather_in_evaluations(model: nn.Module) -> None:
    """Let ``eval_forward`` find the whole of a sharded model: FSDP gathers it for `forward` alone."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    register = getattr(fsdp, "register_fsdp_forward_method", None)  # takes no notice of other models
    if register is not None and callable(getattr(model, "eval_forward", None)) and "eval_forward" not in vars(model):
        register(model, "eval_forward")


def _check_sharding(model: nn.Module, world_size: int) -> None:
    """Refuse a model of which ranks that see different data hold different parts, in other ways than `fully_shard`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    first = getattr(fsdp, "FullyShardedDataParallel", None)
    if first is not None and any(isinstance(module, first) for module in model.modules()):
        raise ConfigError(
            "model is wrapped in FullyShardedDataParallel (FSDP1), whose flattened parameters the trainer does not "
            "save: use torch.distributed.fsdp.fully_shard instead"
        )
    older = sys.modules.get("torch.distributed._composable.fsdp")  # torch < 2.6
    second: Any = getattr(fsdp, "FSDPModule", None) or getattr(older, "FSDPModule", ())
    for name, parameter, within in _spread_parameters(model, second):
        mesh = getattr(parameter, "device_mesh", None)  # a ShardedTensor has none
        places = () if mesh is None else zip(parameter.placements, mesh.shape, strict=True)
        if mesh is None or not within or sum(size > 1 and not place.is_replicate() for place, size in places) > 1:
            raise ConfigError(
                f"the parameter {name} is split over ranks by something else than fully_shard (such as tensor "
                f"parallelism){_INSTEAD}"
            )
        if mesh.size() != world_size:
            raise ConfigError(
                f"the parameter {name} is sharded over {mesh.size()} of {world_size} ranks, so the others "
                "would train another model: give fully_shard a mesh of all ranks"
            )


def _spread_parameters(module: nn.Module, fsdp: Any, path: str = "", within: bool = False) -> Iterator[Any]:
    """Yield the sharded parameters: name, parameter, and whether it lies within a module under `fully_shard`."""
    within = within or isinstance(module, fsdp)
    for name, parameter in module._parameters.items():
        if parameter is not None and is_spread(parameter):
            yield f"{path}{name}", parameter, within
    for name, child in module.named_children():
        yield from _spread_parameters(child, fsdp, f"{path}{name}.", within)
