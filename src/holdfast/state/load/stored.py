"""A committed checkpoint opened for reading: its index, its decoded tree, its digests."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import CorruptCheckpointError, StorageNotFoundError
from holdfast.format.codec import decode, loads
from holdfast.format.commit import read_manifest
from holdfast.format.digest import Digests, bytes_digest, file_digest, table_at, table_bytes
from holdfast.format.division import disagreement
from holdfast.format.index import Index, TensorEntry
from holdfast.format.index_group import IndexFile, IndexGroup, read_indexes
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.format.merge import merged
from holdfast.format.pieces import FileNumbers, Pieces, PieceTable
from holdfast.format.schema import check_node, check_object, check_parts
from holdfast.storage.base import Storage
from holdfast.storage.together import together

from ..tree import arrays
from ..tree.values import ObjectNode, PerRankNode, TensorRef

__all__ = ["Stored", "decode_tree", "open_stored", "unite"]

_LOG = get_logger("state")
_FEW = 2  # up to so many indexes, all are read when a checkpoint is opened
_MAX_JSON = 2 << 30  # bound for index and state files before they are read
_AHEAD_BYTES = 32 << 20  # at most so many bytes of such files are read side by side


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
        resized: how many ranks load; None if as many have saved.
        parts: the files of the ranks that stored values of their own.
        own: names of the tensors of ``per_rank``, if several ranks wrote this checkpoint: they differ on each rank, so
            no tie between them and a common tensor is stored.
        files: numbers of the files that tables of pieces name.
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
    resized: int | None = None
    parts: dict[int, FileEntry] = field(default_factory=dict)
    files: FileNumbers = field(default_factory=FileNumbers)
    _warned: bool = False
    _indexes: list[Index | IndexGroup] = field(default_factory=list)
    _unread: list[FileEntry] = field(default_factory=list)  # indexes of other ranks, which may not be needed
    _lazy_digests: bool = False
    _keys: list[tuple[str, bool, str]] = field(default_factory=list)  # of values per rank, in the structure
    _wanted: list[FileEntry] = field(default_factory=list)  # small files that will be needed
    _ahead: dict[str, bytes] = field(default_factory=dict)  # path -> content of those that have been read

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
        return bool(entry.pieces) and _in_boxes(entry)

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
        sizes = {entry.path: entry.size for entry in self.manifest.files}
        self._read_ahead(self._unread)
        indexes = [*self._indexes, *self._read_indexes(self._unread, sizes)]
        self._unread, self._indexes, self.entries, self.aliases = [], [], {}, {}
        unite(self, indexes)
        _check_lost(self)
        return True

    def digests_of(self, files: Collection[str]) -> Digests:
        """Return the digests of some files.

        Raises:
            CorruptCheckpointError: a table of digests is damaged.
        """
        if not self._lazy_digests:
            return self.digests
        wanted = [entry for entry in self.manifest.files if entry.path in files and entry.chunks is not None]
        paths = {entry.chunks[0] for entry in wanted if entry.chunks is not None}
        tables = self._checked_all([entry for entry in self.manifest.files if entry.path in paths])
        self._wanted, self._ahead = [], {}
        return Digests(dict(_tables(wanted, tables)))

    def part(self, rank: int) -> dict[str, Any] | None:
        """Read the values that a rank stored for itself; None if no such rank stored any."""
        entry = self.parts.get(rank)
        return None if entry is None else _decode_part(self._checked(entry), entry.path, {}, self._keys)

    def _read_ahead(self, entries: Iterable[FileEntry]) -> None:
        """Note small files to read side by side, where that saves waiting; `_checked` takes them about in order."""
        if self.storage.traits.num_parallel > 1:
            known = {*self._ahead, *(entry.path for entry in self._wanted)}
            self._wanted += [entry for entry in entries if entry.path not in known]

    def _fetch(self) -> None:
        size, batch = 0, list[FileEntry]()
        while self._wanted and (not batch or size + self._wanted[0].size <= _AHEAD_BYTES):
            batch.append(self._wanted.pop(0))
            size += batch[-1].size
        contents = together(self.storage, [partial(_if_sound, self.storage, entry) for entry in batch])
        self._ahead.update((entry.path, data) for entry, data in zip(batch, contents, strict=True) if data is not None)

    def _checked(self, entry: FileEntry) -> bytes:
        """Return the content of a small file, checked against its digest."""
        while entry.path not in self._ahead and entry in self._wanted:
            self._fetch()
        data = self._ahead.pop(entry.path, None)
        return _checked(self.storage, entry) if data is None else data

    def _checked_all(self, entries: Sequence[FileEntry]) -> dict[str, bytes]:
        self._read_ahead(entries)
        return {entry.path: self._checked(entry) for entry in entries}

    def _read_indexes(self, entries: Sequence[FileEntry], sizes: Mapping[str, int]) -> list[Index | IndexGroup]:
        texts = (IndexFile(entry.path, _save_id(entry.path), self._checked(entry)) for entry in entries)
        return read_indexes(texts, self.files, sizes=sizes)

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
    manifest = read_manifest(storage, "")
    stored = Stored(storage, manifest, _lazy_digests=own_first)
    sizes = {entry.path: entry.size for entry in manifest.files}
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
    stored._read_ahead([*ahead, *(tables_of if not stored._unread else ())])
    if not own_first:
        stored.digests = Digests(dict(_tables(manifest.files, stored._checked_all(tables_of))))
    indexes = stored._read_indexes([entry for entry in listed if entry.path not in unread], sizes)
    trees: list[tuple[int, str, Any]] = []
    for entry in manifest.files:
        if entry.role == "state":
            tree = loads(stored._checked(entry), max_bytes=_MAX_JSON, where=entry.path)
            trees.append((entry.writer, entry.path, tree))
    if not trees:
        raise CorruptCheckpointError("the manifest lists no state file: this checkpoint holds no state to load")
    trees.sort(key=itemgetter(0))
    stored.tree = _decoded(merged(tree for _, _, tree in trees), trees[0][1], stored.refs, stored._keys)
    unite(stored, indexes)
    stored.parts = ranks
    if chosen is not None:
        refs: dict[str, TensorRef] = {}
        stored.per_rank = _decode_part(stored._checked(chosen), chosen.path, refs, stored._keys)
        stored.refs.update(refs)
        stored.borrowed = chosen.writer != rank
        stored.own = frozenset(refs) if len(listed) > 1 else frozenset()
    _check_lost(stored)
    return stored


def _check_lost(stored: Stored) -> None:
    """Check that several indexes together list all tensors of the structure."""
    if stored.is_complete and sum(entry.role == "index" for entry in stored.manifest.files) > 1:
        lost = stored.refs.keys() - stored.entries.keys() - stored.aliases.keys()
        if lost:
            stored.entry(min(lost))


def unite(stored: Stored, indexes: Sequence[Index | IndexGroup]) -> None:
    """Merge the indexes of all writers, or of the writers that have been read so far, into ``stored``.

    Raises:
        CorruptCheckpointError: an index is missing, or two of them contradict each other.
    """
    groups = [index for index in indexes if isinstance(index, IndexGroup)]
    singles = sorted([index for index in indexes if isinstance(index, Index)], key=attrgetter("writer"))
    if len(singles) == 1 and not groups and singles[0].division is None and stored.is_complete:
        stored.entries, stored.aliases = singles[0].tensors, singles[0].aliases
        return
    where = stored.storage.uri
    if not stored.is_complete:
        stored._indexes = list(indexes)
    else:
        divisions = {index.writer: index.division for index in singles}
        divisions.update((writer, group.first.division) for group in groups for writer in group.writers)
        if problem := disagreement(divisions):
            raise CorruptCheckpointError(f"{where}: {problem}: this checkpoint is damaged; use another one")
    entries, aliases = stored.entries, stored.aliases
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
        if parts is None and before is not None and _in_boxes(before):
            parts = blocks[name] = [before.pieces]
        if before is None or parts is None or before[1:3] != entry[1:3] or not _in_boxes(entry):
            raise _twice(where, name, index, firsts)
        parts.append(block)

    for index in singles:
        for name, entry in index.tensors.items():
            add(index, name, entry, entry.pieces)
        _tie(stored, index, firsts)
    for group in groups:
        for entry, block in group.blocks():
            add(group.first, entry.name, entry, block)
        _tie(stored, group.first, firsts)
    table = PieceTable(stored.files)
    for name, parts in blocks.items():
        plain = all(isinstance(part, tuple) for part in parts)
        pieces = tuple(chain.from_iterable(parts)) if plain else table.pieces(parts, len(entries[name].shape))
        entries[name] = entries[name]._replace(pieces=pieces)


def _tie(stored: Stored, index: Index, indexes: Sequence[Index]) -> None:
    for name, original in index.aliases.items():
        # Boxes of tied tensors are tied on each rank.
        if name in stored.entries or stored.aliases.setdefault(name, original) != original:
            raise _twice(stored.storage.uri, name, index, indexes)


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
            if not _in_boxes(entry):
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


def _in_boxes(entry: TensorEntry) -> bool:
    pieces = entry[3]
    # `box_start` by its number: for a million pieces the name takes noticeably longer.
    return isinstance(pieces, Pieces) or None not in [piece[3] for piece in pieces]


def _save_id(index_path: str) -> str:
    # index-00000-<save id>.json
    return index_path.removesuffix(".json").split("-", 2)[2]


def _if_sound(storage: Storage, entry: FileEntry) -> bytes | None:
    """Return the content of a small file; None if it is damaged: whoever needs it reads it again and gets the error."""
    try:
        return _checked(storage, entry)
    except CorruptCheckpointError:
        return None


def _checked(storage: Storage, entry: FileEntry) -> bytes:
    if entry.size > _MAX_JSON:
        raise CorruptCheckpointError(f"{entry.path} claims {entry.size} bytes: refused", file=entry.path)
    try:
        with storage.open(entry.path) as reader:
            # A file that was cut short is damage, not an error of the storage: `resume` tries the next checkpoint.
            data = bytearray(min(entry.size, reader.size))
            reader.read_into(0, memoryview(data))
    except StorageNotFoundError as error:
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


def _tables(files: Iterable[FileEntry], tables: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Cut the digest tables of the files out of the tables of their writers, and check them against the manifest."""
    for entry in files:
        if entry.chunks is None:
            continue
        path, offset = entry.chunks
        table = table_at(tables.get(path, b""), offset, entry.size)
        if len(table) != table_bytes(entry.size) or file_digest(table) != entry.digest:
            raise CorruptCheckpointError(
                f"{path} does not hold the digests of {entry.path}: the checkpoint is damaged", file=path
            )
        yield entry.path, table


def decode_tree(
    data: bytes, where: str, refs: dict[str, TensorRef], keys: list[tuple[str, bool, str]] | None = None
) -> Any:
    """Return the structure that a state file describes; its tensors go to ``refs`` by name.

    Args:
        data: content of the file.
        where: name of the file, for messages.
        refs: receives the tensors.
        keys: receives the references to values of single ranks, for `check_parts`.

    Raises:
        CorruptCheckpointError: the file breaks `holdfast.format.schema`; a structure that is returned keeps it.
    """
    return _decoded(loads(data, max_bytes=_MAX_JSON, where=where), where, refs, keys)


def _decoded(tree: Any, where: str, refs: dict[str, TensorRef], keys: list[tuple[str, bool, str]] | None = None) -> Any:
    def leaf(tag: str, node: dict[str, Any]) -> Any:
        check_node(tag, node)
        if tag == "tensors":
            at = node["at"]
            items = {key: TensorRef(at + key) for key in node["k"]}
            refs.update((ref.name, ref) for ref in items.values())
            return OrderedDict(items) if node["o"] else items
        if tag == "tensor":
            extra = {key: value for key, value in node.items() if key not in ("$", "n", "k")}
            ref = refs.setdefault(node["n"], TensorRef(node["n"], node.get("k", "tensor")))
            ref.extra = {**ref.extra, **extra}
            return ref
        if tag == "object":
            state = decode(node["state"], leaf, where=where)
            check_object(node["kind"], state)
            return ObjectNode(node["type"], node["kind"], state, node.get("spread", {}))
        if tag in ("per_rank", "rng"):
            if keys is not None:
                keys.append((node["key"], tag == "rng", ""))
            return PerRankNode(node["key"], rng=tag == "rng")
        return arrays.decode_torch_value(node)

    if type(tree) is not dict:
        raise CorruptCheckpointError(f"{where} holds a {type(tree).__name__}, no structure: it is damaged", file=where)
    return decode(tree, leaf, where=where)


def _decode_part(data: bytes, where: str, refs: dict[str, TensorRef], keys: Sequence[tuple[str, bool, str]]) -> Any:
    """Return the values a rank stored for itself; ``keys`` are the references to them in the structure."""
    part = decode_tree(data, where, refs)
    try:
        check_parts(part, [*keys, *_inner_keys(part)])
    except ValueError as error:
        raise CorruptCheckpointError(f"{where}: {error}: this checkpoint is damaged", file=where) from error
    return part


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
