"""The contents of a checkpoint, from its small files alone, as flat rows that can be compared. Imports no torch.

A path is that of ``holdfast.load(only=...)``: the keys on the way, joined by "/". Where that makes the paths of several
values alike, as the keys 1 and "1" do, those after the first get "~2", "~3" at their end. Values of single ranks come
after it, as ``rank 0/...``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.summary import entries_of, short, state_tree
from holdfast.errors import ConfigError, CorruptCheckpointError
from holdfast.format.contents import ContentsReader, TensorList
from holdfast.format.digest import CHUNK, DIGEST_BYTES
from holdfast.format.index import Piece, TensorEntry
from holdfast.format.manifest import Manifest
from holdfast.format.schema import check_whole

__all__ = ["CheckpointContents", "Leaf", "read_contents"]

_SEQUENCES = frozenset({"tuple", "set", "frozenset", "deque", "namedtuple"})
_MAPPINGS = frozenset({"dict", "odict", "ddict", "counter"})
_Found = tuple[str, tuple[str, ...], "Leaf"]  # path, keys exactly, value


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
class CheckpointContents:
    """A checkpoint taken apart.

    Attributes:
        checkpoint: the checkpoint.
        manifest: its manifest.
        leaves: all values of the state, by path.
        tree: the structure as typed JSON; None if the checkpoint has none.
    """

    checkpoint: Checkpoint
    manifest: Manifest
    leaves: dict[str, Leaf]
    tree: Any
    _tensors: TensorList
    _tables: dict[str, bytes]

    def original(self, name: str) -> str:
        """Return the name under which the bytes of a tensor are stored."""
        return self._tensors.aliases.get(name, name)

    def tensor(self, name: str) -> TensorEntry:
        """Return dtype, shape and pieces of a tensor.

        Raises:
            CorruptCheckpointError: the structure names a tensor that no index lists.
        """
        entry = self._tensors.entry(name)
        if entry is None:
            raise CorruptCheckpointError(
                f"{self.checkpoint.uri}: the structure names a tensor {name!r} that no index lists: the checkpoint is "
                "damaged",
                tensor=name,
            )
        return entry

    def nbytes(self, name: str) -> int:
        """Return the stored bytes of a tensor."""
        return sum(piece.nbytes for piece in self.tensor(name).pieces)

    def is_same(self, name: str, other: CheckpointContents, its_name: str) -> bool:
        """Tell whether digests alone prove that two tensors have the same bytes; False if they have to be read."""
        sides = self.tensor(name), other.tensor(its_name)
        mine, its = ({piece[3:]: piece for piece in entry.pieces} for entry in sides)
        if mine.keys() != its.keys():
            return False
        return all(_is_same(piece, self._tables, its[box], other._tables) for box, piece in mine.items())


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
    reader = ContentsReader(checkpoint.storage.child(checkpoint.directory), manifest)
    reader.read_ahead([entry for entry in manifest.files if entry.role in ("index", "state", "rank", "digests")])
    tensors, tree = reader.tensors(), state_tree(reader)
    leaves = _by_path(_leaves(tree, "", ())) if tree is not None else {}
    for entry in sorted(manifest.with_role("rank"), key=lambda entry: entry.writer):
        own = reader.tree(entry)
        check_whole(own, where=entry.path)
        leaves.update(_by_path(_leaves(own, f"rank {entry.writer}", ())))
    return CheckpointContents(checkpoint, manifest, leaves, tree, tensors, reader.tables(manifest.files))


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


def _by_path(found: Iterable[_Found]) -> dict[str, Leaf]:
    """Key leaves by path; what follows a path that several have depends on their keys, not on their order."""
    rows = list(found)
    leaves = {path: leaf for path, _, leaf in rows}
    if len(leaves) == len(rows):
        return leaves
    homes: dict[str, list[tuple[str, ...]]] = {}
    for path, keys, _ in rows:
        homes.setdefault(path, []).append(keys)
    leaves = {}
    for path, keys, leaf in rows:
        number = sorted(homes[path]).index(keys) + 1
        label = path if number == 1 else f"{path}~{number}"
        while label in leaves or (label != path and label in homes):
            number += 1
            label = f"{path}~{number}"
        leaves[label] = leaf
    return leaves


def _leaves(node: Any, path: str, keys: tuple[str, ...]) -> Iterator[_Found]:
    tag = node.get("$") if isinstance(node, dict) else None
    if tag == "tensors":
        yield from ((_join(path, key), (*keys, repr(key)), Leaf("tensor", node["at"] + key)) for key in node["k"])
        return
    if tag == "tensor":
        is_array = node.get("k") == "array"
        yield path, keys, Leaf("array" if is_array else "tensor", node["n"], node.get("dt"))
        return
    if tag in ("rng", "per_rank"):
        yield path, keys, Leaf("generators" if tag == "rng" else "a value per rank")
        return
    if tag == "object":
        # A module has no leaf of its own, so that it equals its state dict.
        if node["kind"] != "module":
            yield path, keys, Leaf(f"object {node['type']}")
        yield from _leaves(node["state"], path, keys)
        return
    if isinstance(node, dict) and (tag is None or tag in _MAPPINGS):
        kind = "mapping"
    elif isinstance(node, list) or tag in _SEQUENCES:
        kind = "sequence"
    else:
        yield path, keys, Leaf("plain", node)
        return
    children = list(entries_of(node))
    if not children or (kind == "sequence" and not any(isinstance(child, (dict, list)) for _, child in children)):
        yield path, keys, Leaf("plain", node)  # a list of numbers and texts is one value
        return
    if kind == "sequence":
        yield path, keys, Leaf(kind)
    exact = [key for key, _ in node["v"]] if tag in _MAPPINGS else [key for key, _ in children]
    for (key, child), own in zip(children, exact, strict=True):
        below = _join(path, key if isinstance(key, (str, int)) else short(key))
        yield from _leaves(child, below, (*keys, repr(own)))


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)
