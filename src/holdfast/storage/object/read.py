"""Read an object: parallel ranged reads with bounded memory, of the version that was opened. And listings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from holdfast._fork import after_fork_in_child
from holdfast.errors import StorageError

from ..base import FileReader, check_range
from .client import BucketClient
from .errors import Errors, ShortAnswerError, again_if_broken, status_of

__all__ = ["ObjectReader", "list_all", "open_reader", "read_version"]

_RANGE_BYTES = 8 << 20
_NUM_RANGES = 12  # asked for at once, in this process
_FIRST_BYTES = 128 << 10
"""Bytes that opening reads: nearly every manifest, index and report is whole with that, in one request."""

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _readers() -> ThreadPoolExecutor:
    """Return the threads that read ranges, shared by the process so that their memory is bounded too."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_NUM_RANGES, thread_name_prefix="holdfast-ranges")
        return _pool


@after_fork_in_child
def _after_fork_in_child() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


def open_reader(client: BucketClient, key: str, errors: Errors, path: str) -> ObjectReader:
    """Ask for the beginning of an object: the answer tells its size and version, too.

    Args:
        client: of the bucket.
        key: of the object.
        errors: translates what the client raises.
        path: the object, for messages.
    """
    with errors("read"):
        first, meta = again_if_broken(lambda: _first(client, key, path))
    return ObjectReader(client, key, errors, path, first=first, size=meta["size"], etag=meta.get("e_tag"))


def read_version(client: BucketClient, key: str, path: str) -> tuple[bytes, Any]:
    """Return all bytes of one version of an object, and its metadata; a big object takes two requests."""
    first, meta = again_if_broken(lambda: _first(client, key, path))
    if len(first) == meta["size"]:
        return first, meta

    def get() -> tuple[bytes, Any]:
        answer = client.obs.get(client.store, key)
        data = bytes(answer.bytes())
        if len(data) != meta["size"] and answer.meta.get("e_tag") == meta.get("e_tag"):
            raise ShortAnswerError(f"cannot read {path}: the storage sent {len(data)} of {meta['size']} bytes")
        return data, answer.meta

    return again_if_broken(get)


def _first(client: BucketClient, key: str, path: str) -> tuple[bytes, Any]:
    obs, store = client.obs, client.store
    try:
        answer = obs.get(store, key, options={"range": (0, _FIRST_BYTES)})
    except Exception as error:
        # An empty object has no ranges: most servers refuse the request, others send an empty part.
        if status_of(error) != 416 and "only 0 bytes long" not in str(error):
            raise
        return b"", obs.head(store, key)
    first, meta = bytes(answer.bytes()), answer.meta
    if len(first) != min(_FIRST_BYTES, meta["size"]):
        raise ShortAnswerError(f"cannot read {path}: the storage sent {len(first)} of {meta['size']} bytes")
    return first, meta


def list_all(client: BucketClient, base: str) -> Iterator[Any]:
    """Yield the metadata of each object below a prefix; after a break the listing goes on behind the last object."""
    last: str | None = None
    pages = client.obs.list(client.store, base or None)
    broken = False

    def next_page() -> Any:
        nonlocal pages, broken
        if broken:
            pages, broken = client.obs.list(client.store, base or None, offset=last), False
        try:
            return next(pages, None)
        except Exception:
            broken = True
            raise

    while (page := again_if_broken(next_page)) is not None:
        for meta in page:
            last = meta["path"]
            yield meta


class ObjectReader(FileReader):
    """Reads ranges of the version of an object that was opened, several at once."""

    ahead_bytes = 8 * _RANGE_BYTES

    def __init__(
        self, client: BucketClient, key: str, errors: Errors, path: str, *, first: bytes, size: int, etag: str | None
    ) -> None:
        self._client, self._key, self._errors, self._path = client, key, errors, path
        self._first, self._etag, self.size = first, etag, size
        self._ahead = Ahead(self._read_range, _readers)

    def will_read(self, offset: int, size: int) -> None:
        """Begin to read a range; `read_into` takes the bytes that have arrived."""
        known = min(max(0, len(self._first) - offset), size)
        self._ahead.ask(offset + known, size - known)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` by parallel requests of at most 8 MiB."""
        target = view.cast("B")
        end = offset + len(target)
        check_range(self._path, size=self.size, offset=offset, nbytes=len(target))
        known = min(end, len(self._first)) - offset
        if known > 0:
            target[:known] = self._first[offset : offset + known]
            offset, target = offset + known, target[known:]
        taken = self._ahead.take(offset, target)
        offset, target = offset + taken, target[taken:]
        if not len(target):
            return
        if len(target) <= _RANGE_BYTES:
            self._read_range(offset, target)
            return
        pool = _readers()
        pieces = [
            pool.submit(self._read_range, begin, target[begin - offset : min(begin + _RANGE_BYTES, end) - offset])
            for begin in range(offset, end, _RANGE_BYTES)
        ]
        wait(pieces)  # each ends: every request has its deadline
        for piece in pieces:
            piece.result()

    def _fetch(self, start: int, end: int) -> Any:
        asked: dict[str, Any] = {"range": (start, end)}
        if self._etag is not None:
            asked["if_match"] = self._etag
        answer = self._client.obs.get(self._client.store, self._key, options=asked)
        if self._etag is not None and answer.meta.get("e_tag") not in (None, self._etag):
            raise StorageError(f"cannot read {self._path}: it was replaced while it was read; open it again")
        return answer.stream(min_chunk_size=1 << 20)

    def _read_range(self, offset: int, target: memoryview) -> None:
        at = 0

        def go_on() -> None:
            nonlocal at
            # Chunk by chunk as they arrive: an answer is never held twice. After a break the read goes on from there.
            for chunk in self._fetch(offset + at, offset + len(target)) if at < len(target) else ():
                data = memoryview(chunk)
                if at + len(data) > len(target):
                    raise StorageError(f"cannot read {self._path}: the storage sent more than was asked for")
                target[at : at + len(data)] = data
                at += len(data)
            if at < len(target):
                raise ShortAnswerError(
                    f"cannot read {self._path}: the storage sent {at} of {len(target)} bytes at {offset}"
                )

        with self._errors("read"):
            again_if_broken(go_on)

    def close(self) -> None:
        """Free the bytes that were read when it was opened, and ahead."""
        self._first = b""
        self._ahead.close()


_PIECE = 8 << 20
_MAX_BYTES = 96 << 20  # of one object; further ranges are read when they are wanted


@dataclass(slots=True)
class _Piece:
    start: int
    buffer: bytearray
    size: int
    arrived: Future[None]
    left: int  # bytes that no reader has taken
    users: int = 0  # threads that wait for it or copy from it


class Ahead:
    """Reads ahead in the order of the hints; each reader has its own.

    Args:
        read: fills a view from an offset on.
        pool: returns the threads that read.
    """

    def __init__(self, read: Callable[[int, memoryview], None], pool: Callable[[], ThreadPoolExecutor]) -> None:
        self._read, self._pool = read, pool
        self._pieces: list[_Piece] = []
        self._free: list[bytearray] = []
        self._lock = threading.Lock()

    def ask(self, offset: int, size: int) -> None:
        """Begin to read a range, as far as the bound of memory lets it."""
        with self._lock:
            for start in range(offset, offset + size, _PIECE):
                if _PIECE * (len(self._pieces) + 1) > _MAX_BYTES:
                    return
                length = min(_PIECE, offset + size - start)
                buffer = self._free.pop() if self._free else bytearray(_PIECE)
                arrived = self._pool().submit(self._read, start, memoryview(buffer)[:length])
                self._pieces.append(_Piece(start, buffer, length, arrived, length))

    def take(self, offset: int, target: memoryview) -> int:
        """Fill the head of ``target`` with bytes read ahead; return their number."""
        done = 0
        while done < len(target):
            piece = self._enter(offset + done)
            if piece is None:
                break
            length = 0
            try:
                if piece.arrived.exception() is not None:
                    break  # the caller reads the range anew, and gets the error
                first = offset + done - piece.start
                length = min(piece.size - first, len(target) - done)
                target[done : done + length] = memoryview(piece.buffer)[first : first + length]
                done += length
            finally:
                self._leave(piece, length or piece.size)
        return done

    def close(self) -> None:
        """Drop all ranges; requests under way end by themselves."""
        with self._lock:
            for piece in self._pieces:
                piece.arrived.cancel()
            self._pieces, self._free = [], []

    def _enter(self, offset: int) -> _Piece | None:
        with self._lock:
            piece = next((held for held in self._pieces if held.start <= offset < held.start + held.size), None)
            if piece is not None:
                piece.users += 1
            return piece

    def _leave(self, piece: _Piece, taken: int) -> None:
        with self._lock:
            piece.users -= 1
            piece.left -= taken
            if piece.left <= 0 and piece in self._pieces:
                self._pieces.remove(piece)
            if piece.left <= 0 and not piece.users:
                self._free.append(piece.buffer)
