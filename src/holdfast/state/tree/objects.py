"""Objects that keep their state behind ``state_dict``: optimizers by the names of parameters, metrics, all others.

``Optimizer.state_dict`` keys its state by position. Here it is keyed by the stored name of the parameter, so that
the order of parameters, their groups and which of them are frozen may change between save and load. It is put back
without casts (torch's own ``load_state_dict`` turns float32 state of bfloat16 parameters into bfloat16).

All ranks call ``state_dict`` of other objects in the order of their names: it may use collectives, as in wrappers
around sharded models, and ranks whose dicts have another order would wait for each other for ever
(torch.distributed.checkpoint sorts keys for that reason). Metrics of torchmetrics are read past their ``state_dict``,
which is empty unless every state is declared persistent.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .names import without_tokens
from .values import PerRank

__all__ = [
    "IMPLEMENTATION_FLAGS",
    "OTHER_STATE",
    "apply_groups",
    "ask_in_order",
    "by_param_name",
    "empty_beside",
    "is_metric",
    "is_plain",
    "live_names",
    "metric_state",
    "odd_layouts",
    "restore_metric",
    "shared_names",
    "state_device",
    "state_of",
    "to_named",
    "to_positions",
]

# How a step is computed on this device, not what it computes: the live optimizer's own choice stays.
IMPLEMENTATION_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})

# Where a stored optimizer has what is in ``Optimizer.state`` under keys that are no parameters.
OTHER_STATE = "other_state"

# The live optimizer also keeps its own parameters in each group, and their names.
_OWN = frozenset({"params", "param_names"})

_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def is_plain(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer keeps its state the standard way; others go through their own ``state_dict``.

    Others have methods of their own for it, or hooks that see or change what is saved and loaded.
    """
    kind = type(optimizer)
    standard = kind.state_dict is Optimizer.state_dict and kind.load_state_dict is Optimizer.load_state_dict
    return standard and not any(getattr(optimizer, hooks, None) for hooks in _HOOKS)


def live_names(optimizer: Optimizer, names: dict[int, str]) -> list[list[str]]:
    """Return the stored name of each parameter, group by group.

    A parameter that belongs to no module of the state is called ``param.<position>``.
    """
    position = 0
    groups = []
    for group in optimizer.param_groups:
        row = []
        for param in group["params"]:
            row.append(names.get(id(param), f"param.{position}"))
            position += 1
        groups.append(row)
    return groups


def shared_names(optimizer: Optimizer, rows: Sequence[Sequence[str]]) -> list[str]:
    """Say which of the names that `live_names` gave several parameters have, and what to do."""
    names = [name for row in rows for name in row]
    if len(set(names)) == len(names):
        return []
    owner: dict[str, torch.Tensor] = {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    twice = {name for name, param in zip(names, params, strict=True) if owner.setdefault(name, param) is not param}
    return [
        f"two parameters are called {name!r} by their places in the state: give it other keys" for name in sorted(twice)
    ]


def to_named(optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """Return ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}`` with the live tensors in it.

    `OTHER_STATE` is there too if the optimizer keeps anything under keys that are no parameters (MADGRAD counts steps
    so).
    """
    groups = live_names(optimizer, names)
    state = {}
    for group, row in zip(optimizer.param_groups, groups, strict=True):
        for param, name in zip(group["params"], row, strict=True):
            if kept := optimizer.state.get(param):
                state[name] = dict(kept)
    hyper = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": row}
        for group, row in zip(optimizer.param_groups, groups, strict=True)
    ]
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {"state": state, "param_groups": hyper, **({OTHER_STATE: others} if others else {})}


def by_param_name(groups: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return what stands for each parameter by the name that torch keeps for it (``param_names`` of a group).

    Args:
        groups: of an optimizer.
        rows: what stands for the parameters of each group.

    Returns:
        Empty if some parameter has no name, or two have the same. Prefixes of wrappers are not part of a name.
    """
    names: list[str] = []
    for group, row in zip(groups, rows, strict=True):
        own = group.get("param_names")
        if not isinstance(own, (list, tuple)) or len(own) != len(row):
            return {}
        names.extend(own)
    if not all(isinstance(name, str) for name in names):
        return {}
    names = [without_tokens(name) for name in names]
    if all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    found = dict(zip(names, (item for row in rows for item in row), strict=True))
    return found if len(found) == len(names) else {}


def to_positions(named: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return what `to_named` gave as the dict of torch's own ``state_dict``.

    Args:
        named: the result of `to_named`.
        rows: names of the live parameters: the parameters are in this order, if each group has the same ones.
    """
    groups = [dict(group) for group in named["param_groups"]]
    if [set(group["params"]) for group in groups] == [set(row) for row in rows]:
        for group, row in zip(groups, rows, strict=True):
            if "param_names" in group:
                own = dict(zip(group["params"], group["param_names"], strict=True))
                group["param_names"] = [own[name] for name in row]
            group["params"] = list(row)
    position = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    for group in groups:
        group["params"] = [position[name] for name in group["params"]]
    states = {position[name]: state for name, state in named["state"].items()}
    return {"state": {**states, **named.get(OTHER_STATE, {})}, "param_groups": groups}


def odd_layouts(optimizer: Optimizer, names: dict[int, str], kinds: tuple[type, ...]) -> dict[str, list[int | None]]:
    """Return the sharding of state whose shape is not that of its parameter (factored second moments).

    Returns:
        "parameter/key" -> for each dimension of the mesh the dimension that is sharded along it, or None.
    """
    layouts = {}
    for group, row in zip(optimizer.param_groups, live_names(optimizer, names), strict=True):
        for param, name in zip(group["params"], row, strict=True):
            if isinstance(param, kinds):
                whole: Any = param
                kept: Any = optimizer.state.get(whole) or {}
                for key, value in kept.items():
                    placements = getattr(value, "placements", None) if isinstance(value, kinds) else None
                    if placements is not None and tuple(value.shape) != tuple(whole.shape):
                        layouts[f"{name}/{key}"] = [getattr(placement, "dim", None) for placement in placements]
    return layouts


def _tensor_package() -> Any:
    try:
        return importlib.import_module("torch.distributed.tensor")
    except ImportError:
        return importlib.import_module("torch.distributed._tensor")  # torch 2.4


def empty_beside(
    param: Any, shape: tuple[int, ...], dtype: torch.dtype, layout: list[int | None] | None
) -> torch.Tensor:
    """Return an uninitialised tensor on the mesh of a parameter, of another shape than the parameter.

    Args:
        param: a DTensor.
        shape: of the whole tensor.
        dtype: of the tensor.
        layout: as in `odd_layouts`. If it is None or does not fit the mesh, each dimension of the same size as in
            ``param`` is sharded as in ``param``.
    """
    kinds = _tensor_package()
    Replicate, Shard = kinds.Replicate, kinds.Shard  # noqa: N806 - classes
    if layout is None or len(layout) != param.device_mesh.ndim:
        dims = (getattr(placement, "dim", None) for placement in param.placements)
        layout = [
            dim if dim is not None and dim < len(shape) and shape[dim] == param.shape[dim] else None for dim in dims
        ]
    placements = [Replicate() if dim is None or dim >= len(shape) else Shard(dim) for dim in layout]
    made: torch.Tensor = kinds.empty(*shape, dtype=dtype, device_mesh=param.device_mesh, placements=placements)
    return made


def state_device(key: str, group: dict[str, Any], param: torch.Tensor) -> torch.device:
    """Return where a state tensor of ``param`` lives: torch keeps ``step`` on the CPU unless a kernel reads it."""
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.device("cpu")
    return param.device


def apply_groups(optimizer: Optimizer, rows: list[list[str]], saved: list[dict[str, Any]]) -> list[str]:
    """Put saved hyper-parameters into the live groups; return a line for each group that could not be matched.

    A live group takes the hyper-parameters of the saved groups its parameters came from, if these agree.
    """
    home = {name: group for group in saved for name in group["params"]}
    problems = []
    for number, (group, row) in enumerate(zip(optimizer.param_groups, rows, strict=True)):
        sources = list({id(home[name]): home[name] for name in row if name in home}.values())
        if not sources:
            if saved and row:
                problems.append(f"param_groups[{number}]: none of its parameters was saved; live values kept")
            continue
        for key in sources[0]:
            if key in _OWN or key in IMPLEMENTATION_FLAGS:
                continue
            values = [source.get(key) for source in sources]
            if any(not _same(values[0], other) for other in values[1:]):
                problems.append(f"param_groups[{number}].{key}: saved groups disagree ({values}); live value kept")
            elif isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(values[0]))
            elif isinstance(values[0], torch.Tensor) and isinstance(group.get(key), (int, float)):
                group[key] = values[0].item()  # whether lr is a tensor is a choice of implementation, too
            else:
                group[key] = values[0]
    return problems


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(left), torch.as_tensor(right)))
    return bool(left == right)


_PLAIN = (torch.Tensor, int, float, str, bytes, type(None))
_Asked = dict[str, tuple[Any, Any]]


def ask_in_order(state: Mapping[Any, Any], takes: Callable[[str], bool] | None = None) -> _Asked:
    """Return by name each object that keeps its state itself, with what its ``state_dict`` gave.

    Args:
        state: the state of this rank; other ranks call this with theirs.
        takes: tells by the name of an object whether to ask it; default: all are asked.
    """
    objects = {name: item for name, item in _objects(state, "", ()) if takes is None or takes(name)}
    return {name: (objects[name], objects[name].state_dict()) for name in sorted(objects)}


def state_of(value: Any, asked: _Asked, name: str) -> Any:
    """Return the state of an object: what `ask_in_order` got from it, else its ``state_dict()``."""
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


def is_metric(value: Any) -> bool:
    """Tell whether ``value`` is a torchmetrics ``Metric`` or ``MetricCollection``, without importing torchmetrics."""
    return _is_single(value) or (isinstance(value, nn.ModuleDict) and hasattr(value, "_enable_compute_groups"))


def metric_state(metric: Any) -> dict[str, Any]:
    """Return states, buffers and update count of a metric and of every metric inside it, by module path."""
    if isinstance(metric, nn.ModuleDict):
        # Metrics of a compute group share the states of their first metric; iterating refreshes the others.
        list(metric.items(keep_base=True, copy_state=False))  # type: ignore[call-arg]
    return {path: _state(part) for path, part in _singles(metric)}


def restore_metric(metric: Any, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Put back what `metric_state` took; returns a line for each part that has no place."""
    parts = dict(_singles(metric))
    problems = [f"{path or 'metric'}: no such metric now" for path in state if path not in parts]
    for path, part in parts.items():
        if path not in state:
            problems.append(f"{path or 'metric'}: the checkpoint has no such metric; it starts empty")
            part.reset()
            continue
        held = {**vars(part), **part._buffers, **part._defaults}
        attributes = {name for name, value in held.items() if not callable(value)}
        for name, value in state[path].items():
            if name == "_update_count":
                part._update_count = value
            elif name not in attributes or name.startswith("_"):
                # An unknown name could hide a method: names in a checkpoint are not trusted.
                problems.append(f"{path or 'metric'}: it has no state {name!r} now")
            elif isinstance(value, torch.Tensor):
                # A copy: metrics of a compute group share one stored tensor, and some add to it in place.
                setattr(part, name, value.to(part.device, copy=True))
            else:
                setattr(part, name, [item.to(part.device) for item in value])
        part._computed = None
    return problems


def _state(metric: Any) -> dict[str, Any]:
    # Wrappers such as MinMaxMetric keep what they have seen in buffers or plain attributes.
    kept = {**metric._buffers, **vars(metric)}
    loose = {name: item for name, item in kept.items() if isinstance(item, torch.Tensor) and not name.startswith("_")}
    declared = {name: getattr(metric, name) for name in metric._defaults}
    return {**loose, **declared, "_update_count": metric._update_count}


def _singles(metric: Any) -> list[tuple[str, Any]]:
    return [(path, part) for path, part in metric.named_modules() if _is_single(part)]


def _is_single(value: Any) -> bool:
    return hasattr(value, "_defaults") and hasattr(value, "_reductions") and hasattr(value, "_update_count")
