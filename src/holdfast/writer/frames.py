"""Length-prefixed JSON over a socket pair, with attachments and file descriptors.

A message is 4 bytes (big endian) of header length, the JSON header, then the attachments one after another; their
lengths are in the header under "$". Descriptors (SCM_RIGHTS) ride with the first byte of their message.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage

__all__ = ["Attachments", "Channel", "Message"]

_MAX_HEADER = 256 << 20
_MAX_FDS = 8
_CHUNK = 1 << 20
_PAUSE_S = 0.01
_CLOSED_BY_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
# The kernel has no room for the message at this moment: nothing was sent, nothing is lost if it is said again.
_NO_MEMORY = (errno.ENOBUFS, errno.ENOMEM)
_PASSING = (errno.EAGAIN, errno.EINTR, errno.ETOOMANYREFS, *_NO_MEMORY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One received message; whoever takes it owns ``fds``."""

    header: dict[str, Any]
    attachments: tuple[bytes, ...] = ()
    fds: tuple[int, ...] = ()


class Attachments(Protocol):
    """Where storages and arenas come from: the socket (process) or the trainer's own objects (thread)."""

    def storage(self, message: Message) -> Storage:
        """Give the storage a message tells of."""

    def arena(self, message: Message) -> memoryview:
        """Give the memory a message hands over."""

    def drop(self, number: int) -> None:
        """Let go of an arena."""


class Channel:
    """One end of a socket pair. `send` never blocks; `receive` belongs to one thread.

    What the socket does not take at once goes to a sender thread, so that a trainer which submits a job with a large
    index is not held, while a small job is in the kernel (and survives the trainer) when `send` returns.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self._lock = threading.Condition()
        self._backlog: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._sender: threading.Thread | None = None
        self._closed = False

    def fileno(self) -> int:
        """Descriptor of the socket, for a selector."""
        return self._sock.fileno()

    def set_timeout(self, timeout_s: float) -> None:
        """Bound how long `receive` waits for the rest of a message; it then reports the end of the stream."""
        self._sock.settimeout(timeout_s)

    def send(self, header: dict[str, Any], attachments: Sequence[bytes] = (), fds: Sequence[int] = ()) -> None:
        """Hand one message over.

        Args:
            header: JSON-able, without a key "$".
            attachments: bytes that follow the header.
            fds: descriptors to share; duplicates travel, the caller keeps its own.

        Raises:
            BrokenPipeError: the other side is gone.
        """
        if attachments:
            header = {**header, "$": [len(item) for item in attachments]}
        body = json.dumps(header, separators=(",", ":")).encode()
        data = memoryview(b"".join((struct.pack(">I", len(body)), body, *attachments)))
        with self._lock:
            if self._closed:
                raise BrokenPipeError("the channel is closed")
            if not self._backlog:
                data, fds = self._try_send(data, fds)
            if data:
                # The caller may close its descriptors before the sender thread gets to them.
                self._backlog.append((data, tuple(os.dup(fd) for fd in fds)))
                if self._sender is None:
                    sender = threading.Thread(target=self._drain, name="holdfast-send", daemon=True)
                    sender.start()
                    self._sender = sender
                self._lock.notify_all()

    def _try_send(self, data: memoryview, fds: Sequence[int]) -> tuple[memoryview, Sequence[int]]:
        while data:
            try:
                sent = _send_some(self._sock, data, fds, socket.MSG_DONTWAIT)
            except OSError as error:
                if not (isinstance(error, BlockingIOError) or error.errno in _PASSING):
                    raise
                break
            data, fds = data[sent:], ()
        return data, fds

    def _drain(self) -> None:
        while True:
            with self._lock:
                while not self._backlog and not self._closed:
                    self._lock.wait()
                if not self._backlog:
                    return
                data, fds = self._backlog[0]
                self._backlog[0] = (data, ())  # the descriptors are ours now: `close` must not close them again
            try:
                while data:
                    try:
                        sent = _send_some(self._sock, data, fds, 0)
                    except OSError as error:
                        if error.errno not in _PASSING:
                            raise
                        time.sleep(_PAUSE_S)
                        continue
                    data = data[sent:]
                    for fd in fds:
                        os.close(fd)
                    fds = ()
            except OSError:
                for fd in fds:
                    os.close(fd)
                self.close()  # the receiving side of this end sees the same end of file and reports it
                return
            with self._lock:
                if self._backlog:  # `close` may have emptied it meanwhile
                    self._backlog.popleft()
                self._lock.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything sent so far is in the kernel; False when that took too long."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._backlog or self._closed, timeout_s)

    def receive(self) -> Message | None:
        """Wait for the next message; None at the end of the stream."""
        prefix, fds = self._read_start()
        if prefix is None:
            return None
        (length,) = struct.unpack(">I", prefix)
        if length > _MAX_HEADER:
            raise HoldfastError(f"message header of {length} bytes: both sides must run the same Holdfast")
        body = self._read(length)
        if body is None:
            return None
        header: dict[str, Any] = json.loads(body)
        attachments = []
        for size in header.pop("$", ()):
            item = self._read(size)
            if item is None:
                return None
            attachments.append(item)
        return Message(header=header, attachments=tuple(attachments), fds=tuple(fds))

    def _read_start(self) -> tuple[bytes | None, list[int]]:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 4, _MAX_FDS, _CLOSED_BY_EXEC)
                break
            except OSError as error:
                if error.errno not in _NO_MEMORY:
                    return None, []
                time.sleep(_PAUSE_S)
        if not data:
            return None, []
        rest = self._read(4 - len(data)) if len(data) < 4 else b""
        return (None if rest is None else data + rest), fds

    def _read(self, size: int) -> bytes | None:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            try:
                received = self._sock.recv_into(view, min(len(view), _CHUNK))
            except OSError as error:
                if error.errno not in _NO_MEMORY:
                    return None
                time.sleep(_PAUSE_S)
                continue
            if not received:
                return None
            view = view[received:]
        return bytes(buffer)

    def close(self) -> None:
        """Close this end; a `receive` waiting in another thread sees the end of the stream. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _, fds in self._backlog:
                for fd in fds:
                    os.close(fd)
            self._backlog.clear()
            self._lock.notify_all()
            with contextlib.suppress(OSError):  # the other side was first
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    def forget_in_child(self) -> None:
        """Close a forked child's copy without ending the stream for the parent."""
        self._closed = True
        self._sock.close()


def _send_some(sock: socket.socket, data: memoryview, fds: Sequence[int], flags: int) -> int:
    if fds:
        return socket.send_fds(sock, [data], list(fds), flags)
    return sock.send(data, flags)
