"""Import files of ``torch.save``, among them checkpoints of PyTorch Lightning, with optimizers by parameter names."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.errors import UnsupportedStateError
from holdfast.state.save.torch_file import from_plain

from .gathered import Gathered, mapped_ranges
from .unpickle import Opaque, read_torch

__all__ = ["from_lightning", "from_torch", "is_lightning", "named", "take_optimizers"]

_WRAPPERS = ("module.", "_orig_mod.")
# What optimizers of torch and those modelled on them keep for each element of a parameter, so in its shape. Other state
# may have another: factored moments (Adafactor) have that of rows and columns, where a norm may have the same.
_ELEMENTWISE = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "prev", "step_size", "ax"}
)
_LIGHTNING = (("optimizer_states", "optimizer", "optimizers"), ("lr_schedulers", "scheduler", "schedulers"))


def from_torch(path: str, *, trusted: bool = False) -> Gathered:
    """Read one file; a Lightning checkpoint is recognised."""
    content = read_torch(path, trusted=trusted)
    if is_lightning(content):
        return _lightning(content, path)
    return _plain(content, path)


def from_lightning(path: str, *, trusted: bool = False) -> Gathered:
    """Read a checkpoint of Lightning."""
    content = read_torch(path, trusted=trusted)
    if not isinstance(content, Mapping) or "state_dict" not in content:
        raise UnsupportedStateError(f"{path} is no checkpoint of Lightning: it has no 'state_dict'")
    return _lightning(content, path)


def is_lightning(value: Any) -> bool:
    """Tell whether this is what Lightning saves."""
    return isinstance(value, Mapping) and "state_dict" in value and "pytorch-lightning_version" in value


def _plain(content: Any, path: str) -> Gathered:
    gathered = Gathered()
    if isinstance(content, torch.nn.Module):
        content = {"model": content}
    if isinstance(content, Opaque):
        raise UnsupportedStateError(
            f"{path} holds one object of {content.name}, which is not made here: if you trust who wrote it, import it "
            "with trusted=True (--trusted)"
        )
    if _is_weights(content):
        content = {"model": content}  # the state_dict of a model
    elif not isinstance(content, Mapping):
        content = {os.path.basename(path).partition(".")[0] or "value": content}
    elif not all(isinstance(key, str) for key in content):
        content = {"value": content}
    state = {key: _without_wrappers(value, key, gathered) for key, value in from_plain(content, where=path).items()}
    state, labels = take_optimizers(state, gathered)
    gathered.values(state, labels=labels, mapped=mapped_ranges(path))
    gathered.position(state.get("step", state.get("global_step")), state.get("epoch"))
    return gathered


def _lightning(content: Mapping[str, Any], path: str) -> Gathered:
    gathered = Gathered()
    state: dict[str, Any] = {"model": _without_wrappers(content["state_dict"], "model", gathered)}
    for key, singular, plural in _LIGHTNING:
        values = content.get(key) or []
        if len(values) == 1:
            state[singular] = values[0]
        elif values:
            state[plural] = list(values)
    renamed = {"state_dict", *(key for key, _, _ in _LIGHTNING)}
    rest = {key: value for key, value in content.items() if key not in renamed and value is not None}
    gathered.not_taken += [(key, "what Lightning itself keeps has this name here") for key in rest if key in state]
    state.update((key, value) for key, value in rest.items() if key not in state)
    state, labels = take_optimizers(state, gathered)
    gathered.values(state, labels=labels, mapped=mapped_ranges(path))
    gathered.position(content.get("global_step"), content.get("epoch"))
    return gathered


def take_optimizers(state: dict[str, Any], gathered: Gathered) -> tuple[dict[str, Any], dict[str, str]]:
    """Key state of optimizers by parameter names where these are certain; returns the state, and labels of items."""
    labels: dict[str, str] = {}
    models = {key: value for key, value in state.items() if _is_weights(value)}

    def by_name(value: Any) -> Any:
        fitting = [keyed for key, model in models.items() if (keyed := named(value, model, f"{key}/")) is not None]
        return fitting[0] if len(fitting) == 1 else None

    for key, value in list(state.items()):
        values = value if isinstance(value, list) else [value]
        if not values or not all(map(_is_optimizer, values)):
            continue
        keyed = [by_name(item) for item in values]
        if all(item is not None for item in keyed):
            state[key] = keyed if isinstance(value, list) else keyed[0]
            labels[key] = "optimizer state, by parameter name"
        else:
            labels[key] = "optimizer state, by position: fits an optimizer made with its parameters in the same order"
    return state, labels


def _is_weights(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items())
    )


def _without_wrappers(value: Any, key: str, gathered: Gathered) -> Any:
    """Strip prefixes of DDP and torch.compile that all names of a state dict have."""
    if not _is_weights(value):
        return value
    names, stripped = list(value), ""
    while prefix := next((prefix for prefix in _WRAPPERS if all(name.startswith(prefix) for name in names)), ""):
        names, stripped = [name[len(prefix) :] for name in names], stripped + prefix
    if not stripped:
        return value
    gathered.not_taken.append((key, f"the prefix {stripped!r} of all its names: wrappers are not part of stored names"))
    return OrderedDict(zip(names, value.values(), strict=True))


def _is_optimizer(value: Any) -> bool:
    """Tell whether a value looks like a result of ``Optimizer.state_dict``."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in value["param_groups"])
    )


def named(optimizer: Mapping[str, Any], model: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    """Return the same state keyed by parameter name (``prefix`` and the name in the model); None if uncertain.

    ``Optimizer.state_dict`` numbers parameters in the order in which the script gave them. The file names that order
    (``param_names``, or names in place of numbers), or it does not matter, because each state has a different shape (by
    tensors that are known to have that of their parameter) that exactly one parameter of the model has. A wrong guess
    would mix up states silently, so all other state stays by position: an optimizer made in the same way takes it
    unchanged.
    """
    groups, states = optimizer["param_groups"], optimizer["state"]
    keys = [key for group in groups for key in group["params"]]
    listed = [name for group in groups for name in group.get("param_names", ())]
    if len(listed) == len(keys) and keys:
        names: list[str] | None = listed if all(name in model for name in listed) else None
    elif keys and all(isinstance(key, str) for key in keys):  # FSDP, torch.distributed.checkpoint.state_dict
        names = keys if all(key in model for key in keys) else None
    else:
        names = _by_shape([_shape(states.get(key)) for key in keys], _parameters(model))
    if names is None or len(set(names)) < len(names) or not states.keys() <= set(keys):
        return None
    name_of = dict(zip(keys, names, strict=True))
    if not all(isinstance(kept, Mapping) for kept in states.values()):
        return None
    return {
        **optimizer,
        "state": {prefix + name_of[key]: kept for key, kept in states.items()},
        "param_groups": [{**group, "params": [prefix + name_of[key] for key in group["params"]]} for group in groups],
    }


def _parameters(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return shapes of what may be parameters in a ``state_dict``: floating tensors, tied tensors once."""
    shapes = {}
    seen = set()
    for name, value in model.items():
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        memory = (value.data_ptr(), value.shape, value.stride())
        if memory[0] and memory in seen:  # 0: no memory at all (empty, or only the shape is known)
            continue
        seen.add(memory)
        shapes[name] = tuple(value.shape)
    return shapes


def _shape(kept: Any) -> tuple[int, ...] | None:
    """Return the shape that an optimizer's state gives to its parameter; None if it gives none for certain."""
    tensors = kept.items() if isinstance(kept, Mapping) else ()
    shapes = {
        tuple(value.shape)
        for key, value in tensors
        if key in _ELEMENTWISE and isinstance(value, torch.Tensor) and value.dim()
    }
    return shapes.pop() if len(shapes) == 1 else None


def _by_shape(wanted: list[tuple[int, ...] | None], shapes: Mapping[str, tuple[int, ...]]) -> list[str] | None:
    """Return the parameter of each wanted shape; None unless each shape belongs to exactly one parameter."""
    homes: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        homes.setdefault(shape, []).append(name)
    candidates = [homes.get(shape, []) if shape is not None else [] for shape in wanted]
    if len(set(wanted)) != len(wanted) or any(len(names) != 1 for names in candidates):
        return None
    return [names[0] for names in candidates]
