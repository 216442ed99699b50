"""One line of ``holdfast doctor``: what was found, what it means, what to do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["Finding", "ProbeDeadline", "bad", "good", "warn"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a probe has found.

    Attributes:
        name: of the probe.
        level: "ok"; "warn": training works, slower or with less protection; "bad": to be mended before training.
        found: what was seen.
        means: what follows from it.
        todo: what to do about it; "" for nothing.
        values: the numbers behind, in the units their names say.
    """

    name: str
    level: Literal["ok", "warn", "bad"]
    found: str
    means: str
    todo: str = ""
    values: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)

    def to_json(self) -> dict[str, Any]:
        """Describe as JSON."""
        return {
            "name": self.name,
            "level": self.level,
            "found": self.found,
            "means": self.means,
            "do": self.todo,
            "values": dict(self.values),
        }


def good(name: str, found: str, means: str, **values: Any) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(name=name, level="ok", found=found, means=means, values=values)


def warn(name: str, found: str, means: str, todo: str, **values: Any) -> Finding:
    """Return a finding with which training works, slower or with less protection."""
    return Finding(name=name, level="warn", found=found, means=means, todo=todo, values=values)


def bad(name: str, found: str, means: str, todo: str, **values: Any) -> Finding:
    """Return a finding that has to be mended before training."""
    return Finding(name=name, level="bad", found=found, means=means, todo=todo, values=values)


class ProbeDeadline:
    """A span that probes share.

    Args:
        seconds: how long.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; 0 or less: it is over."""
        return self._end - time.monotonic()
