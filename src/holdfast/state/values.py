"""The kinds of value a state holds, and what stands for them in a stored tree.

A stored tree is typed JSON (`holdfast.format.codec`). The nodes this layer adds:

- ``{"$": "tensor", "n": name}``: one tensor; ``"k": "parameter"`` / ``"array"`` when it was one of these.
- ``{"$": "tensors", "at": prefix, "k": [keys]}``: a dict that holds tensors only; its tensors are ``prefix/key``.
- ``{"$": "object", "type": ..., "kind": ..., "state": tree}``: something with ``state_dict``.
- ``{"$": "per_rank"}`` and ``{"$": "rng"}``: the tree is in the part of each rank.
- ``{"$": "torch", "t": "dtype" | "device" | "size" | "generator", ...}``: torch's plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["RNG", "ObjectNode", "PerRank", "PerRankNode", "RngSentinel", "TensorRef"]


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class PerRank:
    """Marks a value that differs on every rank and is stored once for each.

    Example:
        >>> PerRank({"cache": [1, 2]}).value
        {'cache': [1, 2]}
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class RngSentinel:
    """The value to put into a state for the python, numpy, torch and accelerator generators of each rank."""

    _only: RngSentinel | None = None

    def __new__(cls) -> RngSentinel:  # noqa: D102 - there is one
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "holdfast.RNG"

    def __reduce__(self) -> str:
        return "RNG"


RNG = RngSentinel()


@dataclass(slots=True, eq=False)
class TensorRef:
    """A place in a decoded tree that a tensor fills; ``value`` is set once the tensor has been read."""

    name: str
    kind: str = "tensor"
    extra: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)  # shared: a state may hold 100 000 of these
    value: Any = None


@dataclass(slots=True, eq=False)
class ObjectNode:
    """A stored object: the class it had, how it was taken apart, and its decoded state."""

    type: str
    kind: str
    state: Any


@dataclass(slots=True, eq=False)
class PerRankNode:
    """A stored `PerRank` (or `RNG`) value: where to find it among the parts of the ranks."""

    key: str
    rng: bool = False
