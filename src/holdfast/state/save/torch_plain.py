"""Plain data for files that torch reads: what its weights-only reader knows stays, the rest becomes typed JSON.

A value that reader has no class for (a deque, a date, a NumPy array) is written as ``{"$holdfast": node}`` with a node
of `holdfast.format.codec`, in which tensors are themselves. `from_plain` turns it back.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from holdfast.errors import CorruptCheckpointError
from holdfast.format.codec import decode, encode

from ..tree import arrays

__all__ = ["MARK", "from_plain", "to_plain"]

MARK = "$holdfast"
"""The only key of a dict that stands for something torch's reader has no class for."""

Leaf = Callable[[Any, str], Any]

_MAX_BITS = 2000  # the reader knows integers of at most 255 bytes
_SCALARS = frozenset({type(None), bool, float, str, bytes, complex, torch.dtype, torch.device, torch.Size})
_MAPS = frozenset({dict, OrderedDict, Counter})


def to_plain(value: Any, leaf: Leaf | None = None, *, path: str = "state") -> Any:
    """Return ``value`` in terms of what ``torch.load(weights_only=True)`` knows.

    Args:
        value: plain data, tensors, NumPy arrays. It is not changed.
        leaf: asked first for every value that is no plain container or scalar; returns what stands in its place (plain
            in this sense, or a tensor), or NotImplemented.
        path: how messages call ``value``.

    Raises:
        UnsupportedStateError: naming path and type of what cannot be stored.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is int:
        return value if value.bit_length() <= _MAX_BITS else _encoded(value, leaf, path)
    if kind in _MAPS:
        if MARK in value or not all(map(_is_key, value)):
            return _encoded(value, leaf, path)
        items = ((key, to_plain(item, leaf, path=f"{path}[{key!r}]")) for key, item in value.items())
        return kind(dict(items)) if kind is Counter else kind(items)
    if kind is list:
        return [to_plain(item, leaf, path=f"{path}[{number}]") for number, item in enumerate(value)]
    if kind is tuple:
        return tuple(to_plain(item, leaf, path=f"{path}[{number}]") for number, item in enumerate(value))
    if kind is set and all(map(_is_key, value)):
        return value
    if leaf is not None and (found := leaf(value, path)) is not NotImplemented:
        return found
    if isinstance(value, torch.Tensor):
        return value
    return _encoded(value, leaf, path)


def from_plain(value: Any, *, where: str = "state") -> Any:
    """Turn what `to_plain` returned into the original again; anything else stays as it is.

    Raises:
        CorruptCheckpointError: a node is malformed.
    """
    kind = type(value)
    if kind in _MAPS:
        if kind is dict and len(value) == 1 and MARK in value:
            return decode(value[MARK], _from_node, where=where)
        if kind is Counter:
            return value
        return kind((key, from_plain(item, where=where)) for key, item in value.items())
    if kind is list:
        return [from_plain(item, where=where) for item in value]
    if kind is tuple:
        return tuple(from_plain(item, where=where) for item in value)
    return value


def _is_key(key: Any) -> bool:
    kind = type(key)
    if kind is tuple:
        return all(map(_is_key, key))
    return kind in (str, float, bool, bytes, type(None)) or (kind is int and key.bit_length() <= _MAX_BITS)


def _encoded(value: Any, leaf: Leaf | None, path: str) -> Any:
    def inner(item: Any, where: str) -> Any:
        if leaf is not None and (found := leaf(item, where)) is not NotImplemented:
            # A node must be a node: what a leaf gives is hidden from the codec in one.
            return found if isinstance(found, torch.Tensor) else {"$": "plain", "v": found}
        if isinstance(item, torch.Tensor):
            return item
        if arrays.is_array(item):
            tensor, extra = arrays.array_to_tensor(item, where)
            return {"$": "array", "t": tensor, **extra}
        node = arrays.encode_torch_value(item)
        return NotImplemented if node is None else node

    return {MARK: encode(value, inner, path=path)}


def _from_node(tag: str, node: dict[str, Any]) -> Any:
    try:
        if tag == "array":
            return arrays.array_from_tensor(node["t"], node)
        if tag == "plain":
            return from_plain(node["v"])
    except (KeyError, AttributeError) as error:
        raise CorruptCheckpointError(f"a stored {tag!r} node is malformed ({error!r})") from error
    if tag == "torch":
        return arrays.decode_torch_value(node)
    raise CorruptCheckpointError(f"unknown node {tag!r}: written by a newer Holdfast?")
