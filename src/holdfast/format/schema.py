"""What a decoded structure may look like: checked once, right after parsing, so that later code may trust it.

Strict JSON bounds size, depth and numbers (`strict_json`); `codec` knows its own containers and values. Here are the
nodes that stand for state (docs/format.md): tensors, objects, values of a single rank. All checks raise ValueError;
`codec.decode` turns it into `CorruptCheckpointError`, with the file and the place in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .codec import decode

__all__ = ["check_node", "check_object", "check_parts", "check_whole"]

_TENSOR_KINDS = ("tensor", "array", "parameter")
_NODES = frozenset({"tensor", "tensors", "object", "per_rank", "rng", "torch"})
_ARRAY_DTYPE = re.compile(r"[<>|=][a-zA-Z]\d*(?:\[\d*[A-Za-z]+\])?")
_MAX_SIZE = 1 << 60
_MAX_DIMS = 64


def check_node(tag: str, node: Mapping[str, Any]) -> None:
    """Check the fields of a node that stands for state; fields that are not known here are left to newer versions.

    Raises:
        ValueError: a field is missing or of another kind, or the tag is not known.
    """
    if tag not in _NODES:
        raise ValueError(f"unknown node {tag[:40]!a}: written by a newer Holdfast?")
    if tag == "tensors":
        keys = node.get("k")
        good = type(node.get("at")) is str and type(keys) is list and {*map(type, keys)} <= {str}
        good = good and type(node.get("o")) in (int, bool) and len({*keys}) == len(keys)  # type: ignore[misc, arg-type]
        trained = node.get("rg", [])
        good = good and type(trained) is list and {*map(type, trained)} <= {str}
    elif tag == "tensor":
        kind = node.get("k", "tensor")
        good = type(node.get("n")) is str and kind in _TENSOR_KINDS and type(node.get("rg", 0)) in (int, bool)
        good = good and (kind != "array" or _is_array(node))
    elif tag == "object":
        good = type(node.get("type")) is type(node.get("kind")) is str and "state" in node
        good = good and _are_layouts(node.get("spread", {}))
    elif tag == "torch":
        good = type(node.get("t")) is type(node.get("d", "")) is type(node.get("own", "")) is str
        good = good and type(node.get("v")) is (list if node["t"] == "size" else str)
        good = good and (node["t"] != "size" or _are_sizes(node["v"]))
    else:
        good = type(node.get("key")) is str
    if not good:
        raise ValueError(f"a {tag!r} node is malformed")


def _is_array(node: Mapping[str, Any]) -> bool:
    dtype = node.get("dt")
    return type(dtype) is str and _ARRAY_DTYPE.fullmatch(dtype) is not None and _are_sizes(node.get("sh"))


def _are_sizes(sizes: Any) -> bool:
    return type(sizes) is list and all(type(size) is int and 0 <= size < _MAX_SIZE for size in sizes)


def _are_layouts(layouts: Any) -> bool:
    if type(layouts) is not dict or not {*map(type, layouts.values())} <= {list}:
        return False
    return all(dim is None or (type(dim) is int and 0 <= dim < _MAX_DIMS) for row in layouts.values() for dim in row)


def check_object(kind: str, state: Any) -> None:
    """Check the decoded state of an object whose parts are put back one by one.

    Raises:
        ValueError: it is not laid out as the state of such an object.
    """
    if kind == "metric":
        if not (isinstance(state, Mapping) and all(isinstance(value, Mapping) for value in state.values())):
            raise ValueError("the state of a metric is no mapping of mappings")
    elif kind == "optimizer":
        mapping = state if isinstance(state, Mapping) else {}
        states, groups = mapping.get("state"), mapping.get("param_groups")
        good = isinstance(states, Mapping) and isinstance(groups, list)
        good = good and all(isinstance(entry, Mapping) for entry in (*states.values(), *groups))  # type: ignore[union-attr, misc]
        good = good and all(type(key) is str for key in states)  # type: ignore[union-attr]
        good = good and isinstance(mapping.get("other_state", {}), Mapping)
        if not good or not all(_are_names(group.get("params")) for group in groups or ()):
            raise ValueError("the state of an optimizer is no mapping of states and parameter groups by name")


def _are_names(names: Any) -> bool:
    return type(names) is list and all(type(name) is str for name in names)


def check_parts(parts: Any, keys: Iterable[tuple[str, bool, str]]) -> None:
    """Check the values that belong to a single rank.

    Args:
        parts: decoded.
        keys: (key, whether it is of generators, key of the part it was found in or "") of every reference.

    Raises:
        ValueError: it is no mapping by name, generators are not laid out as such, or parts lead to each other.
    """
    if not isinstance(parts, Mapping) or not all(type(key) is str for key in parts):
        raise ValueError("the values of a rank are no mapping by name")
    for key, is_rng, inside in keys:
        if inside and not key.startswith(f"{inside}@"):
            raise ValueError(f"the part {inside[:80]!a} refers to {key[:80]!a}, which does not lie in it")
        part = parts.get(key)
        if is_rng and part is not None and not (isinstance(part, Mapping) and isinstance(part.get("rng"), Mapping)):
            raise ValueError(f"{key[:80]!a} holds no generators")


def check_whole(tree: Any, *, where: str) -> None:
    """Check a structure that is only looked at, never loaded.

    Raises:
        CorruptCheckpointError: it is malformed.
    """

    def leaf(tag: str, node: dict[str, Any]) -> Any:
        check_node(tag, node)
        if tag == "tensors":
            return dict.fromkeys(node["k"])
        if tag == "object":
            state = decode(node["state"], leaf, where=where)
            check_object(node["kind"], state)
            return state
        return node

    decode(tree, leaf, where=where)
