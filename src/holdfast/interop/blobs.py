"""Tensors as bytes on demand: what exporters and importers pass to each other, and what writes them.

`Blob` has the bytes of a whole tensor in row-major order; `assemble` reads them, window by window, out of the boxes
that the tensor is stored in. `ExportFolder` writes files to any storage; a file gets its final name when it is whole.
`DirectPartWriter` writes the files of one rank in our own layout, straight through a storage: bytes that arrive tensor
by tensor from another format need no writer process, no arena and no snapshot. `write_alone` commits a checkpoint that
belongs to no run.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from holdfast._units import listed
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.pending_saves import manifest_fields, new_start_id
from holdfast.errors import CheckpointError, CheckpointExistsError, ConfigError, CorruptCheckpointError, HoldfastError
from holdfast.format.codec import dumps
from holdfast.format.commit import PartSummary, Replaced, commit, look_before, read_manifest
from holdfast.format.digest import chunk_digests, digests_name, file_digest
from holdfast.format.division import Box, flaw, overlap
from holdfast.format.index import Index, Piece, TensorEntry
from holdfast.format.manifest import FileEntry
from holdfast.format.names import MANIFEST_NAME, join, save_id_of
from holdfast.format.tensor_file import TensorRow, item_size, lay_out, split_by_size
from holdfast.run.names import RUN_FILE
from holdfast.storage.base import FileWriter, Storage

if TYPE_CHECKING:
    import torch

# Names of files in formats of others: of torch.distributed.checkpoint, and of Transformers.
METADATA_NAME, WEIGHTS_NAME, INDEX_NAME = ".metadata", "model.safetensors", "model.safetensors.index.json"

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


# ---- files of an export


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

    def check_foreign(self) -> None:
        """Refuse a run and a checkpoint as the folder: files of an export could take the place of theirs.

        Raises:
            CheckpointExistsError: it is one.
        """
        if any(self.storage.exists(self.path(name)) for name in (RUN_FILE, MANIFEST_NAME)):
            raise CheckpointExistsError(
                f"{self.uri} is a run or a checkpoint of Holdfast, and an export is neither: give a folder of its own"
            )

    def check_free(self, *names: str) -> None:
        """Refuse to replace a file.

        Raises:
            CheckpointExistsError: a file exists, and ``overwrite`` is false.
        """
        existing = [name for name in names if not self.overwrite and self.storage.exists(self.path(name))]
        if existing:
            raise CheckpointExistsError(
                f"{self.uri} has {listed(existing, 3)} already: pass overwrite=True (--overwrite) to replace it, "
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
    """Turns parts of any length into the whole blocks that `FileWriter.write` takes; an error aborts the file.

    Args:
        writer: of the file, which is closed at the end.
        see: called with each block, of whole MiB but for the last.
    """

    def __init__(self, writer: FileWriter, see: Callable[[memoryview], object] = lambda block: None) -> None:
        self._writer, self._see = writer, see
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER))  # aligned, so that a disk may take it directly
        self._used = 0

    def __call__(self, view: memoryview) -> None:
        """Take the next bytes."""
        done = 0
        while done < len(view):
            if not self._used and len(view) - done >= _BUFFER:
                whole = (len(view) - done) // _BUFFER * _BUFFER
                self._write(view[done : done + whole])
                done += whole
                continue
            take = min(_BUFFER - self._used, len(view) - done)
            self._buffer[self._used : self._used + take] = view[done : done + take]
            self._used, done = self._used + take, done + take
            if self._used == _BUFFER:
                self._write(self._buffer)
                self._used = 0

    def _write(self, block: memoryview) -> None:
        self._see(block)
        self._writer.write(block)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._writer.abort()
            return
        try:
            if self._used:
                self._write(self._buffer[: self._used])
        except BaseException:
            self._writer.abort()
            raise
        self._writer.close()


# ---- files of a checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A tensor, or a box of a tensor, to write.

    Attributes:
        name: name of the tensor in the state.
        blob: its bytes; the shape is that of the box.
        shape: shape of the whole tensor.
        box: the part of the tensor; None for the whole.
    """

    name: str
    blob: Blob
    shape: tuple[int, ...]
    box: Box | None = None


class DirectPartWriter:
    """Writes the files of one rank: safetensors, digests, index, and on one of the ranks the structure.

    Args:
        storage: holds the checkpoint.
        directory: directory of the checkpoint inside the storage.
        save_id: id of this rank's files; ranks need not agree on it.
        rank: the writing rank.
        progress: called with the bytes of tensors just written.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        save_id: str,
        *,
        rank: int = 0,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._progress = progress
        self._storage, self._directory, self._save_id, self._rank = storage, directory, save_id, rank
        self._entries: list[FileEntry] = []
        self._digests_path, self._tables = digests_name(rank, save_id), bytearray()

    def write(self, rows: list[Row], aliases: Mapping[str, str]) -> PartSummary:
        """Write all tensors, their index and digests; durable on return.

        Args:
            rows: the tensors in any order; a tensor may have several boxes.
            aliases: name of a tied tensor -> name of the tensor it is stored as.

        Raises:
            ConfigError: two tensors have one name; nothing is written.
        """
        first: dict[str, Row] = {}
        for row in rows:
            known = first.setdefault(row.name, row)
            is_box = row.box is not None and known.box is not None
            if known is not row and not (is_box and (known.shape, known.blob.dtype) == (row.shape, row.blob.dtype)):
                raise ConfigError(f"two tensors are called {row.name!r}: give one of them another name")
        tensors: dict[str, TensorEntry] = {}
        files: list[str] = []
        for label, members in self._groups(rows):
            template = f"{label}-{{save_id}}.safetensors"
            files.append(template)
            self._tensors(template, members, tensors)
        tied = {name: original for name, original in aliases.items() if original in tensors}
        index = Index(writer=self._rank, files=tuple(files), tensors=tensors, aliases=tied)
        self.put(f"index-{self._rank:05d}-{self._save_id}.json", index.to_bytes(), "index")
        if self._tables:
            self.put(self._digests_path, bytes(self._tables), "digests")
        return PartSummary(writer=self._rank, files=tuple(self._entries))

    def state(self, tree: bytes) -> FileEntry:
        """Write the structure (typed JSON)."""
        return self.put(f"state-{self._save_id}.json", tree, "state")

    def put(self, name: str, data: bytes, role: str) -> FileEntry:
        """Write a small file."""
        with Blocks(self._storage.create(join(self._directory, name), len(data))) as sink:
            sink(memoryview(data))
        entry = FileEntry.of_small(name, data, role=role, writer=self._rank)
        self._entries.append(entry)
        return entry

    def discard(self) -> None:
        """Remove the written files after a failure, unless a manifest lists them by now. Ignores errors."""
        with suppress(HoldfastError):
            try:
                listed = {entry.path for entry in read_manifest(self._storage, self._directory).files}
            except CheckpointError:
                listed = set()
            skip = len(self._directory) + 1 if self._directory else 0
            names = [info.path[skip:] for info in self._storage.list(self._directory, recursive=False)]
            own = {name for name in names if save_id_of(name) == self._save_id}
            if not own & listed:
                for name in sorted(own):
                    self._storage.delete(join(self._directory, name))

    def _groups(self, rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
        """Assign tensors to files: one for each item of the state, and more where it would grow too large."""
        items: dict[str, list[Row]] = {}
        for row in rows:
            items.setdefault(row.name.partition("/")[0] if "/" in row.name else "state", []).append(row)
        taken: set[str] = set()
        for item, members in items.items():
            stem = re.sub(r"[^A-Za-z0-9_.-]", "_", item).lstrip(".")[:64] or "state"
            stem = f"{stem}.{len(taken)}" if stem in taken else stem
            taken.add(stem)
            parts = split_by_size([row.blob.nbytes for row in members], self._storage.traits.max_file_bytes)
            for number, part in enumerate(parts):
                label = f"{stem}-{self._rank:05d}" + (f".part{number:02d}" if number else "")
                yield label, [members[position] for position in part]

    def _tensors(self, template: str, rows: list[Row], tensors: dict[str, TensorEntry]) -> None:
        file = lay_out(rows_of((row.name.partition("/")[2] or row.name, row.blob) for row in rows))
        path = template.replace("{save_id}", self._save_id)
        table = bytearray()
        writer = self._storage.create(join(self._directory, path), file.size)
        with Blocks(writer, lambda block: table.extend(chunk_digests(block))) as sink:
            sink(memoryview(file.header))
            for number in file.order:
                row = rows[number]
                for view in row.blob.parts():
                    sink(view)
                    if self._progress is not None:
                        self._progress(len(view))
                start, shape = (None, None) if row.box is None else (row.box.start, row.box.shape)
                piece = Piece(template, file.offsets[number], row.blob.nbytes, start, shape)
                before = tensors[row.name].pieces if row.name in tensors else ()
                tensors[row.name] = TensorEntry(row.name, row.blob.dtype, row.shape, (*before, piece))
        place, digest = (self._digests_path, len(self._tables)), file_digest(bytes(table))
        self._tables += table
        self._entries.append(
            FileEntry(path=path, size=file.size, digest=digest, role="tensors", writer=self._rank, chunks=place)
        )


def write_alone(
    target: Checkpoint,
    rows: list[Row],
    aliases: Mapping[str, str],
    tree: Any,
    *,
    step: int | None = None,
    epoch: float | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write and commit a checkpoint; durable on return. After a failure the target is as before.

    Args:
        target: the checkpoint to write.
        rows: the tensors.
        aliases: name of a tied tensor -> name of the tensor it is stored as.
        tree: the structure as typed JSON.
        step: training step to record.
        epoch: epoch to record.
        extra: plain data for the manifest.
        overwrite: replace a committed checkpoint.
        progress: called with the bytes of tensors just written.

    Raises:
        CheckpointExistsError: the target is committed already, and ``overwrite`` is false.
    """
    # No lease is held here: files that other writers left, or have not committed yet, are removed after this commit,
    # which also keeps those writers from committing.
    replaced = look_before(target.storage, target.directory)
    writer = DirectPartWriter(target.storage, target.directory, f"{new_start_id()}-1", progress=progress)
    try:
        part = writer.write(rows, aliases)
        state = writer.state(dumps(tree))
        part = PartSummary(writer=0, files=(*part.files, state))
        commit_alone(target, [part], replaced, overwrite=overwrite, step=step, epoch=epoch, extra=extra)
    except BaseException:
        writer.discard()
        raise


def commit_alone(
    target: Checkpoint,
    parts: Sequence[PartSummary],
    before: Replaced,
    *,
    overwrite: bool,
    step: int | None,
    epoch: float | None = None,
    metrics: Mapping[str, Any] | None = None,
    world_size: int = 1,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Commit what all ranks have written of a checkpoint that belongs to no run, as `write_alone` does.

    ``before`` is what was there before the first of these files.
    """
    fields = manifest_fields(
        checkpoint_id=uuid.uuid4().hex, step=step, epoch=epoch, metrics=metrics or {}, world_size=world_size
    )
    replaced = before if overwrite or before.etag == "" else None
    commit(target.storage, target.directory, {**fields, "extra": dict(extra or {})}, parts, overwrite=replaced)
