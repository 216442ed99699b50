"""The one codec of all sockets, and one end of a socket pair that speaks it.

A frame is 4 bytes (big endian) of header length, the JSON header, then the attachments one after another; their lengths
are in the header under "$". A `FrameDecoder` neither reads nor writes: `Channel` (waiting and with descriptors, or
neither) and `ranks.link` do, and give it what they got.

Descriptors (SCM_RIGHTS) ride with the first byte of their message, so `Channel.receive` never reads beyond its end.
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
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from holdfast.errors import HoldfastError

__all__ = ["MAX_HEADER_BYTES", "Channel", "FrameDecoder", "Message", "encode"]

MAX_HEADER_BYTES = 256 << 20
"""Longest JSON header: the index of 100 000 tensors takes about a tenth of it."""
_MAX_ATTACHED_BYTES = 1 << 40
_PREFIX = struct.Struct(">I")
_SMALL = 64 << 10  # pieces below it are put together: each costs 200 bytes by itself
_BEHIND = "$"
_MAX_FDS = 8
# `socket.send_fds` and `recv_fds` forget the flags that they are given (Python 3.13 still does): not used here.
_RIGHTS_BYTES = socket.CMSG_LEN(_MAX_FDS * array("i").itemsize) if hasattr(socket, "CMSG_LEN") else 0
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


def encode(header: dict[str, Any], attachments: Sequence[bytes] = ()) -> bytes:
    """Return one frame.

    Args:
        header: JSON-able, without a key "$"; values in it may have a ``to_json()``.
        attachments: bytes that follow the header.
    """
    if attachments:
        header = {**header, _BEHIND: list(map(len, attachments))}
    body = json.dumps(header, separators=(",", ":"), default=methodcaller("to_json")).encode()
    return b"".join((_PREFIX.pack(len(body)), body, *attachments))


class FrameDecoder:
    """Takes bytes in pieces of any size and gives the messages that are complete.

    Memory follows what has arrived, never what a length says. After an error the stream is lost: close it.

    Args:
        peer: who sends, for messages ("a worker").
        max_header_bytes: longest header that is taken.
        max_attached_bytes: what the attachments of one message may have together; 0 for none.

    Attributes:
        wanted: bytes that are missing of the present part: whoever reads no more never reads beyond a frame.
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
        self.wanted = _PREFIX.size
        self._length_known = False
        self._header: dict[str, Any] | None = None
        self._sizes: list[int] = []  # of the attachments that are still to come, the last one first
        self._attachments: list[bytes] = []

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> list[Message]:
        """Take what has arrived; returns the messages that it completes.

        Args:
            data: any number of bytes.
            fds: descriptors that came with them; they belong to the first frame of which there are bytes in ``data``.

        Raises:
            HoldfastError: this is no frame, or it is longer than allowed.
        """
        self._fds += fds
        found: list[Message] = []
        rest = memoryview(data)
        while True:
            piece = rest[: self.wanted]
            if piece:
                if len(piece) == self.wanted or len(piece) >= _SMALL:
                    self._pieces.append(piece)
                elif self._pieces and isinstance(self._pieces[-1], bytearray):
                    self._pieces[-1] += piece
                else:
                    self._pieces.append(bytearray(piece))
                rest = rest[len(piece) :]
                self.wanted -= len(piece)
            if self.wanted:
                return found
            self._take_part(found)

    def drop(self) -> tuple[int, ...]:
        """Forget the frame that has begun; returns its descriptors, which the caller closes."""
        fds = tuple(self._fds)
        self._fds.clear()
        self._pieces.clear()
        self._begin()
        return fds

    def _take_part(self, found: list[Message]) -> None:
        part = b"".join(self._pieces)
        self._pieces.clear()
        if not self._length_known:
            (self.wanted,) = _PREFIX.unpack(part)
            self._length_known = True
            if self.wanted > self._max_header:
                raise HoldfastError(
                    f"{self._peer} sent a message header of {self.wanted} bytes, more than {self._max_header}: both "
                    "sides must run the same Holdfast"
                )
            return
        if self._header is None:
            self._header = self._read_header(part)
        else:
            self._attachments.append(part)
        if self._sizes:
            self.wanted = self._sizes.pop()
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


class Channel:
    """One end of a socket pair. `send` never blocks; `receive`, or `read`, belongs to one thread.

    What the socket does not take at once goes to a sender thread, so that a trainer which submits a job with a large
    index is not held, while a small job is in the kernel (and survives the trainer) when `send` returns.

    Args:
        sock: connected.
        peer: who is at the other end, for messages.

    Attributes:
        ended: `read` has found the end of the stream, or what cannot be understood.
        drained: the last `read` has taken all that was there.
        broken: why the stream cannot be understood from here on; "" if it can.
    """

    def __init__(self, sock: socket.socket, peer: str = "the other side of this channel") -> None:
        self._sock = sock
        self._decoder = FrameDecoder(peer)
        self.ended = self.drained = False
        self.broken = ""
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self._lock = threading.Condition()
        self._backlog: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._sender: threading.Thread | None = None
        self._closed = self._broken = False

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
            if self._closed or self._broken:
                raise BrokenPipeError("the channel is closed" if self._closed else "the other side is gone")
            try:
                while data and not self._backlog:
                    data, fds = data[_send_some(self._sock, data, fds, socket.MSG_DONTWAIT) :], ()
            except OSError as error:
                if not (isinstance(error, BlockingIOError) or error.errno in _PASSING):
                    raise
            if data:
                # The caller may close its descriptors before the sender thread gets to them.
                self._backlog.append((data, tuple(os.dup(fd) for fd in fds)))
                if self._sender is None:
                    sender = threading.Thread(target=self._drain, name="holdfast-send", daemon=True)
                    sender.start()
                    self._sender = sender
                self._lock.notify_all()

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
                self._break_off()
                return
            with self._lock:
                if self._backlog:  # `close` may have emptied it meanwhile
                    self._backlog.popleft()
                self._lock.notify_all()

    def _break_off(self) -> None:
        """Send nothing any more. The socket is its reader's: what the other side said before its end is in it still."""
        with self._lock:
            if self._closed:
                return
            self._broken = True
            self._drop_backlog()
            with contextlib.suppress(OSError):  # should the other side live, it hears that nothing more comes
                self._sock.shutdown(socket.SHUT_WR)

    def _drop_backlog(self) -> None:
        for _, fds in self._backlog:
            for fd in fds:
                os.close(fd)
        self._backlog.clear()
        self._lock.notify_all()

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until everything sent so far is in the kernel, or lost with the other side; False if it takes longer."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._backlog or self._closed, timeout_s)

    def receive(self) -> Message | None:
        """Wait for the next message; None at the end of the stream.

        Raises:
            HoldfastError: the other side speaks another language.
        """
        decoder, data = self._decoder, b"-"
        try:
            while data:
                wanted = min(decoder.wanted, _CHUNK)
                try:
                    data, rights, _, _ = self._sock.recvmsg(wanted, _RIGHTS_BYTES, _CLOSED_BY_EXEC)
                except OSError as error:
                    if error.errno in _NO_MEMORY:
                        time.sleep(_PAUSE_S)
                        continue
                    data, rights = b"", []
                fds = array("i")
                for _, _, received in rights:
                    fds.frombytes(received[: len(received) // fds.itemsize * fds.itemsize])
                for message in decoder.feed(data, fds):  # one at most: nothing beyond it was read
                    return message
        except HoldfastError:
            _close_all(decoder.drop())
            raise
        _close_all(decoder.drop())
        return None

    def read(self) -> list[Message]:
        """Return the messages completed by the bytes received so far, at most about 1 MiB; never waits.

        For a selector, in place of `receive`, where no descriptors travel. Sets `ended` at the end of the stream; an
        incomplete message before it is dropped. Bytes that are no message of Holdfast end the stream too, with the
        reason in `broken`: a broken worker must not stop its reader.
        """
        messages: list[Message] = []
        taken, self.drained = 0, False
        while taken < _CHUNK and not self.ended:
            try:
                data = self._sock.recv(_CHUNK >> 2, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                self.drained = True
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

    def close(self) -> None:
        """Close this end; a `receive` waiting in another thread sees the end of the stream. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drop_backlog()
            with contextlib.suppress(OSError):  # the other side was first
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    def forget_in_child(self) -> None:
        """Close a forked child's copy without ending the stream for the parent."""
        self._closed = True
        self._sock.close()


def _send_some(sock: socket.socket, data: memoryview, fds: Sequence[int], flags: int) -> int:
    if fds:
        return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))], flags)
    return sock.send(data, flags)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
