"""The driver's side of the zygote: a selector over the messages, output and ends of children. No threads.

Output goes to the driver's own with the rank in front, and unchanged and whole into a file.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from holdfast._fork import after_fork_in_child
from holdfast._log import get_logger
from holdfast.errors import HoldfastError
from holdfast.writer.frames import Channel, Message

from .zygote import end_session

_LOG = get_logger("trainers.function")
# The folder of the current directory that `-c` puts first must not shadow the modules we start with.
_BOOT = (
    "import sys;sys.path[:1]=[p for p in sys.path[:1] if p];import json;a=json.loads(sys.argv[1]);"
    "sys.path[:]=a['paths'];from holdfast.trainers.function.engines.zygote import main;"
    "sys.exit(main(a['socket']))"
)
_STATUS_S = 5.0  # how long the zygote may take to report the status of a process that is gone
_END_S = 5.0
_READ = 1 << 16
_LONGEST = 1 << 16
_TAIL_LINES = 20


def _import_paths() -> list[str]:
    """Return the driver's ``sys.path`` for another process: relative entries absolute, "" (the current folder) kept."""
    paths = [os.path.abspath(entry) if entry else "" for entry in sys.path if isinstance(entry, str)]
    # Last: a driver may find this package by an import hook alone.
    return list(dict.fromkeys([*paths, str(Path(__file__).resolve().parents[5])]))


def threads_for(num_workers: int) -> int:
    """Return the number of threads of each worker on this machine: its cores divided by the workers, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, num_workers))


class Process:
    """A worker or a task, as its engine sees it.

    Attributes:
        number: its name among all that the engine ever started.
        name: for people.
        rank: of a worker; None for a task, and on a node, where nobody asks.
        sinks: take its stdout and stderr.
        where: its node, for people; "" on a single machine.
        outcome: what a task has sent.
    """

    def __init__(self, number: int, name: str, rank: int | None, sinks: tuple[Sink, Sink]) -> None:
        self.number, self.name, self.rank, self.sinks = number, name, rank, sinks
        self.where = ""
        self.outcome: Message | None = None


class Child(Process):
    """A process of this machine. Its output streams may outlive it: a writer process that it started holds them too.

    Attributes:
        channel: to it; read it, and write with `send`.
        logs: its stdout and stderr.
        pid: None until it exists.
        status: of `os.waitpid`, None until the zygote reports it, if ever.
        kill_at: when SIGKILL is due, as of `time.monotonic`.
        gone_at: when it was found gone and its status was not known yet.
        killed: its engine wants it to end.
        ended: nothing more comes from it.
    """

    def __init__(self, number: int, name: str, rank: int | None, sinks: tuple[Sink, Sink]) -> None:
        super().__init__(number, name, rank, sinks)
        ours, self._theirs = socket.socketpair()
        self.channel = Channel(ours, "a worker")
        out, self._out = os.pipe()
        err, self._err = os.pipe()
        self.logs = (LogStream(out, sinks[0]), LogStream(err, sinks[1]))
        self.pid: int | None = None
        self.pidfd = -1
        self.status: int | None = None
        self.kill_at: float | None = None
        self.gone_at: float | None = None
        self.killed = self.ended = False

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
        return self.channel.fileno()

    def send(self, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send without blocking; dropped when it has ended."""
        if not self.ended:
            with contextlib.suppress(OSError):  # its end is reported elsewhere
                self.channel.send(header, attachments)

    def signal(self, number: int) -> None:
        """Send a signal if it exists and has not ended."""
        if self.pid is None or self.ended or self.status is not None:
            return
        with contextlib.suppress(OSError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.kill(self.pid, number)

    def close(self) -> None:
        """Close all but the logs. Idempotent."""
        self.ended = True
        self.handed_over()
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def forget_in_child(self) -> None:
        """Close a forked process's copies without ending anything."""
        self.ended = True
        self._theirs.close()
        self.channel.forget_in_child()
        for fd in (self.pidfd, self._out, self._err, self.logs[0].fd, self.logs[1].fd):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self._out = self._err = self.logs[0].fd = self.logs[1].fd = -1


class Supervisor:
    """Owns the zygote and its children; reports events through four functions, called from `wait` alone.

    Args:
        on_start: a child exists.
        on_message: a child sent a message.
        on_dying: a child has closed its connection or is gone; its end is told when its status is known.
        on_end: a child and all its session are gone; ``why`` says more if it never started or its status is unknown.
        zygote_sinks: where the zygote's own output goes; default: shown.
    """

    def __init__(
        self,
        *,
        on_start: Callable[[Child], None],
        on_message: Callable[[Child, Message], None],
        on_dying: Callable[[Child], None],
        on_end: Callable[[Child, str], None],
        zygote_sinks: tuple[Sink, Sink] | None = None,
    ) -> None:
        self._on_start, self._on_message = on_start, on_message
        self._on_dying, self._on_end = on_dying, on_end
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}
        self._zygote: _Zygote | None = None
        self._zygote_sinks = zygote_sinks
        self._closed = False
        after_fork_in_child(self.forget_in_child)

    # ---- asking

    def prepare(self, num_workers: int) -> None:
        """Start the zygote unless it runs."""
        if self._closed:
            raise HoldfastError("this engine is closed; make another one")
        while self._zygote is not None and self._zygote.process.poll() is not None:
            self._read_zygote()  # up to its end, which is there or about to come
        if self._zygote is None:
            self._zygote = _Zygote(num_workers, self._zygote_sinks or shown_and_kept("workers", None))
            self._selector.register(self._zygote.sock, selectors.EVENT_READ, self._read_zygote)
            for log in self._zygote.logs:
                self._watch_log(log)

    def watch(self, fd: int, function: Callable[[], None]) -> None:
        """Call ``function`` from `wait` whenever a descriptor has something to read."""
        self._selector.register(fd, selectors.EVENT_READ, function)

    def fork(
        self,
        number: int,
        name: str,
        entry: str,
        *,
        rank: int | None = None,
        environment: Mapping[str, str],
        sinks: tuple[Sink, Sink],
        arguments: Sequence[str] | None = None,
        listener: socket.socket | None = None,
        use_gpu: bool = False,
    ) -> Child:
        """Ask for a process that runs ``entry`` ("module:function"); `prepare` comes first.

        Args:
            number: of the process; never used again.
            name: of it, for people.
            entry: what it runs.
            rank: of a worker.
            environment: all its variables.
            sinks: where its stdout and stderr go.
            arguments: its ``sys.argv``; default: that of this process.
            listener: a socket for it.
            use_gpu: whether it may use accelerators.
        """
        if self._zygote is None:
            raise HoldfastError("the zygote is gone")
        child = Child(number, name, rank, sinks)
        fds = child.hand_over()
        if listener is not None:
            fds["listen"] = listener.fileno()
        request = {
            "do": "fork",
            "id": child.number,
            "fds": list(fds),
            "entry": entry,
            "environment": dict(environment),
            "directory": _working_directory(),
            "paths": _import_paths(),
            "arguments": list(sys.argv if arguments is None else arguments),
            "use_gpu": use_gpu,
        }
        # If the zygote has just died, the next read finds that: the child then ends without having started.
        with contextlib.suppress(OSError):
            self._zygote.channel.send(request, fds=tuple(fds.values()))
        child.handed_over()
        self._children[child.number] = child
        self._selector.register(child, selectors.EVENT_READ, lambda: self._read_child(child))
        for log in child.logs:
            self._watch_log(log)
        return child

    def kill(self, child: Child, grace_s: float) -> None:
        """Send SIGTERM now and SIGKILL after the grace; a child that is still being started is killed later."""
        child.killed = True
        if grace_s > 0:
            child.signal(signal.SIGTERM)
        self.limit(child, grace_s if child.pid is not None else 0.0)
        self._kill_overdue()

    def limit(self, child: Child, seconds: float) -> None:
        """Give a child so much time to end by itself."""
        due = time.monotonic() + seconds
        child.kill_at = due if child.kill_at is None else min(due, child.kill_at)

    # ---- what happens

    def wait(self, timeout_s: float | None) -> None:
        """Handle the events that are there, or come next; return then, at an own deadline, or after the time-out."""
        due = [c.kill_at for c in self._children.values() if c.kill_at is not None and c.pid is not None]
        due += [c.gone_at + _STATUS_S for c in self._children.values() if c.gone_at is not None]
        if due:
            left = max(0.0, min(due) - time.monotonic())
            timeout_s = left if timeout_s is None else min(left, timeout_s)
        for key, _ in self._selector.select(timeout_s):
            # An event before it in this round may have closed it.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        self._kill_overdue()
        self._settle_overdue()

    def _read_zygote(self) -> None:
        zygote = self._zygote
        if zygote is None:
            return
        message = zygote.channel.receive()
        if message is None:
            self._zygote = None
            self._selector.unregister(zygote.sock)
            self._lose(zygote)
            return
        child = self._children.get(message.header["id"])
        on = message.header["on"]
        if child is None:
            for fd in message.fds:
                os.close(fd)
        elif on == "forked":
            child.pid = message.header["pid"]
            if message.fds:
                child.pidfd = message.fds[0]
                self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._see_gone(child))
            self._on_start(child)
        elif on == "not_forked":
            self._end(child, f"its process could not be started: {message.header['error']}")
        else:
            child.status = message.header["status"]
            self._end(child, child.channel.broken and f"{child.channel.broken}; it was ended")

    def _lose(self, zygote: _Zygote) -> None:
        """Handle the death of the zygote. Running children go on; only their exit status will not be known."""
        why = f"the process that starts workers ended ({zygote.end(at_once=False)})"
        _LOG.warning("%s; it is started again when it is needed", why)
        for child in list(self._children.values()):
            if child.pid is None:
                for log in zygote.logs:
                    log.drain()
                self._end(child, "\n".join([f"{why} before it had started this process", *zygote.logs[1].sink.tail]))
            elif child.gone_at is not None or (child.channel.ended and child.pidfd < 0):
                self._end(child, why)

    def _read_child(self, child: Child) -> None:
        for message in child.channel.read():
            self._on_message(child, message)
        if child.channel.ended:
            self._selector.unregister(child)
            if child.gone_at is None:
                self._on_dying(child)
            if child.channel.broken:  # it may still train, but cannot be understood any more
                child.signal(signal.SIGKILL)
            if self._zygote is None and child.pidfd < 0:
                self._end(child, "its exit status is not known")

    def _see_gone(self, child: Child) -> None:
        self._selector.unregister(child.pidfd)
        child.gone_at = time.monotonic()
        if not child.channel.ended:  # as when a process that it has started holds the connection too
            self._on_dying(child)
        if self._zygote is None:
            self._end(child, "its exit status is not known: the process that started it is gone")

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.pid is not None and child.kill_at is not None and now >= child.kill_at:
                child.signal(signal.SIGKILL)
                child.kill_at = None

    def _settle_overdue(self) -> None:
        now = time.monotonic()
        for child in list(self._children.values()):
            if child.gone_at is not None and now >= child.gone_at + _STATUS_S:
                self._end(child, "its exit status is not known: the process that started it does not answer")

    def _end(self, child: Child, why: str) -> None:
        """Deliver the child's last messages and output, then its end."""
        if child.status is None and child.pid is not None:
            end_session(child.pid)
        while not child.channel.ended:
            for message in child.channel.read():  # none, as long as a part of a large one was read
                self._on_message(child, message)
            if child.channel.drained:  # a process that it has started holds the connection too
                break
        for log in child.logs:
            if log.fd >= 0:
                log.drain()
        del self._children[child.number]
        for fd in (child.fileno(), child.pidfd):
            if fd >= 0 and fd in self._selector.get_map():
                self._selector.unregister(fd)
        child.close()
        self._on_end(child, why)

    def _watch_log(self, log: LogStream) -> None:
        def read() -> None:
            if not log.read():
                self._selector.unregister(log)
                log.close()

        self._selector.register(log, selectors.EVENT_READ, read)

    # ---- the end

    def close(self) -> None:
        """Kill all children with their sessions and end the zygote. Idempotent; bounded."""
        if self._closed:
            return
        self._closed = True
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        if self._zygote is not None:
            self._zygote.end(at_once=all(child.pid is None for child in self._children.values()))
        for child in self._children.values():
            if child.pid is not None and child.status is None:
                end_session(child.pid)
            child.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, LogStream):
                key.fileobj.drain()
                key.fileobj.close()
        self._selector.close()

    def forget_in_child(self) -> None:
        """Close, in a process forked from the driver, every descriptor whose end of file others wait for."""
        self._closed = True
        for child in self._children.values():
            child.forget_in_child()
        if self._zygote is not None:
            self._zygote.forget_in_child()
        self._children.clear()
        self._selector.close()


class _Zygote:
    """The process that loads torch and forks workers, its socket and its own output; it takes requests at once.

    Args:
        num_workers: how many workers are expected: thread pools read OMP_NUM_THREADS when torch is loaded.
        sinks: for its stdout and stderr; workers have their own.

    Raises:
        HoldfastError: the interpreter could not be started.
    """

    def __init__(self, num_workers: int, sinks: tuple[Sink, Sink]) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise HoldfastError("cannot start workers: sys.executable does not name a Python interpreter")
        self.sock, theirs = socket.socketpair()
        out, out_write = os.pipe()
        err, err_write = os.pipe()
        request = json.dumps({"socket": theirs.fileno(), "paths": _import_paths()})
        try:
            self.process = subprocess.Popen(
                [sys.executable, *_args_from_interpreter_flags(), "-c", _BOOT, request],
                stdin=subprocess.DEVNULL,
                stdout=out_write,
                stderr=err_write,
                env={"OMP_NUM_THREADS": str(threads_for(num_workers)), **os.environ},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self.sock.close()
            os.close(out)
            os.close(err)
            raise HoldfastError(
                f"cannot start workers with {sys.executable}: {error}; check the limits on processes and open files"
            ) from error
        finally:
            theirs.close()
            os.close(out_write)
            os.close(err_write)
        self.channel = Channel(self.sock)
        self.logs = (LogStream(out, sinks[0]), LogStream(err, sinks[1]))

    def end(self, *, at_once: bool) -> str:
        """End the process; return how it ended. It ends by itself when the channel closes, after its children."""
        self.channel.close()
        if at_once or not _ended_within(self.process, _END_S):
            self.process.kill()
        status = self.process.wait()
        return f"signal {-status}" if status < 0 else f"status {status}"

    def forget_in_child(self) -> None:
        self.channel.forget_in_child()
        for log in self.logs:
            if log.fd >= 0:
                os.close(log.fd)
                log.fd = -1
        self.process.returncode = 0  # not our child: keeps Popen from warning about it


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return "/"


def _ended_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        fd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        return process.poll() is not None
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


class LogFile:
    """A file that both streams of a worker append to; closed when both have ended."""

    def __init__(self, path: Path | None) -> None:
        self._file: BinaryIO | None = None
        self._streams = 2
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
