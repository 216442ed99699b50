"""The index of one writer: which tensor lies where. Compact and linear: 100 000 tensors are an ordinary case.

On disk: ``{"index": 1, "writer": w, "files": [...], "tensors": [[name, dtype, shape, pieces], ...], "aliases": {...}}``
with a piece being ``[file number, offset, bytes]`` for a whole tensor, or with ``start, shape`` of its box added.
File names hold ``{save_id}`` in place of the id of the save, so that one index serves every save of a structure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast._outgoing import brief
from holdfast._paused_gc import paused_gc
from holdfast.errors import CorruptCheckpointError, FormatVersionError

from .names import check_path
from .strict_json import dumps, loads
from .tensor_file import item_size

if TYPE_CHECKING:
    from .division import Division

__all__ = ["SAVE_ID", "FileNumbers", "Index", "IndexFile", "Piece", "TensorEntry"]

INDEX_VERSION = 1
SAVE_ID = "{save_id}"
_MAX_INDEX = 2 << 30
_MAX_DEPTH = 64
_LIMIT = 1 << 62
_MAX_DIMS = 64
_MAX_ELEMENTS = 1 << 60  # of the tensor that an empty dimension would have with one row: strides are counted so


# Named tuples, unlike other values of this package: 100 000 of them are made in a third of the time of dataclasses.
class Piece(NamedTuple):
    """A box of a tensor and the bytes that hold it. ``box_start`` None means the whole tensor."""

    file: str
    offset: int
    nbytes: int
    box_start: tuple[int, ...] | None = None
    box_shape: tuple[int, ...] | None = None


class TensorEntry(NamedTuple):
    """One tensor: torch-like dtype name, global shape, and its pieces in this index, or in those of all writers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[Piece]


# Half the time of calling the class, whose __new__ is a Python function.
_new = tuple.__new__


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What one writer wrote.

    Attributes:
        writer: its rank.
        files: paths that hold pieces.
        tensors: by name.
        aliases: name of a tied tensor -> name of the tensor whose memory it shares.
        per_rank: free JSON about what differs between ranks.
        division: how this writer and others divided the state; None for a writer that wrote all of it.
    """

    writer: int = 0
    files: tuple[str, ...] = ()
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    per_rank: Any = None
    division: Division | None = None

    def to_bytes(self) -> bytes:
        """Encode; linear in the number of pieces."""
        with paused_gc():
            return dumps(self._body())

    def _body(self) -> dict[str, Any]:
        numbers = {path: number for number, path in enumerate(self.files)}
        rows = [
            (
                name,
                dtype,
                shape,
                [
                    (numbers[file], offset, nbytes)
                    if start is None
                    else (numbers[file], offset, nbytes, start, box_shape)
                    for file, offset, nbytes, start, box_shape in pieces
                ],
            )
            for name, dtype, shape, pieces in self.tensors.values()
        ]
        body: dict[str, Any] = {"index": INDEX_VERSION, "writer": self.writer, "files": self.files, "tensors": rows}
        if self.aliases:
            body["aliases"] = self.aliases
        if self.per_rank is not None:
            body["per_rank"] = self.per_rank
        if self.division is not None:
            body["division"] = self.division.to_json()
        return body

    @classmethod
    def from_bytes(
        cls,
        data: bytes | memoryview,
        *,
        where: str = "index",
        save_id: str | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Index:
        """Decode and check.

        Args:
            data: what `to_bytes` gave.
            where: name of the file, for messages.
            save_id: replaces ``{save_id}`` in file names.
            sizes: bytes of each file of the checkpoint, by path; other files and ranges beyond them are refused.

        Raises:
            CorruptCheckpointError: malformed, or boxes and ranges that overlap, do not fit or leave their files.
            FormatVersionError: a newer kind of index.
        """
        with paused_gc():
            body = loads(data, max_bytes=_MAX_INDEX, max_depth=_MAX_DEPTH, where=where)
            return cls.from_body(body, where=where, save_id=save_id, sizes=sizes)

    @classmethod
    def from_body(cls, body: Any, *, where: str, save_id: str | None, sizes: Mapping[str, int] | None) -> Index:
        """Check a decoded index; arguments and errors are those of `from_bytes`."""
        try:
            version, writer = body["index"], body["writer"]
            if type(version) is not int or type(writer) is not int or not 0 <= writer < _LIMIT or version < 1:
                raise TypeError("index version or writer")
            if version > INDEX_VERSION:
                from holdfast._optional import upgrade_command  # not above: of this error only

                raise FormatVersionError(
                    f"{where}: index version {version}, this Holdfast reads {INDEX_VERSION}: {upgrade_command()}"
                )
            files = tuple(_file(path, save_id, where) for path in body["files"])
            rows = _Rows(files, where)
            tensors = rows.read(body["tensors"])
            rows.check_ranges(sizes)
            aliases = body.get("aliases", {})
            if not isinstance(aliases, dict):
                raise TypeError("aliases")
            for name, original in aliases.items():
                if name in tensors or original not in tensors:
                    raise ValueError(f"{name!r} is tied to {brief(original, 80)!r}, which is no tensor of this index")
            stated = body.get("division")
            division = None if stated is None else _division(stated)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _corrupt(where, f"malformed ({type(error).__name__}: {brief(error, 400)})") from error
        if missing := [] if sizes is None else [path for path in files if path not in sizes]:
            raise CorruptCheckpointError(
                f"{where} refers to {missing[0]}, which the manifest does not list: this checkpoint is damaged; use "
                "another one",
                file=where,
            )
        free = body.get("per_rank")
        return cls(writer=writer, files=files, tensors=tensors, aliases=aliases, per_rank=free, division=division)


class IndexFile(NamedTuple):
    """An index as it is stored: its name, for messages, the id of its save, and its bytes."""

    where: str
    save_id: str | None
    data: bytes

    def decode(self, sizes: Mapping[str, int] | None) -> Index:
        """Decode and check it, as `Index.from_bytes` does."""
        return Index.from_bytes(self.data, where=self.where, save_id=self.save_id, sizes=sizes)


class FileNumbers:
    """Numbers the files of a checkpoint, for tables of pieces that name them by number."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, path: str) -> int:
        """Return the number of a file."""
        number = self._numbers.setdefault(path, len(self.paths))
        if number == len(self.paths):
            self.paths.append(path)
        return number


def _division(stated: Any) -> Division:
    from .division import Division  # not above: of several ranks only

    return Division.from_json(stated)


def _file(path: object, save_id: str | None, where: str) -> str:
    if isinstance(path, str) and save_id is not None:
        path = path.replace(SAVE_ID, save_id)
    return check_path(path, where=where)


class _Kind(NamedTuple):
    """A dtype with a shape; how many bytes and elements that is, bytes of one. None: such a dtype is not known here."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int | None
    num_elements: int
    width: int | None


class _Rows:
    """Reads rows; every check is made once, in a pass over the pieces and a pass over their sorted ranges."""

    def __init__(self, files: tuple[str, ...], where: str) -> None:
        self.files, self.num_files, self.where = files, len(files), where
        self.ranges: list[tuple[int, int, int, str]] = []
        # Boxes occur many times as well: layers are cut alike.
        self.boxes: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...], int]] = {}

    def read(self, rows: Any) -> dict[str, TensorEntry]:
        tensors: dict[str, TensorEntry] = {}
        files, num_files, ranges = self.files, self.num_files, self.ranges
        # Most shapes occur many times: each is checked once, and what was checked is kept, once for all of them.
        kinds: dict[tuple[Any, ...], _Kind] = {}
        for row in rows:
            name, dtype, dims, piece_rows = row if len(row) == 4 else row[:4]
            kind = kinds.get(key := (dtype, *dims))
            if kind is None:
                kind = kinds[key] = self.kind(name, dtype, dims)
            if type(name) is not str or name in tensors:
                raise _corrupt(self.where, f"tensor {brief(name, 80)!r} is malformed or listed twice")
            dtype, shape, whole, _, _ = kind
            if (
                len(piece_rows) == 1
                and len(piece := piece_rows[0]) == 3
                and type(number := piece[0]) is type(offset := piece[1]) is type(piece[2]) is int
                and piece[2] == whole
                and 0 <= number < num_files
                and 0 <= offset < _LIMIT
            ):  # a whole tensor, as nearly all are: without a call
                pieces: tuple[Piece, ...] = (_new(Piece, (files[number], offset, whole, None, None)),)
                if whole:
                    ranges.append((number, offset, whole, name))
            else:
                pieces = tuple([self.piece(piece, name, kind) for piece in piece_rows])
            tensors[name] = _new(TensorEntry, (name, dtype, shape, pieces))
        return tensors

    def kind(self, name: Any, dtype: Any, dims: Any) -> _Kind:
        shape = tuple(dims)
        if not _is_box(shape) or prod(size or 1 for size in shape) > _MAX_ELEMENTS:
            raise _corrupt(self.where, f"tensor {brief(name, 80)!r} has the shape {brief(dims, 80)}")
        if type(dtype) is not str:
            raise _corrupt(self.where, f"tensor {brief(name, 80)!r} is malformed or listed twice")
        count, width = prod(shape), item_size(dtype)
        nbytes = None if width is None or width * count >= _LIMIT else width * count
        return _Kind(dtype, shape, nbytes, count, width)

    def piece(self, row: Any, name: str, kind: _Kind) -> Piece:
        number, offset, nbytes = row if len(row) == 3 else row[:3]
        if (
            not (type(number) is int and type(offset) is int and type(nbytes) is int)
            or not 0 <= number < self.num_files
            or not 0 <= offset < _LIMIT
            or not 0 <= nbytes < _LIMIT
        ):
            raise _corrupt(self.where, f"tensor {name!r} has the piece {brief(row, 80)}", name)
        _, shape, _, count, width = kind
        start = box = None
        if len(row) > 3:
            key = (shape, *row[3], None, *row[4])
            seen = self.boxes.get(key)
            if seen is None:
                start, box = tuple(row[3]), tuple(row[4])
                self.check_box(name, shape, start, box)
                seen = self.boxes[key] = (start, box, prod(box))
            start, box, count = seen
        if width is not None and nbytes != width * count:
            raise _corrupt(self.where, f"tensor {name!r}: {nbytes} bytes do not make {list(box or shape)}", name)
        if nbytes:
            self.ranges.append((number, offset, nbytes, name))
        return _new(Piece, (self.files[number], offset, nbytes, start, box))

    def check_box(self, name: str, shape: tuple[int, ...], start: tuple[int, ...], box: tuple[int, ...]) -> None:
        fits = len(start) == len(box) == len(shape) and _is_box(start) and _is_box(box)
        if not fits or any(at + size > whole for at, size, whole in zip(start, box, shape, strict=True)):
            raise _corrupt(self.where, f"tensor {name!r} has a box outside of its shape {list(shape)}", name)

    def check_ranges(self, sizes: Mapping[str, int] | None) -> None:
        # Our own writer lists pieces in file order, so this sort is linear in practice.
        self.ranges.sort()
        limits = [_LIMIT if sizes is None else sizes.get(path, -1) for path in self.files]
        file, end, owner = -1, 0, ""
        for number, offset, nbytes, name in self.ranges:
            if number == file and offset < end:
                path = self.files[number]
                raise _corrupt(self.where, f"tensors {owner!r} and {name!r} overlap at byte {offset} of {path}", name)
            file, end, owner = number, offset + nbytes, name
            if end > limits[number]:
                limit = "is no file of this checkpoint" if limits[number] < 0 else f"has {limits[number]} bytes"
                raise _corrupt(
                    self.where, f"tensor {name!r} ends at byte {end} of {self.files[number]}, which {limit}", name
                )


def _is_box(values: tuple[Any, ...]) -> bool:
    # A plain loop: shapes are short, and a generator would cost more than the checks.
    for value in values:
        if type(value) is not int or not 0 <= value < _LIMIT:
            return False
    return len(values) <= _MAX_DIMS


def _corrupt(where: str, problem: str, tensor: str | None = None) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{where}: {problem}: this checkpoint is damaged; use another one", file=where, tensor=tensor
    )
