"""A tensor as bytes on demand: what exporters and importers pass to each other, and the files that exporters write.

`Blob` has the bytes of a whole tensor in row-major order. `assemble` reads them, window by window, out of the boxes
that the tensor is stored in. `ExportFolder` writes to any storage; a file gets its final name only when it is whole.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from holdfast.errors import CheckpointExistsError, CorruptCheckpointError
from holdfast.format.division import Box, flaw, overlap
from holdfast.format.tensor_file import TensorRow, item_size
from holdfast.storage.base import FileWriter, Storage

if TYPE_CHECKING:
    import torch

__all__ = [
    "WINDOW", "Blob", "Blocks", "BoxReader", "ExportFolder", "assemble", "cast", "check_parts", "fill", "rows_of",
    "windows",
]  # fmt: skip

WINDOW = 8 << 20
"""Bytes of a tensor in memory at a time."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """One tensor.

    Attributes:
        name: name in messages.
        dtype: torch's name of the dtype, as "float32".
        shape: shape of the tensor.
        parts: starts a pass over its bytes in row-major order; each view holds whole elements and is valid until the
            next.
        itemsize: bytes of an element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[memoryview]]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.itemsize


def rows_of(blobs: Iterable[tuple[str, Blob]]) -> list[TensorRow]:
    """Describe named blobs to `holdfast.format.tensor_file.lay_out`."""
    return [(name, blob.dtype, blob.shape, blob.nbytes) for name, blob in blobs]


def cast(blob: Blob, dtype: torch.dtype, too_large: set[str]) -> Blob:
    """Return a floating blob in another floating dtype, converted while it is read; any other blob unchanged.

    Args:
        blob: the tensor.
        dtype: of the result.
        too_large: gets the name of the blob if a finite value of it is beyond what ``dtype`` holds.

    Raises:
        ValueError: ``dtype`` is no floating dtype.
    """
    import torch

    have = getattr(torch, blob.dtype)
    if have is dtype or not have.is_floating_point:
        return blob
    if not dtype.is_floating_point:
        raise ValueError(f"{dtype} is no floating dtype")

    largest = torch.finfo(dtype).max if torch.finfo(dtype).max < torch.finfo(have).max else None

    def parts() -> Iterator[memoryview]:
        for view in blob.parts():
            if len(view):
                values = torch.frombuffer(view, dtype=torch.uint8).view(have)
                converted = values.to(dtype)
                if largest is not None and blob.name not in too_large:
                    size = values.to(torch.float64 if have.itemsize == 8 else torch.float32).abs_()
                    if bool(((size > largest) & (size != torch.inf)).any()):
                        too_large.add(blob.name)
                yield memoryview(converted.view(torch.uint8).numpy().data)

    name = str(dtype)[6:]
    return replace(blob, dtype=name, parts=parts, itemsize=item_size(name) or dtype.itemsize)


class BoxReader(NamedTuple):
    """A box of a tensor whose elements lie in row-major order: ``read(offset, view)`` fills ``view`` from there on."""

    box: Box
    read: Callable[[int, memoryview], None]


def assemble(name: str, shape: Shape, itemsize: int, parts: Sequence[BoxReader]) -> Iterator[memoryview]:
    """Yield the bytes of a whole tensor; each view is valid until the next.

    Raises:
        CorruptCheckpointError: the boxes do not make up the tensor.
    """
    check_parts(name, shape, parts)
    if not prod(shape):
        return
    buffer = memoryview(bytearray(min(max(WINDOW, itemsize), prod(shape) * itemsize)))
    for window in windows(shape, max(1, WINDOW // itemsize)):
        view = buffer[: prod(window.shape) * itemsize]
        for part in parts:
            fill(view, window, part, itemsize)
        yield view


def check_parts(name: str, shape: Shape, parts: Sequence[BoxReader]) -> None:
    """Raise CorruptCheckpointError if the boxes do not make up the tensor."""
    if problem := flaw(shape, (part.box for part in parts)):
        raise CorruptCheckpointError(
            f"tensor {name!r}: {problem}: this checkpoint is damaged; use another one", tensor=name
        )


def windows(shape: Shape, limit: int) -> Iterator[Box]:
    """Cut a shape into boxes of at most ``limit`` elements, each a run of the row-major order, in that order."""
    if not shape:
        yield Box((), ())
        return
    dim = next(at for at in range(len(shape)) if prod(shape[at + 1 :]) <= limit)
    rest = shape[dim + 1 :]
    rows = limit // prod(rest)
    for outer in np.ndindex(*shape[:dim]):
        for at in range(0, shape[dim], rows):
            size = min(rows, shape[dim] - at)
            yield Box((*outer, at, *(0 for _ in rest)), (*(1 for _ in outer), size, *rest))


def fill(view: memoryview, window: Box, part: BoxReader, itemsize: int) -> None:
    """Read the overlap of a window and a stored box into ``view``, the memory of the window."""
    common = overlap(window, part.box)
    if common is None:
        return
    # A window is a run of the tensor, so its overlap with a box is a run of the box.
    offset = 0
    for index, start, size in zip(common.start, part.box.start, part.box.shape, strict=True):
        offset = offset * size + index - start
    if common == window:
        part.read(offset * itemsize, view)
        return
    data = bytearray(prod(common.shape) * itemsize)
    part.read(offset * itemsize, memoryview(data))
    spot = tuple(slice(a - b, a - b + n) for a, b, n in zip(common.start, window.start, common.shape, strict=True))
    whole = np.frombuffer(view, np.uint8).reshape(*window.shape, itemsize)
    whole[spot] = np.frombuffer(data, np.uint8).reshape(*common.shape, itemsize)


_BUFFER = 1 << 20  # bytes; a multiple of the block size of storages
Sink = Callable[[memoryview], None]


class ExportFolder:
    """The destination of an export: writes files of known size, durably.

    Args:
        storage: holds the files.
        prefix: directory inside of it, "" for its root.
        overwrite: replace existing files.

    Attributes:
        written: (name, bytes) of every file written so far.
    """

    def __init__(self, storage: Storage, prefix: str = "", *, overwrite: bool = False) -> None:
        self.storage, self.prefix, self.overwrite = storage, prefix, overwrite
        self.written: list[tuple[str, int]] = []

    @property
    def uri(self) -> str:
        """Location of the folder, for messages."""
        return f"{self.storage.uri.rstrip('/')}/{self.prefix}".rstrip("/")

    def path(self, name: str) -> str:
        """Return where a file lies inside the storage."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def check_free(self, *names: str) -> None:
        """Refuse to replace a file.

        Raises:
            CheckpointExistsError: a file exists, and ``overwrite`` is false.
        """
        existing = [name for name in names if not self.overwrite and self.storage.exists(self.path(name))]
        if existing:
            raise CheckpointExistsError(
                f"{self.uri} has {', '.join(existing[:3])} already: pass overwrite=True (--overwrite) to replace it, "
                "or another destination"
            )

    @contextlib.contextmanager
    def create(self, name: str, size: int) -> Iterator[Sink]:
        """Write one file: the body passes its bytes in parts of any length.

        The file has its name only when it is whole; the one that it replaces stays until then.

        Raises:
            CheckpointExistsError: the file exists, and ``overwrite`` is false.
        """
        self.check_free(name)
        path = self.path(name)
        with Blocks(self.storage.replace(path, size) or self.storage.create(path, size)) as sink:
            yield sink
        self.written.append((name, size))

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically."""
        self.check_free(name)
        self.storage.put(self.path(name), data)
        self.written.append((name, len(data)))


class Blocks(contextlib.AbstractContextManager["Blocks"]):
    """Turns parts of any length into the whole blocks that `FileWriter.write` takes; an error aborts the file."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER))  # aligned, so that a disk may take it directly
        self._used = 0

    def __call__(self, view: memoryview) -> None:
        """Take the next bytes."""
        done = 0
        while done < len(view):
            if not self._used and len(view) - done >= _BUFFER:
                whole = (len(view) - done) // _BUFFER * _BUFFER
                self._writer.write(view[done : done + whole])
                done += whole
                continue
            take = min(_BUFFER - self._used, len(view) - done)
            self._buffer[self._used : self._used + take] = view[done : done + take]
            self._used, done = self._used + take, done + take
            if self._used == _BUFFER:
                self._flush()

    def _flush(self) -> None:
        if self._used:
            self._writer.write(self._buffer[: self._used])
            self._used = 0

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._writer.abort()
            return
        try:
            self._flush()
        except BaseException:
            self._writer.abort()
            raise
        self._writer.close()
