"""Pieces of a tensor as rows of numbers, where there are too many for an object each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from .index import FileNumbers, Piece

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Boxes", "PieceTable", "Pieces"]

_HEAD = 3  # file number, offset, bytes; the box follows


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
        cut = rows[:, _HEAD:]
        key = num_dims, cut.tobytes()
        boxes = self._known.get(key)
        if boxes is None:
            boxes = self._known[key] = Boxes(*map(np.ascontiguousarray, (cut[:, :num_dims], cut[:, num_dims:])))
        return Pieces(self._files, rows[:, :_HEAD], boxes)

    def _rows(self, pieces: Sequence[Piece], num_dims: int) -> NDArray[np.int64]:
        number = self._files.number
        rows = [
            (number(file), offset, nbytes, *(start or ()), *(size or ()))
            for file, offset, nbytes, start, size in pieces
        ]
        return np.array(rows, np.int64).reshape(len(rows), _HEAD + 2 * num_dims)
