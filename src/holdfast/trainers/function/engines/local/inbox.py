"""Messages out of a stream that arrives in pieces: reading a `Channel`'s other end without ever waiting."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.writer.frames import Message

__all__ = ["Inbox"]

_MAX_HEADER = 256 << 20
_READ = 1 << 20


class Inbox:
    """Takes what a socket has and gives the messages that are complete.

    One part (length, header, attachment) is collected at a time, so that a large attachment is copied once.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._header: dict[str, Any] | None = None
        self._sizes: list[int] = []
        self._attachments: list[bytes] = []
        self._part = bytearray(4)
        self._filled = 0
        self._length_known = False
        self.ended = False

    def read(self) -> list[Message]:
        """Return the messages completed by what is there now, after at most about 1 MiB; never waits.

        Sets `ended` at the end of the stream; an incomplete message before it is dropped.
        """
        messages: list[Message] = []
        taken = 0
        while taken < _READ and not self.ended:
            if self._filled < len(self._part):
                view = memoryview(self._part)[self._filled :]
                try:
                    received = self._sock.recv_into(view, min(len(view), _READ), socket.MSG_DONTWAIT)
                except (BlockingIOError, InterruptedError):
                    break
                except OSError:  # reset by a dead peer
                    received = 0
                if not received:
                    self.ended = True
                    break
                self._filled += received
                taken += received
            if self._filled == len(self._part):
                self._complete(messages)
        return messages

    def _complete(self, messages: list[Message]) -> None:
        if not self._length_known:
            (length,) = struct.unpack(">I", self._part)
            if length > _MAX_HEADER:
                raise HoldfastError(f"a worker sent a header of {length} bytes: its output does not come from Holdfast")
            self._length_known = True
            self._expect(length)
            return
        if self._header is None:
            header: dict[str, Any] = json.loads(self._part)
            self._sizes = list(header.pop("$", ()))
            self._header = header
        else:
            self._attachments.append(bytes(self._part))
        if self._sizes:
            self._expect(self._sizes.pop(0))
            return
        messages.append(Message(header=self._header, attachments=tuple(self._attachments)))
        self._header, self._attachments, self._length_known = None, [], False
        self._expect(4)

    def _expect(self, size: int) -> None:
        self._part, self._filled = bytearray(size), 0
