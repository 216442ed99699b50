"""What is in a checkpoint, from its small files alone: items, tensors, plain data. Never reads a tensor's bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.format.contents import ContentsReader, check_whole

_MAPPINGS = frozenset({"dict", "odict", "ddict", "counter"})
_SEQUENCES = frozenset({"tuple", "set", "frozenset", "deque"})
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One stored tensor. ``tied_to`` names the tensor whose bytes it shares."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tied_to: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Totals of one top-level entry of the state.

    Attributes:
        numel: elements of all its tensors, tied ones once ("parameters" where the item is a model).
    """

    name: str
    tensors: int
    numel: int
    nbytes: int
    dtypes: tuple[str, ...]


def tensors(contents: ContentsReader) -> list[TensorRow]:
    """List all tensors in order of name, tied names included.

    Raises:
        CorruptCheckpointError: an index is damaged, or two of them contradict each other.
    """
    stored = contents.tensors()
    rows = {
        name: TensorRow(name=name, dtype=dtype, shape=tuple(shape), nbytes=sum(piece.nbytes for piece in pieces))
        for name, dtype, shape, pieces in stored.entries.values()
    }
    for alias, target in stored.aliases.items():
        if target in rows:
            of = rows[target]
            rows[alias] = TensorRow(name=alias, dtype=of.dtype, shape=of.shape, nbytes=0, tied_to=target)
    return [rows[key] for key in sorted(rows)]


def items(rows: list[TensorRow]) -> list[Item]:
    """Total the tensors by the first part of their names."""
    groups: dict[str, list[TensorRow]] = {}
    for row in rows:
        groups.setdefault(row.name.split("/", 1)[0], []).append(row)
    return [
        Item(
            name=name,
            tensors=len(group),
            numel=sum(row.numel for row in group if row.tied_to is None),
            nbytes=sum(row.nbytes for row in group),
            dtypes=tuple(sorted({row.dtype for row in group})),
        )
        for name, group in groups.items()
    ]


def state_tree(contents: ContentsReader) -> Any:
    """Return the structure as typed JSON, checked but not decoded; None if the checkpoint has none.

    Raises:
        CorruptCheckpointError: the file is not as it was written.
    """
    structure = contents.structure()
    if structure is None:
        return None
    where, tree = structure
    check_whole(tree, where=where)
    return tree


def top_names(tree: Any) -> list[str]:
    """The keys of the state, in its own order."""
    return [key for key, _ in entries_of(tree) if isinstance(key, str)]


def plain_names(tree: Any) -> list[tuple[str, str]]:
    """Name each piece of plain data, with its value in short."""
    return list(_plain(tree, ""))


def entries_of(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the children of a container of the typed JSON, tagged or not."""
    if isinstance(node, list):
        yield from enumerate(node)
    elif isinstance(node, dict):
        tag = node.get("$")
        if tag is None:
            yield from node.items()
        elif tag == "object":
            yield from entries_of(node.get("state"))
        elif tag == "tensors":
            yield from ((key, {"$": "tensor"}) for key in node.get("k", ()))
        elif tag in _MAPPINGS:
            # A key that is no text is a tree of its own.
            yield from ((key if isinstance(key, str) else short(key), value) for key, value in node["v"])
        elif tag == "namedtuple":
            yield from zip(node["f"], node["v"], strict=False)
        elif tag in _SEQUENCES:
            yield from enumerate(node["v"])


def _plain(node: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict) and node.get("$") in ("tensor", "tensors"):
        return
    if isinstance(node, dict) and node.get("$") in ("rng", "per_rank"):
        yield name, "random generators" if node["$"] == "rng" else "one value per rank"
        return
    children = list(entries_of(node))
    is_short = isinstance(node, list) and not any(isinstance(child, (dict, list)) for _, child in children)
    if not children or is_short:
        text = short(node)
        if text:
            yield name, text
        return
    for key, child in children:
        yield from _plain(child, f"{name}/{key}" if name else str(key))


def short(node: Any) -> str:
    """Write plain data (typed JSON) in at most 60 characters."""
    if isinstance(node, dict):
        tag = node.get("$")
        rest = {key: value for key, value in node.items() if key != "$"}
        text = "{}" if tag is None else f"{rest['v']}" if tag == "float" else f"{tag} {rest.get('v', rest or '')}"
    else:
        text = repr(node)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
