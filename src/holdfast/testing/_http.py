"""The parts of HTTP/1.1 that a proxy needs: heads, and where bodies end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

__all__ = ["Head", "body_of", "read_head"]

_PIECE = 64 << 10


@dataclass(frozen=True, slots=True)
class Head:
    """First line and headers of a request or an answer.

    Attributes:
        first: first line, without its end.
        headers: (name, value) as they were sent.
    """

    first: str
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str:
        """Return the first header of this name, "" without one."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def to_bytes(self, *, without: tuple[str, ...] = (), add: tuple[tuple[str, str], ...] = ()) -> bytes:
        """Return the head for the wire, with some headers left out and others added."""
        kept = [pair for pair in self.headers if pair[0].lower() not in without]
        lines = [self.first, *(f"{key}: {value}" for key, value in (*kept, *add))]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    @property
    def length(self) -> int | None:
        """The value of Content-Length, None without."""
        text = self.get("content-length")
        return int(text) if text.isdigit() else None

    @property
    def status(self) -> int:
        """Status of an answer."""
        return int(self.first.split(" ", 2)[1])


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """Read a head; None if the other side has closed the connection."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = raw.decode("latin-1")[:-4].split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Head(first, tuple((key.strip(), value.strip()) for key, _, value in pairs))


async def body_of(reader: asyncio.StreamReader, head: Head, *, to_its_end: bool) -> AsyncIterator[bytes]:
    """Yield the body that follows a head, chunk marks included.

    Args:
        reader: the stream of the message.
        head: of the message.
        to_its_end: whether a body without a length ends with the connection (answers), or is none (requests).

    Raises:
        ConnectionError: the body broke off.
    """
    if head.get("transfer-encoding").lower() == "chunked":
        left = 1
        while left:
            line = await reader.readline()
            if not line:
                raise ConnectionResetError("a body broke off")
            left = int(line.partition(b";")[0], 16)
            yield line
            async for piece in _exactly(reader, left + 2):
                yield piece
    elif head.length is not None:
        async for piece in _exactly(reader, head.length):
            yield piece
    elif to_its_end:
        while piece := await reader.read(_PIECE):
            yield piece


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await reader.read(min(_PIECE, size))
        if not piece:
            raise ConnectionResetError("a body broke off")
        size -= len(piece)
        yield piece
