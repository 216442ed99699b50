"""Checkpoints that Composer has written, in the layout of ours: the same parts under other names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch

from holdfast.interop.from_files import named
from holdfast.state.data.batches import ResumableBatches
from holdfast.state.tree.rng import REFUSALS, plain, python_entry

from ..algorithms import EMA
from ..state import State
from ..training.data import with_state

__all__ = ["as_ours", "is_composers"]

_MODEL = "state/model/"


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
