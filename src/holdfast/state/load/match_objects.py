"""Match a stored module or optimizer with the live one: tensor by tensor, parameter by parameter."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys
from torch.optim import Optimizer

from holdfast._log import get_logger
from holdfast._outgoing import brief
from holdfast.errors import CorruptCheckpointError

from ..tree import arrays
from ..tree.names import canonical_keys, unwrap
from ..tree.optimizers import apply_groups, empty_beside, live_names, state_device
from ..tree.sharded import check_module, is_spread, local_tensor
from ..tree.values import ObjectNode, TensorRef
from .match_plan import MatchPlan, kind_of
from .selection import covers

__all__ = ["match_module", "match_optimizer"]

_LOG = get_logger("state")


def match_module(plan: MatchPlan, live: nn.Module, saved: Any, path: str) -> nn.Module:
    """Match by name. Tensors the module owns are read in place; the rest goes through ``load_state_dict``."""
    if isinstance(saved, ObjectNode) and saved.kind != "optimizer":
        entries = saved.state
    else:
        entries = {} if saved is None and plan.moved else saved
    prefix = f"{path}/" if path else ""
    if not isinstance(entries, Mapping):
        if plan.takes(path):
            plan.problems.wrong.append(f"{path}: a module in the state, {kind_of(saved)} in the checkpoint")
        return live
    have = _named(plan, entries, path, prefix)
    module = unwrap(live)
    check_module(module, path)
    raw = module.state_dict()
    owned = [*module.parameters(), *module.buffers()]
    own = {local_tensor(tensor).data_ptr() for tensor in owned if not tensor.is_meta}
    memory = _MetaMemory(plan, module) if any(tensor.is_meta for tensor in owned) else None
    in_place = type(module).load_state_dict is nn.Module.load_state_dict
    copies: dict[str, Any] = {}  # key -> value that has to go through load_state_dict
    direct: dict[str, Any] = {}
    absent: list[tuple[Any, str]] = []
    for (key, value), name in zip(raw.items(), canonical_keys(module, list(raw)), strict=True):
        where = prefix + name
        if name not in have:
            absent.append((value, where))
            continue
        ref = have.pop(name)
        if not plan.takes(where):
            continue
        # Extra state may have another size each time: no shape to compare.
        if not isinstance(value, torch.Tensor) or not isinstance(ref, TensorRef) or _is_extra(key):
            copies[key] = plan.fresh(ref, where)
        elif in_place and not (local := local_tensor(value)).is_meta and (local.data_ptr() in own or not local.numel()):
            if plan.read(ref, value, where):
                direct[key] = value
        elif in_place and memory is not None and local.is_meta and (made := memory.make(key)) is not None:
            if plan.read(ref, made, where):
                direct[key] = made
        else:
            target = torch.empty_like(value, device=plan.home_of(value))
            if plan.read(ref, target, where):
                copies[key] = target
    given = {(local_tensor(value).data_ptr(), value.shape) for value in direct.values()}
    for value, where in absent:
        # Other libraries (transformers) store a tied tensor under one of its names only.
        if not (isinstance(value, torch.Tensor) and (local_tensor(value).data_ptr(), value.shape) in given):
            plan.lacks(value, where)
    for name in have:
        if plan.takes(prefix + name):
            plan.problems.unexpected.append(prefix + name)
    if memory is not None:
        plan.actions.append(memory.install)
    if copies:
        tensors = [local_tensor(value) for value in raw.values() if isinstance(value, torch.Tensor)]
        assign = not in_place and any(tensor.is_meta for tensor in tensors)
        plan.actions.append(lambda: _load_rest(module, direct, plan.filled(copies), assign=assign))
    elif direct:
        plan.actions.append(lambda: _run_hooks(module))
    if memory is not None:
        plan.actions.append(lambda: _note_meta(plan, module, prefix))
    if copies or direct:
        plan.restored.append(path)
    return live


def _named(plan: MatchPlan, entries: Mapping[Any, Any], path: str, prefix: str) -> dict[str, Any]:
    """Return the stored entries of this module by their present names."""
    if not plan.selection.renames:
        return dict(entries)
    have = {name[len(prefix) :]: ref for name, ref in plan.moved.items() if name.startswith(prefix)}
    for key, item in entries.items():
        name = prefix + str(key)
        if isinstance(item, TensorRef):
            # By its stored name: the container may have been renamed as well.
            name = item.name
            if plan.selection.renamed(name) != name:
                continue
        have[name.removeprefix(prefix)] = item
    return have


def _note_meta(plan: MatchPlan, module: nn.Module, prefix: str) -> None:
    for name in _without_memory(module):
        why = "still on the meta device: the checkpoint has nothing for it, so it is yours to initialise"
        plan.not_restored.append((prefix + name, why))


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _load_rest(module: nn.Module, direct: dict[str, Any], copies: dict[str, Any], *, assign: bool) -> None:
    """Let the module load what cannot be read in place, with the rest, so that its hooks see all tensors."""
    values = copies if assign else {**direct, **copies}
    accepted = inspect.signature(module.load_state_dict).parameters
    anything = any(option.kind is inspect.Parameter.VAR_KEYWORD for option in accepted.values())
    wanted: dict[str, Any] = {"strict": False, **({"assign": True} if assign else {})}
    outcome = module.load_state_dict(values, **{key: on for key, on in wanted.items() if anything or key in accepted})
    if unexpected := getattr(outcome, "unexpected_keys", None):
        raise CorruptCheckpointError(f"{type(module).__name__} refused {unexpected[:5]}")


def _run_hooks(module: nn.Module) -> None:
    """Run the hooks that modules registered for after a load, as ``load_state_dict`` does."""
    for child in module.modules():
        for hook in child._load_state_dict_post_hooks.values():
            hook(child, _IncompatibleKeys([], []))


# -- tensors on the meta device


class _MetaMemory:
    """New memory for the tensors of one module.

    Args:
        plan: names the device for tensors without memory.
        module: a module with tensors on the meta device.
    """

    def __init__(self, plan: MatchPlan, module: nn.Module) -> None:
        self._plan, self._module = plan, module
        self._tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self._tensors.update(module.named_buffers(remove_duplicate=False))
        self._made: dict[int, torch.Tensor] = {}  # by id: tied tensors stay tied

    def make(self, key: str) -> torch.Tensor | None:
        """Return memory for the tensor of this name in the ``state_dict``; None if it is not the module's own."""
        tensor = self._tensors.get(key)
        if tensor is None or not tensor.is_meta:
            return None
        if id(tensor) not in self._made:
            with torch.no_grad():
                self._made[id(tensor)] = torch.empty_like(tensor, device=self._plan.home_of(tensor))
        return self._made[id(tensor)]

    def install(self) -> None:
        """Put the memory into the module. Parameters stay the same objects where torch can swap their memory."""
        new: dict[int, nn.Parameter | None] = {}  # by id: None where the old object has the new memory
        for key, tensor in self._tensors.items():
            made = self._made.get(id(tensor))
            if made is None:
                continue
            path, _, leaf = key.rpartition(".")
            owner = self._module.get_submodule(path)
            if leaf in owner._buffers:
                owner._buffers[leaf] = made
                continue
            if id(tensor) not in new:
                new[id(tensor)] = _filled(tensor, made, key)
            if (other := new[id(tensor)]) is not None:
                owner._parameters[leaf] = other


def _filled(tensor: torch.Tensor, made: torch.Tensor, key: str) -> nn.Parameter | None:
    """Give a parameter its memory; returns a new parameter where torch cannot change the old."""
    new = nn.Parameter(made, requires_grad=tensor.requires_grad)
    new.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # a weak reference to it exists
        _LOG.warning("%s is a new parameter now; optimizers made before do not know it (%s)", key, error)
        return new
    return None


def _without_memory(module: nn.Module) -> Iterator[str]:
    """Yield the names of tensors that have no memory."""
    for named in (module.named_parameters, module.named_buffers):
        yield from (name for name, tensor in named() if tensor.is_meta)


def match_optimizer(plan: MatchPlan, live: Optimizer, saved: Any, path: str) -> Optimizer:
    """Match by parameter name: read tensors of the same shape and dtype in place, make others anew, without casts."""
    rows = live_names(live, plan.parameter_names)
    if not _wanted(plan, rows, path):
        return live
    if isinstance(saved, Mapping):
        saved = _from_positions(saved, rows, type(live).__name__)
    if not (isinstance(saved, ObjectNode) and saved.kind == "optimizer"):
        kind = saved.type if isinstance(saved, ObjectNode) else type(saved).__name__
        plan.problems.wrong.append(f"{path}: {type(live).__name__} in the state, {kind} in the checkpoint")
        return live
    if saved.type != type(live).__name__:
        plan.problems.wrong.append(
            f"{path}: optimizer {type(live).__name__} in the state, {saved.type} in the checkpoint: load with "
            f"skip=[{path!r}] to start it afresh"
        )
        return live
    rename = plan.selection.renamed
    states = {rename(name): state for name, state in saved.state["state"].items()}
    groups = [{**group, "params": [rename(name) for name in group["params"]]} for group in saved.state["param_groups"]]
    known = {name for group in groups for name in group["params"]}
    fresh: dict[torch.Tensor, dict[str, Any]] = {}
    for group, row in zip(live.param_groups, rows, strict=True):
        for param, name in zip(group["params"], row, strict=True):
            if name in known:
                where = f"{path}/state/{name}"
                fresh[param] = _match_state(plan, live, group, param, states.get(name, {}), where, saved.spread)
            elif not plan.takes(f"{path}/state/{name}"):
                continue
            elif covers(plan.allow_missing, name) or covers(plan.allow_missing, f"{path}/state/{name}"):
                plan.not_restored.append((f"{path}/state/{name}", "a parameter the checkpoint does not have"))
            else:
                plan.problems.missing.append(f"{path}/state/{name}")
    _unused(plan, known - {name for row in rows for name in row}, path)
    if plan.takes(f"{path}/param_groups"):
        _check_hyper(plan, live, groups, path)

    def put_back() -> None:
        for param, values in fresh.items():
            filled = {key: _move(plan.filled(value), key, param, live) for key, value in values.items()}
            if filled:
                live.state[param] = filled
            else:
                live.state.pop(param, None)
        if plan.takes(f"{path}/param_groups"):
            hyper = [plan.filled(group) for group in groups]
            plan.not_restored.extend((path, why) for why in apply_groups(live, rows, hyper))

    plan.actions.append(put_back)
    for group in groups:
        plan.fresh(group, path)
    plan.restored.append(path)
    return live


def _check_hyper(plan: MatchPlan, live: Optimizer, groups: Sequence[Mapping[str, Any]], path: str) -> None:
    """Find hyper-parameters that cannot take the place of the live ones: tensors for numbers, or of other shapes."""
    for key in {key for group in groups for key in group}:
        mine = [group[key] for group in live.param_groups if key in group]
        for value in (group[key] for group in groups if key in group):
            shape = tuple(plan.stored.entry(value.name).shape) if isinstance(value, TensorRef) else ()
            for own in mine:
                if not isinstance(own, torch.Tensor):
                    fits = math.prod(shape) == 1 or not isinstance(own, (int, float))
                elif isinstance(value, TensorRef):
                    fits = shape == tuple(own.shape) or math.prod(shape) == 1
                else:
                    fits = isinstance(value, (int, float))
                if not fits:
                    there = f"a tensor of shape {list(shape)}" if isinstance(value, TensorRef) else brief(value, 80)
                    plan.problems.wrong.append(
                        f"{path}/param_groups/{key}: {own!r} in the state, {there} in the checkpoint"
                    )
                    break


def _wanted(plan: MatchPlan, rows: list[list[str]], path: str) -> bool:
    takes = plan.takes
    if takes(path) or takes(f"{path}/param_groups") or plan.selection.partly(f"{path}/state"):
        return True
    return any(takes(f"{path}/state/{name}") for row in rows for name in row)


def _from_positions(saved: Mapping[Any, Any], rows: list[list[str]], kind: str) -> Any:
    """Turn the dict of torch's own ``state_dict`` into a stored optimizer; unchanged if the parameters are not as many.

    Takes the dict of ``torch.distributed.checkpoint`` as well: its keys are names of parameters in their module, or
    positions as text.
    """
    groups, states = saved.get("param_groups"), saved.get("state", {})
    if not isinstance(groups, list) or not isinstance(states, Mapping):
        return saved
    keys = [key for group in groups for key in group["params"]]
    names = [name for row in rows for name in row]
    name_of: dict[Any, str]
    if all(type(key) is int for key in keys) and len(keys) == len(names):
        name_of = dict(zip(keys, names, strict=True))
        name_of.update({str(key): name for key, name in name_of.items()})
    elif all(type(key) is str for key in keys):
        short = {name.rpartition("/")[2]: name for name in names}
        unique, known = len(short) == len(names), frozenset(names)
        name_of = {key: short.get(key, key) if unique and key not in known else key for key in keys}
    else:
        return saved
    if not name_of.keys() >= states.keys():
        return saved
    return ObjectNode(
        kind,
        "optimizer",
        {
            "state": {name_of[key]: state for key, state in states.items()},
            "param_groups": [{**group, "params": [name_of[key] for key in group["params"]]} for group in groups],
        },
    )


def _match_state(
    plan: MatchPlan,
    live: Optimizer,
    group: dict[str, Any],
    param: torch.Tensor,
    saved: Mapping[str, Any],
    path: str,
    spread: Mapping[str, list[int | None]],
) -> dict[str, Any]:
    """Plan the state of one parameter; returns its values with placeholders."""
    have = live.state.get(param, {})
    values = {key: item for key, item in have.items() if not plan.takes(f"{path}/{key}")}
    for key, item in saved.items():
        where = f"{path}/{key}"
        if not plan.takes(where):
            continue
        if not (isinstance(item, TensorRef) and item.kind == "tensor"):
            values[key] = plan.fresh(item, where)
            continue
        entry = plan.stored.entry(item.name)
        dtype = arrays.dtype_of(entry.dtype)
        target = have.get(key)
        if not (isinstance(target, torch.Tensor) and target.dtype == dtype and target.shape == tuple(entry.shape)):
            if is_spread(param) and param.shape == tuple(entry.shape) and key != "step":
                target = torch.empty_like(param, dtype=dtype, device=plan.home_of(param))
            elif hasattr(param, "device_mesh") and (item.name in spread or plan.stored.in_boxes(entry)):
                target = empty_beside(param, tuple(entry.shape), dtype, spread.get(item.name))
            else:
                device = state_device(key, group, param)
                target = torch.empty(
                    entry.shape, dtype=dtype, device=plan.home_of(param) if device.type == "meta" else device
                )
        if plan.read(item, target, where):
            values[key] = target
    return values


def _unused(plan: MatchPlan, names: set[str], path: str) -> None:
    """Report stored parameters that this optimizer does not hold: they are frozen now, or gone."""
    live = set(plan.parameter_names.values())
    for name in sorted(names):
        if name in live:
            plan.not_restored.append((f"{path}/state/{name}", "the parameter is not in this optimizer now"))
        elif plan.takes(f"{path}/state/{name}"):
            plan.problems.unexpected.append(f"{path}/state/{name}")


def _move(value: Any, key: str, param: torch.Tensor, live: Optimizer) -> Any:
    """Bring freshly read values (nested ones, such as LBFGS keeps) to the parameter's device."""
    if isinstance(value, torch.Tensor):
        if value.device == param.device or key == "step" or param.is_meta:
            return value
        return value.to(param.device)
    if isinstance(value, list):
        return [_move(item, key, param, live) for item in value]
    return value
