"""One forked process as its driver sees it: what connects them, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

from holdfast.writer.frames import Channel

from .inbox import Inbox
from .logs import LogStream, Sink

__all__ = ["Child"]


class Child:
    """A worker or a task. Its two output streams may outlive it: a writer process that it started holds them too.

    Attributes:
        number: what driver and zygote call it.
        name: what people call it.
        inbox: messages from it.
        logs: its stdout and stderr.
        pid: None until it exists.
        status: of `os.waitpid`, None until (and unless) the zygote tells.
        kill_at: when SIGKILL is due, as of `time.monotonic`.
        gone_at: when it was seen to be gone while its status was still to come.
        ended: nothing more comes from it.
    """

    def __init__(self, number: int, name: str, sinks: tuple[Sink, Sink]) -> None:
        self.number, self.name = number, name
        ours, self._theirs = socket.socketpair()
        self._channel = Channel(ours)
        self.inbox = Inbox(ours)
        out, self._out = os.pipe()
        err, self._err = os.pipe()
        self.logs = (LogStream(out, sinks[0]), LogStream(err, sinks[1]))
        self.pid: int | None = None
        self.pidfd = -1
        self.status: int | None = None
        self.kill_at: float | None = None
        self.gone_at: float | None = None
        self.ended = False

    def hand_over(self) -> dict[str, int]:
        """Return the ends that belong to the child, by the names that `forked` knows."""
        return {"control": self._theirs.fileno(), "stdout": self._out, "stderr": self._err}

    def handed_over(self) -> None:
        """Close our copies of them: its end of file must mean its end. Idempotent."""
        self._theirs.close()
        for fd in (self._out, self._err):
            if fd >= 0:
                os.close(fd)
        self._out = self._err = -1

    def fileno(self) -> int:
        """Descriptor of the socket, for a selector."""
        return self._channel.fileno()

    def send(self, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send without blocking; dropped when it has ended."""
        if not self.ended:
            with contextlib.suppress(OSError):  # its end is reported by other ways
                self._channel.send(header, attachments)

    def signal(self, number: int) -> None:
        """Send a signal if it exists and has not ended."""
        if self.pid is None or self.ended or self.status is not None:
            return
        with contextlib.suppress(OSError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.kill(self.pid, number)

    def last_words(self) -> str:
        """Return the end of its error output, for people."""
        lines = [line for line in self.logs[1].sink.tail if line.strip()]
        return "\n".join(lines)

    def close(self) -> None:
        """Close all but the logs. Idempotent."""
        self.ended = True
        self.handed_over()
        self._channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def forget_in_child(self) -> None:
        """Close a forked process's copies without ending anything."""
        self.ended = True
        self._theirs.close()
        self._channel.forget_in_child()
        for fd in (self.pidfd, self._out, self._err, self.logs[0].fd, self.logs[1].fd):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self._out = self._err = self.logs[0].fd = self.logs[1].fd = -1
