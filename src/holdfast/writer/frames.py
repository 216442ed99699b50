"""One end of a socket pair: frames (`frame_codec`) with file descriptors, written without waiting, read by one thread.

Descriptors (SCM_RIGHTS) ride with the first byte of their message, so nothing is ever read beyond the end of one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage

from .frame_codec import FrameDecoder, Message, encode

__all__ = ["Attachments", "Channel", "Message"]

_MAX_FDS = 8
_CHUNK = 1 << 20
_PAUSE_S = 0.01
_CLOSED_BY_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
# The kernel has no room for the message at this moment: nothing was sent, nothing is lost if it is said again.
_NO_MEMORY = (errno.ENOBUFS, errno.ENOMEM)
_PASSING = (errno.EAGAIN, errno.EINTR, errno.ETOOMANYREFS, *_NO_MEMORY)


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
        self._decoder = FrameDecoder("the other side of this channel")
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
        data = memoryview(encode(header, attachments))
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
        """Wait for the next message; None at the end of the stream.

        Raises:
            HoldfastError: the other side speaks another language.
        """
        decoder = self._decoder
        try:
            while True:
                data, fds = self._read_some()
                if not data:
                    break
                for message in decoder.feed(data, fds):  # one at most: nothing beyond it was read
                    return message
        except HoldfastError:
            _close_all(decoder.drop())
            raise
        _close_all(decoder.drop())
        return None

    def _read_some(self) -> tuple[bytes, list[int]]:
        decoder = self._decoder
        while True:
            try:
                if not decoder.is_between:
                    return self._sock.recv(min(decoder.wanted, _CHUNK)), []
                data, fds, _, _ = socket.recv_fds(self._sock, decoder.wanted, _MAX_FDS, _CLOSED_BY_EXEC)
            except OSError as error:
                if error.errno not in _NO_MEMORY:
                    return b"", []
                time.sleep(_PAUSE_S)
            else:
                return data, fds

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


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
