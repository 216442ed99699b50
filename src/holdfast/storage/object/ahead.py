"""Read ranges of an object before they are wanted: for many small reads in order and slow answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

__all__ = ["Ahead"]

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
