"""Write a checkpoint, or the part of one rank, straight through a storage, in the file layout of Holdfast.

For bytes that arrive tensor by tensor from another format: no writer process, no arena, no snapshot.
`DirectPartWriter` stores the files of one rank; `write_alone` commits a checkpoint that belongs to no run.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.identity import manifest_fields, new_start_id
from holdfast.errors import CheckpointError, CheckpointExistsError, ConfigError, HoldfastError
from holdfast.format.codec import dumps
from holdfast.format.commit import PartSummary, commit, look_before, read_manifest
from holdfast.format.digest import ChunkHasher, DigestFile, bytes_digest, file_digest
from holdfast.format.division import Box
from holdfast.format.index import Index, Piece, TensorEntry
from holdfast.format.manifest import FileEntry
from holdfast.format.names import MANIFEST_NAME, join, save_id_of
from holdfast.format.tensor_file import lay_out, split_by_size
from holdfast.run.names import refuse_run
from holdfast.storage.base import Storage

from .blobs import Blob, Blocks, rows_of

__all__ = ["DirectPartWriter", "Row", "check_free", "write_alone"]


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
        self._digests = DigestFile(rank, save_id)

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
        if tables := self._digests.content:
            self.put(self._digests.path, tables, "digests")
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
        hasher = ChunkHasher()
        with Blocks(self._storage.create(join(self._directory, path), file.size)) as sink:
            hasher.update(file.header)
            sink(memoryview(file.header))
            for number in file.order:
                row = rows[number]
                for view in row.blob.parts():
                    hasher.update(view)
                    sink(view)
                    if self._progress is not None:
                        self._progress(len(view))
                start, shape = (None, None) if row.box is None else (row.box.start, row.box.shape)
                piece = Piece(template, file.offsets[number], row.blob.nbytes, start, shape)
                before = tensors[row.name].pieces if row.name in tensors else ()
                tensors[row.name] = TensorEntry(row.name, row.blob.dtype, row.shape, (*before, piece))
        table = hasher.table
        place, digest = self._digests.add(table), file_digest(table)
        self._entries.append(
            FileEntry(path=path, size=file.size, digest=digest, role="tensors", writer=self._rank, chunks=place)
        )


def check_free(target: Checkpoint, *, overwrite: bool) -> None:
    """Refuse to replace a committed checkpoint, or to write one onto a run, before any work is done.

    Raises:
        CheckpointExistsError: the target is committed already, and ``overwrite`` is false; or it is a run.
    """
    refuse_run(target.storage, target.directory)
    if not overwrite and target.storage.exists(f"{target.directory}/{MANIFEST_NAME}"):
        raise CheckpointExistsError(
            f"{target.uri} is a committed checkpoint already: pass overwrite=True (--overwrite) to replace it, or use "
            "another name"
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
        fields = manifest_fields(
            checkpoint_id=uuid.uuid4().hex,
            step=step,
            epoch=epoch,
            metrics={},
        )
        summary = PartSummary(writer=0, files=(*part.files, state))
        allowed = replaced if overwrite or replaced.etag == "" else None
        commit(target.storage, target.directory, {**fields, "extra": dict(extra or {})}, [summary], overwrite=allowed)
    except BaseException:
        writer.discard()
        raise
