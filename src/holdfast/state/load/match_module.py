"""Match a stored module with a live module, tensor by tensor."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys

from holdfast._log import get_logger
from holdfast.errors import CorruptCheckpointError

from ..tree.names import canonical_keys, unwrap
from ..tree.sharded import check_module, local_tensor
from ..tree.values import ObjectNode, TensorRef
from .match_plan import MatchPlan, kind_of

__all__ = ["match_module"]

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
