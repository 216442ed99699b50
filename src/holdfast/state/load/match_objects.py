"""Match a stored module or optimizer with the live one: tensor by tensor, parameter by parameter."""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.optim import Optimizer

from holdfast._log import get_logger
from holdfast._outgoing import brief
from holdfast.errors import StateMismatchError
from holdfast.format.codec import OUTER
from holdfast.format.index import TensorEntry

from ..tree import arrays
from ..tree.arrays import check_module, is_spread, local_tensor
from ..tree.objects import (
    OTHER_STATE,
    apply_groups,
    by_param_name,
    canonical_keys,
    live_names,
    renamed,
    shared_names,
    state_device,
    unwrap,
)
from ..tree.values import ObjectNode, PerRankNode, TensorRef
from .match_plan import MatchPlan, kind_of
from .selection import covers, of_one_name_each

__all__ = ["match_module", "match_optimizer", "match_wrapper"]

_LOG = get_logger("state")
_NO_SHAPE = "a lazy module in the state has given it no shape yet: run one batch through the module before the load"
_TRIAL_BYTES = 1 << 30  # a part of a module that is larger is not copied to try its code
_REFUSALS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)  # of code that is tried


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
    have = _renamed(plan, entries, prefix) if plan.selection.renames else dict(entries)
    check_module(live, path)
    module = unwrap(live)
    raw = module.state_dict()
    # Past what a class makes of these methods, as `objects.stored_parameters` asks.
    named: dict[str, torch.Tensor] = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    named.update(nn.Module.named_buffers(module, remove_duplicate=False))
    owned = named.values()
    own = {_address(tensor) for tensor in owned} - {None}
    memory = _MetaMemory(plan, module, named) if any(tensor.is_meta for tensor in owned) else None
    in_place = type(module).load_state_dict is nn.Module.load_state_dict
    copies: dict[str, Any] = {}  # key -> value that has to go through load_state_dict
    direct: dict[str, Any] = {}
    odd: dict[str, tuple[TensorRef, str]] = {}  # key -> what is stored has another shape
    absent: list[tuple[Any, str]] = []
    for (key, value), name in zip(raw.items(), canonical_keys(module, list(raw)), strict=True):
        where = prefix + name
        if name not in have:
            absent.append((value, where))
            continue
        ref = have.pop(name)
        if not plan.takes(where):
            continue
        if in_place and key in named and (fits := match_wrapper(plan, named[key], ref, where)) is not None:
            if fits:
                direct[key] = named[key]
            continue
        # Extra state may have another size each time: no shape to compare.
        if not isinstance(value, torch.Tensor) or not isinstance(ref, TensorRef) or _is_extra(key):
            copies[key] = plan.fresh(ref, where)
        elif in_place and (is_lazy(value) or value.shape != plan.stored.entry(ref.name).shape):
            odd[key] = ref, where
        elif in_place and (at := _address(value)) is not None and (at in own or not local_tensor(value).numel()):
            if plan.read(ref, value, where):
                direct[key] = value
        elif in_place and memory is not None and local_tensor(value).is_meta and (made := memory.make(key)) is not None:
            if plan.read(ref, made, where):
                direct[key] = made
        elif in_place and not _is_loaded(module, key):
            plan.fixed.append((where, value, ref))
        else:
            target = torch.empty_like(value, device=plan.home_of(value))
            if plan.read(ref, target, where):
                copies[key] = target
    shapes = {key: plan.stored.entry(ref.name) for key, (ref, _) in odd.items()}
    resized = _resized(module, raw, shapes) if odd else frozenset()
    for key, (ref, where) in odd.items():
        if key in resized:
            copies[key] = plan.fresh(ref, where)
        elif _shape(raw[key]) is None:
            plan.problems.wrong.append(f"{where}: {_NO_SHAPE}")
        else:
            plan.read(ref, raw[key], where)  # notes the two shapes
    given = {(_address(value), value.shape) for value in direct.values()} if absent else {}
    for value, where in absent:
        # Other libraries (transformers) store a tied tensor under one of its names only.
        at = _address(value) if isinstance(value, torch.Tensor) else None
        if at is None or (at, value.shape) not in given:
            plan.lacks(value, where)
    for name in have:
        if plan.takes(prefix + name):
            plan.problems.unexpected.append(prefix + name)
    if memory is not None:
        plan.actions.append(memory.install)
    if copies or (direct and _loads_by_itself(module)):
        tensors = [local_tensor(value) for value in raw.values() if isinstance(value, torch.Tensor)]
        assign = not in_place and any(tensor.is_meta for tensor in tensors)
        versions = getattr(raw, "_metadata", None)
        plan.actions.append(lambda: _load_rest(module, direct, plan.filled(copies), versions, assign=assign))
    elif direct:
        plan.actions.append(lambda: _run_hooks(module))
    if memory is not None:
        plan.actions.append(lambda: _note_meta(plan, module, prefix))
    if copies or direct:
        plan.restored.append(path)
    return live


def _address(tensor: torch.Tensor) -> int | None:
    """Return where the elements of this rank lie, None if nowhere (lazy, meta) or not as one block (sparse)."""
    if is_lazy(tensor) or (local := local_tensor(tensor)).is_meta or local.layout is not torch.strided:
        return None
    return local.data_ptr()


def match_wrapper(plan: MatchPlan, live: torch.Tensor, saved: Any, path: str) -> bool | None:
    """Read the tensors that a stored wrapper was made of into those of a live one, see `arrays.parts_of`.

    Returns:
        None if no wrapper is stored; False, and a problem, if the stored one does not fit.
    """
    part = _own_part(plan, saved)
    if part is None:
        return None
    if (flaw := _other_layout(plan, live, saved, part)) is not None:
        plan.problems.wrong.append(f"{path}: {flaw}")
        return False
    return _match_parts(plan, local_tensor(live), part, path)


def _own_part(plan: MatchPlan, saved: Any) -> ObjectNode | None:
    """Return the parts of a stored tensor that wraps others; None if it is none."""
    part = (plan.stored.per_rank or {}).get(saved.key) if isinstance(saved, PerRankNode) and not saved.rng else saved
    return part if isinstance(part, ObjectNode) and part.kind == "tensor" else None


def _other_layout(plan: MatchPlan, live: torch.Tensor, saved: Any, part: ObjectNode) -> str | None:
    """Return why a wrapper of which each rank has stored what it held does not fit this rank; None if it does.

    Args:
        plan: of the load.
        live: the tensor that gets it, or, for new state of an optimizer, its parameter.
        saved: what is stored: the part itself if it is no such wrapper.
        part: of this rank.
    """
    if saved is part:
        return None
    moved = plan.stored.resized is not None or plan.stored.borrowed or not is_spread(live)
    if not moved and list(local_tensor(live).shape) == part.state[OUTER]["size"]:
        return None
    num_ranks = plan.stored.manifest.world_size
    return (
        f"a {part.type} of which each rank has stored what it held: it fits {num_ranks} ranks in the same layout, as "
        "have saved"
    )


def _match_parts(plan: MatchPlan, live: torch.Tensor, saved: ObjectNode, path: str) -> bool:
    mine, flaw = arrays.parts_of(live), None
    if mine is None or saved.type != type(live).__name__:
        flaw = f"a {type(live).__name__} in the state, a {saved.type} in the checkpoint"
    else:
        made, was = ({**parts[OUTER], "class": "", "stride": ""} for parts in (mine, saved.state))
        odd = [key for key in made if made[key] != was.get(key)]
        if odd or mine.keys() != saved.state.keys():
            there = (", ".join(brief(parts[key], 200) for key in odd) or "other parts" for parts in (made, was))
            flaw = "{} of {} in the state, of {} in the checkpoint".format(f"a {saved.type}", *there)
    if flaw is not None or mine is None:
        plan.problems.wrong.append(f"{path}: {flaw}")
        return False
    fits = True
    for key, ref in saved.state.items():
        if isinstance(ref, TensorRef):
            fits &= plan.read(ref, mine[key], f"{path}/{key}")
        elif key != OUTER:
            fits &= _match_parts(plan, mine[key], ref, f"{path}/{key}")
    return fits


def _renamed(plan: MatchPlan, entries: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    """Return the stored entries of this module by their present names."""
    have = {name[len(prefix) :]: ref for name, ref in plan.moved.items() if name.startswith(prefix)}
    for key, item in entries.items():
        name = prefix + str(key)
        if isinstance(item, TensorRef):
            # By its stored name: the container may have been renamed as well.
            name = item.name
            if plan.selection.renamed(name) != name or name in plan.outdone:
                continue
        have[name.removeprefix(prefix)] = item
    return have


def _note_meta(plan: MatchPlan, module: nn.Module, prefix: str) -> None:
    for name in _without_memory(module):
        why = "still on the meta device: the checkpoint has nothing for it, so it is yours to initialise"
        plan.not_restored.append((prefix + name, why))


def _is_loaded(module: nn.Module, key: str) -> bool:
    """Tell whether a module takes an entry of its ``state_dict`` back, or torch's code would find it unexpected.

    Quantized layers show there how their weights were quantized, and have no code to load it (bitsandbytes, 4 bit).
    """
    part, name, inner = module, key, True
    while inner:
        base = type(part)._load_from_state_dict is nn.Module._load_from_state_dict
        if not base or part._load_state_dict_pre_hooks:
            return True  # its code may take anything
        first, _, rest = name.partition(".")
        inner = bool(rest) and part._modules.get(first) is not None
        if inner:
            part, name = part._modules[first], rest  # type: ignore[assignment]
    return name in part._parameters or name in part._buffers or _is_extra(key)


def _is_extra(key: str) -> bool:
    return key.endswith(_EXTRA_STATE_KEY_SUFFIX) and key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the shape of a tensor; None if a lazy module has not given it one yet."""
    return None if is_lazy(tensor) else tuple(tensor.shape)


def _resized(module: nn.Module, raw: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> frozenset[str]:
    """Return the tensors that code of the module gives their stored shape when it loads them.

    Observers, code books and lazy layers do so. Whether a part does is tried with a copy of it, so that a module that
    does not is refused before anything changes.

    Args:
        module: gets them through ``load_state_dict``.
        raw: its ``state_dict``.
        stored: the tensors of another shape, by their keys in ``raw``.
    """
    found: set[str] = set()
    for path, part in reversed([*module.named_modules()]):  # inner parts first: they are small
        prefix = f"{path}." if path else ""
        mine = {key for key in stored.keys() - found if key.startswith(prefix)}
        is_base = type(part)._load_from_state_dict is nn.Module._load_from_state_dict
        if not mine or (is_base and not part._load_state_dict_pre_hooks):
            continue
        have = {key: value for key, value in raw.items() if key.startswith(prefix) and isinstance(value, torch.Tensor)}
        sized = [value for value in have.values() if not is_lazy(value)]
        if any(map(is_spread, sized)) or sum(value.nbytes for value in sized) > _TRIAL_BYTES:
            continue
        try:
            lazy = (value for value in part.buffers() if is_lazy(value))  # torch cannot copy these
            memo = {
                id(value): UninitializedBuffer(device=value.device, dtype=value.dtype)  # type: ignore[call-arg]
                for value in lazy
            }
            trial = copy.deepcopy(part, memo)
            values: Any = OrderedDict((key.removeprefix(prefix), have[key]) for key in have if key not in stored)
            for key in stored.keys() & have.keys():
                zeros = torch.zeros(stored[key].shape, dtype=arrays.dtype_of(stored[key].dtype), device="cpu")
                values[key.removeprefix(prefix)] = zeros
            values._metadata = getattr(trial.state_dict(), "_metadata", None)
            nn.Module.load_state_dict(trial, values, strict=False)
            after = trial.state_dict()
        except _REFUSALS:
            continue
        found |= {key for key in mine if _shape(after[key.removeprefix(prefix)]) == tuple(stored[key].shape)}
    return frozenset(found)


def _loads_by_itself(module: nn.Module) -> bool:
    """Tell whether a part of a module has code of its own for loading, which may make something of the tensors.

    What torch itself has there only renames keys and fills in what old files lack.
    """
    for part in module.modules():
        for call in (part._load_from_state_dict, *part._load_state_dict_pre_hooks.values()):
            if not str(getattr(call, "__module__", "")).startswith("torch."):
                return True
    return False


def _load_rest(
    module: nn.Module, direct: dict[str, Any], copies: dict[str, Any], versions: Any, *, assign: bool
) -> None:
    """Let the module load what cannot be read in place, with the rest, so that its code and hooks see all tensors.

    Args:
        module: gets them through ``load_state_dict``.
        direct: its own tensors, which have been read already.
        copies: what is to be loaded.
        versions: those of its parts, as ``state_dict`` gives them: without them, code that brings old files up to date
            would change tensors of today.
        assign: tensors of the module have no memory.
    """
    values = OrderedDict(copies if assign else {**direct, **copies})
    if versions is not None:
        values._metadata = versions  # type: ignore[attr-defined]
    accepted = inspect.signature(module.load_state_dict).parameters
    anything = any(option.kind is inspect.Parameter.VAR_KEYWORD for option in accepted.values())
    wanted: dict[str, Any] = {"strict": False, **({"assign": True} if assign else {})}
    outcome = module.load_state_dict(values, **{key: on for key, on in wanted.items() if anything or key in accepted})
    if unexpected := [key for key in getattr(outcome, "unexpected_keys", ()) if key not in direct]:
        raise StateMismatchError(
            f"{type(module).__name__}.load_state_dict did not take {unexpected[:5]}, which its state_dict gave: let it "
            "load what it saves, or leave them out with skip="
        )


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
        tensors: its parameters and buffers by name, tied ones under each of theirs.
    """

    def __init__(self, plan: MatchPlan, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        self._plan, self._module, self._tensors = plan, module, tensors
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
    """Match by parameter name: read tensors of the same shape and dtype in place, make others anew."""
    rows = live_names(live, plan.parameter_names)
    if not _wanted(plan, rows, path):
        return live
    if isinstance(saved, Mapping):
        saved = _from_positions(saved, live, rows, type(live).__name__)
    elif isinstance(saved, ObjectNode) and saved.kind == "object" and isinstance(saved.state, Mapping):
        # It had hooks for its state_dict, or Fabric's wrapper, in versions that did not look into that.
        saved = _from_positions(saved.state, live, rows, saved.type.removeprefix("Fabric"))
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
    if shared := shared_names(live, rows):
        plan.problems.wrong.extend(f"{path}: {flaw}" for flaw in shared)
        return live
    content: Mapping[str, Any] = saved.state
    stored_name: dict[str, str] = {}  # of those that are called otherwise now
    by_name = _by_param_name(content["param_groups"], live, rows)
    if by_name or plan.selection.renames:
        grouped = [name for group in content["param_groups"] for name in group["params"]]
        now = {name: plan.selection.renamed(by_name.get(name, name)) for name in (*grouped, *content["state"])}
        of_one_name_each((name, now[name]) for name in grouped)
        stored_name = {now[name]: name for name in content["state"]}
        content = renamed(content, now.__getitem__)
    states, groups = content["state"], [dict(group) for group in content["param_groups"]]
    known = {name for group in groups for name in group["params"]}
    fresh: dict[torch.Tensor, dict[str, Any]] = {}
    for group, row in zip(live.param_groups, rows, strict=True):
        for param, name in zip(group["params"], row, strict=True):
            where = f"{path}/state/{name}"
            is_wanted = plan.takes(where)
            if name in known:
                have, state = live.state.get(param, {}), states.get(name, {})
                mine = _in_place(plan, have, state, where)
                flaw = None
                if len(mine) < len(state) or is_lazy(param):
                    flaw = _of_another_shape(plan, param, have, state, where, stored_name.get(name, name))
                if flaw:
                    plan.problems.wrong.append(f"{where}: {flaw}")
                    continue
                new = partial(_new_state, plan, group, param, saved.spread)
                fresh[param] = _match_state(plan, param, have, mine, state, where, new, saved.spread)
            elif not is_wanted:
                continue
            elif covers(plan.allow_missing, name) or covers(plan.allow_missing, where):
                plan.not_restored.append((where, "a parameter the checkpoint does not have"))
            else:
                plan.problems.missing.append(where)
    others = _match_others(plan, live, content.get(OTHER_STATE, {}), f"{path}/{OTHER_STATE}")
    if unused := known.difference(*rows):
        _unused(plan, unused, path)
    if plan.takes(f"{path}/param_groups"):
        _check_hyper(plan, live, groups, path)

    def put_back() -> None:
        for param, values in fresh.items():
            device = param.device
            filled = {key: _move(plan.filled(value), key, device) for key, value in values.items()}
            if is_spread(param):
                from ..tree.sharded import spread_as  # not above: few states have such tensors

                filled = {key: spread_as(param, value) for key, value in filled.items()}
            if filled:
                live.state[param] = filled
            else:
                live.state.pop(param, None)
        for key, value in others.items():
            whole = plan.filled(value)
            live.state[key] = whole if isinstance(whole, torch.Tensor) else _move(whole, key, _first(live).device)
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
    if takes(path) or takes(f"{path}/param_groups") or takes(f"{path}/{OTHER_STATE}"):
        return True
    if plan.selection.partly(f"{path}/state") or plan.selection.partly(f"{path}/{OTHER_STATE}"):
        return True
    return any(takes(f"{path}/state/{name}") for row in rows for name in row)


def _by_param_name(groups: Sequence[Mapping[str, Any]], live: Optimizer, rows: list[list[str]]) -> dict[str, str]:
    """Return the live names of stored parameters for which their position alone speaks on one of the two sides.

    Torch keeps names of its own if the optimizer was made with ``named_parameters``; empty if one side has none.
    """
    if not (mine := by_param_name(live.param_groups, rows)):
        return {}
    theirs = by_param_name(groups, [group["params"] for group in groups])
    found = ((stored, mine.get(name, name)) for name, stored in theirs.items())
    return {stored: now for stored, now in found if stored.startswith("param.") or now.startswith("param.")}


def _from_positions(saved: Mapping[Any, Any], live: Optimizer, rows: list[list[str]], kind: str) -> Any:
    """Turn the dict of torch's own ``state_dict`` into a stored optimizer; unchanged if the parameters are not as many.

    Names that torch keeps on both sides (``param_names``) count more than positions. Takes the dict of
    ``torch.distributed.checkpoint`` as well: its keys are names of parameters in their module, or positions as text.
    """
    groups, states, others = saved.get("param_groups"), saved.get("state", {}), saved.get(OTHER_STATE, {})
    if not (isinstance(groups, list) and isinstance(states, Mapping) and isinstance(others, Mapping)):
        return saved
    keys = [key for group in groups for key in group["params"]]
    names = [name for row in rows for name in row]
    name_of: dict[Any, str]
    mine = by_param_name(live.param_groups, rows)
    theirs = by_param_name(groups, [group["params"] for group in groups]) if mine else {}
    if all(type(key) is int for key in keys) and (theirs or len(keys) == len(names)):
        name_of = {key: mine.get(name, name) for name, key in theirs.items()} or dict(zip(keys, names, strict=True))
        name_of.update({str(key): name for key, name in name_of.items()})
    elif all(type(key) is str for key in keys):
        short = {name.rpartition("/")[2]: name for name in names}
        unique, known = len(short) == len(names), frozenset(names)
        name_of = {key: short.get(key, key) if unique and key not in known else key for key in keys}
    else:
        return saved
    others, by_name = dict(others), bool(keys) and type(keys[0]) is str
    for key, state in states.items():
        if key not in name_of:
            if isinstance(state, Mapping) if by_name else str(key).isdecimal():
                return saved  # it seems to be of a parameter that is in no group
            others[key] = state
    return ObjectNode(
        kind,
        "optimizer",
        {
            "state": {name_of[key]: state for key, state in states.items() if key in name_of},
            "param_groups": [{**group, "params": [name_of[key] for key in group["params"]]} for group in groups],
            OTHER_STATE: others,
        },
    )


def _in_place(plan: MatchPlan, have: Mapping[Any, Any], saved: Mapping[Any, Any], path: str) -> dict[Any, torch.Tensor]:
    """Return the live tensors, by their keys, that stored tensors are to be read into."""
    fits, takes = plan.targets.fits, plan.takes
    return {
        key: have[key]
        for key, item in saved.items()
        if type(item) is TensorRef
        and item.kind == "tensor"
        and key in have
        and takes(f"{path}/{key}")
        and fits(item.name, have[key])
    }


def _match_state(
    plan: MatchPlan,
    param: torch.Tensor,
    have: Mapping[Any, Any],
    mine: Mapping[Any, torch.Tensor],
    saved: Mapping[Any, Any],
    path: str,
    new: Callable[[Any, str, TensorEntry, torch.dtype], torch.Tensor],
    spread: Mapping[str, list[int | None]] | None = None,
) -> dict[Any, Any]:
    """Plan the state of one parameter, or what belongs to none.

    Args:
        plan: of the load.
        param: the parameter; for what belongs to none, the first one.
        have: the live state.
        mine: those of its tensors that are read in place, as `_in_place` finds them.
        saved: the stored state.
        path: of both.
        new: makes a tensor for (key, stored name, entry, dtype) where the live state has none that fits.
        spread: layouts of tensors, as `ObjectNode` has them.

    Returns:
        The values, with placeholders.
    """
    values = {key: item for key, item in have.items() if not plan.takes(f"{path}/{key}")}
    for key, item in saved.items():
        where = f"{path}/{key}"
        target = mine.get(key)
        if target is None:
            if not plan.takes(where):
                continue
            own = have.get(key)
            if isinstance(own, torch.Tensor) and match_wrapper(plan, own, item, where) is not None:
                values[key] = own
                continue
            part = _own_part(plan, item)
            if part is not None:
                flaw = _other_layout(plan, param, item, part) or arrays.why_not_whole(part.state)
                if flaw is not None:
                    plan.problems.wrong.append(f"{where}: {flaw}")
            if not (isinstance(item, TensorRef) and item.kind == "tensor"):
                if spread and is_spread(param):
                    plan.place_spread(item, spread, [param])
                values[key] = plan.fresh(part or item, where)
                continue
            entry = plan.stored.entry(item.name)
            target = new(key, item.name, entry, arrays.dtype_of(entry.dtype))
        if plan.read(item, target, where):
            values[key] = target
    return values


def _of_another_shape(
    plan: MatchPlan, param: torch.Tensor, have: Mapping[str, Any], saved: Mapping[str, Any], path: str, name: str
) -> str | None:
    """Say why the stored state of a parameter, ``name`` in the checkpoint, is of no use: it has another shape now.

    State of another shape than its parameter is usual (factored moments): the shape that the parameter had decides.
    """
    if is_lazy(param):
        return _NO_SHAPE if saved else None
    now = tuple(param.shape)
    for key, item in saved.items():
        if key != "step" and isinstance(item, TensorRef) and item.kind == "tensor" and plan.takes(f"{path}/{key}"):
            shape = tuple(plan.stored.entry(item.name).shape)
            if shape not in (now, getattr(have.get(key), "shape", now)):
                break
    else:
        return None
    if name not in plan.stored.refs:
        return None
    was = tuple(plan.stored.entry(name).shape)
    return f"its parameter has shape {now} in the state, {was} in the checkpoint" if was != now else None


def _new_state(
    plan: MatchPlan, group: dict[str, Any], param: torch.Tensor, spread: Mapping[str, list[int | None]],
    key: Any, name: str, entry: TensorEntry, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return memory for a tensor of a parameter's state, spread over the ranks as the parameter is.

    It gets the dtype of its parameter if the load casts to that: Adam cannot make a step with two dtypes.
    """
    if plan.targets.cast is param.dtype and dtype.is_floating_point and key != "step":
        dtype = param.dtype
    if is_spread(param) and param.shape == tuple(entry.shape) and key != "step":
        return torch.empty_like(param, dtype=dtype, device=plan.home_of(param))
    if hasattr(param, "device_mesh") and (name in spread or plan.stored.in_boxes(entry)):
        from ..tree.sharded import empty_beside

        return empty_beside(param, tuple(entry.shape), dtype, spread.get(name))
    device = state_device(key, group, param)
    return torch.empty(entry.shape, dtype=dtype, device=plan.home_of(param) if device.type == "meta" else device)


def _match_others(plan: MatchPlan, live: Optimizer, saved: Mapping[Any, Any], path: str) -> dict[Any, Any]:
    """Plan what an optimizer keeps under keys that are no parameters; returns the values with placeholders."""
    have = {
        key: kept
        for key, kept in live.state.items()
        if not isinstance(key, torch.Tensor) and plan.takes(f"{path}/{key}")
    }
    for key in have:
        if key not in saved:  # early versions stored none
            plan.not_restored.append((f"{path}/{key}", "not in the checkpoint: the live value stays"))
    if not saved:
        return have
    first = _first(live)

    def new(_key: Any, _name: str, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
        if hasattr(first, "device_mesh") and plan.stored.in_boxes(entry):
            from ..tree.sharded import empty_beside

            return empty_beside(first, tuple(entry.shape), dtype, None)
        home = plan.home_of(first) if entry.shape else torch.device("cpu")  # torch keeps counters there, too
        return torch.empty(entry.shape, dtype=dtype, device=home)

    return _match_state(plan, first, have, _in_place(plan, have, saved, path), saved, path, new)


def _first(optimizer: Optimizer) -> torch.Tensor:
    """Return the first parameter: its device is that of what belongs to none."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return next(params, torch.empty(0, device="cpu"))


def _unused(plan: MatchPlan, names: set[str], path: str) -> None:
    """Report stored parameters that this optimizer does not hold: they are frozen now, or gone."""
    live = set(plan.parameter_names.values())
    for name in sorted(names):
        if name in live:
            plan.not_restored.append((f"{path}/state/{name}", "the parameter is not in this optimizer now"))
        elif plan.takes(f"{path}/state/{name}"):
            plan.problems.unexpected.append(f"{path}/state/{name}")


def _move(value: Any, key: Any, device: torch.device) -> Any:
    """Bring freshly read values (nested ones, such as LBFGS keeps) to the parameter's device."""
    if isinstance(value, torch.Tensor):
        if value.device == device or key == "step" or device.type == "meta":
            return value
        return value.to(device)
    if isinstance(value, list):
        return [_move(item, key, device) for item in value]
    if type(value) is dict:
        return {inner: _move(item, inner, device) for inner, item in value.items()}
    return value
