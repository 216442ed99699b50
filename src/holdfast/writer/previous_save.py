"""What the previous save of this writer contained: the base of reuse and of unchanged ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.errors import HoldfastError
from holdfast.format.digest import CHUNK, file_digest
from holdfast.format.manifest import Manifest
from holdfast.storage.base import Storage

__all__ = ["MAX_REUSES", "Known", "Previous", "read_previous", "unchanged_runs"]

# Every tenth save writes again, so that a checkpoint and its fallback do not share all their rot.
MAX_REUSES = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One file of the previous save.

    Attributes:
        path: name inside its directory.
        size: length in bytes.
        table: its chunk digests.
        reuses: how many saves in a row have linked these bytes.
        repeated: the save before had the same bytes at this place.
    """

    path: str
    size: int
    table: bytes
    reuses: int = 0
    repeated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Previous:
    """The files of the previous save in the order of its plan."""

    directory: str = ""
    files: tuple[Known, ...] = field(default=())

    def at(self, number: int, size: int) -> Known | None:
        """Give the file at the same place of the plan if the layout (its size) is the same."""
        if number < len(self.files) and self.files[number].size == size:
            return self.files[number]
        return None

    def same(self, size: int, table: bytes) -> Known | None:
        """Find a file of the same bytes that may be reused once more."""
        for known in self.files:
            if known.size == size and known.reuses < MAX_REUSES and known.table == table:
                return known
        return None


def read_previous(storage: Storage, directory: str, manifest: Manifest, writer: int) -> Previous:
    """Rebuild what an earlier life wrote from its manifest and digest table; empty when that cannot be read.

    How often its linked files had been linked is not known, so those are written again.
    """
    known = []
    tables: dict[str, bytes] = {}
    try:
        for entry in manifest.files:
            if entry.writer != writer or entry.chunks is None:
                continue
            path, offset = entry.chunks
            if path not in tables:
                tables[path] = storage.read(f"{directory}/{path}")
            length = 8 * -(-entry.size // CHUNK)
            table = tables[path][offset : offset + length]
            if file_digest(table) != entry.digest:
                return Previous()
            reuses = MAX_REUSES if entry.reused_from else 0
            known.append(Known(path=entry.path, size=entry.size, table=table, reuses=reuses))
    except HoldfastError:
        return Previous()
    return Previous(directory=directory, files=tuple(known))


def unchanged_runs(tables: Sequence[bytes], sizes: Sequence[int], previous: Previous) -> list[tuple[int, int, int]]:
    """List [file number, offset, nbytes] runs of equal chunks in files that changed, but not wholly."""
    runs: list[tuple[int, int, int]] = []
    for number, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        known = previous.at(number, size)
        if known is None or known.table == table:
            continue
        old, new = memoryview(known.table).cast("Q"), memoryview(table).cast("Q")
        start = -1
        for chunk in range(len(new) + 1):
            equal = chunk < len(new) and old[chunk] == new[chunk]
            if equal and start < 0:
                start = chunk
            elif not equal and start >= 0:
                runs.append((number, start * CHUNK, min(chunk * CHUNK, size) - start * CHUNK))
                start = -1
    return runs
