"""Read the indexes of many writers, which nearly always list the same tensors with other numbers.

A million pieces as JSON are six million lists, and an object for each piece. Here only the first index of each kind is
decoded and checked by `Index.from_bytes`. From an index whose text differs from the first text in digits alone, NumPy
arrays take the numbers and check them. An index that differs in anything else, or fails a check, goes to
`Index.from_bytes`, which says what is wrong: nothing is accepted here that `Index.from_bytes` would refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from holdfast.errors import CorruptCheckpointError, FormatVersionError

from .index import FileNumbers, Index, IndexFile, Piece, TensorEntry
from .strict_json import dumps, loads
from .tensor_file import item_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TENSORS = b'"tensors":['
_HEAD = {"index", "writer", "files", "tensors"}
_DIGITS = b"0123456789"
_RUN = re.compile("[0-9]+")
_MAX_DIGITS = 18  # of a number that fits into 64 bits whatever they are
_LIMIT = 1 << 62
_MAX_KINDS = 16  # of indexes; the text of more of them is not worth keeping
_TURNS = 4  # over the indexes that were unlike the first of their kind
_BATCH = 1 << 20  # bytes of text that are looked at at once
_BOX_AT = 3  # in a row of numbers: file number, offset, bytes, the box


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexGroup:
    """Indexes of several writers that list the same tensors in as many pieces, all of them boxes.

    Attributes:
        first: an index of the group; the others have the same tensors, aliases and division, and other pieces.
        writers: of all of them.
        numbers: a row for each writer: file number, offset, bytes, first indices and sizes of each piece in turn.
        places: where in such a row the pieces of a tensor begin, and how many it has; in the order of ``first``.
    """

    first: Index
    writers: tuple[int, ...]
    numbers: NDArray[np.int64]
    places: tuple[tuple[int, int], ...]

    def blocks(self) -> Iterator[tuple[TensorEntry, NDArray[np.int64]]]:
        """Yield each tensor with its pieces of all writers: rows of numbers, as `PieceTable.pieces` takes them."""
        for entry, (start, count) in zip(self.first.tensors.values(), self.places, strict=True):
            width = 3 + 2 * len(entry.shape)
            block = self.numbers[:, start : start + count * width]
            yield entry, block if count == 1 else block.reshape(-1, width)


def read_indexes(
    indexes: Iterable[IndexFile], files: FileNumbers, *, sizes: Mapping[str, int] | None = None
) -> list[Index | IndexGroup]:
    """Decode and check indexes, as `Index.from_bytes` does; those that go together become groups.

    Args:
        indexes: as they are stored.
        files: gets the files of groups.
        sizes: bytes of each file of the checkpoint, by path; ranges beyond them are refused.

    Raises:
        CorruptCheckpointError: an index is malformed, or boxes and ranges overlap, do not fit or leave their files.
        FormatVersionError: a newer kind of index.
    """
    result: list[Index | IndexGroup] = []
    for turn in range(_TURNS):
        kinds: dict[tuple[bytes, bytes], _Kind] = {}
        left: list[IndexFile] = []
        for index in indexes:
            at = index.data.find(_TENSORS)
            if at < 0 or turn == _TURNS - 1:
                result.append(index.decode(sizes))
                continue
            # Equal keys are equal bytes, compared by the dictionary: everything but the digits, and the first name.
            key = index.data[at:].translate(None, _DIGITS), index.data[at : index.data.find(b",", at)]
            kind = kinds.get(key)
            if kind is not None:
                kind.add(index, at, left)
            elif len(kinds) < _MAX_KINDS:
                kinds[key] = _Kind(index.decode(sizes), index, at, len(key[0]), files, sizes)
            else:
                result.append(index.decode(sizes))
        result += [kind.finish(left) for kind in kinds.values()]
        indexes = left
    return result


class _Runs(NamedTuple):
    """The runs of digits in some texts: values (of short ones), how long they are, what comes before each."""

    values: NDArray[np.int64]
    lengths: NDArray[np.int64]
    before: NDArray[np.int64]  # bytes that are no digits
    zeros: NDArray[np.bool_]  # begins with a 0


class _Kind:
    """Indexes whose text is the same but for digits."""

    def __init__(
        self, index: Index, file: IndexFile, at: int, size: int, files: FileNumbers, sizes: Mapping[str, int] | None
    ) -> None:
        self.index, self.size, self.files, self.sizes = index, size, files, sizes
        self.text: bytes = file.data[at:]
        self.waiting: list[tuple[IndexFile, int]] = []
        self.waiting_bytes = 0
        self.numbers: list[NDArray[np.int64]] = []
        self.writers: list[int] = []
        self.limits: list[int] = []  # of each file in `files`, as far as it is known

    @cached_property
    def shape(self) -> _Shape | None:
        """Which numbers are pieces; None if indexes of this kind have to be read one by one."""
        return _shape_of(self.index, self.text, self.size)

    def add(self, file: IndexFile, at: int, left: list[IndexFile]) -> None:
        """Add an index; an index that arrays cannot read goes to ``left``."""
        if self.shape is None:
            left.append(file)
            return
        self.waiting.append((file, at))
        self.waiting_bytes += len(file.data)
        if self.waiting_bytes > _BATCH:
            self._flush(left)

    def finish(self, left: list[IndexFile]) -> Index | IndexGroup:
        """Return the group of all indexes of this kind, or the index if it is alone."""
        self._flush(left)
        shape = self.shape if self.writers else None
        if shape is None:
            return self.index
        first = shape.first.copy()
        numbers = np.array([self.files.number(path) for path in self.index.files], np.int64)
        first[shape.piece_files] = numbers[first[shape.piece_files]]
        return IndexGroup(
            first=self.index,
            writers=(self.index.writer, *self.writers),
            numbers=np.concatenate([first[None], *self.numbers]),
            places=shape.places,
        )

    def _flush(self, left: list[IndexFile]) -> None:
        waiting, self.waiting, self.waiting_bytes = self.waiting, [], 0
        if not waiting or self.shape is None:  # an index that is alone needs no shape: it costs as much as encoding it
            return
        shape, heads = self.shape, []
        for file, at in waiting:
            head = _head(file, at)
            if head is None or (self.sizes is not None and not self.sizes.keys() >= {*head.files}):
                left.append(file)
            else:
                heads.append((file, at, head))
        if not heads:
            return  # all of them are read one by one
        runs = shape.runs([file.data[at:] for file, at, _ in heads])
        if runs is None:
            left += [file for file, _, _ in heads]
            return
        base, counts = [], []
        for _, _, head in heads:
            base.append([self.files.number(path) for path in head.files])
            counts.append(len(head.files))
        if self.sizes is not None:
            self.limits += [min(self.sizes.get(path, -1), _LIMIT) for path in self.files.paths[len(self.limits) :]]
        widest = max(counts, default=0)
        table = np.array([[*row, *[0] * (widest - len(row))] for row in base], np.int64).reshape(len(base), widest)
        limits = None if self.sizes is None else np.array(self.limits, np.int64)
        good, numbers = shape.check(runs, np.array(counts, np.int64), table, limits)
        self.numbers.append(numbers[good])
        for fine, (file, _, head) in zip(good.tolist(), heads, strict=True):
            if fine:
                self.writers.append(head.writer)
            else:
                left.append(file)


def _head(file: IndexFile, at: int) -> Index | None:
    """Decode the text before the tensors: writer and files. None if it has other keys."""
    try:
        body = loads(file.data[:at] + _TENSORS + b"]}", where=file.where)
        if type(body) is not dict or body.keys() != _HEAD:
            return None  # what follows the tensors may have the same keys
        return Index.from_body(body, where=file.where, save_id=file.save_id, sizes=None)
    except (CorruptCheckpointError, FormatVersionError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Where in the text of a kind of indexes the numbers of pieces are.

    Attributes:
        size: bytes of the text that are no digits.
        fixed: positions of the runs of digits that are no numbers of pieces, which have to be the same in all texts.
        moving: positions of the numbers of pieces, in the order of the text.
        model_runs: the runs of the first index.
        first: numbers of its pieces. What follows are positions among these.
        piece_files: numbers of files.
        offsets: first bytes.
        nbytes: bytes.
        starts: first indices of boxes, for each dimension of each piece.
        sizes: their sizes.
        wholes: size of the tensor there.
        heads: where the dimensions of a piece begin, among the dimensions of all of them.
        widths: bytes of an element of each piece; 0 if this version does not know it.
        order: pieces in the order of the files.
        places: see `IndexGroup`.
    """

    size: int
    fixed: NDArray[np.int64]
    moving: NDArray[np.int64]
    model_runs: _Runs
    first: NDArray[np.int64]
    piece_files: NDArray[np.int64]
    offsets: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    wholes: NDArray[np.int64]
    heads: NDArray[np.int64]
    widths: NDArray[np.int64]
    order: NDArray[np.int64]
    places: tuple[tuple[int, int], ...] = field(repr=False)

    def runs(self, texts: Sequence[bytes]) -> _Runs | None:
        """Find the runs of digits in texts of this kind, a row for each; None if a text has more or fewer of them."""
        flat = _find_runs(b"".join([*texts, b" "]))
        if len(flat.lengths) != len(texts) * len(self.model_runs.lengths):
            return None
        size = len(texts), len(self.model_runs.lengths)
        before = flat.before.reshape(size) - self.size * np.arange(len(texts))[:, None]
        return _Runs(flat.values.reshape(size), flat.lengths.reshape(size), before, flat.zeros.reshape(size))

    def check(
        self,
        runs: _Runs,
        num_files: NDArray[np.int64],
        table: NDArray[np.int64],
        limits: NDArray[np.int64] | None,
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Tell which texts are good, and return the numbers of the pieces of all.

        Args:
            runs: what `runs` found.
            num_files: how many files each text names.
            table: what the numbers of its files become.
            limits: bytes of the files, by these numbers; None: not known.
        """
        fixed, moving, model_runs = self.fixed, self.moving, self.model_runs
        good: NDArray[np.bool_] = (runs.before == model_runs.before).all(1)
        good &= (runs.lengths[:, fixed] == model_runs.lengths[fixed]).all(1)
        good &= (runs.values[:, fixed] == model_runs.values[fixed]).all(1)
        lengths = runs.lengths[:, moving]
        good &= ((lengths <= _MAX_DIGITS) & ((lengths == 1) | ~runs.zeros[:, moving])).all(1)
        numbers = runs.values[:, moving]
        numbers[~good] = self.first  # so that what follows cannot fail on them
        sizes = numbers[:, self.sizes]
        good &= (numbers[:, self.starts] + sizes <= self.wholes).all(1)
        counts = np.multiply.reduceat(np.minimum(sizes, self.wholes), self.heads, axis=1)
        nbytes, offsets, own = numbers[:, self.nbytes], numbers[:, self.offsets], numbers[:, self.piece_files]
        good &= ((nbytes == counts * self.widths) | (self.widths == 0)).all(1)
        good &= (nbytes > 0).all(1) & (own < num_files[:, None]).all(1)
        own[~good] = 0
        ends = offsets + nbytes
        low, high, file = offsets[:, self.order], ends[:, self.order], own[:, self.order]
        apart = (file[:, 1:] > file[:, :-1]) | ((file[:, 1:] == file[:, :-1]) & (low[:, 1:] >= high[:, :-1]))
        good &= apart.all(1)
        if table.shape[1]:
            own = np.take_along_axis(table, own, axis=1)
            numbers[:, self.piece_files] = own
            if limits is not None:
                good &= (ends <= limits[own]).all(1)
        return good, numbers


def _shape_of(index: Index, text: bytes, size: int) -> _Shape | None:
    """Find the numbers of the pieces of an index in its text; None if the text is not what `Index.to_bytes` writes.

    None as well if the index has something that cannot be grouped with other writers' indexes.
    """
    if not index.tensors or (index.division is not None and index.division.alike is not None):
        return None
    ours = index.to_bytes()
    if ours[ours.find(_TENSORS) :] != text:
        return None
    moving: list[int] = []
    files: list[int] = []
    starts: list[int] = []
    wholes: list[int] = []
    heads: list[int] = []
    widths: list[int] = []
    places: list[tuple[int, int]] = []
    numbers: list[int] = []
    numbered = {path: number for number, path in enumerate(index.files)}
    run = 0
    for name, dtype, shape, pieces in index.tensors.values():
        width, dims = item_size(dtype) or 0, len(shape)
        if not dims or not pieces or prod(shape) * max(1, width) >= _LIMIT:
            return None
        run += _num_runs(name) + _num_runs(dtype) + dims
        places.append((len(moving), len(pieces)))
        for piece in pieces:
            if piece.box_start is None or not piece.nbytes:
                return None
            heads.append(len(starts))
            first = len(moving)
            files.append(first)
            starts += range(first + 3, first + 3 + dims)
            wholes += shape
            widths.append(width)
            moving += range(run, run + 3 + 2 * dims)
            numbers += (numbered[piece.file], piece.offset, piece.nbytes, *piece.box_start, *(piece.box_shape or ()))
            run += 3 + 2 * dims
    model_runs = _find_runs(text)
    rest = len(model_runs.lengths) - run  # of aliases, division and what each rank has for itself
    if rest < 0 or (model_runs.lengths > _MAX_DIGITS).any():
        return None
    chosen = np.array(moving, np.int64)
    first_numbers = model_runs.values[chosen]
    if not np.array_equal(first_numbers, np.array(numbers, np.int64)):
        return None
    fixed = np.ones(len(model_runs.lengths), np.bool_)
    fixed[chosen] = False
    dims_of = np.array([end - head for head, end in pairwise([*heads, len(starts)])], np.int64)
    piece_files, first_starts = np.array(files, np.int64), np.array(starts, np.int64)
    return _Shape(
        size=size,
        fixed=np.flatnonzero(fixed),
        moving=chosen,
        model_runs=model_runs,
        first=first_numbers,
        piece_files=piece_files,
        offsets=piece_files + 1,
        nbytes=piece_files + 2,
        starts=first_starts,
        sizes=first_starts + np.repeat(dims_of, dims_of),
        wholes=np.array(wholes, np.int64),
        heads=np.array(heads, np.int64),
        widths=np.array(widths, np.int64),
        order=np.lexsort((first_numbers[piece_files + 1], first_numbers[piece_files])),
        places=tuple(places),
    )


def _num_runs(text: str) -> int:
    """Return how many runs of digits a text has as JSON."""
    plain = text.isascii() and text.isprintable()  # else there may be escapes with digits
    return len(_RUN.findall(text if plain else dumps(text).decode()))


def _find_runs(text: bytes) -> _Runs:
    """Find the runs of digits in a text that neither begins nor ends with a digit."""
    digits = np.frombuffer(text, np.uint8) - np.uint8(ord("0"))  # what comes before "0" wraps around
    edges = np.flatnonzero(np.diff(digits < 10)) + 1
    starts, ends = edges[0::2], edges[1::2]
    lengths = ends - starts
    values = digits[starts].astype(np.int64)
    zeros = values == 0
    rest = np.flatnonzero(lengths > 1)
    at = 1
    while len(rest) and at < _MAX_DIGITS:
        values[rest] = values[rest] * 10 + digits[starts[rest] + at]
        at += 1
        rest = rest[lengths[rest] > at]
    return _Runs(values, lengths, starts - np.cumsum(lengths) + lengths, zeros)


class Boxes:
    """First indices and sizes of boxes: rows of as many numbers as dimensions. Tensors that are cut alike share it."""

    __slots__ = ("sizes", "starts")

    def __init__(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        self.starts, self.sizes = starts, sizes


class Pieces(Sequence[Piece]):
    """Pieces of one tensor, made when they are asked for. All of them are boxes.

    Args:
        files: paths by number.
        rows: file number, offset and bytes of each piece.
        boxes: of the pieces.
    """

    __slots__ = ("_files", "_rows", "boxes")

    def __init__(self, files: FileNumbers, rows: NDArray[np.int64], boxes: Boxes) -> None:
        self._files, self._rows, self.boxes = files, rows, boxes

    @property
    def nbytes(self) -> NDArray[np.int64]:
        """Bytes of each piece."""
        return self._rows[:, 2]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> Piece: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Piece, ...]: ...
    def __getitem__(self, at: int | slice) -> Piece | tuple[Piece, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        number, offset, nbytes = self._rows[at].tolist()
        start, size = tuple(self.boxes.starts[at].tolist()), tuple(self.boxes.sizes[at].tolist())
        return Piece(self._files.paths[number], offset, nbytes, start, size)

    def __iter__(self) -> Iterator[Piece]:
        rows = zip(self._rows.tolist(), self.boxes.starts.tolist(), self.boxes.sizes.tolist(), strict=True)
        paths = self._files.paths
        for (number, offset, nbytes), start, size in rows:
            yield Piece(paths[number], offset, nbytes, tuple(start), tuple(size))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class PieceTable:
    """Makes the pieces of many tensors out of rows of numbers.

    Args:
        files: paths by number.
    """

    def __init__(self, files: FileNumbers) -> None:
        self._files = files
        self._known: dict[tuple[int, bytes], Boxes] = {}

    def pieces(self, blocks: Sequence[NDArray[np.int64] | Sequence[Piece]], num_dims: int) -> Pieces:
        """Put the pieces of one tensor together.

        Args:
            blocks: rows of file number, offset, bytes, first indices and sizes; or pieces that are boxes.
            num_dims: dimensions of the tensor.
        """
        arrays = [block if isinstance(block, np.ndarray) else self._rows(block, num_dims) for block in blocks]
        rows = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        cut = rows[:, _BOX_AT:]
        key = num_dims, cut.tobytes()
        boxes = self._known.get(key)
        if boxes is None:
            boxes = self._known[key] = Boxes(*map(np.ascontiguousarray, (cut[:, :num_dims], cut[:, num_dims:])))
        return Pieces(self._files, rows[:, :_BOX_AT], boxes)

    def _rows(self, pieces: Sequence[Piece], num_dims: int) -> NDArray[np.int64]:
        number = self._files.number
        rows = [
            (number(file), offset, nbytes, *(start or ()), *(size or ()))
            for file, offset, nbytes, start, size in pieces
        ]
        return np.array(rows, np.int64).reshape(len(rows), _BOX_AT + 2 * num_dims)
