"""What the first step of a life shows of a resume: layers that were frozen and train now, and what nobody saves.

``requires_grad``, some buffers, and what hooks of DDP keep are in no ``state_dict()``, so no load can compare them;
every front door asks here.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import dataloader

from holdfast._units import listed
from holdfast.errors import HoldfastError
from holdfast.format.names import save_id_of
from holdfast.state.save.plan import FROZEN
from holdfast.state.tree.objects import Modules, leaves, parameter_names

from .progress import Batches, Progress

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
        from holdfast.state.gradient_order import changed_hooks  # not above: of several ranks only

        looks.extend(changed_hooks(state))
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


def loaders_apart(progress: Progress, state: Mapping[Any, Any]) -> Look:
    """Return what finds batches whose position is in no checkpoint: what `itertools.cycle` keeps, and a loader's own.

    The latter where no batches come from ``ck.batches``: those of a `DataLoader` whose iterator is in hand from a step
    to the next and has moved on between them, unless an object of the state (its sampler) may keep its place.
    """
    seen: list[tuple[weakref.ref[Any], int]] = []
    kinds = (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter)

    def look() -> str:
        if progress.num_passes > 1:
            return _cycled(progress)
        if progress.num_drawn or progress.used_epochs or progress.has_own_place:
            return ""  # the epochs have a warning of their own
        found = [one for one in gc.get_objects() if type(one) in kinds]
        if found:
            from holdfast.state.gradient_order import named_objects  # not above: few scripts come here

            held = {id(value) for value in named_objects(state)}
            for one in found:
                index = one._index_sampler
                if held.isdisjoint(map(id, (one._dataset, index, getattr(index, "sampler", None)))):
                    seen.append((weakref.ref(one), one._num_yielded))
        if seen:
            progress.checks.append(moved_on)
        return ""

    def moved_on() -> str:
        moved = [one for one, count in seen if (alive := one()) is not None and alive._num_yielded > count]
        return "" if not moved else (
            "steps are made on batches of a DataLoader that are not drawn from ck.batches(): its position is in no "
            "checkpoint, so a resume begins it anew. Take them from `for batch in ck.batches(loader)`, and epochs from "
            "`for epoch in ck.epochs(n)`"
        )  # fmt: skip

    return look


def _cycled(progress: Progress) -> str:
    """Say which of several loaders are shorter than another and begun again by `itertools.cycle`."""
    cycles = [gc.get_referents(one) for one in gc.get_objects() if type(one) is cycle]
    names = {one._name for held in cycles for one in held if isinstance(one, Batches)}
    left = {name: progress.left(name) for name in progress._passes}
    longest = max((count for count in left.values() if count is not None), default=0)
    kept = sorted(name for name in names if (left.get(name) or 0) < longest)
    return "" if not kept else (
        f"itertools.cycle gives batches of {listed(kept)} again that it keeps itself: they are in no checkpoint, so a "
        "resume in the middle of an epoch repeats others, or ends the epoch. Make that loader as long as the longest, "
        "with RandomSampler(dataset, num_samples=...)"
    )  # fmt: skip


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
