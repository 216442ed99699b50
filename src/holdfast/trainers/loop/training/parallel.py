"""A model on several ranks: gradients averaged by DDP, or a model that the user has sharded already.

Steps that torch takes for tensors of a single kind only are taken here for models with sharded and plain parameters.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import ConfigError
from holdfast.state.accelerator import has_streams
from holdfast.state.gradient_order import fix_or_warn
from holdfast.state.tree.arrays import is_spread, local_tensor

from .ranks import Ranks

__all__ = ["Parallel", "bare", "check_optimizers", "clip_gradients", "default_optimizer", "is_sharded", "move_plain"]

_INSTEAD = "; the trainer gives every rank its own part of the data: use holdfast.Checkpointer in a loop of your own"
_HOW = (
    "give each kind {what} of its own, of the parameters that are DTensors and of the others (isinstance(one, "
    "torch.distributed.tensor.DTensor) tells)"
)


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


def move_plain(model: nn.Module, device: torch.device) -> None:
    """Bring what `fully_shard` did not move to the device, in place: optimizers keep the parameters they have."""
    for parameter in model.parameters():
        if not is_spread(parameter) and parameter.device != device:
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_spread(buffer):
                module._buffers[name] = buffer.to(device)


def default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a trainer that was given none."""
    parameters = list(model.parameters())
    # One group whatever is sharded, so that a checkpoint fits a model that is sharded in another way.
    options: dict[str, Any] = {"foreach": False} if _is_mixed(parameters) else {}
    return torch.optim.AdamW(parameters, lr=1e-3, **options)


def check_optimizers(optimizers: Iterable[Any], device: torch.device, *, scaled: bool) -> None:
    """Refuse optimizers that would fail at their first step, over sharded and plain parameters at once.

    Args:
        optimizers: of the trainer.
        device: trained on.
        scaled: gradients are scaled (amp_fp16).

    Raises:
        ConfigError: saying how to part them.
    """
    for number, optimizer in enumerate(optimizers):
        groups = getattr(optimizer, "param_groups", ())
        where = f"optimizers[{number}] ({type(optimizer).__name__})"
        if scaled and _is_mixed([parameter for group in groups for parameter in group["params"]]):
            raise ConfigError(
                f"{where} has sharded and plain parameters, whose gradients precision='amp_fp16' cannot scale "
                f"together: {_HOW.format(what='an optimizer')}, or use 'amp_bf16'"
            )
        for at, group in enumerate(groups):
            way = _way(group, device)
            if way is not None and _is_mixed(group["params"]):
                raise ConfigError(
                    f"{where} has sharded and plain parameters in its group {at}, which {way} cannot step together: "
                    f"{_HOW.format(what='a group')}, or pass foreach=False"
                )


def _way(group: dict[str, Any], device: torch.device) -> str | None:
    """Return how an optimizer goes through a group at once; None if it takes one parameter after another."""
    for way in ("fused", "foreach"):
        if group.get(way):
            return f"{way}=True"
    unset = "foreach" in group and group["foreach"] is None and group.get("fused") is None
    return f"foreach (torch's choice on {device.type})" if unset and device.type not in ("cpu", "mps") else None


def _is_mixed(parameters: Iterable[torch.Tensor]) -> bool:
    """Tell whether parameters of both kinds are trained; frozen ones have no gradient to step with."""
    return len({is_spread(parameter) for parameter in parameters if parameter.requires_grad}) == 2


def clip_gradients(model: nn.Module, bound: float) -> None:
    """Bound the norm of all gradients together, sharded and plain ones (which torch's own function does not mix)."""
    with_grad = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grads: list[Any] = [parameter.grad for parameter in with_grad]
    kinds = [[grad for grad in grads if is_spread(grad) is spread] for spread in (True, False)]
    if not all(kinds):
        torch.nn.utils.clip_grad_norm_(with_grad, bound)
        return
    norms = [_norm(kind) for kind in kinds]
    whole = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    factor = (bound / (whole + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local = local_tensor(grad)  # a part of it is scaled as the whole is
        local.mul_(factor.to(local.device))


def _norm(grads: Sequence[Any]) -> torch.Tensor:
    """Measure gradients of one kind together, and leave them as they are."""
    total = getattr(torch.nn.utils, "get_total_norm", None)
    if total is not None:
        norm = total(grads)
    else:  # torch < 2.6
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    return norm.full_tensor() if is_spread(norm) else norm  # type: ignore[no-any-return]
