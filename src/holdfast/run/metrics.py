"""The metrics of a checkpoint: what one may be, how one is found by its name, and how they become strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from holdfast._outgoing import brief
from holdfast.errors import ConfigError
from holdfast.format.strict_json import BIG_INT_BITS

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def check_length(value: Any, name: str) -> None:
    """Check that a metric is no integer of so many digits that Python does not write it.

    Raises:
        ConfigError: it is.
    """
    if type(value) is int and value.bit_length() > BIG_INT_BITS:
        raise ConfigError(
            f"metric {name!r} is an integer of {value.bit_length()} bits, and a metric has {BIG_INT_BITS} at most: "
            "give a float (its logarithm), or put it into the state"
        )


def metric_value(metrics: Mapping[str, Any], name: str) -> Any:
    """Look up one metric; None if it does not exist.

    The exact name first (a mapping is no metric), then ``/`` leads into nested mappings.

    Example:
        >>> metric_value({"val": {"acc": 0.5}}, "val/acc"), metric_value({"val/acc": 0.7}, "val/acc")
        (0.5, 0.7)
    """
    if name in metrics and not isinstance(metrics[name], Mapping):
        return metrics[name]
    cut = name.find("/")
    while cut >= 0:
        inner = metrics.get(name[:cut])
        if isinstance(inner, Mapping) and (value := metric_value(inner, name[cut + 1 :])) is not None:
            return value
        cut = name.find("/", cut + 1)
    return None


def flat_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested metrics: each gets the name under which `metric_value` finds it.

    Example:
        >>> flat_metrics({"loss": 1, "val": {"acc": 0.5}})
        {'loss': 1, 'val/acc': 0.5}
    """
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            for inner, item in flat_metrics(value).items():
                flat.setdefault(f"{name}/{inner}", item)
        else:
            flat[name] = value
    return flat


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as JSON values; tensors and arrays of one element become numbers.

    Raises:
        ConfigError: a value is neither a JSON value nor has one element.
    """
    read = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    for name, value in read.items():
        try:
            json.dumps(to_plain({name: value}), allow_nan=False)
        except (TypeError, ValueError) as error:
            check_length(value, name)
            raise ConfigError(f"metric {name!r} is {brief(value, 200)}: give a number or text") from error
    return read


def to_plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Make metrics strict JSON: NaN and infinities become strings that `from_plain` knows."""
    return {name: _plain(value) for name, value in metrics.items()}


def from_plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `to_plain`."""
    return {name: _unplain(value) for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _unplain(value: Any) -> Any:
    kind = type(value)
    if kind is str:
        return _SPECIAL.get(value, value)
    if kind is dict:
        return {name: _unplain(item) for name, item in value.items()}
    return [_unplain(item) for item in value] if kind is list else value
