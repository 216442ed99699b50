"""Write what one rank has of a checkpoint straight through a storage, in the file layout of Holdfast.

For bytes that come one tensor at a time from somewhere else: no writer process, no arena, no snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from holdfast.errors import CheckpointError, HoldfastError
from holdfast.format.boxes import Box
from holdfast.format.commit import PartSummary, read_manifest
from holdfast.format.digest import ChunkHasher, bytes_digest, file_digest
from holdfast.format.index import Index, Piece, TensorEntry
from holdfast.format.layout import header_bytes, order_key
from holdfast.format.manifest import FileEntry
from holdfast.format.names import join, save_id_of
from holdfast.storage.base import Storage

from .blobs import Blob
from .sink import Blocks

__all__ = ["DirectPartWriter", "Row"]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A tensor, or a box of one, to be written.

    Attributes:
        name: of the tensor, in the state.
        blob: its bytes; the shape is that of the box.
        shape: of the whole tensor.
        box: which part it is; None for all of it.
    """

    name: str
    blob: Blob
    shape: tuple[int, ...]
    box: Box | None = None


class DirectPartWriter:
    """The files of one rank: safetensors, digests, index, and on one rank the structure.

    Args:
        storage: holds the checkpoint.
        directory: of the checkpoint, inside the storage.
        save_id: of this rank alone, so that ranks need not agree on one.
        rank: the writing rank.
        progress: told the bytes of tensors just written.
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
        self._tables = bytearray()
        self._digests = f"digests-{rank:05d}-{save_id}.bin"

    def write(self, rows: list[Row], aliases: Mapping[str, str]) -> PartSummary:
        """Write all tensors, their index and digests; durable on return.

        Args:
            rows: in any order; of one tensor there may be several boxes.
            aliases: name of a tied tensor -> name of the one it is stored as.
        """
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
            self.put(self._digests, bytes(self._tables), "digests")
        return PartSummary(writer=self._rank, files=tuple(self._entries))

    def state(self, tree: bytes) -> FileEntry:
        """Write the structure (typed JSON)."""
        return self.put(f"state-{self._save_id}.json", tree, "state")

    def put(self, name: str, data: bytes, role: str) -> FileEntry:
        """Write a small file."""
        with Blocks(self._storage.create(join(self._directory, name), len(data))) as sink:
            sink(memoryview(data))
        entry = FileEntry(path=name, size=len(data), digest=bytes_digest(data), role=role, writer=self._rank)
        self._entries.append(entry)
        return entry

    def discard(self) -> None:
        """Remove what was written, after a failure, unless a manifest has it by now. What fails here stays."""
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
        """Assign tensors to files: one for each item of the state, and more where they would grow too large."""
        items: dict[str, list[Row]] = {}
        for row in rows:
            items.setdefault(row.name.partition("/")[0] if "/" in row.name else "state", []).append(row)
        taken: set[str] = set()
        for item, members in items.items():
            stem = re.sub(r"[^A-Za-z0-9_.-]", "_", item).lstrip(".")[:64] or "state"
            stem = f"{stem}.{len(taken)}" if stem in taken else stem
            taken.add(stem)
            for number, part in enumerate(_parts(members, self._storage.max_file_bytes)):
                yield f"{stem}-{self._rank:05d}" + (f".part{number:02d}" if number else ""), part

    def _tensors(self, template: str, rows: list[Row], tensors: dict[str, TensorEntry]) -> None:
        rows = sorted(rows, key=lambda row: order_key(row.blob.dtype))
        header = header_bytes(
            [(row.name.partition("/")[2] or row.name, row.blob.dtype, row.blob.shape, row.blob.nbytes) for row in rows],
            {"format": "pt"},
        )
        path = template.replace("{save_id}", self._save_id)
        size = len(header) + sum(row.blob.nbytes for row in rows)
        hasher = ChunkHasher()
        offset = len(header)
        with Blocks(self._storage.create(join(self._directory, path), size)) as sink:
            hasher.update(header)
            sink(memoryview(header))
            for row in rows:
                for view in row.blob.parts():
                    hasher.update(view)
                    sink(view)
                    if self._progress is not None:
                        self._progress(len(view))
                start, shape = (None, None) if row.box is None else (row.box.start, row.box.shape)
                piece = Piece(template, offset, row.blob.nbytes, start, shape)
                before = tensors[row.name].pieces if row.name in tensors else ()
                tensors[row.name] = TensorEntry(row.name, row.blob.dtype, row.shape, (*before, piece))
                offset += row.blob.nbytes
        table = hasher.table
        place = (self._digests, len(self._tables))
        digest = file_digest(table)
        self._tables += table
        self._entries.append(
            FileEntry(path=path, size=size, digest=digest, role="tensors", writer=self._rank, chunks=place)
        )


def _parts(rows: list[Row], limit: int) -> Iterator[list[Row]]:
    part: list[Row] = []
    total = 0
    for row in rows:
        if part and total + row.blob.nbytes > limit:
            yield part
            part, total = [], 0
        part.append(row)
        total += row.blob.nbytes
    if part:
        yield part
