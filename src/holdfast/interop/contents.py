"""The contents of a checkpoint, from its small files alone, as flat rows that can be compared. Imports no torch.

A path is that of ``holdfast.load(only=...)``: the keys on the way, joined by "/". Values of single ranks come after it,
as ``rank 0/...``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.summary import entries_of, short
from holdfast.errors import ConfigError, CorruptCheckpointError, StorageNotFoundError
from holdfast.format.digest import CHUNK, DIGEST_BYTES, bytes_digest, table_at
from holdfast.format.index import Index, Piece, TensorEntry
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.format.merge import merged
from holdfast.format.names import save_id_of
from holdfast.format.schema import check_whole
from holdfast.format.strict_json import loads
from holdfast.storage.base import Storage

__all__ = ["CheckpointContents", "Leaf", "read_contents"]

_MAX_JSON = 2 << 30
_SEQUENCES = frozenset({"tuple", "set", "frozenset", "deque", "namedtuple"})
_MAPPINGS = frozenset({"dict", "odict", "ddict", "counter"})
_Box = tuple[tuple[int, ...] | None, tuple[int, ...] | None]


class Leaf(NamedTuple):
    """One value of a state.

    Attributes:
        kind: "tensor", "array", "plain", "mapping", "sequence", "object AdamW", "generators", "a value per rank".
        value: name of the tensor, or the typed JSON of plain data.
        dtype: NumPy's spelling of the dtype of an array.
    """

    kind: str
    value: Any = None
    dtype: str | None = None


@dataclass(slots=True)
class _Tensor:
    entry: TensorEntry
    pieces: dict[_Box, Piece] = field(default_factory=dict)


@dataclass(slots=True)
class CheckpointContents:
    """A checkpoint taken apart.

    Attributes:
        checkpoint: the checkpoint.
        manifest: its manifest.
        leaves: all values of the state, by path.
        aliases: name of a tied tensor -> name of the tensor it is stored as.
        tree: the structure as typed JSON; None if the checkpoint has none.
    """

    checkpoint: Checkpoint
    manifest: Manifest
    leaves: dict[str, Leaf]
    aliases: dict[str, str]
    tree: Any
    _tensors: dict[str, _Tensor]
    _tables: dict[str, bytes]

    def original(self, name: str) -> str:
        """Return the name under which the bytes of a tensor are stored."""
        return self.aliases.get(name, name)

    def tensor(self, name: str) -> TensorEntry:
        """Return dtype and shape of a tensor.

        Raises:
            CorruptCheckpointError: the structure names a tensor that no index lists.
        """
        return self._stored(name).entry

    def nbytes(self, name: str) -> int:
        """Return the stored bytes of a tensor."""
        return sum(piece.nbytes for piece in self._stored(name).pieces.values())

    def is_same(self, name: str, other: CheckpointContents, its_name: str) -> bool:
        """Tell whether digests alone prove that two tensors have the same bytes; False if they have to be read."""
        mine, its = self._stored(name).pieces, other._stored(its_name).pieces
        if mine.keys() != its.keys():
            return False
        return all(_is_same(piece, self._tables, its[box], other._tables) for box, piece in mine.items())

    def _stored(self, name: str) -> _Tensor:
        tensor = self._tensors.get(self.original(name))
        if tensor is None:
            raise CorruptCheckpointError(
                f"{self.checkpoint.uri}: the structure names a tensor {name!r} that no index lists: the checkpoint is "
                "damaged",
                tensor=name,
            )
        return tensor


def read_contents(checkpoint: Checkpoint) -> CheckpointContents:
    """Read manifest, structure, indexes and digests of a checkpoint, each checked against its digest.

    Raises:
        ConfigError: the checkpoint has no manifest of Holdfast.
        CorruptCheckpointError: a file of these is damaged.
    """
    manifest = checkpoint.manifest
    if manifest is None:
        raise ConfigError(
            f"{checkpoint.uri} was not written by Holdfast (it has no manifest): `holdfast import` makes a checkpoint "
            "from files of torch, safetensors, DCP, Lightning or DeepSpeed"
        )
    files = _Files(checkpoint.storage.child(checkpoint.directory))
    tensors: dict[str, _Tensor] = {}
    aliases: dict[str, str] = {}
    # If several ranks stored an entry under the same name, the entry of the first counts.
    for entry in sorted(manifest.with_role("index"), key=lambda entry: entry.writer):
        index = Index.from_bytes(files.read(entry), where=entry.path, save_id=save_id_of(entry.path) or "")
        for name, tensor in index.tensors.items():
            known = tensors.setdefault(name, _Tensor(tensor))
            for piece in tensor.pieces:
                known.pieces.setdefault((piece.box_start, piece.box_shape), piece)
        for name, original in index.aliases.items():
            aliases.setdefault(name, original)
    trees = [files.tree(entry) for entry in sorted(manifest.with_role("state"), key=lambda entry: entry.writer)]
    tree = merged(trees) if trees else None
    leaves = dict(_leaves(tree, "")) if trees else {}
    for entry in sorted(manifest.with_role("rank"), key=lambda entry: entry.writer):
        leaves.update(_leaves(files.tree(entry), f"rank {entry.writer}"))
    return CheckpointContents(checkpoint, manifest, leaves, aliases, tree, tensors, _tables(files, manifest))


class _Files:
    """Reads small files of a checkpoint."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def read(self, entry: FileEntry) -> bytes:
        """Return the content of a file, checked against its digest."""
        if entry.size > _MAX_JSON:
            raise CorruptCheckpointError(f"{entry.path} claims {entry.size} bytes: refused", file=entry.path)
        try:
            data = self._storage.read(entry.path)
        except StorageNotFoundError as error:
            raise CorruptCheckpointError(
                f"{entry.path} is gone: this checkpoint is damaged; use another one", file=entry.path
            ) from error
        if len(data) != entry.size or bytes_digest(data) != entry.digest:
            raise CorruptCheckpointError(
                f"{entry.path}: its bytes are not what was written (digest differs): this checkpoint is damaged",
                file=entry.path,
            )
        return data

    def tree(self, entry: FileEntry) -> Any:
        """Return the typed JSON of a structure."""
        tree = loads(self.read(entry), max_bytes=_MAX_JSON, where=entry.path)
        check_whole(tree, where=entry.path)
        return tree


def _tables(files: _Files, manifest: Manifest) -> dict[str, bytes]:
    whole = {entry.path: files.read(entry) for entry in manifest.with_role("digests")}
    tables = {}
    for entry in manifest.files:
        if entry.chunks is not None:
            path, offset = entry.chunks
            tables[entry.path] = table_at(whole[path], offset, entry.size)
    return tables


def _is_same(mine: Piece, tables: Mapping[str, bytes], its: Piece, its_tables: Mapping[str, bytes]) -> bool:
    """Compare the digests of the chunks of two pieces, which must begin at the same place within a chunk."""
    if mine.nbytes != its.nbytes or mine.offset % CHUNK != its.offset % CHUNK:
        return False
    if not mine.nbytes:
        return True
    digests = []
    for piece, known in ((mine, tables), (its, its_tables)):
        first, last = piece.offset // CHUNK, (piece.offset + piece.nbytes - 1) // CHUNK
        digests.append(known.get(piece.file, b"")[DIGEST_BYTES * first : DIGEST_BYTES * (last + 1)])
    return bool(digests[0]) and digests[0] == digests[1]


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Leaf]]:
    tag = node.get("$") if isinstance(node, dict) else None
    if tag == "tensors":
        yield from ((_join(path, key), Leaf("tensor", node["at"] + key)) for key in node["k"])
        return
    if tag == "tensor":
        is_array = node.get("k") == "array"
        yield path, Leaf("array" if is_array else "tensor", node["n"], node.get("dt"))
        return
    if tag in ("rng", "per_rank"):
        yield path, Leaf("generators" if tag == "rng" else "a value per rank")
        return
    if tag == "object":
        # A module has no leaf of its own, so that it equals its state dict.
        if node["kind"] != "module":
            yield path, Leaf(f"object {node['type']}")
        yield from _leaves(node["state"], path)
        return
    if isinstance(node, dict) and (tag is None or tag in _MAPPINGS):
        kind = "mapping"
    elif isinstance(node, list) or tag in _SEQUENCES:
        kind = "sequence"
    else:
        yield path, Leaf("plain", node)
        return
    children = list(entries_of(node))
    if not children or (kind == "sequence" and not any(isinstance(child, (dict, list)) for _, child in children)):
        yield path, Leaf("plain", node)  # a list of numbers and texts is one value
        return
    if kind == "sequence":
        yield path, Leaf(kind)
    for key, child in children:
        yield from _leaves(child, _join(path, key if isinstance(key, (str, int)) else short(key)))


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)
