"""A state in the anatomy of a checkpoint, as nested dictionaries of tensors and plain data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast._log import get_logger
from holdfast.errors import ConfigError
from holdfast.state.load.selection import covers
from holdfast.state.save.torch_file import to_plain
from holdfast.state.tree import objects
from holdfast.state.tree import optimizers as optim
from holdfast.state.tree.names import canonical_keys, parameter_names, unwrap
from holdfast.state.tree.values import PerRank

__all__ = [
    "IgnoreKeys",
    "as_torch_file",
    "check_ignore_keys",
    "emptied",
    "expand",
    "ignored",
    "left_out_of",
    "plain_leaf",
]

_LOG = get_logger("trainers.loop")
_LEFT_OUT = "ignored_keys"
IgnoreKeys = Sequence[str] | Callable[[dict[str, Any]], Any] | None


def check_ignore_keys(given: Any, what: str) -> IgnoreKeys:
    """Return globs as a list, or the function.

    Raises:
        ConfigError: it is neither.
    """
    if given is None or callable(given):
        return given  # type: ignore[no-any-return]
    globs = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if isinstance(given, Mapping) or not all(isinstance(glob, str) and glob for glob in globs):
        raise ConfigError(f"{what}={given!r}: give globs such as 'state/optimizers/*', or a function")
    return globs


def expand(live: Mapping[str, Any]) -> dict[str, Any]:
    """Replace modules, optimizers and objects by their state, tensors live in it.

    Parameters keep the names that a checkpoint directory has, those of optimizers too ("state/model/fc.weight").
    Generators (`RNG`) and torchmetrics, which have no state of plain dictionaries, stay as they are.
    """
    names = parameter_names(live)

    def walk(value: Any) -> Any:
        if isinstance(value, nn.Module) and not objects.is_metric(value):
            module = unwrap(value)
            raw = module.state_dict()
            return OrderedDict(zip(canonical_keys(module, list(raw)), raw.values(), strict=True))
        if isinstance(value, torch.optim.Optimizer) and optim.is_plain(value):
            return optim.to_named(value, names)
        if isinstance(value, PerRank):
            return PerRank(walk(value.value))
        if isinstance(value, Mapping):
            return {key: walk(item) for key, item in value.items()}
        if not objects.is_metric(value) and callable(getattr(value, "load_state_dict", None)):
            return value.state_dict()
        return value

    return {key: walk(item) for key, item in live.items()}


def ignored(live: Mapping[str, Any], ignore: IgnoreKeys, *, what: str, looked: set[str]) -> dict[str, Any]:
    """Return ``live`` without what ``ignore`` names; its metadata say what that is, for whoever loads it.

    Args:
        live: a state in the anatomy of a checkpoint.
        ignore: globs over "/"-joined paths, or a function that changes the dictionary it is given.
        what: the argument it came from, for messages.
        looked: globs that were used before; of those that match nothing each is said once.
    """
    if not ignore:
        return dict(live)
    found = expand(live)
    if callable(ignore):
        every = list(paths(found))
        ignore(found)
        found.setdefault("state", {})
        kept, left_out = found, _roots(every, set(paths(found)))
    else:
        kept, left_out = _prune(found, ignore, what, looked), list(ignore)
    metadata = kept["state"].get("metadata")
    if isinstance(metadata, Mapping) and left_out:
        kept["state"]["metadata"] = {**metadata, _LEFT_OUT: left_out}
    return kept


def left_out_of(saved: Mapping[str, Any]) -> list[str]:
    """Return the globs of what a checkpoint was saved without.

    Args:
        saved: its "state".
    """
    metadata = saved.get("metadata")
    found = metadata.get(_LEFT_OUT) if isinstance(metadata, Mapping) else None
    return [glob for glob in found if isinstance(glob, str)] if isinstance(found, (list, tuple)) else []


def _roots(every: Iterable[str], kept: set[str]) -> list[str]:
    """Return the paths that are gone, each without what was below it."""
    roots: list[str] = []
    for path in every:  # what is in a container comes right after it
        if path not in kept and not (roots and path.startswith(f"{roots[-1]}/")):
            roots.append(path)
    return roots


def _prune(found: dict[str, Any], globs: Sequence[str], what: str, looked: set[str]) -> dict[str, Any]:
    """Take out of nested dictionaries what globs name."""
    new = [glob for glob in globs if glob not in looked]
    looked.update(new)
    every = list(paths(found)) if new else []
    for glob in new:
        if not any(covers((glob.rstrip("/"),), path) for path in every):
            _LOG.warning("%s: %r matches nothing; there are %s ...", what, glob, ", ".join(every[:8]))

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, PerRank):
            return PerRank(walk(value.value, path))
        if not isinstance(value, dict):
            return value
        kept = ((key, item, f"{path}/{key}" if path else str(key)) for key, item in value.items())
        return type(value)((key, walk(item, where)) for key, item, where in kept if not covers(globs, where))

    pruned: dict[str, Any] = walk(found, "")
    pruned.setdefault("state", {})
    return pruned


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the "/"-joined path of everything in nested dictionaries."""
    if path:
        yield path
    if isinstance(value, PerRank):
        value = value.value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from paths(item, f"{path}/{key}" if path else str(key))


def emptied(every: Iterable[str], globs: Sequence[str], among: Iterable[str]) -> set[str]:
    """Return those of ``among`` of which ``globs`` cover everything there is.

    Args:
        every: the "/"-joined path of everything in a checkpoint.
        globs: what is left out of it.
        among: some of those paths.
    """
    ordered = sorted({f"{path}/" for path in every})  # what is in a container comes right after it
    ends = [path[:-1] for path, after in zip(ordered, [*ordered[1:], ""], strict=True) if not after.startswith(path)]
    taken = [end for end in ends if not covers(globs, end)]
    return {path for path in among if not any(prefix == path or prefix.startswith(f"{path}/") for prefix in taken)}


_MODEL = "state/model/"


def as_torch_file(expanded: Mapping[str, Any]) -> Any:
    """Return what goes into a file for ``torch.load``: parameters of optimizers under the names the model has."""
    found = dict(expanded)
    state = dict(found["state"])
    if isinstance(state.get("optimizers"), Mapping):
        state["optimizers"] = renamed_optimizers(state["optimizers"], lambda name: name.removeprefix(_MODEL))
    return to_plain({**found, "state": state}, plain_leaf)


def from_torch_file(found: dict[str, Any]) -> dict[str, Any]:
    """Undo `as_torch_file`, apart from the generators."""
    state = found.get("state")
    if isinstance(state, dict) and isinstance(state.get("optimizers"), dict):

        def back(name: str) -> str:
            return name if name.startswith("param.") or "/" in name else _MODEL + name

        state["optimizers"] = renamed_optimizers(state["optimizers"], back)
    return found


def renamed_optimizers(optimizers: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Rename the parameters in the states of optimizers, where they are kept by name."""
    return {key: _renamed(state, rename) for key, state in optimizers.items()}


def _renamed(optimizer: Any, rename: Callable[[str], str]) -> Any:
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("param_groups"), list):
        return optimizer

    def each(names: Iterable[Any]) -> list[Any]:
        return [rename(name) if isinstance(name, str) else name for name in names]

    state = optimizer.get("state", {})
    groups = [{**group, "params": each(group.get("params", ()))} for group in optimizer["param_groups"]]
    return {**optimizer, "state": dict(zip(each(state), state.values(), strict=True)), "param_groups": groups}


def plain_leaf(value: Any, path: str) -> Any:
    """Say how what `expand` leaves as it is goes into a file."""
    if objects.is_metric(value):
        return to_plain(objects.metric_state(value), plain_leaf, path=path)
    return NotImplemented
