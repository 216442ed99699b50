"""Who wrote a checkpoint: ids, versions, times."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch

from holdfast._version import __version__
from holdfast.errors import ConfigError
from holdfast.format.strict_json import check_length
from holdfast.state.tree.arrays import is_spread, local_tensor
from holdfast.storage.base import Storage
from holdfast.writer.messages import RunOpened


def new_start_id() -> str:
    """Return an id for one life of a process; part of file names, so two lives never share a file."""
    return secrets.token_hex(4)


def free_name(step: int, *, attempt: int, taken: Collection[str]) -> str:
    """Return a directory name for a step; if it is taken (by a branch, or a quarantined checkpoint) add the attempt."""
    name = f"step_{step:08d}"
    if name in taken:
        name = f"{name}-a{attempt}"
    base, number = name, 1
    while name in taken:
        number += 1
        name = f"{base}.{number}"
    return name


def taken_names(storage: Storage, opened: RunOpened) -> set[str]:
    """Return the names a save must not use: of checkpoints, good or bad, and of anything else that lies there."""
    there: set[str] = set()
    if storage.local_root is not None:  # at an object store `opened.taken` has all names
        there = {info.path.rstrip("/") for info in storage.list("", recursive=False)}
    return {*(row[0] for row in opened.records), *opened.quarantined, *opened.taken, *there}


def manifest_fields(
    *,
    checkpoint_id: str,
    step: int | None,
    epoch: float | None,
    metrics: Mapping[str, Any],
    run_id: str | None = None,
    parent: str | None = None,
    attempt: int = 1,
    world_size: int = 1,
) -> dict[str, Any]:
    """Return the fields of a manifest that the trainer knows; the defaults are those of a save without a run."""
    return {
        "run_id": run_id,
        "checkpoint_id": checkpoint_id,
        "parent": parent,
        "attempt": attempt,
        "step": step,
        "epoch": epoch,
        "created": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "metrics": plain_metrics(metrics),
        "world_size": world_size,
        "versions": {"holdfast": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Turn metric values into plain numbers; tensors are read here, which waits for their device.

    Raises:
        ConfigError: a value is no metric.
    """
    return {name: _plain(value, name) for name, value in metrics.items()}


def plain_at_once(metrics: dict[str, Any]) -> dict[str, Any] | None:
    """Return metrics of `take_metrics` as plain numbers; None if that would wait for a device, or one is no metric."""
    if all(type(value) in _PLAIN for value in metrics.values()):
        return metrics
    if any(_is_far(value) for value in metrics.values()):
        return None
    try:
        return plain_metrics(metrics)
    except ConfigError:  # of a list of a mapping: said when the row is sent
        return None


def _is_far(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type != "cpu"
    if isinstance(value, Mapping):
        return any(map(_is_far, value.values()))
    if isinstance(value, list):
        return any(map(_is_far, value))
    return is_foreign_array(value)


def is_foreign_array(value: object) -> bool:
    """Tell whether a value is an array of another library, which may wait for a device when it is read."""
    return callable(getattr(value, "tolist", None)) and not isinstance(value, (np.ndarray, np.generic))


def take_metrics(metrics: Mapping[str, Any], *, step: int) -> dict[str, Any]:
    """Copy metrics that the caller may go on changing; no tensor is read, so that nothing waits for a device.

    Raises:
        ConfigError: a value is no metric; it names the metric and its step.
    """
    try:
        return {
            name: value
            if type(value) in _SHORT or (type(value) is int and -_USUAL < value < _USUAL)  # counts, at each step
            else _take(value, name)
            for name, value in metrics.items()
        }
    except ConfigError as error:
        raise ConfigError(f"step {step}: {error}") from None


def _take(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_complex():
        if is_spread(value):
            value = _on_this_rank(value, name)
        # The caller may go on adding to it in place, and a CUDA graph writes to the same tensor each step.
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {str(key): _take(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_take(item, name) for item in value]
    if callable(getattr(value, "tolist", None)) and not isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return value  # of JAX: it cannot be changed, and reading it waits for its device
    return _plain(value, name)


def _on_this_rank(value: Any, name: str) -> torch.Tensor:
    """Return a DTensor that each rank holds as a whole as a plain tensor, without communication.

    Raises:
        ConfigError: other ranks hold parts of it: to read it is a call of all ranks, and rank 0 reads metrics alone.
    """
    places = getattr(value, "placements", None)
    if places is None or not all(
        place.is_replicate() or size == 1 for place, size in zip(places, value.device_mesh.shape, strict=True)
    ):
        raise ConfigError(
            f"metric {name!r} is a {type(value).__name__} of which each rank holds a part ({places}), and rank 0 alone "
            f"reads metrics: give {name}=value.full_tensor(), called on all ranks"
        )
    return local_tensor(value)


_SHORT = (float, str, bool, type(None))
_PLAIN = (*_SHORT, int)
_USUAL = 1 << 63


def _plain(value: Any, name: str) -> Any:
    check_length(value, name)
    if type(value) in _PLAIN:
        return value
    for kind in (int, float, str):  # subclasses (an enum, numpy.float64) become what they are
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, torch.Tensor):
        return _plain(value.item() if value.numel() == 1 else value.tolist(), name)
    if callable(getattr(value, "tolist", None)):  # NumPy scalars and arrays
        return _plain(value.tolist(), name)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if hasattr(value, "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"metric {name!r} is a {type(value).__name__} that is no number: {error}") from error
    raise ConfigError(f"metric {name!r} is a {type(value).__name__}: give a number, a tensor or a string")
