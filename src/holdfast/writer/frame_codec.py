"""The one codec of all sockets: length-prefixed JSON with attachments, encoded at once, decoded as it arrives.

A frame is 4 bytes (big endian) of header length, the JSON header, then the attachments one after another; their lengths
are in the header under "$". Nothing here reads or writes: `frames` (blocking, with descriptors), `ranks.link` and the
engines' `Inbox` (both without waiting) do, and give what they got to a `FrameDecoder`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import HoldfastError

__all__ = ["MAX_HEADER_BYTES", "FrameDecoder", "Message", "encode"]

MAX_HEADER_BYTES = 256 << 20
"""Longest JSON header: the index of 100 000 tensors takes about a tenth of it."""
_MAX_ATTACHED_BYTES = 1 << 40
_PREFIX = struct.Struct(">I")
_SMALL = 64 << 10  # pieces below it are put together: each costs 200 bytes by itself
_BEHIND = "$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One received message; whoever takes it owns ``fds``."""

    header: dict[str, Any]
    attachments: tuple[bytes, ...] = ()
    fds: tuple[int, ...] = ()


def encode(header: dict[str, Any], attachments: Sequence[bytes] = ()) -> bytes:
    """Return one frame.

    Args:
        header: JSON-able, without a key "$".
        attachments: bytes that follow the header.
    """
    if attachments:
        header = {**header, _BEHIND: [len(item) for item in attachments]}
    body = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((_PREFIX.pack(len(body)), body, *attachments))


class FrameDecoder:
    """Takes bytes in pieces of any size and gives the messages that are complete.

    Memory follows what has arrived, never what a length says. After an error the stream is lost: close it.

    Args:
        peer: who sends, for messages ("a worker").
        max_header_bytes: longest header that is taken.
        max_attached_bytes: what the attachments of one message may have together; 0 for none.
    """

    def __init__(
        self, peer: str, *, max_header_bytes: int = MAX_HEADER_BYTES, max_attached_bytes: int = _MAX_ATTACHED_BYTES
    ) -> None:
        self._peer = peer
        self._max_header, self._max_attached = max_header_bytes, max_attached_bytes
        self._pieces: list[bytearray | memoryview] = []
        self._fds: list[int] = []
        self._begin()

    def _begin(self) -> None:
        self._wanted = _PREFIX.size
        self._length_known = False
        self._header: dict[str, Any] | None = None
        self._sizes: list[int] = []  # of the attachments that are still to come, the last one first
        self._attachments: list[bytes] = []

    @property
    def wanted(self) -> int:
        """Bytes that are missing of the present part: whoever reads no more never reads beyond a frame."""
        return self._wanted

    @property
    def is_between(self) -> bool:
        """Whether the next byte is the first of a frame."""
        return not (self._pieces or self._length_known)

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> list[Message]:
        """Take what has arrived; returns the messages that it completes.

        Args:
            data: any number of bytes.
            fds: descriptors that came with them; they belong to the first frame of which there are bytes in ``data``.

        Raises:
            HoldfastError: this is no frame, or one that is longer than allowed.
        """
        self._fds += fds
        found: list[Message] = []
        rest = memoryview(data)
        while True:
            piece = rest[: self._wanted]
            if piece:
                self._keep(piece)
                rest = rest[len(piece) :]
                self._wanted -= len(piece)
            if self._wanted:
                return found
            self._take_part(found)

    def drop(self) -> tuple[int, ...]:
        """Forget the frame that has begun; returns its descriptors, which the caller closes."""
        fds = tuple(self._fds)
        self._fds.clear()
        self._pieces.clear()
        self._begin()
        return fds

    def _keep(self, piece: memoryview) -> None:
        if len(piece) == self._wanted or len(piece) >= _SMALL:
            self._pieces.append(piece)
        elif self._pieces and isinstance(self._pieces[-1], bytearray):
            self._pieces[-1] += piece
        else:
            self._pieces.append(bytearray(piece))

    def _take_part(self, found: list[Message]) -> None:
        part = b"".join(self._pieces)
        self._pieces.clear()
        if not self._length_known:
            (self._wanted,) = _PREFIX.unpack(part)
            self._length_known = True
            if self._wanted > self._max_header:
                raise HoldfastError(
                    f"{self._peer} sent a message header of {self._wanted} bytes, more than {self._max_header}: both "
                    "sides must run the same Holdfast"
                )
            return
        if self._header is None:
            self._header = self._read_header(part)
        else:
            self._attachments.append(part)
        if self._sizes:
            self._wanted = self._sizes.pop()
            return
        found.append(Message(header=self._header, attachments=tuple(self._attachments), fds=tuple(self._fds)))
        self._fds.clear()
        self._begin()

    def _read_header(self, part: bytes) -> dict[str, Any]:
        try:
            header = json.loads(part)
        except (ValueError, RecursionError) as error:
            raise self._is_none() from error
        if not isinstance(header, dict):
            raise self._is_none()
        sizes = header.pop(_BEHIND, [])
        if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
            raise self._is_none()
        if (total := sum(sizes)) > self._max_attached or (sizes and not self._max_attached):
            raise HoldfastError(
                f"{self._peer} sent {total} bytes behind a message, more than {self._max_attached}: both sides must "
                "run the same Holdfast"
            )
        self._sizes = sizes[::-1]
        return header

    def _is_none(self) -> HoldfastError:
        return HoldfastError(f"what {self._peer} sent is no message: both sides must run the same Holdfast")
