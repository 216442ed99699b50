"""Compare two checkpoints: structure, tensors, plain data, metrics. Torch is imported if values must be read.

`CheckpointContents` is a checkpoint from its small files alone, as flat rows that can be compared. A path is that of
``holdfast.load(only=...)``: the keys on the way, joined by "/". Where that makes the paths of several values alike, as
the keys 1 and "1" do, those after the first get "~2", "~3" at their end. Values of single ranks come after it, as
``rank 0/...``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.summary import entries_of, short, state_tree
from holdfast.errors import ConfigError, CorruptCheckpointError
from holdfast.format.contents import ContentsReader, TensorList, check_whole
from holdfast.format.digest import CHUNK, DIGEST_BYTES
from holdfast.format.index import Piece, TensorEntry
from holdfast.format.manifest import Manifest
from holdfast.run.record import flat_metrics
from holdfast.state.load.selection import Selection

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


_ABOUT = ("step", "epoch", "attempt", "run_id", "created", "world_size", "total_bytes")
_SHOWN_ITEMS = 3


def compare(
    a: Checkpoint,
    b: Checkpoint,
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    tolerance: Tolerance | None = None,
    progress: Callable[[int | None, int], object] = lambda total, done: None,
) -> CheckpointDifference:
    """Compare two checkpoints of any layouts and numbers of ranks; reads tensors window by window (about 150 MB).

    Tensors whose digests are equal are the same and are not read. NaN equals NaN, and 0.0 equals -0.0.

    Args:
        a: the checkpoint that counts as before.
        b: the checkpoint that counts as after.
        only: names or globs over paths; None takes the whole state, and files of the user too.
        skip: names or globs to leave out.
        tolerance: how far numbers may lie apart.
        progress: called once with (bytes of A to be read, 0), then with (None, bytes of A just compared).

    Raises:
        ConfigError: a checkpoint was not written by Holdfast, or ``only`` names nothing in either of them.
        CorruptCheckpointError: a checkpoint is damaged.
    """
    tolerance = tolerance or Tolerance()
    contents_a, contents_b = read_contents(a), read_contents(b)
    difference = CheckpointDifference(a=a, b=b)
    _notes(difference, contents_a, contents_b)
    selection = Selection(only, skip)
    selection.check({*contents_a.leaves, *contents_b.leaves})
    leaves_a, leaves_b = (
        {path: leaf for path, leaf in side.leaves.items() if selection.takes(path)} for side in (contents_a, contents_b)
    )
    if only is None:
        _files(difference, contents_a, contents_b, selection)
    difference.only_in_a, difference.only_in_b = _missing(leaves_a, leaves_b), _missing(leaves_b, leaves_a)
    unsettled: dict[tuple[str, str], tuple[str, Leaf, Leaf]] = {}
    seen: set[tuple[str, str]] = set()
    for path in leaves_a:
        left, right = leaves_a[path], leaves_b.get(path)
        if right is None:
            continue
        if left.kind != right.kind:
            difference.kinds.append(_Change(name=path, a=_kind(left), b=_kind(right)))
        elif left.kind == "plain":
            if (change := _plain(path, left.value, right.value, tolerance)) is not None:
                difference.plain.append(change)
        elif left.kind in ("tensor", "array"):
            key = (contents_a.original(left.value), contents_b.original(right.value))
            if key in seen:
                continue  # tied: the same bytes have been compared
            seen.add(key)
            difference.compared += 1
            if _tensor(difference, path, left, right, contents_a, contents_b):
                unsettled[key] = (path, left, right)
    if unsettled:
        from .arithmetic import compare_values

        progress(sum(contents_a.nbytes(left.value) for _, left, _ in unsettled.values()), 0)
        compare_values(
            difference, contents_a, contents_b, list(unsettled.values()), tolerance, lambda done: progress(None, done)
        )
        order = {path: number for number, path in enumerate(leaves_a)}
        difference.tensors.sort(key=lambda change: order[change.name])
    return difference


def _tensor(
    difference: CheckpointDifference,
    path: str,
    left: Leaf,
    right: Leaf,
    contents_a: CheckpointContents,
    contents_b: CheckpointContents,
) -> bool:
    """Compare shape, dtype and digests of a tensor; True if its values have to be read."""
    before, after = contents_a.tensor(left.value), contents_b.tensor(right.value)
    dtypes = (left.dtype or before.dtype, right.dtype or after.dtype)
    if before.shape != after.shape:
        difference.tensors.append(TensorChange(name=path, dtype=dtypes, shape=(before.shape, after.shape)))
        return False
    if dtypes[0] != dtypes[1]:
        return True
    if contents_a.is_same(left.value, contents_b, right.value):
        difference.by_digest += 1
        return False
    return True


def _missing(mine: Collection[str], its: Collection[str]) -> list[Missing]:
    known = set(its)
    for path in its:
        while "/" in path and (path := path.rpartition("/")[0]) not in known:
            known.add(path)
    counts: dict[str, int] = {}
    for path in mine:
        if path not in known:
            end = len(path)
            while (cut := path.rfind("/", 0, end)) >= 0 and path[:cut] not in known:
                end = cut
            counts[path[:end]] = counts.get(path[:end], 0) + 1
    return [Missing(name=name, entries=count) for name, count in counts.items()]


def _kind(leaf: Leaf) -> str:
    return f"plain data ({short(leaf.value)})" if leaf.kind == "plain" else leaf.kind


def _plain(path: str, left: Any, right: Any, tolerance: Tolerance) -> _Change | None:
    if left == right and type(left) is type(right):
        return None
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right) > _SHOWN_ITEMS:
        at = [n for n, (x, y) in enumerate(zip(left, right, strict=True)) if not _alike(x, y, tolerance)]
        if not at:
            return None
        sides = ([f"[{number}] {short(side[number])}" for number in at[:_SHOWN_ITEMS]] for side in (left, right))
        more = f" ({len(at)} of {len(left)} items differ)"
        first, second = (", ".join(texts) for texts in sides)
        return _Change(name=path, a=first, b=second + more)
    return None if _alike(left, right, tolerance) else _Change(name=path, a=short(left), b=short(right))


def _alike(left: Any, right: Any, tolerance: Tolerance) -> bool:
    """Compare typed JSON; lists and mappings of numbers item by item."""
    numbers = _number(left), _number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return type(left) is type(right) and tolerance.allows(numbers[0], numbers[1])
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(_alike(x, y, tolerance) for x, y in zip(left, right, strict=True))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_alike(left[key], right[key], tolerance) for key in left)
    return bool(left == right)


def _number(node: Any) -> float | None:
    if isinstance(node, dict) and node.get("$") == "float":
        try:
            return float(node["v"])  # nan, inf
        except (TypeError, ValueError):
            return None
    return node if type(node) in (int, float) and -(1 << 1000) < node < 1 << 1000 else None


def _notes(difference: CheckpointDifference, contents_a: CheckpointContents, contents_b: CheckpointContents) -> None:
    """Note fields of the manifests, metrics and metadata."""
    for name in _ABOUT:
        difference.about[name] = (getattr(contents_a.manifest, name), getattr(contents_b.manifest, name))
    for name in {**contents_a.manifest.versions, **contents_b.manifest.versions}:
        difference.about[name] = (contents_a.manifest.versions.get(name), contents_b.manifest.versions.get(name))
    metrics = flat_metrics(contents_a.checkpoint.metrics), flat_metrics(contents_b.checkpoint.metrics)
    difference.metrics = _changes(*metrics)
    difference.metadata = _changes(contents_a.checkpoint.get_metadata(), contents_b.checkpoint.get_metadata())


def _changes(values_a: Mapping[str, Any], values_b: Mapping[str, Any]) -> list[_Change]:
    names: Collection[str] = dict.fromkeys([*values_a, *values_b])
    changes = [_Change(name=name, a=values_a.get(name), b=values_b.get(name)) for name in names]
    return [change for change in changes if change.a != change.b and not (_is_nan(change.a) and _is_nan(change.b))]


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _files(
    difference: CheckpointDifference,
    contents_a: CheckpointContents,
    contents_b: CheckpointContents,
    selection: Selection,
) -> None:
    sides = [
        {entry.path: entry.digest for entry in side.manifest.with_role("user") if selection.takes(entry.path)}
        for side in (contents_a, contents_b)
    ]
    difference.files = _changes(*sides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far numbers may lie apart and count as the same: |a - b| <= absolute + relative * |a|."""

    absolute: float = 0.0
    relative: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.absolute < math.inf and 0 <= self.relative < math.inf):
            raise ConfigError(f"tolerance {self.absolute}, {self.relative}: give numbers that are not negative")

    def allows(self, a: float, b: float) -> bool:
        """Tell whether two numbers count as the same; NaN and NaN do."""
        if a == b or (math.isnan(a) and math.isnan(b)):
            return True
        return abs(a - b) <= self.absolute + self.relative * abs(a) and math.isfinite(a - b)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """An entry of both checkpoints that differs: its name, and its value in A and in B."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Entries that one side lacks: the path nearest to the root below which it has none, and their number."""

    name: str
    entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A tensor that differs.

    Attributes:
        name: its path.
        dtype: in A and in B.
        shape: in A and in B.
        elements: number of elements; None where the shapes differ, as are all fields below.
        differing: number of elements that are not the same.
        norm: L2 norm of the difference, over elements where it is finite.
        relative: ``norm`` by the L2 norm of A; None if that is 0.
        largest: largest finite absolute difference.
        at: index of its first occurrence.
        values: the element there in A and in B.
        not_finite: elements that differ by no finite number: NaN or an infinity on one side alone.
    """

    name: str
    dtype: tuple[str, str]
    shape: tuple[tuple[int, ...], tuple[int, ...]]
    elements: int | None = None
    differing: int | None = None
    norm: float | None = None
    relative: float | None = None
    largest: float | None = None
    at: tuple[int, ...] | None = None
    values: tuple[Any, Any] | None = None
    not_finite: int | None = None


@dataclass(slots=True, kw_only=True)
class CheckpointDifference:
    """The result of `compare`.

    Attributes:
        a: first checkpoint.
        b: second checkpoint.
        about: fields of the manifests: (value in A, value in B). They do not count for `same`.
        metrics: metrics that differ; they do not count.
        metadata: metadata of the user that differs; it does not count.
        only_in_a: entries that B lacks.
        only_in_b: entries that A lacks.
        kinds: paths with values of different kinds.
        plain: plain data that differs.
        tensors: tensors that differ.
        files: files of the user that differ, by path: digests in A and B, None for a missing file.
        compared: number of tensors that both have.
        by_digest: how many of these are the same by their digests alone.
        within: tensors whose elements differ, but none by more than the tolerance.
        bytes_read: bytes of tensors that were read.
    """

    a: Checkpoint
    b: Checkpoint
    about: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    metrics: list[_Change] = field(default_factory=list)
    metadata: list[_Change] = field(default_factory=list)
    only_in_a: list[Missing] = field(default_factory=list)
    only_in_b: list[Missing] = field(default_factory=list)
    kinds: list[_Change] = field(default_factory=list)
    plain: list[_Change] = field(default_factory=list)
    tensors: list[TensorChange] = field(default_factory=list)
    files: list[_Change] = field(default_factory=list)
    compared: int = 0
    by_digest: int = 0
    within: list[str] = field(default_factory=list)
    bytes_read: int = 0

    @property
    def same(self) -> bool:
        """Whether the states (and files of the user) are the same; manifests, metrics and metadata do not count."""
        return not (self.only_in_a or self.only_in_b or self.kinds or self.plain or self.tensors or self.files)
