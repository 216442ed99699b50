"""Schedules of the learning rate in time strings, and optimizers with decoupled weight decay, for the loop trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, AdamW

from .trainers.loop.schedulers import (
    ComposerScheduler,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    StepScheduler,
    compile_composer_scheduler,
)

# torch's own step without what wraps it: hooks of an optimizer are called once, around the step of ours.
_ADAMW: Any = inspect.unwrap(AdamW.step)
_SGD: Any = inspect.unwrap(SGD.step)

__path__: list[str] = []  # an import of one of Composer's inner modules is answered with where it is
__all__ = [
    "ComposerScheduler", "ConstantScheduler", "ConstantWithWarmupScheduler", "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler", "CosineAnnealingWithWarmupScheduler", "DecoupledAdamW", "DecoupledSGDW",
    "ExponentialScheduler", "LinearScheduler", "LinearWithWarmupScheduler", "MultiStepScheduler",
    "MultiStepWithWarmupScheduler", "PolynomialScheduler", "PolynomialWithWarmupScheduler", "StepScheduler",
    "compile_composer_scheduler",
]  # fmt: skip


class DecoupledAdamW(AdamW):
    """AdamW whose weight decay does not depend on the learning rate it begins with (arXiv:1711.05101, equation 9).

    In each step a weight w becomes ``w * (1 - weight_decay * lr / initial_lr)`` before the update of the gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = DecoupledAdamW([weight], lr=0.1, weight_decay=0.5)
        >>> weight.grad = torch.zeros(2)
        >>> _ = optimizer.step()
        >>> weight.tolist()
        [0.5, 0.5]
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 1e-5, amsgrad: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        _note_rates(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step."""
        return _decoupled(self, _ADAMW, closure)


class DecoupledSGDW(SGD):
    """SGD whose weight decay does not depend on the learning rate it begins with, as that of `DecoupledAdamW`."""

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0, dampening: float = 0, weight_decay: float = 0,
        nesterov: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
        _note_rates(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step."""
        return _decoupled(self, _SGD, closure)


def _note_rates(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]


def _decoupled(optimizer: torch.optim.Optimizer, step: Any, closure: Callable[[], Any] | None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        first = group.setdefault("initial_lr", group["lr"])
        keep = 1 - group["weight_decay"] * (group["lr"] / first if first else 1.0)
        for parameter in group["params"] if group["weight_decay"] != 0 else ():
            if parameter.grad is not None:
                parameter.mul_(keep)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        step(optimizer)
    finally:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
    return loss
