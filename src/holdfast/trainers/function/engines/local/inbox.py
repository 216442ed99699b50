"""What a `Channel`'s other end has sent, read without ever waiting: for drivers that watch many of them."""

from __future__ import annotations

import socket

from holdfast.errors import HoldfastError
from holdfast.writer.frame_codec import FrameDecoder, Message

__all__ = ["Inbox"]

_READ = 1 << 20
_CHUNK = 1 << 18


class Inbox:
    """Takes what a socket has and gives the messages that are complete. No descriptors travel this way.

    Attributes:
        ended: the stream is at its end, or nothing after this can be understood.
        broken: why nothing can be understood; "" as long as all could.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = FrameDecoder("a worker")
        self.ended = False
        self.broken = ""

    def read(self) -> list[Message]:
        """Return the messages completed by what is there now, after at most about 1 MiB; never waits.

        Sets `ended` at the end of the stream; an incomplete message before it is dropped. So it does where what was
        sent does not come from Holdfast, and says so in `broken`: one worker's fault is not that of its reader.
        """
        messages: list[Message] = []
        taken = 0
        while taken < _READ and not self.ended:
            try:
                data = self._sock.recv(_CHUNK, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:  # reset by a dead peer
                data = b""
            self.ended = not data
            taken += len(data)
            try:
                messages += self._decoder.feed(data)
            except HoldfastError as error:
                self.ended, self.broken = True, str(error)
        return messages
