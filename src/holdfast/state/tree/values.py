"""The kinds of value a state holds, and what stands for them in a stored tree.

A stored tree is typed JSON (`holdfast.format.codec`). This layer adds the nodes:

- ``{"$": "tensor", "n": name}``: one tensor; ``"k": "parameter"`` or ``"array"`` if it was that, ``"rg": 1`` if it has
  a gradient.
- ``{"$": "tensors", "at": prefix, "k": [keys]}``: a dict that holds tensors only; its tensors are ``prefix/key``. Those
  of the keys ``"rg"`` have a gradient.
- ``{"$": "object", "type": ..., "kind": ..., "state": tree}``: something with ``state_dict``; with the kind "tensor" a
  tensor that wraps others, which are its state (`arrays.parts_of`).
- ``{"$": "per_rank"}`` and ``{"$": "rng"}``: the tree is in the part of each rank.
- ``{"$": "torch", "t": "dtype" | "device" | "size" | "generator", ...}``: torch's plain values.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.format.codec import BESIDE

from . import arrays

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_DONE = (torch.Tensor, int, float, str)  # nothing to fill in


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


class Attrs(MutableMapping[str, Any]):
    """Some attributes of an object as a mapping: a state saves them, a resume sets them again.

    Args:
        owner: any object whose attributes can be set.
        names: of the attributes.

    Raises:
        ConfigError: there is no such attribute.
    """

    __slots__ = ("_names", "_owner")

    def __init__(self, owner: Any, names: tuple[str, ...]) -> None:
        missing = [name for name in names if not isinstance(name, str) or not hasattr(owner, name)]
        if not names or missing:
            flaw = f"has no attribute {', '.join(map(repr, missing))}" if missing else "with no names saves nothing"
            raise ConfigError(
                f"holdfast.attrs: {type(owner).__name__} {flaw}; name attributes that exist before the run begins, as "
                "in holdfast.attrs(trainer, 'lr', 'best')"
            )
        self._owner, self._names = owner, tuple(dict.fromkeys(names))

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._names:
            raise KeyError(name)
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name!r} is an attribute of {type(self._owner).__name__}: it stays")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"attrs({type(self._owner).__name__}, {', '.join(map(repr, self._names))})"


def attrs(owner: Any, *names: str) -> Attrs:
    """Name attributes of an object as a value of a state: they are saved, and set again by a resume.

    Args:
        owner: any object whose attributes can be set.
        *names: of the attributes; their values are of the kinds that a state may hold.

    Raises:
        ConfigError: there is no such attribute.

    Example:
        >>> class Schedule:
        ...     best = 1.5
        >>> dict(attrs(Schedule(), "best"))
        {'best': 1.5}
    """
    return Attrs(owner, names)


class RngSentinel:
    """The value to put into a state for the python, numpy, torch and accelerator generators of each rank."""

    _only: RngSentinel | None = None

    def __new__(cls) -> RngSentinel:  # noqa: D102 - a singleton
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "holdfast.RNG"

    def __reduce__(self) -> str:
        return "RNG"


RNG = RngSentinel()


@dataclass(slots=True, eq=False, init=False)
class TensorRef:
    """A place in a decoded tree that a tensor fills; ``value`` is set once the tensor has been read."""

    name: str
    kind: str
    extra: Mapping[str, Any]
    value: Any

    # By hand: a state may hold 100 000 of these, which share one empty mapping.
    def __init__(self, name: str, kind: str = "tensor", extra: Mapping[str, Any] = _NOTHING, value: Any = None) -> None:
        self.name, self.kind, self.extra, self.value = name, kind, extra, value


@dataclass(slots=True, eq=False)
class ObjectNode:
    """A stored object: the class it had, how it was taken apart, and its decoded state.

    ``spread`` has, for tensors that were spread over ranks, the dimension that was sharded along each dimension of the
    mesh, or None; of an optimizer for those that are not of their parameter's shape, or lie in lists.
    """

    type: str
    kind: str
    state: Any
    spread: Mapping[str, list[int | None]] = field(default_factory=lambda: _NOTHING)


@dataclass(slots=True, eq=False)
class PerRankNode:
    """A stored `PerRank` (or `RNG`) value: where to find it among the parts of the ranks."""

    key: str
    rng: bool = False


def fill(value: Any, per_rank: dict[str, Any] | None) -> Any:
    """Return ``value`` with every placeholder replaced: tensors by what was read, objects by their state.

    Containers keep their type; a value of another rank becomes None.
    """
    if isinstance(value, _DONE):
        return value
    if isinstance(value, TensorRef):
        return _tensor(value)
    if isinstance(value, ObjectNode):
        whole = fill(value.state, per_rank)
        return arrays.whole_of(whole) if value.kind == "tensor" else whole
    if isinstance(value, PerRankNode):
        own = (per_rank or {}).get(value.key)
        return fill(own["rng"] if value.rng and own is not None else own, per_rank)
    if isinstance(value, PerRank):  # of the live state, with the stored value of this rank
        value.value = fill(value.value, per_rank)
        return value
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(item, _DONE):
                value[key] = fill(item, per_rank)
        if BESIDE in value and isinstance(value, OrderedDict):
            value._metadata = value.pop(BESIDE)  # type: ignore[attr-defined]
        return value
    if isinstance(value, (list, deque)):
        for number, item in enumerate(value):
            if not isinstance(item, _DONE):
                value[number] = fill(item, per_rank)
        return value
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [fill(item, per_rank) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return remade(value, items)
    if type(value) in (set, frozenset) and any(isinstance(item, (TensorRef, ObjectNode)) for item in value):
        return type(value)(fill(item, per_rank) for item in value)
    return value


def remade(sequence: Any, items: list[Any]) -> Any:
    """Return items in a list, tuple or deque of the same kind as another one."""
    if isinstance(sequence, deque):
        return deque(items, sequence.maxlen)
    return sequence._make(items) if hasattr(sequence, "_make") else type(sequence)(items)


def _tensor(ref: TensorRef) -> Any:
    if ref.kind == "array":
        return arrays.array_from_tensor(ref.value, ref.extra)
    if ref.kind == "parameter" and isinstance(ref.value, torch.Tensor):
        return torch.nn.Parameter(ref.value, requires_grad=bool(ref.extra.get("rg", 1)))
    if ref.extra.get("rg") and isinstance(ref.value, torch.Tensor) and ref.value.is_leaf:
        trains = ref.value.dtype.is_floating_point or ref.value.dtype.is_complex
        return ref.value.requires_grad_(trains)
    return ref.value
