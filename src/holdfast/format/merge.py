"""Merge the structures of ranks that hold different things: what a single rank has stands beside the rest.

Works on the typed JSON of state files (docs/format.md), before it is decoded. Mappings are united by key; where two
ranks have plain data under one key, the data of the first rank counts, as plain data of rank 0 does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

__all__ = ["merged"]

_MAPPINGS = ("odict", "dict", "ddict")


def merged(trees: Iterable[Any]) -> Any:
    """Return one structure made of several, the first of which counts where they differ. They are not changed."""
    return reduce(_merge, trees)


def _merge(first: Any, other: Any) -> Any:
    if type(first) is not dict or type(other) is not dict:
        return _sequence(first, other)
    if first == other:
        return first
    if _tag(first) == _tag(other) == "object":
        if first.get("kind") != other.get("kind"):
            return first
        combine = _optimizers if first["kind"] == "optimizer" else _merge
        both = {**first, "state": combine(first["state"], other["state"])}
        if "spread" in first or "spread" in other:
            both["spread"] = {**other.get("spread", {}), **first.get("spread", {})}
        return both
    if _tag(first) == _tag(other) == "tensors" and first["at"] == other["at"]:
        both = {**first, "k": list(dict.fromkeys([*first["k"], *other["k"]]))}
        if "rg" in first or "rg" in other:
            both["rg"] = list(dict.fromkeys([*first.get("rg", ()), *other.get("rg", ())]))
        return both
    rows, others = _rows(first), _rows(other)
    if rows is None or others is None:
        return first
    if _tag(first) is None and _tag(other) is None and _is_optimizer(first) and _is_optimizer(other):
        return _optimizers(first, other)
    for key, (name, node) in others.items():
        rows[key] = (name, _merge(rows[key][1], node) if key in rows else node)
    united = list(rows.values())
    if _tag(first) in _MAPPINGS:
        return {**first, "v": [list(row) for row in united]}
    ordered = bool(first.get("o")) and _tag(first) == "tensors"
    if not ordered and "$" not in rows and all(isinstance(name, str) for name, _ in united):
        return dict(united)
    return {"$": "odict" if ordered else "dict", "v": [list(row) for row in united]}


def _tag(node: Mapping[str, Any]) -> str | None:
    tag = node.get("$")
    return tag if isinstance(tag, str) else None


def _rows(node: dict[str, Any]) -> dict[str, tuple[Any, Any]] | None:
    """Return the entries of a mapping by the text of their keys; None for anything else."""
    tag = _tag(node)
    if tag is None:
        return {name: (name, item) for name, item in node.items()}
    if tag == "tensors":
        trained = frozenset(node.get("rg", ()))
        rows = {
            key: {"$": "tensor", "n": node["at"] + key, **({"rg": 1} if key in trained else {})} for key in node["k"]
        }
        return {key: (key, row) for key, row in rows.items()}
    if tag in _MAPPINGS and isinstance(node.get("v"), list):
        # A key that is no text is a tree of its own.
        return {name if isinstance(name, str) else f"\0{name!r}": (name, item) for name, item in node["v"]}
    return None


def _sequence(first: Any, other: Any) -> Any:
    """Unite lists whose items are live (tensors, objects, dicts with such in them); plain lists are one value."""
    if type(first) is not list or type(other) is not list or not (_is_live(first) and _is_live(other)):
        return first
    both = [_merge(left, right) for left, right in zip(first, other, strict=False)]
    return both + first[len(both) :] + other[len(both) :]


def _is_live(node: Any) -> bool:
    if type(node) is list:
        return any(map(_is_live, node))
    if type(node) is dict:
        return _tag(node) in ("tensor", "tensors", "object") or any(map(_is_live, node.values()))
    return False


def _is_optimizer(node: Mapping[str, Any]) -> bool:
    groups = node.get("param_groups")
    return type(groups) is list and "state" in node and all(map(_is_named, groups))


def _is_named(group: Any) -> bool:
    names = group.get("params") if type(group) is dict else None
    return type(names) is list and not any(type(name) is int for name in names)  # positions say nothing to others


def _optimizers(first: Any, other: Any) -> Any:
    """Unite optimizers that keep state by name: parameters of groups that are alike come into one group."""
    if not (type(first) is type(other) is dict and _is_optimizer(first) and _is_optimizer(other)):
        return first
    groups = [{**group, "params": list(group["params"])} for group in first["param_groups"]]
    known = {repr(name) for group in groups for name in group["params"]}
    for group in other["param_groups"]:
        names = [name for name in group["params"] if repr(name) not in known]
        known.update(map(repr, names))
        home = next((known_group for known_group in groups if _hyper(known_group) == _hyper(group)), None)
        if home is not None:
            home["params"].extend(names)
        elif names:
            groups.append({**group, "params": names})
    rest = {key: value for key, value in first.items() if key not in ("state", "param_groups")}
    more = {key: value for key, value in other.items() if key not in ("state", "param_groups")}
    return {"state": _merge(first["state"], other["state"]), "param_groups": groups, **_merge(rest, more)}


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
