"""The output of workers: to the driver's own output with the rank in front, and unchanged and whole into a file."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from holdfast._log import get_logger

__all__ = ["LineLimit", "LogFile", "LogStream", "LogText", "Sink", "shown_and_kept"]

_LOG = get_logger("trainers.function")
_READ = 1 << 16
_LONGEST = 1 << 16
_TAIL_LINES = 20


class LogFile:
    """A file that both streams of a worker append to; closed when both have ended."""

    def __init__(self, path: Path | None, streams: int = 2) -> None:
        self._file: BinaryIO | None = None
        self._streams = streams
        if path is not None:
            try:
                # `logs`, the folder of the attempt and the file lie in the run, which may be somebody else's.
                if any(part.is_symlink() for part in path.parents[:2]):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)
            except OSError as error:
                _LOG.warning("the output of workers is shown but not kept in %s: %s", path, error)

    def write(self, data: bytes) -> None:
        """Append. A full disk must not stop training: the rest of the output is only shown then."""
        if self._file is not None:
            try:
                self._file.write(data)
            except OSError as error:
                _LOG.warning("the rest of this worker's output is shown but not kept: %s", error)
                self._file.close()
                self._file = None

    def release(self) -> None:
        """Note that a stream has ended."""
        self._streams -= 1
        if self._streams <= 0 and self._file is not None:
            self._file.close()
            self._file = None


class Sink(Protocol):
    """Takes the output of a stream of a process, in pieces."""

    @property
    def tail(self) -> deque[str]:
        """The last lines."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes; b"" at the end of the stream. Never waits for long."""

    def flush(self) -> None:
        """Show a last line without an end too; more bytes may come."""

    def end(self) -> None:
        """Note that no more bytes come."""


class LogStream:
    """The reading end of a process's stdout or stderr, whose bytes go to ``sink``; `read` never waits."""

    def __init__(self, fd: int, sink: Sink) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.sink = sink

    def fileno(self) -> int:
        """Descriptor for a selector."""
        return self.fd

    def read(self) -> bool:
        """Pass on what is there, at most 64 KiB; return False at the end of the stream."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.sink.feed(data)
        return bool(data)

    def drain(self) -> None:
        """Pass on all that is there now; for when the process has ended. A last line without an end is shown too."""
        waiting = True
        while waiting:
            try:
                data = os.read(self.fd, _READ)
            except OSError:  # nothing now, though another process holds the other end
                break
            self.sink.feed(data)
            waiting = bool(data)
        self.sink.flush()

    def close(self) -> None:
        """Let go of the descriptor. Idempotent."""
        if self.fd >= 0:
            self.sink.flush()
            os.close(self.fd)
            self.fd = -1
            self.sink.end()


class LineLimit:
    """How many lines of a process are shown: at most ``burst`` at once, ``per_s`` each second in the long run.

    Args:
        kept: where all lines are, for people.
        per_s: lines per second in the long run.
        burst: lines at once.
        clock: gives seconds.
    """

    def __init__(
        self, kept: str, *, per_s: float = 50, burst: int = 1000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept, self._per_s, self._burst, self._clock = kept, per_s, burst, clock
        self._room, self._at = float(burst), clock()
        self._left_out = 0

    def choose(self, lines: list[str]) -> list[str]:
        """Return the lines to show now, and a line in place of those that are left out."""
        now = self._clock()
        self._room = min(self._burst, self._room + (now - self._at) * self._per_s)
        self._at = now
        if self._left_out and self._room < self._per_s:  # a second's worth at once, not a line now and then
            self._left_out += len(lines)
            return []
        chosen = lines[: int(self._room)]
        self._room -= len(chosen)
        before, self._left_out = self._left_out, len(lines) - len(chosen)
        if before:
            chosen.insert(0, f"[... {before} lines are left out here ...]")
        if self._left_out:
            chosen.append(f"[... too many lines to show all: they are in {self._kept} ...]")
        return chosen


class LogText:
    """Shows whole lines of output with a prefix on that of this process, and writes it unchanged into a file.

    Attributes:
        prefix: of each line shown.
        tail: the last lines.
    """

    def __init__(
        self, prefix: str, to: Literal["stdout", "stderr"], file: LogFile, limit: LineLimit | None = None
    ) -> None:
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.prefix = prefix
        self._to = to
        self._file = file
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._file.write(data)
        self._show(self._decoder.decode(data, final=not data))

    def flush(self) -> None:
        """Show what is left without an end of line."""
        rest, self._rest = self._rest, ""
        if rest:
            self._print([rest])

    def end(self) -> None:
        """Note that no more bytes come."""
        self._file.release()

    def _show(self, text: str) -> None:
        *lines, rest = (self._rest + text).split("\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], ""
        # A progress bar draws over itself: keep what a terminal would show of it.
        head, back, last = rest.rpartition("\r")
        self._rest = (last or head.rpartition("\r")[2] + back) if back else rest
        if lines:
            self._print(lines)

    def _print(self, lines: list[str]) -> None:
        shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        self.tail.extend(shown)
        stream = sys.stdout if self._to == "stdout" else sys.stderr
        if stream is None:  # pythonw and daemons have none
            return
        chosen = shown if self._limit is None else self._limit.choose(shown)
        text = "".join(f"{self.prefix}{line}\n" for line in chosen)
        # A reader that is gone (`| head`) or an encoding without these characters must not stop training.
        with contextlib.suppress(OSError, ValueError):
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
            stream.flush()


def shown_and_kept(name: str, path: Path | None, limit: LineLimit | None = None) -> tuple[LogText, LogText]:
    """Make sinks for stdout and stderr of a process: its name in front of each line shown, a file for both."""
    file = LogFile(path)
    return LogText(f"({name}) ", "stdout", file, limit), LogText(f"({name}) ", "stderr", file, limit)
