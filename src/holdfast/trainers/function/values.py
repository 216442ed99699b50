"""Metrics as plain JSON, scores, and dictionaries that travel without touching a disk."""

from __future__ import annotations

import math
import pickle
import secrets
from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint._location import DictStore
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError
from holdfast.format.names import MANIFEST_NAME
from holdfast.run.record import check_length
from holdfast.storage.memory import MemoryStorage

__all__ = ["TIMESTAMP", "check_score", "pack_checkpoint", "plain_metrics", "score_of", "unpack_checkpoint"]

TIMESTAMP = "_timestamp"
"""Score attribute that means the time of the save."""

_SHORT = frozenset({float, str, bool, type(None)})
_PLAIN = _SHORT | {int}
_MAX_DEPTH = 32


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of metrics in which everything is JSON: nested dicts and lists, one-element tensors as numbers.

    A tensor on an accelerator is read here, which waits for its device.

    Raises:
        ConfigError: a value is no metric; the message names the first.
    """
    if type(metrics) is dict:
        for key, value in metrics.items():
            if type(value) not in _SHORT or type(key) is not str:
                break
        else:
            return metrics.copy()
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"report(metrics={_show(metrics)}): metrics are a dict such as {{'loss': 0.3}}, not {_kind(metrics)}"
        )
    return _plain_mapping(metrics, "", 0)


def check_score(metrics: Mapping[str, Any], attribute: str) -> None:
    """Refuse a score that cannot rank. A missing score and NaN are fine: they rank below everything.

    Raises:
        ConfigError: the value is neither a number nor missing.
    """
    from holdfast.run.record import metric_value

    value = metric_value(metrics, attribute)
    if value is not None and not isinstance(value, (int, float)):
        raise ConfigError(
            f"metric {attribute!r} is {_show(value)} ({_kind(value)}), but checkpoint_score_attribute={attribute!r} "
            "ranks checkpoints by it: report a number, or name another metric"
        )


def score_of(values: Mapping[str, Any], attribute: str, *, required: bool) -> float | None:
    """Return the number in ``values`` that ranks a dictionary checkpoint.

    Args:
        values: what `save_checkpoint` got.
        attribute: which of them.
        required: refuse values without it.

    Raises:
        ConfigError: it is missing, or no number.
    """
    if attribute not in values:
        if not required:
            return None
        raise ConfigError(
            f"save_checkpoint() got no {attribute!r}, which checkpoint_score_attribute ranks by; it got "
            f"{sorted(map(str, values))}: add it, or name another attribute in CheckpointStrategy"
        )
    value = values[attribute]
    if type(value) not in (int, float):
        value = _number(value)
    if value is None:
        raise ConfigError(
            f"save_checkpoint({attribute}={_show(values[attribute])}): checkpoint_score_attribute={attribute!r} ranks "
            f"by it, so it has to be a number, not {_kind(values[attribute])}"
        )
    return float(value)


def pack_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Return all files of a (small) checkpoint as bytes that `unpack_checkpoint` takes. In transit only."""
    prefix = f"{checkpoint.directory}/"
    storage = checkpoint.storage
    files = {info.path[len(prefix) :]: storage.read(info.path) for info in storage.list(checkpoint.directory)}
    return pickle.dumps(files, protocol=5)


def unpack_checkpoint(data: bytes) -> Checkpoint:
    """Rebuild in memory what `pack_checkpoint` packed; it lives as long as a handle refers to it."""
    files: dict[str, bytes] = pickle.loads(data)
    store = DictStore(secrets.token_hex(8))
    storage = MemoryStorage(store.uri.removeprefix("memory://"))
    for path in sorted(files, key=lambda path: path == MANIFEST_NAME):  # the manifest last, as every commit
        storage.put(f"checkpoint/{path}", files[path])
    return Checkpoint(f"{store.uri}/checkpoint")


def _plain_mapping(metrics: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"metric {path!r} is nested more than {_MAX_DEPTH} deep: does it contain itself?")
    plain = {}
    for key, value in metrics.items():
        if not isinstance(key, (str, int)):
            raise ConfigError(f"metrics{f' below {path!r}' if path else ''} have the key {_show(key)}: use strings")
        plain[str(key)] = _plain(value, f"{path}/{key}" if path else str(key), depth)
    return plain


def _plain(value: Any, path: str, depth: int) -> Any:
    check_length(value, path)
    if type(value) in _PLAIN:
        return value
    for kind in (int, float, str):  # subclasses (an enum, numpy.float64) become what they are
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, depth + 1)
    if isinstance(value, (list, tuple)):
        if depth >= _MAX_DEPTH:
            raise ConfigError(f"metric {path!r} is nested more than {_MAX_DEPTH} deep: does it contain itself?")
        return [_plain(item, f"{path}/{number}", depth + 1) for number, item in enumerate(value)]
    shape = getattr(value, "shape", None)
    if shape is not None and callable(getattr(value, "item", None)):  # torch, NumPy, JAX
        if math.prod(shape) != 1:
            raise ConfigError(
                f"metric {path!r} is a {type(value).__name__} of shape {tuple(shape)}: report one number "
                "(.mean(), .item()), or .tolist() if you want them all; tensors to keep go into state= or a checkpoint"
            )
        return _plain(value.item(), path, depth + 1)
    number = _number(value)
    if number is None:
        raise ConfigError(
            f"metric {path!r} is {_show(value)} ({_kind(value)}): metrics are numbers, strings, None, and dicts and "
            "lists of these; put anything else into state= or the checkpoint"
        )
    return number


def _number(value: Any) -> float | None:
    """Convert what has a number's value: a one-element tensor, a Decimal, an average meter; None for the rest."""
    if isinstance(value, (int, float)):
        return value
    shape = getattr(value, "shape", None)
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") or (shape and math.prod(shape) != 1):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
