"""Metrics: those in what a framework logs, and those of a checkpoint as experiment trackers take them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["finite", "numbers", "scalars"]

_PLAIN = (bool, int, float, str)


def scalars(*logged: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the numbers and strings in what a framework logged; the later mapping wins.

    One-element tensors and arrays become numbers (reading a tensor on an accelerator waits for it). Anything else,
    such as a histogram or an image, is left out: it is no metric.
    """
    found: dict[str, Any] = {}
    for mapping in logged:
        for name, value in (mapping or {}).items():
            plain = _plain(value)
            if plain is not None:
                found[str(name)] = plain
    return found


def _plain(value: Any) -> bool | int | float | str | None:
    if isinstance(value, _PLAIN):
        return value
    size = getattr(value, "numel", None)  # tensors
    size = size() if callable(size) else getattr(value, "size", None)  # arrays
    if size == 1 and callable(getattr(value, "item", None)):
        item = value.item()
        return item if isinstance(item, _PLAIN) else None
    return None


def numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in (nested) metrics, by names joined with "/"."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{name}"] = float(value)
    return found


def finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return (nested) metrics for JSON, which knows neither NaN nor infinity: these become text."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found[name] = finite(value)
        else:
            found[name] = repr(value) if isinstance(value, float) and not math.isfinite(value) else value
    return found
