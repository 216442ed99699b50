"""The digests of a checkpoint's files, by which every block that is read is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.errors import CorruptCheckpointError
from holdfast.format.digest import CHUNK, chunk_digests

__all__ = ["Digests"]


@dataclass(slots=True)
class Digests:
    """The digest tables of a checkpoint's files: path -> eight bytes for each 64 KiB chunk."""

    tables: Mapping[str, bytes]

    def fit(self, file: str, first_chunk: int, view: memoryview) -> bool:
        """Tell whether a block of whole chunks is what was written; a file without a table matches nothing."""
        found = chunk_digests(view)
        return found == self.tables.get(file, b"")[8 * first_chunk : 8 * first_chunk + len(found)]

    def check(self, file: str, first_chunk: int, view: memoryview, names: Callable[[int, int], str | None]) -> None:
        """Compare a block of whole chunks with the table.

        Raises:
            CorruptCheckpointError: naming the file, the chunk and the tensor it belongs to.
        """
        if self.fit(file, first_chunk, view):
            return
        table, found = self.tables.get(file, b""), chunk_digests(view)
        for number in range(len(found) // 8):
            at = 8 * (first_chunk + number)
            if found[8 * number : 8 * number + 8] != table[at : at + 8]:
                chunk = first_chunk + number
                tensor = names(chunk * CHUNK, (chunk + 1) * CHUNK)
                where = f"tensor {tensor!r}, " if tensor else ""
                raise CorruptCheckpointError(
                    f"{file}: {where}bytes {chunk * CHUNK}..{(chunk + 1) * CHUNK} are not what was written "
                    "(digest differs): this checkpoint is damaged; use another one, or a copy of this file",
                    file=file,
                    tensor=tensor,
                    chunk=chunk,
                )
