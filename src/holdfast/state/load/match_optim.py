"""Lay stored optimizer state over a live optimizer, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast._outgoing import brief

from ..tree import arrays
from ..tree.optimizers import apply_groups, empty_beside, live_names, state_device
from ..tree.sharded import is_spread
from ..tree.values import ObjectNode, TensorRef
from .match_plan import MatchPlan
from .selection import covers

__all__ = ["match_optimizer"]


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
