"""What a committed checkpoint holds, read from its small files: tensors (indexes), structure, digests. No torch.

The one reader for whoever looks into a checkpoint: loads, summaries, comparisons, exports. What a decoded structure may
look like is checked here, once, right after parsing, so that later code may trust it: strict JSON bounds size, depth
and numbers, `codec` knows its own containers and values, and the nodes that stand for state (docs/format.md) are
checked by `check_node`, `check_object` and `check_parts`. These raise ValueError; `codec.decode` turns it into
`CorruptCheckpointError`, with the file and the place in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageNotFoundError
from holdfast.storage.base import Storage
from holdfast.storage.together import asked_again, together

from .codec import OUTER, decode
from .digest import bytes_digest, file_digest, table_at, table_bytes
from .division import disagreement
from .index import FileNumbers, Index, IndexFile, TensorEntry
from .manifest import FileEntry, Manifest
from .names import MANIFEST_NAME, save_id_of
from .strict_json import loads

if TYPE_CHECKING:
    from .index_group import IndexGroup

__all__ = [
    "MAX_JSON", "ContentsReader", "TensorList", "check_node", "check_object", "check_parts", "check_there",
    "check_whole", "in_boxes", "merged", "unite",
]  # fmt: skip

MAX_JSON = 2 << 30
"""Bound for the bytes of an index or a structure before it is read."""
_AHEAD_BYTES = 32 << 20  # at most so many bytes of such files are read side by side


class TensorList(NamedTuple):
    """All tensors of a checkpoint, of all writers.

    Attributes:
        entries: by name.
        aliases: name of a tied tensor -> name of the tensor it is stored as.
    """

    entries: dict[str, TensorEntry]
    aliases: dict[str, str]

    def entry(self, name: str) -> TensorEntry | None:
        """Return where a tensor is stored; for a tied tensor, where the tensor it is tied to is stored."""
        return self.entries.get(self.aliases.get(name, name))


class ContentsReader:
    """Reads the small files of a checkpoint, each checked against its digest; used by one thread.

    Args:
        storage: rooted at the checkpoint.
        manifest: its manifest.

    Attributes:
        files: numbers of the files that tables of pieces name.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.manifest = manifest
        self.files = FileNumbers()
        self._storage = storage
        self._wanted: list[FileEntry] = []  # will be needed
        self._ahead: dict[str, bytes] = {}  # path -> content of those that have been read

    def read_ahead(self, entries: Iterable[FileEntry]) -> None:
        """Note files to read side by side, where that saves waiting; `read` takes them about in this order."""
        if self._storage.traits.num_parallel > 1:
            known = {*self._ahead, *(entry.path for entry in self._wanted)}
            self._wanted += [entry for entry in entries if entry.path not in known]

    def read(self, entry: FileEntry) -> bytes:
        """Return the content of a file.

        Raises:
            CorruptCheckpointError: it is gone, or differs from its digest.
        """
        while entry.path not in self._ahead and entry in self._wanted:
            size, batch = 0, list[FileEntry]()
            while self._wanted and (not batch or size + self._wanted[0].size <= _AHEAD_BYTES):
                batch.append(self._wanted.pop(0))
                size += batch[-1].size
            contents = together(self._storage, [partial(_if_sound, self._storage, entry) for entry in batch])
            found = zip(batch, contents, strict=True)
            self._ahead.update((entry.path, data) for entry, data in found if data is not None)
        data = self._ahead.pop(entry.path, None)
        return _checked(self._storage, entry) if data is None else data

    def drop_ahead(self) -> None:
        """Forget what was read ahead, and is not needed after all."""
        self._wanted, self._ahead = [], {}

    def tensors(self) -> TensorList:
        """Return all tensors.

        Raises:
            CorruptCheckpointError: an index is damaged, or two of them contradict each other.
        """
        return unite(self.indexes(self.manifest.with_role("index")), where=self._storage.uri, files=self.files)

    def indexes(self, entries: Sequence[FileEntry]) -> list[Index | IndexGroup]:
        """Read some indexes, for `unite`.

        Raises:
            CorruptCheckpointError: an index is malformed, or names what is no file of this checkpoint.
        """
        sizes = {entry.path: entry.size for entry in self.manifest.files}
        self.read_ahead(entries)
        if len(entries) == 1:  # without NumPy, which takes longer to import than most indexes to read
            (entry,) = entries
            save_id = save_id_of(entry.path)
            return [Index.from_bytes(self.read(entry), where=entry.path, save_id=save_id, sizes=sizes)]
        from .index_group import read_indexes

        texts = (IndexFile(entry.path, save_id_of(entry.path), self.read(entry)) for entry in entries)
        return read_indexes(texts, self.files, sizes=sizes)

    def structure(self) -> tuple[str, Any] | None:
        """Return the structure of the state as typed JSON, undecoded, and the file to name for it; None without one.

        Ranks that hold different things have written a structure each: these are merged.

        Raises:
            CorruptCheckpointError: a file of it is damaged.
        """
        entries = sorted(self.manifest.with_role("state"), key=attrgetter("writer"))
        trees = [self.tree(entry) for entry in entries]
        if len(trees) > 1:  # merging looks into them
            for entry, tree in zip(entries, trees, strict=True):
                check_whole(tree, where=entry.path)
            return entries[0].path, merged(trees)
        return (entries[0].path, trees[0]) if trees else None

    def tree(self, entry: FileEntry) -> Any:
        """Return the typed JSON of one file, not checked against `holdfast.format.contents` yet.

        Raises:
            CorruptCheckpointError: it is damaged.
        """
        return loads(self.read(entry), max_bytes=MAX_JSON, where=entry.path)

    def tables(self, files: Iterable[FileEntry]) -> dict[str, bytes]:
        """Return the chunk digests of files, by path, checked against the manifest; some files have none.

        Raises:
            CorruptCheckpointError: they are damaged.
        """
        rows = [(entry, *entry.chunks) for entry in files if entry.chunks is not None]
        paths = {path for _, path, _ in rows}
        sources = [entry for entry in self.manifest.files if entry.path in paths]
        self.read_ahead(sources)
        whole = {entry.path: self.read(entry) for entry in sources}
        tables: dict[str, bytes] = {}
        for entry, path, offset in rows:
            table = tables[entry.path] = table_at(whole.get(path, b""), offset, entry.size)
            if len(table) != table_bytes(entry.size) or file_digest(table) != entry.digest:
                raise CorruptCheckpointError(
                    f"{path} does not hold the digests of {entry.path}: the checkpoint is damaged", file=path
                )
        return tables


def check_there(storage: Storage) -> None:
    """Check that a checkpoint was not deleted while it was read: its manifest goes first.

    Raises:
        CheckpointNotFoundError: it was.
    """
    if not storage.exists(MANIFEST_NAME):
        raise CheckpointNotFoundError(
            f"{storage.uri} was deleted while it was read, as retention does: load the newest checkpoint of the run, "
            "or pin the one that is to stay"
        )


def _if_sound(storage: Storage, entry: FileEntry) -> bytes | None:
    """Return the content of a small file; None if it is damaged: whoever needs it reads it again and gets the error."""
    try:
        return _checked(storage, entry)
    except CorruptCheckpointError:
        return None


def _checked(storage: Storage, entry: FileEntry) -> bytes:
    if entry.size > MAX_JSON:
        raise CorruptCheckpointError(f"{entry.path} claims {entry.size} bytes: refused", file=entry.path)
    try:
        with asked_again(storage, partial(storage.open, entry.path)) as reader:
            # A file that was cut short is damage, not an error of the storage: `resume` tries the next checkpoint.
            data = bytearray(min(entry.size, reader.size))
            reader.read_into(0, memoryview(data))
    except StorageNotFoundError as error:
        check_there(storage)
        raise CorruptCheckpointError(
            f"{entry.path} (written by rank {entry.writer}) is gone: this checkpoint is damaged; use another one, or a "
            "copy of this file",
            file=entry.path,
        ) from error
    if len(data) != entry.size or bytes_digest(memoryview(data)) != entry.digest:
        raise CorruptCheckpointError(
            f"{entry.path}: its bytes are not what was written (digest differs): this checkpoint is damaged",
            file=entry.path,
        )
    return bytes(data)


def unite(
    indexes: Sequence[Index | IndexGroup], *, where: str, files: FileNumbers, is_complete: bool = True
) -> TensorList:
    """Merge the indexes of all writers, or of the writers that have been read so far.

    Args:
        indexes: of `ContentsReader.indexes`.
        where: the checkpoint, for messages.
        files: numbers of the files of groups.
        is_complete: these are all indexes of the checkpoint.

    Raises:
        CorruptCheckpointError: an index is missing, or two of them contradict each other.
    """
    if is_complete and len(indexes) == 1 and isinstance(only := indexes[0], Index) and only.division is None:
        return TensorList(only.tensors, only.aliases)
    singles = sorted([index for index in indexes if isinstance(index, Index)], key=attrgetter("writer"))
    groups = [index for index in indexes if not isinstance(index, Index)]
    if is_complete:
        divisions = {index.writer: index.division for index in singles}
        divisions.update((writer, group.first.division) for group in groups for writer in group.writers)
        if problem := disagreement(divisions):
            raise CorruptCheckpointError(f"{where}: {problem}: this checkpoint is damaged; use another one")
    entries: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    if any(index.division is not None and index.division.alike is not None for index in singles):
        singles = _apart(singles, where)
    firsts = [*singles, *[group.first for group in groups]]
    blocks: dict[str, list[Any]] = {}  # pieces of tensors that several ranks have boxes of

    def add(index: Index, name: str, entry: TensorEntry, block: Any) -> None:
        before = entries.get(name)
        if before is None and name not in aliases:
            entries[name] = entry
            if block is not entry.pieces:
                blocks[name] = [block]
            return
        parts = blocks.get(name)
        if parts is None and before is not None and in_boxes(before):
            parts = blocks[name] = [before.pieces]
        if before is None or parts is None or before[1:3] != entry[1:3] or not in_boxes(entry):
            raise _twice(where, name, index, firsts)
        parts.append(block)

    def tie(index: Index) -> None:
        for name, original in index.aliases.items():
            # Boxes of tied tensors are tied on each rank.
            if name in entries or aliases.setdefault(name, original) != original:
                raise _twice(where, name, index, firsts)

    for index in singles:
        for name, entry in index.tensors.items():
            add(index, name, entry, entry.pieces)
        tie(index)
    for group in groups:
        for entry, block in group.blocks():
            add(group.first, entry.name, entry, block)
        tie(group.first)
    tables = [name for name, parts in blocks.items() if not all(isinstance(part, tuple) for part in parts)]
    if tables:
        from .index_group import PieceTable

        table = PieceTable(files)
        for name in tables:
            pieces = table.pieces(blocks.pop(name), len(entries[name].shape))
            entries[name] = entries[name]._replace(pieces=pieces)
    for name, parts in blocks.items():
        entries[name] = entries[name]._replace(pieces=tuple(chain.from_iterable(parts)))
    return TensorList(entries, aliases)


def _apart(indexes: Sequence[Index], where: str) -> list[Index]:
    """Keep the first of several entries that ranks with different tensors have stored under one name.

    Each such rank stored its entry because it could not know of the others; the save compared them.
    """
    whole: dict[str, tuple[int, TensorEntry]] = {}
    boxes: dict[tuple[str, Any], int] = {}
    ties: dict[str, int] = {}
    left = []
    for index in indexes:
        for name, entry in index.tensors.items():
            if not in_boxes(entry):
                whole.setdefault(name, (index.writer, entry))
    stored = {name for index in indexes for name in index.tensors}
    for index in indexes:
        tensors = {}
        for name, entry in index.tensors.items():
            first = whole.get(name)
            if first is not None and first[1][1:3] != entry[1:3]:
                raise _twice(where, name, index, indexes)
            if first is None:
                writer = index.writer
                mine = tuple(piece for piece in entry.pieces if boxes.setdefault((name, piece[3:]), writer) == writer)
                if mine or not entry.pieces:
                    tensors[name] = entry._replace(pieces=mine)
            elif first[0] == index.writer:
                tensors[name] = entry
        tied = {
            name: original
            for name, original in index.aliases.items()
            if name not in stored and ties.setdefault(name, index.writer) == index.writer
        }
        left.append(replace(index, tensors=tensors, aliases=tied))
    return left


def _twice(where: str, name: str, second: Index, indexes: Sequence[Index]) -> CorruptCheckpointError:
    first = next(index.writer for index in indexes if name in index.tensors or name in index.aliases)
    return CorruptCheckpointError(
        f"{where}: both rank {first} and rank {second.writer} have stored {name!r}: this checkpoint is damaged; use "
        "another one",
        tensor=name,
    )


def in_boxes(entry: TensorEntry) -> bool:
    """Tell whether all pieces of a tensor are boxes; true for a tensor without pieces."""
    pieces = entry[3]
    # `box_start` by its number: for a million pieces the name takes noticeably longer. A table has boxes only.
    return not isinstance(pieces, tuple) or None not in [piece[3] for piece in pieces]


_MAPPINGS = ("odict", "dict", "ddict")


def merged(trees: Iterable[Any]) -> Any:
    """Unite the structures of ranks that hold different things: what a single rank has stands beside the rest.

    Works on the typed JSON of state files (docs/format.md), before it is decoded. Mappings are united by key; where
    two ranks have plain data under one key, that of the first counts, as plain data of rank 0 does. Nothing is changed.
    """
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


def tensor_rows(node: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Write out a "tensors" node: a node for each of its tensors."""
    trained = frozenset(node.get("rg", ()))
    return {key: {"$": "tensor", "n": node["at"] + key, **({"rg": 1} if key in trained else {})} for key in node["k"]}


def _rows(node: dict[str, Any]) -> dict[str, tuple[Any, Any]] | None:
    """Return the entries of a mapping by the text of their keys; None for anything else."""
    tag = _tag(node)
    if tag is None:
        return {name: (name, item) for name, item in node.items()}
    if tag == "tensors":
        return {key: (key, row) for key, row in tensor_rows(node).items()}
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
        good = good and ("spread" not in node or _are_layouts(node["spread"]))
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
    elif kind == "tensor":
        outer = state.get(OUTER) if isinstance(state, Mapping) else None
        sizes = (outer.get("size"), outer.get("stride")) if isinstance(outer, Mapping) else (None,)
        if not all(map(_are_sizes, sizes)) or not all(type(outer.get(key)) is str for key in ("class", "text")):  # type: ignore[union-attr]
            raise ValueError("the state of a tensor that wraps others says not what it is")
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
