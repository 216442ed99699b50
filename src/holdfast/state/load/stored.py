"""A committed checkpoint opened for reading: its index, its decoded tree, its digests."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from holdfast._log import get_logger
from holdfast.errors import CorruptCheckpointError, IncompleteCheckpointError
from holdfast.format.codec import decode, loads
from holdfast.format.commit import read_manifest
from holdfast.format.contents import MAX_JSON, ContentsReader, check_node, check_object, check_parts, in_boxes, unite
from holdfast.format.digest import Digests
from holdfast.format.index import Index, TensorEntry
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.storage.base import Storage
from holdfast.storage.together import asked_again

from ..tree import arrays
from ..tree.flatten import OWN
from ..tree.values import ObjectNode, PerRankNode, TensorRef

if TYPE_CHECKING:
    from holdfast.format.index_group import IndexGroup

__all__ = ["Stored", "decode_tree", "open_stored"]

_LOG = get_logger("state")
_NOTHING = object()
_DIGITS = 19  # of an index into a list, and fewer
_FEW = 2  # up to so many indexes, all are read when a checkpoint is opened


@dataclass(slots=True)
class Stored:
    """An opened checkpoint.

    Attributes:
        storage: rooted at the checkpoint.
        manifest: its manifest.
        entries: every tensor by name, of all writers.
        aliases: name -> name of the tensor it is tied to.
        tree: decoded structure with `TensorRef`, `ObjectNode` and `PerRankNode` in it.
        per_rank: key -> decoded value of the rank that loads, or of rank 0 if the checkpoint has no such rank.
        borrowed: ``per_rank`` is that of rank 0, because this rank stored none.
        digests: tables of the files with tensors.
        refs: all tensors of the tree, by name.
        generators: key -> decoded generator of ``tree``, for those of which each rank stored its own: that of this
            rank, or of rank 0.
        resized: how many ranks load; None if as many have saved.
        parts: the files of the ranks that stored values of their own.
        own: names of the tensors of ``per_rank``, if several ranks wrote this checkpoint: they differ on each rank, so
            no tie between them and a common tensor is stored.
    """

    storage: Storage
    manifest: Manifest
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    tree: Any = None
    per_rank: dict[str, Any] | None = None
    digests: Digests = field(default_factory=lambda: Digests({}))
    refs: dict[str, TensorRef] = field(default_factory=dict)
    borrowed: bool = False
    own: frozenset[str] = frozenset()
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    resized: int | None = None
    parts: dict[int, FileEntry] = field(default_factory=dict)
    _warned: bool = False
    _indexes: list[Index | IndexGroup] = field(default_factory=list)
    _unread: list[FileEntry] = field(default_factory=list)  # indexes of other ranks, which may not be needed
    _lazy_digests: bool = False
    _keys: list[tuple[str, bool, str]] = field(default_factory=list)  # of values per rank, in the structure
    _small: ContentsReader = field(init=False)

    def __post_init__(self) -> None:
        self._small = ContentsReader(self.storage, self.manifest)

    def entry(self, name: str) -> TensorEntry:
        """Return where a tensor is stored; for a tied tensor, where the tensor it is tied to is stored.

        Raises:
            CorruptCheckpointError: no index lists it.
        """
        entry = self.entries.get(self.aliases.get(name, name))
        if entry is None and self.complete():
            entry = self.entries.get(self.aliases.get(name, name))
        if entry is None:
            raise CorruptCheckpointError(
                f"the structure names a tensor {name!r} that no index lists: the checkpoint is damaged", tensor=name
            )
        return entry

    def in_boxes(self, entry: TensorEntry) -> bool:
        """Tell whether a tensor was spread over ranks when it was saved."""
        return bool(entry.pieces) and in_boxes(entry)

    @property
    def is_complete(self) -> bool:
        """Whether the indexes of all ranks have been read; else ``entries`` may lack tensors, and pieces of them."""
        return not self._unread

    def complete(self) -> bool:
        """Read the indexes of all ranks; False if that has been done already.

        Raises:
            CorruptCheckpointError: an index is damaged, or two of them contradict each other.
        """
        if not self._unread:
            return False
        indexes = [*self._indexes, *self._small.indexes(self._unread)]
        self._unread, self._indexes = [], []
        self._unite(indexes)
        return True

    def digests_of(self, files: Collection[str]) -> Digests:
        """Return the digests of some files.

        Raises:
            CorruptCheckpointError: a table of digests is damaged.
        """
        if not self._lazy_digests:
            return self.digests
        tables = self._small.tables([entry for entry in self.manifest.files if entry.path in files])
        self._small.drop_ahead()
        return Digests(tables)

    def part(self, rank: int) -> dict[str, Any] | None:
        """Read the values that a rank stored for itself; None if no such rank stored any."""
        entry = self.parts.get(rank)
        return None if entry is None else _decode_part(self._small.read(entry), entry.path, {}, self._keys)

    def others_values(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield path, value of rank 0 and value of another rank for what the other ranks stored of their own (`OWN`).

        Looked at are rank 1 and the last rank, as for generators (`match_plan`).
        """
        for rank in sorted({1, self.manifest.world_size - 1} & self.parts.keys()):
            for where, value in _own_values(self.part(rank), self._keys).items():
                container, key = _find(self.tree, where)
                path = where.replace("~1", "/").replace("~0", "~")
                yield path, None if container is None else _at(container, key), value

    def refs_in(self, value: Any) -> Iterator[TensorRef]:
        """Yield the tensors of a stored value, and of the values of this rank (`PerRank`) that it refers to."""
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, ObjectNode):
            yield from self.refs_in(value.state)
        elif isinstance(value, PerRankNode):
            self.say_borrowed()
            yield from self.refs_in((self.per_rank or {}).get(value.key))
        elif isinstance(value, (dict, list, tuple, set, frozenset, deque, Mapping)):
            for item in value.values() if isinstance(value, Mapping) else value:
                if isinstance(item, TensorRef):
                    yield item
                elif not isinstance(item, (int, float, str)):
                    yield from self.refs_in(item)

    def _unite(self, indexes: list[Index | IndexGroup]) -> None:
        """Take the tensors of all indexes, or of those that have been read so far, and check that none is missing."""
        if self._unread:
            self._indexes = indexes
        self.entries, self.aliases = unite(
            indexes, where=self.storage.uri, files=self._small.files, is_complete=self.is_complete
        )
        if self.is_complete and sum(entry.role == "index" for entry in self.manifest.files) > 1:
            lost = self.refs.keys() - self.entries.keys() - self.aliases.keys()
            if lost:
                self.entry(min(lost))

    def say_borrowed(self) -> None:
        """Log, once, that values kept per rank come from another rank."""
        if self.borrowed and not self._warned:
            self._warned = True
            _LOG.warning(
                "%s was saved by fewer ranks and has no values of this rank: it is given the PerRank values of rank 0",
                self.storage.uri,
            )


def open_stored(storage: Storage, *, rank: int = 0, world_size: int | None = None, own_first: bool = False) -> Stored:
    """Open the checkpoint at the root of ``storage``: reads manifest, indexes and structure, checks their digests.

    Args:
        storage: rooted at the checkpoint.
        rank: the rank that loads; its own values are read.
        world_size: how many ranks load; None: as many as have saved, if this rank is one of these.
        own_first: of the indexes of many ranks read only those of this rank and of rank 0: a rank needs no other in the
            layout it has saved in. `Stored.complete` reads the others when a tensor is missing, `Stored.digests_of`
            reads the digests.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is no committed checkpoint.
        CorruptCheckpointError: a small file differs from its digest, or a rank's part is missing.
    """
    manifest = asked_again(storage, lambda: read_manifest(storage, ""), IncompleteCheckpointError)
    stored = Stored(storage, manifest, _lazy_digests=own_first)
    now = world_size if world_size is not None else max(manifest.world_size, rank + 1)
    stored.resized = now if now != manifest.world_size else None
    listed = [entry for entry in manifest.files if entry.role == "index"]
    if own_first and stored.resized is None and len(listed) > _FEW:
        stored._unread = [entry for entry in listed if entry.writer not in (0, rank)]
    unread = {entry.path for entry in stored._unread}
    ranks = {entry.writer: entry for entry in manifest.files if entry.role == "rank"}
    chosen = ranks.get(rank) or ranks.get(0)
    tables_of = [entry for entry in manifest.files if entry.role == "digests"]
    ahead = [entry for entry in manifest.files if entry.role in ("index", "state") and entry.path not in unread]
    ahead += [] if chosen is None else [chosen]
    # With many ranks it is not known yet whose digests are needed.
    stored._small.read_ahead([*ahead, *(tables_of if not stored._unread else ())])
    if not own_first:
        stored.digests = Digests(stored._small.tables(manifest.files))
    indexes = stored._small.indexes([entry for entry in listed if entry.path not in unread])
    structure = stored._small.structure()
    if structure is None:
        raise CorruptCheckpointError("the manifest lists no state file: this checkpoint holds no state to load")
    path, tree = structure
    stored.tree = _decoded(tree, path, stored.refs, stored._keys, stored.generators)
    stored.parts = ranks
    if chosen is not None:
        refs: dict[str, TensorRef] = {}
        stored.per_rank = _decode_part(stored._small.read(chosen), chosen.path, refs, stored._keys)
        stored.refs.update(refs)
        stored.borrowed = chosen.writer != rank
        for key, generator in stored.generators.items():
            own = stored.per_rank.get(key)
            if isinstance(own, torch.Generator) and own.device.type == generator.device.type:
                generator.set_state(own.get_state())
        stored.own = frozenset(refs) if len(listed) > 1 else frozenset()
        own = _own_values(stored.per_rank, stored._keys)
        if own and stored.resized is None and not stored.borrowed:
            for where, value in own.items():
                container, key = _find(stored.tree, where)
                if container is not None:
                    container[key] = value
    stored._unite(indexes)
    return stored


def decode_tree(data: bytes, where: str, refs: dict[str, TensorRef]) -> Any:
    """Return the structure that a state file describes; its tensors go to ``refs`` by name.

    Args:
        data: content of the file.
        where: name of the file, for messages.
        refs: receives the tensors.

    Raises:
        CorruptCheckpointError: the file breaks `holdfast.format.contents`; a structure that is returned keeps it.
    """
    return _decoded(loads(data, max_bytes=MAX_JSON, where=where), where, refs)


def _decoded(
    tree: Any,
    where: str,
    refs: dict[str, TensorRef],
    keys: list[tuple[str, bool, str]] | None = None,
    generators: dict[str, torch.Generator] | None = None,
) -> Any:
    if type(tree) is not dict:
        raise CorruptCheckpointError(f"{where} holds a {type(tree).__name__}, no structure: it is damaged", file=where)
    return decode(tree, partial(_node, where, refs, keys, generators), where=where)


# No function within `_decoded`: one that refers to itself keeps the places of all tensors until a collection.
def _node(
    where: str,
    refs: dict[str, TensorRef],
    keys: list[tuple[str, bool, str]] | None,
    generators: dict[str, torch.Generator] | None,
    tag: str,
    node: dict[str, Any],
) -> Any:
    check_node(tag, node)
    if tag == "tensors":
        at = node["at"]
        items = {}
        for key in node["k"]:
            name = at + key
            items[key] = refs[name] = TensorRef(name)
        for key in items.keys() & node.get("rg", ()):
            items[key].extra = {"rg": 1}
        return OrderedDict(items) if node["o"] else items
    if tag == "tensor":
        extra = {key: value for key, value in node.items() if key not in ("$", "n", "k")}
        ref = refs.setdefault(node["n"], TensorRef(node["n"], node.get("k", "tensor")))
        ref.extra = {**ref.extra, **extra}
        return ref
    if tag == "object":
        state = decode(node["state"], partial(_node, where, refs, keys, generators), where=where)
        check_object(node["kind"], state)
        if node["kind"] == "tensor":
            for ref in state.values():
                if isinstance(ref, TensorRef):
                    ref.kind = "part"  # what it is a part of is not made of another dtype
        return ObjectNode(node["type"], node["kind"], state, node.get("spread", {}))
    if tag in ("per_rank", "rng"):
        if keys is not None:
            keys.append((node["key"], tag == "rng", ""))
        return PerRankNode(node["key"], rng=tag == "rng")
    value = arrays.decode_torch_value(node)
    if generators is not None and isinstance(value, torch.Generator) and "own" in node:
        generators[node["own"]] = value
    return value


def _decode_part(data: bytes, where: str, refs: dict[str, TensorRef], keys: Sequence[tuple[str, bool, str]]) -> Any:
    """Return the values a rank stored for itself; ``keys`` are the references to them in the structure."""
    part = decode_tree(data, where, refs)
    try:
        check_parts(part, [*keys, *_inner_keys(part)])
    except ValueError as error:
        raise CorruptCheckpointError(f"{where}: {error}: this checkpoint is damaged", file=where) from error
    return part


def _own_values(part: dict[str, Any] | None, keys: Sequence[tuple[str, bool, str]]) -> Mapping[str, Any]:
    """Take what a rank stored of its own (`OWN`) out of its part; an early version may have a value of that name."""
    own = None if part is None else part.get(OWN)
    if part is None or not isinstance(own, Mapping) or any(key == OWN for key, _, _ in keys):
        return {}
    del part[OWN]
    return own if all(type(where) is str for where in own) else {}


def _find(tree: Any, where: str) -> tuple[Any, Any]:
    """Return the container that has, or may get, what ``where`` (a `pointer`) leads to, and its key; (None, None)."""
    *above, last = (step.replace("~1", "/").replace("~0", "~") for step in where.split("/"))
    for step in above:
        tree = _at(tree, _key_in(tree, step))
    key = _key_in(tree, last)
    return (None, None) if key is None else (tree, key)


def _key_in(container: Any, step: str) -> str | int | None:
    if isinstance(container, dict):
        return step
    fits = isinstance(container, list) and step.isdecimal() and len(step) < _DIGITS and int(step) < len(container)
    return int(step) if fits else None


def _at(container: Any, key: Any) -> Any:
    return None if key is None else container.get(key, _NOTHING) if isinstance(container, dict) else container[key]


def _inner_keys(parts: Any) -> Iterator[tuple[str, bool, str]]:
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        for node in _references(part):
            yield node.key, node.rng, str(name)


def _references(value: Any) -> Iterator[PerRankNode]:
    if isinstance(value, PerRankNode):
        yield value
    elif isinstance(value, ObjectNode):
        yield from _references(value.state)
    elif isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        for item in value.values() if isinstance(value, dict) else value:
            if not isinstance(item, (int, float, str)):
                yield from _references(item)
