"""Entry of the writer process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from holdfast.storage.base import Storage
from holdfast.storage.resolve import from_description

from .arena import Arena
from .frames import Channel, Message
from .server import WriterLoop

__all__ = ["main"]

_NICE = 5


class _Received:
    """Storages and arenas as they come through the socket."""

    def __init__(self) -> None:
        self._arenas: dict[int, Arena] = {}

    def storage(self, message: Message) -> Storage:
        """Rebuild the storage a message describes."""
        return from_description(message.header["description"], message.header.get("secrets"))

    def arena(self, message: Message) -> memoryview:
        """Map the arena a message hands over, and its pages in the background: direct IO needs them mapped."""
        arena = Arena.attach(message.fds[0], message.header["size"])
        arena.prefault(allocate=False)
        self._arenas[message.header["number"]] = arena
        return arena.view

    def drop(self, number: int) -> None:
        """Unmap an arena that the trainer closed."""
        arena = self._arenas.pop(number, None)
        if arena is not None:
            arena.close()


def main(socket_fd: int, trainer_fd: int) -> None:
    """Serve one trainer until it closes or dies, then end.

    Args:
        socket_fd: our end of the socket pair.
        trainer_fd: pidfd of the trainer, -1 where there is none.
    """
    # Batch systems signal every process of a job. What ends this one is the end of its trainer, after the last save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # some sandboxes refuse; then we compete as an equal
        os.nice(_NICE)
    # Digests of small chunks keep the interpreter lock: hand it to the writing thread sooner than every 5 ms.
    sys.setswitchinterval(0.0005)
    for fd in (socket_fd, trainer_fd):
        if fd >= 0:
            os.set_inheritable(fd, False)
    loop = WriterLoop(Channel(socket.socket(fileno=socket_fd)), _Received(), trainer_fd=trainer_fd)
    loop.serve()
    # An upload that hangs in its client must not keep this process; what it did not finish, the next start does.
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(0)
