"""Digests: xxh3-64 of every 64 KiB chunk, and xxh3-128 of a file's chunk table.

One pass over the data gives both. Chunks are small because a ranged read has to take whole ones to check them.
xxh3 guards against damage, not against forgery.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest, xxh3_128_hexdigest

from holdfast.errors import CorruptCheckpointError
from holdfast.storage.base import FileReader

CHUNK = 65536
DIGEST_BYTES = 8  # in a chunk table
_CLOSING = b',"digest":"'
_CLOSING_BYTES = len(_CLOSING) + 2 * DIGEST_BYTES + len('"}')
_BLANKS = bytes.maketrans(b"01", b" \t")
_FEW_BLANKS = 16  # that a person or an editor leaves at the end of a file


def num_chunks(size: int) -> int:
    """Return how many chunks a file of ``size`` bytes has."""
    return -(-size // CHUNK)


def table_bytes(size: int) -> int:
    """Return the length of the chunk table of a file of ``size`` bytes."""
    return DIGEST_BYTES * num_chunks(size)


def table_at(tables: bytes, offset: int, size: int) -> bytes:
    """Cut the chunk table of a file of ``size`` bytes out of a digest file; shorter where the digest file ends."""
    return tables[offset : offset + table_bytes(size)]


def digests_name(writer: int, save_id: str) -> str:
    """Name the digest file of a writer: the chunk tables of its files, one after another."""
    return f"digests-{writer:05d}-{save_id}.bin"


def chunk_digests(view: memoryview | bytes) -> bytes:
    """Return eight bytes (little endian) for each chunk of ``view``; the last chunk may be short."""
    view = memoryview(view).cast("B") if len(view) else memoryview(b"")
    # One array at the end: 21 GiB/s on one thread, as fast as joining digests and already little endian.
    table = array("Q", [xxh3_64_intdigest(view[start : start + CHUNK]) for start in range(0, len(view), CHUNK)])
    if sys.byteorder == "big":
        table.byteswap()
    return table.tobytes()


def file_digest(table: bytes) -> str:
    """Return the digest of a file from its chunk table, as ``xxh3:<hex>``."""
    return "xxh3:" + xxh3_128_hexdigest(table)


def digested(reader: FileReader, buffer: memoryview) -> Iterator[tuple[int, memoryview, bytes]]:
    """Read a file through one buffer, of whole chunks: yield where each view begins, the view, and its chunk digests.

    A view is valid until the next one is asked for. `holdfast.copying.sending` reads ahead by other threads.
    """
    for start in range(0, reader.size, len(buffer)):
        view = buffer[: min(len(buffer), reader.size - start)]
        reader.read_into(start, view)
        yield start, view, chunk_digests(view)


def bytes_digest(data: bytes | memoryview) -> str:
    """Return the digest of a small file's content."""
    return file_digest(chunk_digests(data))


def close_object(data: bytes) -> bytes:
    """Close the text of a JSON object (not an empty one) by the digest of the bytes before, as its last key.

    Example:
        >>> close_object(b'{"step":5}')
        b'{"step":5,"digest":"58d003054609f636"}'
    """
    body = data[:-1]
    return body + _CLOSING + xxh3_64_hexdigest(body).encode() + b'"}'


def check_object(data: bytes) -> bool | None:
    """Tell whether the text of a JSON object is what `close_object` made; None if it did not close it."""
    if data[-_CLOSING_BYTES : len(_CLOSING) - _CLOSING_BYTES] != _CLOSING:
        return None
    return data == close_object(data[:-_CLOSING_BYTES] + b"}")


def close_by_blanks(data: bytes) -> bytes:
    """Close JSON by the digest of its bytes, written as 64 blanks: what it says is the same to every reader of JSON.

    Another tool that writes it anew drops the blanks, and with them a digest that would be wrong.
    """
    text = data.rstrip()
    return text + b"\n" + f"{xxh3_64_intdigest(text):064b}".encode().translate(_BLANKS)


def check_blanks(data: bytes) -> bool | None:
    """Tell whether JSON is what `close_by_blanks` made; None if it did not close it."""
    return None if len(data) - len(data.rstrip()) <= _FEW_BLANKS else data == close_by_blanks(data)


def closed_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a file that may be closed by blanks.

    Raises:
        ValueError: it is no JSON object, or differs from its digest.
    """
    if check_blanks(data) is False:
        raise ValueError("its bytes are not what was written: damaged, or edited by hand")
    try:
        return dict(json.loads(data))
    except (RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error


@dataclass(slots=True)
class Digests:
    """The digest tables of a checkpoint's files: path -> eight bytes for each 64 KiB chunk."""

    tables: Mapping[str, bytes]

    def fit(self, file: str, first_chunk: int, view: memoryview) -> bool:
        """Tell whether a block of whole chunks is what was written; a file without a table matches nothing."""
        digests, start = chunk_digests(view), DIGEST_BYTES * first_chunk
        return digests == self.tables.get(file, b"")[start : start + len(digests)]

    def check(self, file: str, first_chunk: int, view: memoryview, names: Callable[[int, int], str | None]) -> None:
        """Compare a block of whole chunks with the table.

        Raises:
            CorruptCheckpointError: naming the file, the chunk and the tensor it belongs to.
        """
        if self.fit(file, first_chunk, view):
            return
        table, digests = self.tables.get(file, b""), chunk_digests(view)
        for chunk, start in enumerate(range(0, len(digests), DIGEST_BYTES), first_chunk):
            at = DIGEST_BYTES * chunk
            if digests[start : start + DIGEST_BYTES] != table[at : at + DIGEST_BYTES]:
                tensor = names(chunk * CHUNK, (chunk + 1) * CHUNK)
                where = f"tensor {tensor!r}, " if tensor else ""
                raise CorruptCheckpointError(
                    f"{file}: {where}bytes {chunk * CHUNK}..{(chunk + 1) * CHUNK} are not what was written "
                    "(digest differs): this checkpoint is damaged; use another one, or a copy of this file",
                    file=file,
                    tensor=tensor,
                    chunk=chunk,
                )
