"""Typed JSON of a nested state, built from (path, node) pairs as DCP's planners have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import CheckpointError
from holdfast.state.tree.flatten import Flat, flatten

__all__ = ["nested", "node_of", "tensor_name", "top_items"]

_MAX_HOLES = 10_000  # items of a list that an importer has left out


def tensor_name(path: Sequence[str | int]) -> str:
    """Return the name of the tensor at a path."""
    return "/".join(map(str, path))


def node_of(value: Any, name: str, *, unsupported: str = "raise") -> tuple[Any, Flat]:
    """Encode one value of a state; the tensors in it have names below ``name``.

    Raises:
        UnsupportedStateError: the value cannot be saved.
    """
    flat = flatten({name: value}, unsupported=unsupported)
    items = top_items(flat.tree)
    return items.get(name), flat  # the node is None if the value was dropped


def top_items(tree: Any) -> dict[str, Any]:
    """Return the nodes of a state by name, in whichever form `flatten` wrote the mapping."""
    if tree.get("$") == "tensors":
        return {key: {"$": "tensor", "n": tree["at"] + key} for key in tree["k"]}
    return dict(tree["v"]) if "$" in tree else tree


def nested(nodes: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Build the tree: text in a path is a key of a dict, a number is a place in a list.

    Raises:
        CheckpointError: the paths contradict one another.
    """
    root: dict[Any, Any] = {}
    for path, node in nodes.items():
        at = root
        for step in path[:-1]:
            at = at.setdefault(step, {})
            if not isinstance(at, dict) or isinstance(at, _Node):
                raise CheckpointError(f"{tensor_name(path)!r} lies inside of a value: give it another name")
        if path[-1] in at:
            raise CheckpointError(f"{tensor_name(path)!r} is there twice: give one of them another name")
        at[path[-1]] = _Node(node=node)
    return _close(root)


class _Node(dict[str, Any]):
    """A finished node: its class distinguishes it from containers under construction."""


def _close(value: dict[Any, Any]) -> Any:
    if isinstance(value, _Node):
        return value["node"]
    if value and all(type(key) is int for key in value):
        if min(value) < 0 or max(value) > len(value) + _MAX_HOLES:
            raise CheckpointError(f"a list of {len(value)} items has the places {min(value)} to {max(value)}")
        return [_close(value[key]) if key in value else None for key in range(max(value) + 1)]
    items = {str(key): _close(item) for key, item in value.items()}
    if "$" in items:
        return {"$": "dict", "v": [[key, item] for key, item in items.items()]}
    return items
