"""A checkpoint of the loop trainer as nested dictionaries: made of a state, with parts left out, and of all ranks.

Files of Composer have the same parts under other names; `as_ours` brings them into this layout.
"""

from __future__ import annotations

import base64
import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from holdfast._log import get_logger
from holdfast.errors import ConfigError
from holdfast.interop.from_files import named
from holdfast.state.data.batches import ResumableBatches
from holdfast.state.data.seeding import generators_kept
from holdfast.state.load.match_plan import restore_derived
from holdfast.state.load.selection import covers
from holdfast.state.save.torch_file import from_plain, to_plain
from holdfast.state.tree import objects, rng
from holdfast.state.tree.objects import canonical_keys, parameter_names, unwrap
from holdfast.state.tree.rng import REFUSALS, plain, python_entry
from holdfast.state.tree.values import PerRank

from ..callbacks import EMA
from ..data import with_state
from ..parallel import Ranks
from ..state import State

_LOG = get_logger("trainers.loop")
_LEFT_OUT = "ignored_keys"
_MODEL = "state/model/"
IgnoreKeys = Sequence[str] | Callable[[dict[str, Any]], Any] | None
_KEY = "of_ranks"  # {"of_ranks": [that of rank 0, ...]} stands for a value that each rank has for itself


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
        if (optimizer := objects.plain_optimizer(value)) is not None:
            return objects.to_named(optimizer, objects.live_names(optimizer, names))
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


def as_torch_file(expanded: Mapping[str, Any]) -> Any:
    """Return what goes into a file for ``torch.load``: parameters of optimizers under the names the model has."""
    found = dict(expanded)
    state = dict(found["state"])
    if isinstance(state.get("optimizers"), Mapping):
        state["optimizers"] = _renamed(state["optimizers"], lambda name: name.removeprefix(_MODEL))
    return to_plain({**found, "state": state}, _plain_leaf)


def from_torch_file(found: dict[str, Any]) -> dict[str, Any]:
    """Undo `as_torch_file`, apart from the generators."""
    state = found.get("state")
    if isinstance(state, dict) and isinstance(state.get("optimizers"), dict):

        def back(name: str) -> str:
            return name if name.startswith("param.") or "/" in name else _MODEL + name

        state["optimizers"] = _renamed(state["optimizers"], back)
    return found


def _renamed(optimizers: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Rename the parameters in the states of optimizers, where they are kept by name."""

    def renamed(state: Any) -> Any:
        if not isinstance(state, Mapping) or not isinstance(state.get("param_groups"), list):
            return state
        return objects.renamed(state, lambda name: rename(name) if isinstance(name, str) else name)

    return {key: renamed(state) for key, state in optimizers.items()}


def _plain_leaf(value: Any, path: str) -> Any:
    """Say how what `expand` leaves as it is goes into a file."""
    if objects.is_metric(value):
        return to_plain(objects.metric_state(value), _plain_leaf, path=path)
    return NotImplemented


def gathered(found: dict[str, Any], ranks: Ranks) -> dict[str, Any] | None:
    """Return a state in nested dictionaries with what all ranks have for themselves; None on other ranks than 0."""
    own = {path: per_rank.value for path, per_rank in _per_rank(found)}
    whole = found.get("rng") is rng.RNG
    mine = [{"values": to_plain(own, _plain_leaf), "rng": to_plain(rng.capture()) if whole else None}]
    if ranks.world_size > 1 and (own or whole):
        every: list[dict[str, Any]] = []
        ranks.agree("file", lambda: _packed(mine[0]), lambda packed: every.extend(map(_unpacked, packed)))
        mine = every
    if not ranks.leads:
        return None
    single = ranks.world_size == 1

    def joined(path: str, _: PerRank) -> Any:
        return own[path] if single else {_KEY: [part["values"][path] for part in mine]}

    filled: dict[str, Any] = _replaced(found, joined)
    return {**filled, "rng": [part["rng"] for part in mine]} if whole else filled


def of_rank(found: dict[str, Any], rank: int, world_size: int, *, step: int | None) -> dict[str, Any]:
    """Undo `gathered` for one rank of ``world_size``; "rng" is what it is to have, or is left out."""
    generators = found.pop("rng", None)
    state: dict[str, Any] = _resolved(found, rank)
    metrics = state["state"].get("train_metrics")
    if metrics:
        # One process has gathered them for all; a rank that was not there has nothing.
        state["state"]["train_metrics"] = PerRank(metrics)
        saved_by = len(generators) if isinstance(generators, list) else 1
        if rank >= saved_by:
            del state["state"]["train_metrics"]
    if isinstance(generators, list) and generators:
        state["rng"] = (
            generators[rank] if len(generators) == world_size else _derived(generators, rank, world_size, step)
        )
    elif isinstance(generators, Mapping):
        state["rng"] = generators
    return state


def _derived(generators: list[Any], rank: int, world_size: int, step: int | None) -> dict[str, Any]:
    first, *others = generators
    with generators_kept():
        restore_derived(first, others, step=step, rank=rank, world_size=world_size)
        derived: dict[str, Any] = rng.capture(devices=False)
        return derived


def _per_rank(value: Any, path: str = "") -> Iterator[tuple[str, PerRank]]:
    if isinstance(value, PerRank):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _per_rank(item, f"{path}/{key}")


def _replaced(value: Any, by: Callable[[str, PerRank], Any], path: str = "") -> Any:
    if isinstance(value, PerRank):
        return by(path, value)
    if type(value) is dict:
        return {key: _replaced(item, by, f"{path}/{key}") for key, item in value.items()}
    return value


def _resolved(value: Any, rank: int) -> Any:
    if type(value) is dict:
        if value.keys() == {_KEY}:
            every = value[_KEY]
            return every[rank] if rank < len(every) else every[0]
        return {key: _resolved(item, rank) for key, item in value.items()}
    return value


def _packed(value: dict[str, Any]) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _unpacked(text: str) -> dict[str, Any]:
    found: dict[str, Any] = from_plain(
        torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)
    )
    return found


# -- of Composer


def is_composers(found: Mapping[str, Any]) -> bool:
    """Tell whether Composer wrote a checkpoint: it stores clocks as timedeltas, we store numbers of seconds."""
    state = found.get("state")
    stamp = _inner(state, "timestamp", "Timestamp")
    if isinstance(stamp, Mapping):
        return any(isinstance(value, timedelta) for value in stamp.values())
    about = _inner(state, "metadata")
    return isinstance(about, Mapping) and "composer_env_info" in about


def as_ours(found: dict[str, Any], live: State, notes: list[str]) -> dict[str, Any]:
    """Convert a checkpoint of Composer to our layout; what has no place in ours stays as it is, and is listed later.

    Args:
        found: the content of the file.
        live: what it is loaded into.
        notes: gets a line for what is not as it would be in Composer.
    """
    state: dict[str, Any] = dict(found["state"])
    generators = found.get("rng")
    saved_by = len(generators) if isinstance(generators, list) else 1
    for name, change in _CHANGES.items():
        if name in state:
            state[name] = change(state[name])
    if "optimizers" in state and isinstance(state.get("model"), Mapping):
        state["optimizers"] = _optimizers(state["optimizers"], state["model"])
    if "train_metrics" in state and saved_by > 1:
        del state["train_metrics"]
        notes.append("metrics of training: the file has those of rank 0 alone, they begin anew")
    _take_ema(state, live)
    if "timestamp" in state:
        state["dataset_state"] = _position(state, live, saved_by, notes)
    else:
        state.pop("dataset_state", None)
    changed = {**found, "state": state}
    if isinstance(generators, list):
        changed["rng"] = [_generators(state) for state in generators]
    return changed


def _inner(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _stamp(saved: Any) -> Any:
    stamp = _inner(saved, "Timestamp")
    if not isinstance(stamp, Mapping):
        return saved
    seconds = {name: value.total_seconds() if isinstance(value, timedelta) else value for name, value in stamp.items()}
    return {"Timestamp": seconds}


def _by_name(saved: Any) -> Any:
    """Turn [(name of the class, state), ...] into a dictionary, what is not restored into nothing."""
    if isinstance(saved, list) and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in saved):
        saved = dict(saved)
    if not isinstance(saved, Mapping):
        return saved
    # Every algorithm has the text that makes it: that is no state, and ours is never made from it.
    return {
        name: algorithm
        for name, algorithm in saved.items()
        if not isinstance(algorithm, Mapping) or algorithm.keys() - {"repr"}
    }


def _without_savers(saved: Any) -> Any:
    if not isinstance(saved, Mapping):
        return saved
    return {name: callback for name, callback in saved.items() if name != "CheckpointSaver" and callback != {}}


def _only(saved: Any) -> Any:
    return next(iter(saved.values()), {}) if isinstance(saved, Mapping) and len(saved) <= 1 else saved


def _metrics(saved: Any) -> Any:
    if not isinstance(saved, Mapping):
        return saved
    return {name: _metric(metric) for name, metric in saved.items()}


def _metric(saved: Any) -> Any:
    """Turn {"state_dict": {"inner.tp": ...}, "_computed": ...} into what `state.metrics` makes of a metric."""
    values = _inner(saved, "state_dict")
    if not isinstance(values, Mapping):
        return _metrics(saved)  # the metrics of an evaluator
    found: dict[str, dict[str, Any]] = {"": {}}
    for name, value in values.items():
        path, _, own = str(name).rpartition(".")
        found.setdefault(path, {})[own] = value
    return {path: {**inner, "_update_count": 1} for path, inner in found.items()}


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "timestamp": _stamp,
    "algorithms": _by_name,
    "callbacks": _without_savers,
    "scaler": _only,
    "train_metrics": _metrics,
    "eval_metrics": _metrics,
}


def _optimizers(saved: Any, model: Mapping[str, Any]) -> Any:
    """Name the parameters in states that go by position, as those of early versions do."""
    if not isinstance(saved, Mapping):
        return saved
    weights = {name: tensor for name, tensor in model.items() if isinstance(tensor, torch.Tensor)}

    def renamed(state: Any) -> Any:
        keys = _inner(state, "state")
        if not isinstance(keys, Mapping) or any(isinstance(key, str) for key in keys):
            return state
        return named(state, weights, _MODEL) or state

    return {name: renamed(state) for name, state in saved.items()}


def _take_ema(state: dict[str, Any], live: State) -> None:
    """Put an average into its place: while Composer saves, the model has it, and the algorithm the weights."""
    kept = _inner(state, "algorithms", "EMA", "ema_model")
    model = state.get("model")
    if not isinstance(kept, Mapping) or not isinstance(model, Mapping):
        return
    other = {**(kept.get("named_parameters_dict") or {}), **(kept.get("named_buffers_dict") or {})}
    averaged = bool(_inner(state, "algorithms", "EMA", "ema_weights_active"))
    has_ours = any(isinstance(algorithm, EMA) for algorithm in live.algorithms)
    algorithms = dict(state["algorithms"])
    if not has_ours or not other.keys() <= model.keys():
        return  # as in Composer the model is what the file has as its model; the rest is listed as not restored
    if averaged:
        average = {name: model[name] for name in other}
        state["model"] = type(model)((name, other.get(name, tensor)) for name, tensor in model.items())  # type: ignore[call-arg]
    else:
        average = other
    begun = bool(_inner(state, "algorithms", "EMA", "ema_started"))
    algorithms["EMA"] = {"average": average if begun else {}}
    state["algorithms"] = algorithms


def _position(state: Mapping[str, Any], live: State, saved_by: int, notes: list[str]) -> dict[str, Any]:
    """Return the position in the data: Composer counts, and goes through them again."""
    stamp = _inner(state, "timestamp", "Timestamp") or {}
    batches, samples = (_count(stamp.get(name)) for name in ("batch_in_epoch", "sample_in_epoch"))
    nowhere: dict[str, Any] = {"train": None, "eval": {}, "stage": ""}
    loader = live.train_dataloader
    if not batches or loader is None:
        return nowhere
    theirs = _inner(state, "dataset_state", "train")
    prepared = with_state(loader)
    kind = ResumableBatches(prepared, None, seed=0, epoch=0).kind
    inner: Any = None
    if kind == "stateful":
        if theirs is None or prepared is loader:
            notes.append(f"data: the file does not say where this {type(loader).__name__} was: the epoch begins anew")
            return nowhere
        inner = {"loader": {"samples": samples // saved_by, "dataset": theirs}, "rng": None}
    elif kind == "map":
        notes.append(
            f"data: the epoch goes on after its first {samples} samples; where the order is random it is another one "
            "than Composer's, so a sample of this epoch may come twice, or not"
        )
    seed = _count(state.get("rank_zero_seed", live.rank_zero_seed))
    position = {
        "kind": kind, "epoch": _count(stamp.get("epoch")), "samples": samples, "batches": batches, "done": False,
        "seed": seed, "world_size": saved_by, "inner": inner, "elastic": False,
    }  # fmt: skip
    return {**nowhere, "train": position}


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def _generators(saved: Any) -> dict[str, Any]:
    """Convert the generators of one rank to the form of `rng.capture`; malformed entries are left out."""
    return dict(_entries(saved)) if isinstance(saved, Mapping) else {}


def _entries(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(saved.get("torch"), torch.Tensor):
        yield "torch", saved["torch"]
    if isinstance(saved.get("cuda"), torch.Tensor):
        yield "devices", {"cuda": [saved["cuda"]]}
    for name, read in (("python", python_entry), ("numpy", _numpy)):
        try:
            entry = read(saved[name])
        except REFUSALS:
            continue
        yield name, entry


def _numpy(saved: Any) -> Any:
    if isinstance(saved, Mapping):
        return plain(saved)
    kind, key, position, has_gauss, gauss = saved
    words = {"key": key, "pos": int(position)}
    return plain({"bit_generator": str(kind), "state": words, "has_gauss": int(has_gauss), "gauss": float(gauss)})
