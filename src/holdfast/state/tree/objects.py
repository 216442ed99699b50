"""What keeps its state behind ``state_dict``: modules, optimizers by the names of parameters, metrics, all others.

``Optimizer.state_dict`` keys its state by position. Here it is keyed by the stored name of the parameter, so that
the order of parameters, their groups and which of them are frozen may change between save and load. It is put back
without casts (torch's own ``load_state_dict`` turns float32 state of bfloat16 parameters into bfloat16).

All ranks call ``state_dict`` of other objects in the order of their names: it may use collectives, as in wrappers
around sharded models, and ranks whose dicts have another order would wait for each other for ever
(torch.distributed.checkpoint sorts keys for that reason). Metrics of torchmetrics are read past their ``state_dict``,
which is empty unless every state is declared persistent.

Parameters have names that survive wrappers. DDP and DataParallel add ``module.``, ``torch.compile`` adds
``_orig_mod.``, activation checkpointing and FSDP1 add their own prefixes. None of them is part of a stored name, so a
checkpoint of a wrapped model fits the bare model.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import UnsupportedStateError

from .arrays import is_plain_context, reshard
from .values import PerRank

# Prefixes no user would choose: removed wherever they occur.
_TOKENS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
Modules = dict[int, tuple[nn.Module, list[tuple[str, nn.Parameter]]]]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside any stack of wrappers: DDP, DataParallel, ``torch.compile``, Fabric."""
    inner: nn.Module | None = module
    while inner is not None:
        module = inner
        inner = module.module if isinstance(module, _PARALLEL) else _within(module, "_original_module")
    return module


def _within(module: nn.Module, of_fabric: str) -> nn.Module | None:
    """Return the module that ``torch.compile`` has wrapped, or Fabric, which has two: the user's and what it calls."""
    modules = module.__dict__.get("_modules")  # not a dict in modules of TorchScript
    name = of_fabric if type(module).__name__ == "_FabricModule" else "_orig_mod"
    inner = modules.get(name) if isinstance(modules, dict) else None
    return inner if isinstance(inner, nn.Module) else None


def parallel_wrapper(module: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DDP that ``module`` is, or that ``torch.compile`` or Fabric has wrapped; None if there is none."""
    while (inner := _within(module, "_forward_module")) is not None:
        module = inner
    return module if isinstance(module, nn.parallel.DistributedDataParallel) else None


def is_replicated(module: nn.Module) -> bool:
    """Tell whether ``replicate`` of torch has made this module data parallel, which makes no buffers alike."""
    kind = getattr(sys.modules.get("torch.distributed._composable.replicate"), "DDP", None)
    return kind is not None and isinstance(module, kind)


def averages_buffers(module: nn.Module) -> bool:
    """Tell whether a module averages the buffers of another one (`AveragedModel`, timm): nothing makes these alike."""
    return getattr(module, "use_buffers", None) is True or getattr(module, "exclude_buffers", None) is False


def canonical_keys(module: nn.Module, keys: Mapping[str, Any] | list[str]) -> list[str]:
    """Return the stored name of each raw ``state_dict`` key of an unwrapped module, in the same order."""
    text = "\n".join(keys)
    if "module." not in text and "_orig_mod." not in text:
        return list(keys)  # no wrapper inside: looking for them costs more than the rest
    names = [without_tokens(name) for name in keys]
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
    # Past what a class makes of it: some leave parameters out or take other arguments (losses of torchrl).
    params = dict(nn.Module.named_parameters(module, remove_duplicate=False))
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
    for path, module in leaves(state):
        if not isinstance(module, nn.Module):
            continue
        inner = unwrap(module)
        reshard(inner)
        rows = stored_parameters(inner)
        if modules is not None:
            modules[id(inner)] = inner, rows
        for key, param in rows:
            names.setdefault(id(param), f"{path}/{key}" if path else key)
    return names


def leaves(
    value: Any, path: str = "", above: tuple[int, ...] = (), *, tensors: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield what is neither a container nor plain data, by its path in the state; of ``tensors`` those that lie there.

    ``above`` are the containers around it.
    """
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping) and not isinstance(value, nn.Module):
        items = value.items()
    elif isinstance(value, (list, tuple, deque)):
        items = zip(getattr(value, "_fields", range(len(value))), value, strict=False)
    else:
        yield path, value
        return
    if id(value) in above:
        return  # a cycle: flattening refuses it and names the place
    plain = _PLAIN[1:] if tensors else _PLAIN
    for key, child in items:
        if not isinstance(child, plain):
            yield from leaves(child, f"{path}/{key}" if path else str(key), (*above, id(value)), tensors=tensors)


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


def plain_optimizer(value: Any) -> Optimizer | None:
    """Return an optimizer, out of Fabric's wrapper; None if methods or hooks of its own see what is saved or loaded."""
    if type(value).__name__.startswith("Fabric"):
        value = getattr(value, "_optimizer", value)
    kind, methods = type(value), (Optimizer.state_dict, Optimizer.load_state_dict)
    is_standard = isinstance(value, Optimizer) and (kind.state_dict, kind.load_state_dict) == methods
    return value if is_standard and not any(getattr(value, hooks, None) for hooks in _HOOKS) else None


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
    names = list(chain.from_iterable(rows))
    if len(set(names)) == len(names):
        return []
    owner: dict[str, torch.Tensor] = {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    twice = {name for name, param in zip(names, params, strict=True) if owner.setdefault(name, param) is not param}
    return [
        f"two parameters are called {name!r} by their places in the state: give it other keys" for name in sorted(twice)
    ]


def to_named(optimizer: Optimizer, rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}`` with the live tensors in it.

    ``rows`` are its `live_names`.

    `OTHER_STATE` is there too if the optimizer keeps anything under keys that are no parameters (MADGRAD counts steps
    so).
    """
    state, hyper = {}, []
    for group, row in zip(optimizer.param_groups, rows, strict=True):
        values = dict(group)
        for param, name in zip(values.pop("params"), row, strict=True):
            if kept := optimizer.state.get(param):
                state[name] = dict(kept)
        hyper.append({**values, "params": row})
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {"state": state, "param_groups": hyper, **({OTHER_STATE: others} if others else {})}


def renamed(optimizer: Mapping[str, Any], rename: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the state of an optimizer with other names, or numbers, for its parameters."""
    state, groups = optimizer.get("state", {}), optimizer["param_groups"]
    return {
        **optimizer,
        "state": {rename(name): kept for name, kept in state.items()},
        "param_groups": [{**group, "params": [*map(rename, group.get("params", ()))]} for group in groups],
    }


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
                group[key].copy_(torch.as_tensor(values[0], device="cpu"))
            elif isinstance(values[0], torch.Tensor) and isinstance(group.get(key), (int, float)):
                group[key] = values[0].item()  # whether lr is a tensor is a choice of implementation, too
            else:
                group[key] = values[0]
    return problems


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(left, device="cpu"), torch.as_tensor(right, device="cpu")))
    return bool(left == right)


_PLAIN = (torch.Tensor, int, float, str, bytes, type(None))
_Asked = dict[str, tuple[Any, Any]]


def ask_in_order(state: Mapping[Any, Any], takes: Callable[[str], bool] | None = None) -> _Asked:
    """Return by name each object that keeps its state itself, with what its ``state_dict`` gave.

    Args:
        state: the state of this rank; other ranks call this with theirs.
        takes: tells by the name of an object whether to ask it; default: all are asked, to be saved.

    Raises:
        UnsupportedStateError: an object is of a kind that cannot be asked on all ranks.
    """
    objects = {name: item for name, item in _objects(state) if takes is None or takes(name)}
    for name, item in objects.items() if takes is None else ():
        if type(item).__name__ == "ZeroRedundancyOptimizer":
            raise UnsupportedStateError(
                f"{name}: a ZeroRedundancyOptimizer gathers its state only when it is asked to: give an object whose "
                "state_dict() calls consolidate_state_dict(to=0) on all ranks, and returns the optimizer's "
                "state_dict() on rank 0 and {} on the others, and whose load_state_dict() is the optimizer's"
            )
    return {name: (objects[name], objects[name].state_dict()) for name in sorted(objects)}


def has_objects(value: Any) -> bool:
    """Tell whether there are objects in a value that keep their state themselves."""
    return next(_objects(value), None) is not None


def state_of(value: Any, asked: _Asked, name: str) -> Any:
    """Return the state of an object: what `ask_in_order` got from it, else its ``state_dict()``."""
    known = asked.pop(name, None)
    return known[1] if known is not None and known[0] is value else value.state_dict()


def metadata_of(state: Mapping[Any, Any]) -> dict[str, Any] | None:
    """Return what ``state_dict`` keeps in the attribute ``_metadata`` of its result, where that is needed for a load.

    A TensorDict has its batch size and device there, at each level. What modules have there (versions) is that of the
    live one when it loads, and is left out, as is what is no plain data.
    """
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping) or not all(isinstance(entry, Mapping) for entry in metadata.values()):
        return None
    if not any(entry.keys() - {"version"} for entry in metadata.values()):
        return None
    plain = {key: dict(entry) for key, entry in metadata.items()}
    return plain if is_plain_context(plain) else None


def _objects(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield objects with their names: neither modules nor optimizers, which are taken apart."""
    for name, value in leaves(state):
        if isinstance(value, (type, nn.Module, PerRank)) or not callable(getattr(value, "state_dict", None)):
            continue
        if plain_optimizer(value) is None and callable(getattr(value, "load_state_dict", None)):
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
