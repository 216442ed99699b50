"""Names that survive wrappers: what a parameter is called whatever wraps its module.

DDP and DataParallel add ``module.``, ``torch.compile`` adds ``_orig_mod.``, activation checkpointing and FSDP1 add
their own prefixes. None of them is part of a stored name, so a checkpoint of a wrapped model fits the bare model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .spread import reshard

__all__ = ["Modules", "canonical_keys", "parameter_names", "stored_parameters", "unwrap", "without_tokens"]

# Prefixes no user would choose: removed wherever they occur.
_TOKENS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
Modules = dict[int, tuple[nn.Module, list[tuple[str, nn.Parameter]]]]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside any stack of DDP, DataParallel and ``torch.compile`` wrappers."""
    while True:
        if isinstance(module, _PARALLEL):
            module = module.module
            continue
        modules = module.__dict__.get("_modules", ())  # not a dict in modules of TorchScript
        if "_orig_mod" not in modules or not isinstance(modules["_orig_mod"], nn.Module):
            return module
        module = modules["_orig_mod"]


def canonical_keys(module: nn.Module, keys: Mapping[str, Any] | list[str]) -> list[str]:
    """Return the stored name of each raw ``state_dict`` key of an unwrapped module, in the same order."""
    names = [without_tokens(name) for name in keys]
    if not any("module." in name for name in names):
        return names  # no wrapper inside: looking for them costs more than the rest
    parallel = [
        without_tokens(f"{path}.") for path, child in module.named_modules() if path and isinstance(child, _PARALLEL)
    ]
    if parallel:
        # Longest first: the path of an inner wrapper still contains "module." of the outer wrapper.
        parallel.sort(key=len, reverse=True)
        names = [_strip_parallel(name, parallel) for name in names]
    return names


def without_tokens(name: str) -> str:
    """Return a name without the prefixes that no user would choose."""
    if "_wrapped_module." in name or "_orig_mod." in name:
        for token in _TOKENS:
            name = name.replace(token, "")
    return name


def _strip_parallel(name: str, prefixes: list[str]) -> str:
    for prefix in prefixes:
        if name.startswith(prefix + "module."):
            name = prefix + name[len(prefix) + len("module.") :]
    return name


def stored_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of an unwrapped module by their stored names; shared ones come once for each name."""
    params = dict(module.named_parameters(remove_duplicate=False))
    return list(zip(canonical_keys(module, params), params.values(), strict=True))


def parameter_names(state: Mapping[Any, Any], modules: Modules | None = None) -> dict[int, str]:
    """Map ``id(parameter)`` to its stored name for every parameter of every module in ``state``.

    The name is the path of the module in the state and the parameter's own canonical name, joined by "/":
    ``model/blocks.0.weight``. A parameter shared by several modules keeps the first name.

    Args:
        state: the state whose modules are searched.
        modules: receives each module and its `stored_parameters`, by the ``id`` of the module.
    """
    names: dict[int, str] = {}
    for path, module in _modules(state, ""):
        inner = unwrap(module)
        reshard(inner)
        rows = stored_parameters(inner)
        if modules is not None:
            modules[id(inner)] = inner, rows
        for key, param in rows:
            names.setdefault(id(param), f"{path}/{key}" if path else key)
    return names


def _modules(value: Any, path: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple, deque)):
        names = getattr(value, "_fields", range(len(value)))
        items = zip(names, value, strict=False)
    else:
        return
    if id(value) in above:
        return  # a cycle: flattening refuses it and names the place
    for key, child in items:
        if not isinstance(child, (torch.Tensor, int, float, str)):
            yield from _modules(child, f"{path}/{key}" if path else str(key), (*above, id(value)))
