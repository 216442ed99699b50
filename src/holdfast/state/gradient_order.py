"""What DDP keeps that is in no state: the order in which it adds up gradients, and what its hooks hold.

Gradients are added up in the same order in every step, the first step after a start included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast._log import get_logger
from holdfast._units import listed

from .tree.objects import is_replicated, leaves
from .tree.values import Attrs, PerRank

_LOG = get_logger("state")

# Where torch keeps hooks, and whether it reduces in Python; it has no public way to ask.
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_MODULES = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_comm_hooks",
    "_use_python_reducer",
)  # fmt: skip
# The warning where `fix_gradient_order` returns False.
INEXACT = (
    "DDP adds its gradients in another order in the first step after a start, so with three or more ranks a resume "
    "differs in the last bits: see docs/parallel.md"
)

_tried: WeakKeyDictionary[DistributedDataParallel, bool] = WeakKeyDictionary()  # model -> whether its order is fixed


def parallel_modules(state: Any) -> dict[str, DistributedDataParallel]:
    """Return the DDP modules of a state, by their paths, in the order of the paths.

    Those that an object of the state has as an attribute are among them.
    """
    return dict(sorted(_parallel(state, "", ())))


def _parallel(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, DistributedDataParallel]]:
    if isinstance(value, nn.Module):
        for name, child in value.named_modules():
            if type(child) is DistributedDataParallel:
                yield f"{path}/{name}".strip("/"), child
    elif callable(getattr(value, "state_dict", None)) and not isinstance(value, (type, torch.optim.Optimizer)):
        for name, own in getattr(value, "__dict__", {}).items():
            if isinstance(own, nn.Module):
                yield from _parallel(own, f"{path}/{name}", above)
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in above:
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _parallel(item, f"{path}/{key}", (*above, id(value)))


def replicated_modules(state: Any) -> list[str]:
    """Return the paths of modules that ``replicate`` of torch is to wrap in DDP at their first forward pass.

    It keeps the DDP beside the module, and makes it too late to fix its order.
    """
    return sorted(_replicated(state, ""))


def _replicated(value: Any, path: str) -> Iterator[str]:
    for where, module in leaves(value, path):
        for name, child in module.named_modules() if isinstance(module, nn.Module) else ():
            if is_replicated(child):
                kept = sys.modules["torch.distributed._composable.replicate"].replicate.state(child)
                if not getattr(kept, "_init_kwargs", {}).get("find_unused_parameters"):
                    yield f"{where}/{name}".strip("/")


def fix_gradient_order(model: DistributedDataParallel) -> bool:
    """Let DDP lay out its buckets of gradients now, instead of after the first step of this process.

    DDP fills its buckets in the order of ``parameters()`` for one step, then lays them out anew in the order in which
    the gradients arrived (``Reducer::rebuild_buckets`` of PyTorch). An all-reduce of three or more ranks adds in an
    order that depends on the place in the bucket, and float addition is not associative. So the first step after a
    start differs in the last bits from the same step in the middle of a training, and a resume is not exact. One
    backward pass that gives zeros to all parameters, last parameter first, fixes the layout before the first step.

    All ranks of the model's process group call it, before the first step. Parameters and buffers stay as they are.
    A second call does nothing and returns what the first returned.

    Args:
        model: a module that has done no forward pass yet.

    Returns:
        False where the layout cannot be fixed: with hooks on parameters or on the wrapper and hooks of communication,
        which would take the zeros for gradients of the training, with sparse gradients, ``static_graph=True`` or
        ``mixed_precision``. True otherwise, also where there is nothing to do: with one or two ranks, or
        ``find_unused_parameters=True``.
    """
    if model not in _tried:
        _tried[model] = _fix(model)
    return _tried[model]


def fix_or_warn(model: DistributedDataParallel, *, leads: bool) -> None:
    """Fix the order of a model; the rank that ``leads`` warns once where that cannot be done."""
    is_new = model not in _tried
    if not fix_gradient_order(model) and is_new and leads:
        _LOG.warning(INEXACT)


def _fix(model: DistributedDataParallel) -> bool:
    if model.process_group.size() < 3 or model.find_unused_parameters:
        return True
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    refused = model.static_graph or model.mixed_precision is not None
    refused = refused or any(getattr(child, "sparse", False) is True for child in model.module.modules())
    refused = refused or _has_hooks(model, _OF_MODULES)
    refused = refused or any(_has_hooks(parameter, _OF_PARAMETERS) for parameter in parameters)
    # Asked of all ranks: hooks may be on one of them alone (a logger that watches gradients on rank 0).
    anywhere = torch.tensor(int(refused), device=parameters[0].device if parameters else model.device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=model.process_group)
    if anywhere.item():
        return False
    with torch.enable_grad(), _set_aside(model, parameters):
        model(torch.zeros((), device=anywhere.device)).backward()
    return True


def _has_hooks(holder: Any, kinds: tuple[str, ...]) -> bool:
    return any(getattr(holder, kind, None) for kind in kinds)


@contextmanager
def _set_aside(model: DistributedDataParallel, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Let DDP call zeros instead of its module; gradients and buffers stay as they are."""
    module, syncs, before = model.module, model.require_forward_param_sync, [parameter.grad for parameter in parameters]
    model.module, model.require_forward_param_sync = _Zeros(module, parameters), False
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        model.module, model.require_forward_param_sync = module, syncs
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


def changed_hooks(state: Mapping[Any, Any]) -> Iterator[Callable[[], str]]:
    """Yield for each DDP module with communication hooks what names those that have changed a state of their own.

    Only whether a number is another one, or a container has grown, is looked at.
    """
    for path, module in parallel_modules(state).items():
        kept = [own for _, own in getattr(module, "_comm_hooks", ()) if own is not None]
        known = {id(item) for item in named_objects(state)} if kept else set()
        for own in kept:
            if id(own) not in known:
                yield partial(_changed_hook, path, own, _counts(own))


def _changed_hook(path: str, own: Any, before: Mapping[str, float]) -> str:
    changed = sorted(name for name, count in _counts(own).items() if count != before.get(name))
    kind = type(own).__name__
    return "" if not changed else (
        f"the first step has changed {listed(changed)} of the {kind} that the communication hook of {path} keeps: DDP "
        "gives it to no state_dict(), and a resume goes on with what the script makes anew (docs/parallel.md)"
    )  # fmt: skip


def named_objects(value: Any) -> Iterator[Any]:
    """Yield the objects whose attributes a state names, and what its own objects hold."""
    value = value.value if isinstance(value, PerRank) else value
    if isinstance(value, Attrs):
        yield value._owner
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from named_objects(item)
    elif not isinstance(value, nn.Module):
        yield value
        yield from getattr(value, "__dict__", {}).values()


def _counts(own: Any) -> dict[str, float]:
    """Return the numbers among the attributes of an object, and the lengths of its containers."""
    names = {*getattr(own, "__dict__", ()), *(name for kind in type(own).__mro__ for name in _slots(kind))}
    held = {name: getattr(own, name, None) for name in names}
    counts = {name: value for name, value in held.items() if isinstance(value, (int, float))}
    return {**counts, **{name: len(value) for name, value in held.items() if isinstance(value, Sized)}}


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class _Zeros(nn.Module):
    """A scalar that has all parameters as its inputs, with gradients of zeros."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._given = (module, parameters)  # a tuple: they do not become parts of this module

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self._given[0].named_buffers(*args, **options)

    def forward(self, scalar: torch.Tensor) -> Any:
        add: Any = _ZeroGradient.apply  # torch gives it no types
        for parameter in self._given[1]:
            scalar = add(scalar.to(parameter.device), parameter)
        return scalar


class _ZeroGradient(torch.autograd.Function):
    """One link of a chain. Backward goes from the last link to the first, so the last parameter is ready first."""

    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        return scalar.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        (parameter,) = ctx.saved_tensors
        return gradients[0], torch.zeros_like(parameter)
