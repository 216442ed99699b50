"""Models with sharded and plain parameters: steps that torch's own functions take for a single kind of tensors only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.state.tree.sharded import is_spread, local_tensor

__all__ = ["check_optimizers", "clip_gradients", "default_optimizer", "move_plain"]

_HOW = (
    "give each kind {what} of its own, of the parameters that are DTensors and of the others (isinstance(one, "
    "torch.distributed.tensor.DTensor) tells)"
)


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
