"""What the first step of a life shows of a resume: layers that were frozen and train now, and what nobody saves.

``requires_grad``, some buffers, and what hooks of DDP keep are in no ``state_dict()``, so no load can compare them;
every front door asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from holdfast._units import listed
from holdfast.errors import HoldfastError
from holdfast.format.names import save_id_of
from holdfast.state.save.plan import FROZEN
from holdfast.state.tree.objects import Modules, leaves, parameter_names
from holdfast.state.tree.values import Attrs, PerRank

if TYPE_CHECKING:
    from holdfast.format.manifest import Manifest
    from holdfast.storage.base import Storage

Look = Callable[[], str]
_SMALL_BUFFER = 1 << 20
_GIVEN = ({"state", "param_groups"}, {"last_epoch", "base_lrs"}, {"scale", "growth_factor"})  # by state_dict()
_FOLLOWS = (
    "requires_grad is in no state_dict(), so what {verb} layers on the way has to do so in a resume too, as "
    "`layer.requires_grad_({when})` at the head of each epoch does"
)


def first_step_checks(
    state: Mapping[Any, Any], saved: Storage | None = None, manifest: Manifest | None = None
) -> list[Look]:
    """Return what to call once after the next step; each gives a sentence to log, or "".

    Args:
        state: live state, as it goes into that step.
        saved: root of the checkpoint of this run that was loaded into it, None for no such one.
        manifest: of that checkpoint.
    """
    looks = [_changed_buffers(state)]
    if dist.is_available() and dist.is_initialized():
        looks.extend(_changed_hooks(state))
    if saved is not None and manifest is not None:
        looks.append(_other_layers(state, saved, manifest))
    return looks


def outdated_dicts(state: Mapping[Any, Any]) -> Look:
    """Return what names dicts that the ``state_dict()`` of an optimizer, scheduler or scaler gave before the step."""
    given = dict(_given_dicts(state, "", ()))

    def look() -> str:
        now = dict(_given_dicts(state, "", ())) if given else {}
        same = [path for path, value in given.items() if now.get(path) is value]
        return "" if not same else (
            f"{listed(same)}: what state_dict() gave before the first step, in place of the object. Every save stores "
            "that again, and a resume gives it to no object: put the object itself into the state, as in "
            "{'optimizer': optimizer}"
        )  # fmt: skip

    return look


def _given_dicts(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if type(value) is dict and any(keys <= value.keys() for keys in _GIVEN):
        yield path, value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in above:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, (dict, list, tuple)):  # a long history is mostly numbers
                yield from _given_dicts(item, f"{path}/{key}" if path else str(key), (*above, id(value)))


def _other_layers(state: Mapping[Any, Any], saved: Storage, manifest: Manifest) -> Look:
    """Return what names the parameters that train and did not when a checkpoint was saved, and the other way round.

    The files of a save tell which did: those that are frozen, or did not change from one save to the next, lie apart.
    """
    modules: Modules = {}
    names = parameter_names(state, modules)
    params = {names[id(param)]: param for _, rows in modules.values() for _, param in rows}
    is_apart = any(FROZEN in entry.path for entry in manifest.files)
    trained: dict[str, torch.Tensor] = {}
    resting: dict[str, tuple[torch.Tensor, int]] = {}
    kept: set[str] = set()  # parameters for which an optimizer has kept something there
    if is_apart or not all(param.requires_grad for param in params.values()):
        from holdfast.format.contents import ContentsReader  # not above: a fresh start reads none

        with suppress(HoldfastError):  # removed meanwhile, or away: it is a hint only
            stored = ContentsReader(saved, manifest).tensors()
            for name, param in params.items():
                entry = stored.entry(name)
                if entry is None or not all(save_id_of(piece.file) for piece in entry.pieces):
                    continue
                if not any(FROZEN in piece.file for piece in entry.pieces):
                    trained[name] = param
                elif all(FROZEN in piece.file for piece in entry.pieces):
                    resting[name] = param, param._version
            if resting:
                kept.update(name.partition("/state/")[2].rpartition("/")[0] for name in stored.entries)
    if not trained:  # that nothing trained is no sign of anything
        resting = {}
    optimizers = [value for _, value in leaves(state) if isinstance(value, Optimizer)]
    before = {id(param) for optimizer in optimizers for param in optimizer.state}

    def look() -> str:
        frozen = [name for name, param in trained.items() if not param.requires_grad]
        keeps = {id(param) for optimizer in optimizers for param in optimizer.state}
        moved = [
            name
            for name, (param, version) in resting.items()
            if param.requires_grad and (param._version != version or id(param) in keeps - before)
        ]
        said = []
        if frozen:
            said.append(
                f"{len(frozen)} parameters are frozen now and were trained when this checkpoint was saved "
                f"({listed(frozen)}): {_FOLLOWS.format(verb='thaws', when='epoch >= 3')}"
            )
        if moved:
            anew = any(name not in kept and id(resting[name][0]) in keeps for name in moved)
            said.append(
                f"{len(moved)} parameters train now and did not when this checkpoint was saved ({listed(moved)})"
                f"{', their optimizer state begins anew' if anew else ''}: if they do not thaw "
                f"just here, {_FOLLOWS.format(verb='freezes', when='epoch < 3')}"
            )
        return "; ".join(said)

    return look


def _changed_buffers(state: Mapping[Any, Any]) -> Look:
    """Return what names the buffers that the step has changed and no ``state_dict()`` has.

    Small ones are compared with a copy; one of another shape is taken for a cache that has grown.
    """
    before: dict[str, tuple[nn.Module, str, torch.Tensor]] = {}
    for path, module in leaves(state):
        for inner, part in module.named_modules() if isinstance(module, nn.Module) else ():
            for name in part._non_persistent_buffers_set:
                buffer = part._buffers.get(name)
                if type(buffer) is torch.Tensor and buffer.layout is torch.strided and buffer.nbytes <= _SMALL_BUFFER:
                    full = f"{path}/{inner}.{name}" if inner else f"{path}/{name}"
                    before[full] = part, name, buffer.detach().clone()

    def look() -> str:
        changed = []
        for path, (part, name, old) in before.items():
            now = part._buffers.get(name)
            if now is not None and (now.shape, now.dtype, now.device) == (old.shape, old.dtype, old.device):
                same = (now == old) | ((now != now) & (old != old))  # noqa: PLR0124 - NaN is like NaN here
                if not bool(same.all()):
                    changed.append(path)
        return "" if not changed else (
            f"the first step has changed {listed(changed)}: registered with persistent=False, so in no state_dict(), "
            "and a resume goes on with what the script makes anew. If training depends on it: persistent=True"
        )  # fmt: skip

    return look


def _changed_hooks(state: Mapping[Any, Any]) -> Iterator[Look]:
    """Yield for each DDP module with communication hooks what names those that have changed a state of their own.

    Only whether a number is another one, or a container has grown, is looked at.
    """
    from holdfast.state.gradient_order import parallel_modules  # not above: of several ranks only

    for path, module in parallel_modules(state).items():
        kept = [own for _, own in getattr(module, "_comm_hooks", ()) if own is not None]
        known = {id(item) for item in _named(state)} if kept else set()
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


def _named(value: Any) -> Iterator[Any]:
    """Yield the objects whose attributes a state names, and what its own objects hold."""
    value = value.value if isinstance(value, PerRank) else value
    if isinstance(value, Attrs):
        yield value._owner
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _named(item)
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
