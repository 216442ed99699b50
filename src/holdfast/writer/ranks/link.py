"""One end of a connection of the control channel: frames (`frame_codec`) over a socket that never blocks."""

from __future__ import annotations

import socket
from typing import Any

from holdfast.errors import HoldfastError

from ..frame_codec import FrameDecoder, encode

__all__ = ["MAX_MESSAGE", "Link", "Message"]

MAX_MESSAGE = 64 << 20
_CHUNK = 1 << 18
_TURN_BYTES = 8 << 20  # what one connection may say before the others are heard

Message = dict[str, Any]


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
        self._hello = bytearray()
        self._decoder = FrameDecoder(
            "a rank on the control channel", max_header_bytes=MAX_MESSAGE, max_attached_bytes=0
        )
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
        return self.send_raw(encode(message))

    def send_raw(self, data: bytes) -> bool:
        """Send bytes of the hello (`hello`), or an encoded message, in the manner of `send`."""
        if len(self._outgoing) > 2 * MAX_MESSAGE:
            return False
        self._outgoing += data
        return self.flush()

    def receive_raw(self, size: int) -> bytes | None:
        """Return ``size`` bytes of the hello, b"" while there are not so many; None once the other side is gone.

        Nothing beyond them is read: whoever has not proved to belong to the run has no more memory here.
        """
        try:
            while missing := size - len(self._hello):
                data = self._sock.recv(missing)
                if not data:
                    self.hung_up = True
                    return None
                self._hello += data
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as error:
            self._fail(error)
            return None
        found = bytes(self._hello)
        self._hello.clear()
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
        found: list[Message] = []
        try:
            while data := self._sock.recv(_CHUNK):
                found += [_checked(frame.header) for frame in self._decoder.feed(data)]
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
        return None if ended and not found else found

    def _fail(self, error: OSError) -> None:
        self.hung_up = self.hung_up or isinstance(error, ConnectionResetError | BrokenPipeError)

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._sock.close()


def _checked(message: Message) -> Message:
    if not isinstance(message.get("do"), str):
        raise HoldfastError("what came over the control channel is no message: it does not say what to do")
    return message
