"""Metrics out of what frameworks log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["scalars"]

_PLAIN = (bool, int, float, str)


def scalars(*logged: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the numbers and strings in what a framework logged; the later mapping wins.

    One-element tensors and arrays become numbers (reading one on an accelerator waits for it). Anything else, such as a
    histogram or an image, is left out: it is no metric.
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
