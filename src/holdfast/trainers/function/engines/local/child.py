"""A forked process as its driver sees it: their connection, and its end with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.writer.frames import Channel, FrameDecoder, Message

from .logs import LogStream, Sink

__all__ = ["Child", "Inbox", "end_session"]

_READ = 1 << 20
_CHUNK = 1 << 18
_ROUNDS = 5


class Inbox:
    """Reads a socket and returns the messages that are complete. No descriptors travel this way.

    Attributes:
        ended: the stream is at its end, or broken.
        drained: the last `read` has taken all that was there.
        broken: why the stream cannot be understood from here on; "" if it can.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = FrameDecoder("a worker")
        self.ended = self.drained = False
        self.broken = ""

    def read(self) -> list[Message]:
        """Return the messages completed by the bytes received so far, at most about 1 MiB; never waits.

        Sets `ended` at the end of the stream; an incomplete message before it is dropped. Bytes that are no message of
        Holdfast end the stream too, with the reason in `broken`: a broken worker must not stop its reader.
        """
        messages: list[Message] = []
        taken, self.drained = 0, False
        while taken < _READ and not self.ended:
            try:
                data = self._sock.recv(_CHUNK, socket.MSG_DONTWAIT)
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


class Child:
    """A worker or a task. Its two output streams may outlive it: a writer process that it started holds them too.

    Attributes:
        number: its name for driver and zygote.
        name: for people.
        inbox: messages from it.
        logs: its stdout and stderr.
        pid: None until it exists.
        status: of `os.waitpid`, None until the zygote reports it, if ever.
        kill_at: when SIGKILL is due, as of `time.monotonic`.
        gone_at: when it was found gone and its status was not known yet.
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
        """Return the ends that belong to the child, by the names that the zygote knows."""
        return {"control": self._theirs.fileno(), "stdout": self._out, "stderr": self._err}

    def handed_over(self) -> None:
        """Close our copies of the child's ends: then end of file means that it has ended. Idempotent."""
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
            with contextlib.suppress(OSError):  # its end is reported elsewhere
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


def end_session(leader: int) -> None:
    """Send SIGKILL to every process of a session but its leader, which has ended.

    Call it while the leader is a zombie or members of the session live: only then can no other process have its number.
    """
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
    known: set[int] = set()
    for _ in range(_ROUNDS):  # a process that forks meanwhile is found in the next round
        found = _members(leader) - known
        if not found:
            return
        known |= found
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _members(leader: int) -> set[int]:
    found: set[int] = set()
    try:
        names = os.listdir("/proc")
    except OSError:  # other systems: the process group is all that is known
        return found
    for name in names:
        if not name.isdigit():
            continue
        try:
            # Plain calls: this runs between a death and the restart, over every process of the machine.
            fd = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            try:
                stat = os.read(fd, 512)
            finally:
                os.close(fd)
            # The command name in parentheses may hold spaces and parentheses itself.
            state, _, _, session = stat[stat.rindex(b")") + 1 :].split(None, 4)[:4]
        except (OSError, ValueError):  # it has just ended
            continue
        if int(session) != leader or state in (b"Z", b"X"):
            continue
        if int(name) == leader:  # our leader has ended: this process only has its number
            return set()
        found.add(int(name))
    return found
