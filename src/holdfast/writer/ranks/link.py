"""One end of a connection of the control channel: length-prefixed JSON over a socket that never blocks."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from holdfast.errors import HoldfastError

__all__ = ["MAX_MESSAGE", "Link", "Message", "framed"]

MAX_MESSAGE = 64 << 20
_PREFIX = struct.Struct(">I")
_CHUNK = 1 << 18
_TURN_BYTES = 8 << 20  # what one connection may say before the others are heard

Message = dict[str, Any]


def framed(message: Message) -> bytes:
    """Return a message as it travels: made once where many get it."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _PREFIX.pack(len(body)) + body


class Link:
    """Belongs to one thread, which waits for the socket with a selector.

    Args:
        sock: connected (or connecting).

    Attributes:
        hung_up: the system of the other side has closed the connection, in order or not; False as long as it may be
            the network that fails.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.hung_up = False

    def fileno(self) -> int:
        """Descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        """True while something waits for the socket to take it."""
        return bool(self._outgoing)

    def send(self, message: Message) -> bool:
        """Send, or keep for `flush`; False when the other side is gone, or takes nothing any more."""
        return self.send_raw(framed(message))

    def send_raw(self, data: bytes) -> bool:
        """Send bytes of the hello (`hello`), or a message that is `framed`, in the manner of `send`."""
        if len(self._outgoing) > 2 * MAX_MESSAGE:
            return False
        self._outgoing += data
        return self.flush()

    def receive_raw(self, size: int) -> bytes | None:
        """Return ``size`` bytes of the hello, b"" while there are not so many; None once the other side is gone.

        Nothing beyond them is read: whoever has not proved to belong to the run has no more memory here.
        """
        try:
            while missing := size - len(self._incoming):
                data = self._sock.recv(missing)
                if not data:
                    self.hung_up = True
                    return None
                self._incoming += data
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as error:
            self._fail(error)
            return None
        found = bytes(self._incoming)
        self._incoming.clear()
        return found

    def flush(self) -> bool:
        """Send what the socket takes; False when the other side is gone."""
        while self._outgoing:
            try:
                sent = self._sock.send(self._outgoing)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError as error:
                self._fail(error)
                return False
            del self._outgoing[:sent]
        return True

    def receive(self) -> list[Message] | None:
        """Return the messages that have come; None once the other side is gone and there are no more of them.

        Raises:
            HoldfastError: it speaks another language.
        """
        ended, taken = False, 0
        try:
            while data := self._sock.recv(_CHUNK):
                self._incoming += data
                taken += len(data)
                if len(data) < _CHUNK or taken >= _TURN_BYTES:
                    break
            else:
                ended = self.hung_up = True
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._fail(error)
            ended = True
        found = self._messages()
        return None if ended and not found else found

    def _fail(self, error: OSError) -> None:
        self.hung_up = self.hung_up or isinstance(error, ConnectionResetError | BrokenPipeError)

    def _messages(self) -> list[Message]:
        found = []
        incoming = self._incoming
        start = 0
        while len(incoming) - start >= _PREFIX.size:
            (length,) = _PREFIX.unpack_from(incoming, start)
            if length > MAX_MESSAGE:
                raise HoldfastError(f"a message of {length} bytes on the control channel")
            end = start + _PREFIX.size + length
            if end > len(incoming):
                break
            try:
                message = json.loads(incoming[start + _PREFIX.size : end])
            except (ValueError, RecursionError) as error:
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
