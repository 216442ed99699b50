"""One end of a connection of the control channel: length-prefixed JSON over a socket that never blocks."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from holdfast.errors import HoldfastError

__all__ = ["MAX_MESSAGE", "Link", "Message"]

MAX_MESSAGE = 64 << 20
_PREFIX = struct.Struct(">I")
_CHUNK = 1 << 18

Message = dict[str, Any]


class Link:
    """Belongs to one thread, which waits for the socket with a selector.

    Args:
        sock: connected (or connecting).
        max_message: largest message taken from the other side, in bytes; small until it has proved who it is.
    """

    def __init__(self, sock: socket.socket, *, max_message: int = MAX_MESSAGE) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.max_message = max_message
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """Descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        """True while something waits for the socket to take it."""
        return bool(self._outgoing)

    def send(self, message: Message) -> bool:
        """Send, or keep for `flush`; False when the other side is gone."""
        body = json.dumps(message, separators=(",", ":")).encode()
        self._outgoing += _PREFIX.pack(len(body)) + body
        return self.flush()

    def flush(self) -> bool:
        """Send what the socket takes; False when the other side is gone."""
        while self._outgoing:
            try:
                sent = self._sock.send(self._outgoing)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                return False
            del self._outgoing[:sent]
        return True

    def receive(self) -> list[Message] | None:
        """Return the messages that have come; None once the other side is gone and there are no more of them.

        Raises:
            HoldfastError: it speaks another language.
        """
        ended = False
        try:
            while data := self._sock.recv(_CHUNK):
                self._incoming += data
                if len(data) < _CHUNK:
                    break
            else:
                ended = True
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            ended = True
        found = self._messages()
        return None if ended and not found else found

    def _messages(self) -> list[Message]:
        found = []
        incoming = self._incoming
        start = 0
        while len(incoming) - start >= _PREFIX.size:
            (length,) = _PREFIX.unpack_from(incoming, start)
            if length > self.max_message:
                raise HoldfastError(f"a message of {length} bytes on the control channel")
            end = start + _PREFIX.size + length
            if end > len(incoming):
                break
            try:
                message = json.loads(incoming[start + _PREFIX.size : end])
            except ValueError as error:
                raise HoldfastError("what came over the control channel is no message") from error
            if not isinstance(message, dict) or not isinstance(message.get("do"), str):
                raise HoldfastError("what came over the control channel is no message")
            found.append(message)
            start = end
        del incoming[:start]
        return found

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._sock.close()
