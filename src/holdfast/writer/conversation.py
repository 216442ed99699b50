"""The trainer's half of the conversation: calls that wait for answers, the writer's start and its death.

The other half is a plain interpreter in a session of its own (`launch_process`), or a thread (`launch_thread`).
Ray kills the children of a task, actor or trial that it ends; there the interpreter is no child (`Orphan`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._fork import after_fork_in_child
from holdfast._log import get_logger
from holdfast.errors import ConfigError, DroppedSaveError, HoldfastError, SessionError
from holdfast.storage.base import Storage
from holdfast.storage.resolve import import_paths

from .arena import Arena, can_share_memory
from .frames import Channel, Message
from .messages import error_from_json, error_to_json

if TYPE_CHECKING:
    from .client import WriterClient
    from .server import HandedOver

__all__ = [
    "Conversation", "PendingCall", "WindowsLostError", "can_run_process", "launch_process", "launch_thread",
    "own_paths",
]  # fmt: skip

_LOG = get_logger("writer")
_END_S = 10.0
_AT_EXIT_S = 600.0
_RESTART_PAUSE_S = 600.0  # a writer that dies again within this time is not an accident: saving stops
_TOLD_RANKS = 16
_said: set[str] = set()
_LIVE: weakref.WeakSet[Conversation] = weakref.WeakSet()


class WindowsLostError(HoldfastError):
    """The writer died during a windowed save: a new writer has the job, and needs its windows from the first."""


class PendingCall(Future[Any]):
    """The answer to a message, later; until then the message is kept, to be sent again to a new writer.

    Attributes:
        number: of the call.
        header: the message.
        attachments: bytes behind the header.
        arena: memory the call refers to.
        repeatable: a new writer can carry it out from the start.
        windowed: its bytes come through windows, which a new writer needs again.
        sealed: all windows have been sent: the trainer may have changed what was in them.
        interrupted: a new writer has the job, and its windows have to be sent again from the first.
        dropped: why the trainer has given it up.
        decode: makes a value of the answer: of its JSON, and the bytes behind that.
    """

    def __init__(
        self,
        number: int,
        header: dict[str, Any],
        *,
        attachments: Sequence[bytes] = (),
        arena: Arena | None = None,
        repeatable: bool = True,
        windowed: bool = False,
        decode: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.number, self.header, self.attachments, self.arena = number, header, attachments, arena
        self.repeatable, self.windowed, self.decode = repeatable, windowed, decode
        self.sealed = self.interrupted = False
        self.dropped: HoldfastError | None = None

    def check_windows(self) -> None:
        """Refuse to go on with windows that a writer has lost. Needs the lock of the conversation.

        Raises:
            WindowsLostError: the writer has died and was started again, and the windows were not begun again since.
        """
        if self.interrupted:
            raise WindowsLostError("the writer process died during this save, and was started again")

    def settle(self, *, value: Any = None, error: BaseException | None = None) -> None:
        """Give the answer to those who wait, and let go of what was kept for a new writer."""
        self.header, self.attachments, self.arena = {}, (), None
        if not self.set_running_or_notify_cancel():
            return
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(value)


class Conversation:
    """The calls to a writer and its answers; starts it again once after its death and repeats unanswered calls.

    Callers take a `turn` for messages that belong together.
    """

    def __init__(self, *, thread: bool) -> None:
        self.lock = threading.RLock()
        self.users: set[WriterClient] = set()  # the last one ends the writer
        self.run: dict[str, Any] | None = None
        self.memory: Arena | None = None  # of the trainer of that run, see `WriterClient.open_run`
        self.names: dict[tuple[int, str], dict[str, Any]] = {}  # how the writer has taken the leases of single files
        self.membership: tuple[dict[str, Any], Arena, tuple[int, ...]] | None = None  # how it joins other ranks'
        self.process: subprocess.Popen[bytes] | Orphan | None = None
        self._told_ranks: list[dict[str, Any]] = []  # messages to other ranks that a new writer repeats
        self._numbers = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}
        self._lost: list[tuple[PendingCall, HoldfastError]] = []
        self._keys: dict[str, int] = {}
        self._descriptions: dict[int, dict[str, Any]] = {}
        self._arenas: set[int] = set()
        self._shared: HandedOver | None = None
        if thread:
            from .server import HandedOver  # not above: the other half of a writer that is a process needs it

            self._shared = HandedOver()
        self._thread: threading.Thread | None = None
        self._closing = self._ended = self._left_alone = False
        self._restarted = -_RESTART_PAUSE_S
        self._failure: str | None = None
        self._owner = os.getpid()
        self._held: tuple[int, ...] = ()
        self._channel = self._launch()
        self._reader = threading.Thread(target=self._read, name="holdfast-answers", daemon=True)
        self._reader.start()
        _LIVE.add(self)
        after_fork_in_child(self._forget_in_child)

    @property
    def closed(self) -> bool:
        """True once no more calls are taken."""
        return self._closing or self._ended or self._failure is not None

    @property
    def is_thread(self) -> bool:
        """True when the writer is a thread of this process."""
        return self._shared is not None

    # ---- sending

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock for messages that belong together.

        Raises:
            HoldfastError: the writer is gone for good.
            SessionError: closed, or called in a forked child.
        """
        with self.lock:
            if self._owner != os.getpid():
                raise SessionError(
                    "this process was forked from the trainer: only the trainer itself talks to its writer"
                )
            if self._failure is not None:
                raise HoldfastError(self._failure)
            if self._closing:
                raise SessionError("the writer is closed; start another one")
            if self._ended:
                raise HoldfastError("the writer has ended by itself: nobody would answer; see the log for why")
            yield

    def call(self, header: dict[str, Any], **kept: Any) -> PendingCall:
        """Send a message that is answered, in a `turn`; ``kept`` are the other arguments of a `PendingCall`."""
        with self.turn():
            call = PendingCall(next(self._numbers), header, **kept)
            self._calls[call.number] = call
            self.send({**header, "call": call.number}, call.attachments)
            return call

    def send(self, header: dict[str, Any], attachments: Sequence[bytes] = (), fds: Sequence[int] = ()) -> None:
        """Send a message that nobody waits for."""
        try:
            self._channel.send(header, attachments, fds)
        except (BrokenPipeError, ConnectionResetError):
            # The writer is gone; the reader thread learns it too and sends every unanswered call again.
            _LOG.debug("message lost: %s", header.get("do"))
        except OSError as error:
            # No memory or descriptors left: the writer lives and would never answer what it did not get.
            if self.process is not None:
                _LOG.warning("a message to the writer was lost (%s): it is started again", error)
                # Else it would take us for dead, and rescue a snapshot from memory that we write to from now on.
                self.process.kill()
            else:
                self._failure = f"a message to the writer, a thread, was lost ({error}): saving has stopped"
                _LOG.error("%s", self._failure)
            self._channel.close()

    def flush(self, timeout_s: float | None) -> bool:
        """Wait, without the lock, until the kernel has what was sent: then it outlives us; False if that takes longer.

        True also if the writer that it was sent to is gone.
        """
        return self._channel.flush(timeout_s)

    def tell_storage(self, storage: Storage) -> int:
        """Return the number of a storage in this conversation; the writer gets its description the first time."""
        if self._shared is not None:
            name = f"object {id(storage)}"
        else:
            description = storage.describe()
            if description is None:
                raise ConfigError(
                    f"{storage.uri} cannot be described to a writer process: start a writer for it with "
                    "WriterClient.start(storage)"
                )
            # With its credentials, which travel through the socket only; new credentials make it another storage.
            name = json.dumps({"description": description, "secrets": storage.secrets()}, sort_keys=True)
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = len(self._keys) + 1
            told: dict[str, Any] = {}
            if self._shared is not None:
                self._shared.share_storage(key, storage)
                _say_thread(storage)
            else:
                told = json.loads(name)
                if imports := import_paths(told["description"]):
                    told["imports"] = imports
            self._descriptions[key] = told
            self.send({"do": "storage", "key": key, **told})
        return key

    def tell_arena(self, arena: Arena) -> None:
        """Hand an arena over, the first time."""
        if arena.number in self._arenas:
            return
        fds: tuple[int, ...] = ()
        if self._shared is not None:
            self._shared.share(arena)
        elif arena.fd is None:
            raise ConfigError("this arena cannot be shared with a writer process: it has no memfd or is closed")
        else:
            fds = (arena.fd,)
        self._arenas.add(arena.number)
        self.send({"do": "arena", "number": arena.number, "size": arena.size}, fds=fds)
        reference = weakref.ref(self)
        arena.on_close(lambda closed: _drop_arena(reference, closed.number))

    def remember(self, header: dict[str, Any]) -> None:
        """Keep a message to the other ranks until it has been acted on: it may be lost with the writer."""
        kept = self._told_ranks
        if header["what"] == "acted":
            kept[:] = [message for message in kept if message["what"] != "want"]
        elif header not in kept:
            kept.append(header)
            del kept[:-_TOLD_RANKS]

    def drop_arena(self, number: int) -> None:
        """Let the writer unmap an arena once the jobs before are done."""
        with self.lock:
            if number in self._arenas and not self._ended and self._owner == os.getpid():
                self._arenas.discard(number)
                self.send({"do": "drop_arena", "number": number})

    def forget_ranks(self) -> None:
        """Forget the other ranks: a new writer does not join them."""
        self.membership = None
        self._told_ranks.clear()

    def tell_membership(self) -> None:
        """Let the writer join those of other ranks."""
        assert self.membership is not None
        header, mailbox, fds = self.membership
        self.tell_arena(mailbox)
        self.send({**header, "call": next(self._numbers)}, fds=fds)

    def close(self, timeout_s: float | None, why: str = "closed", *, rescue: bool = False) -> None:
        """Let the writer finish and end; after ``timeout_s`` leave it alone to do so.

        Args:
            timeout_s: how long to wait.
            why: for the run and other ranks.
            rescue: commit first what the writer holds for the case of a death, see `WriterClient.hold`.
        """
        with self.lock:
            if self._owner != os.getpid() or self._ended:
                return
            if not self._closing:
                self._closing = True
                if rescue:
                    self.send({"do": "rescue", "why": why, "call": next(self._numbers)})
                self.send({"do": "close", "why": why})
        self._reader.join(timeout_s)
        if self._reader.is_alive():
            with self.lock:
                self._left_alone = True
                self._end("closed before the writer was done; what was sealed is still committed")
            self._settle_lost()
            self._channel.close()

    # ---- answers, on the reader thread

    def _read(self) -> None:
        try:
            while True:
                answer = self._channel.receive()
                if answer is not None and answer.header["on"] == "hold":
                    self._hold(answer.fds)
                elif answer is not None and answer.header["on"] != "bye":
                    self._resolve(answer)
                elif answer is not None or not self._recover():
                    break
        except Exception as error:  # noqa: BLE001 - a thread edge: the futures fail with it
            _LOG.error("an answer of the writer could not be read", exc_info=error)
            self._failure = f"an answer of the writer could not be read: {error}"
        with self.lock:
            self._end(self._failure or "the writer ended before it answered")
        self._settle_lost()
        self._channel.close()
        if self._owner == os.getpid():
            self._hold(())
            self._reap()

    def _hold(self, fds: tuple[int, ...]) -> None:
        """Keep the writer's connection to the other ranks open too, in place of the connection before.

        Then it ends when trainer and writer are both dead, not with the writer alone, and rank 0 can rely on that.
        """
        with self.lock:
            before, self._held = self._held, fds
        for fd in before:
            os.close(fd)

    def _resolve(self, answer: Message) -> None:
        header = answer.header
        for number in header["calls"]:
            with self.lock:
                call = self._calls.pop(number, None)
            if call is None:
                continue
            value = error = None
            try:
                if header["on"] == "failed":
                    error = error_from_json(header["error"])
                else:
                    value = header.get("value")
                    value = call.decode(value, *answer.attachments) if call.decode else value
            except Exception as unread:
                # The call is ours alone by now: `_end` would not find it.
                call.settle(error=HoldfastError(f"an answer of the writer could not be read: {unread}"))
                raise
            call.settle(value=value, error=error)

    def _end(self, why: str) -> None:
        self._ended = True
        self._lost += [(call, HoldfastError(why)) for call in self._calls.values()]
        self._calls.clear()

    def _settle_lost(self) -> None:
        # Outside of the lock: callbacks of futures may come back to us from other threads.
        with self.lock:
            lost, self._lost = self._lost, []
        for call, error in lost:
            call.settle(error=error)

    def _reap(self) -> int | None:
        """Wait for the end of a writer that has said farewell, closed its socket or died."""
        if self._thread is not None:
            self._thread.join(_END_S)
        if self.process is None:
            return None
        try:
            # One that was left alone by `close` is still saving; this thread is a daemon and has time.
            return self.process.wait(None if self._left_alone else _END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    # ---- death of the writer

    def _launch(self) -> Channel:
        if self._shared is not None:
            channel, self._thread = launch_thread(self._shared)
        else:
            channel, self.process = launch_process()
        return channel

    def _recover(self) -> bool:
        """Start the writer again after its death and repeat what it had not answered; False when all is over."""
        with self.lock:
            if self._ended or self._shared is not None or self._owner != os.getpid():
                return False
            status = self._reap()
            self._channel.close()
            stages = (
                self.membership is not None and "stage" in self.membership[0]
            )  # parts only a new writer would bring
            if self._closing and not self._calls and not stages:
                return False
            died = "the writer process died" + ("" if status is None else f" (exit status {status})")
            now = time.monotonic()
            if now - self._restarted < _RESTART_PAUSE_S:
                self._failure = f"{died} for the second time in short: saving has stopped; see the kernel's log for why"
                _LOG.error("%s", self._failure)
                return False
            self._restarted = now
            _LOG.warning("%s; it is started again and repeats %d unfinished calls", died, len(self._calls))
            try:
                self._channel = self._launch()
            except HoldfastError as error:
                self._failure = f"{died} and could not be started again: {error}"
                return False
            self._repeat(died)
        self._settle_lost()
        return True

    def _repeat(self, died: str) -> None:
        self._arenas.clear()
        for key, description in self._descriptions.items():
            self.send({"do": "storage", "key": key, **description})
        if self.run is not None:
            if self.memory is not None:
                self.tell_arena(self.memory)
            # Nobody waits for this answer: a failure shows in the jobs that follow.
            self.send({**self.run, "call": next(self._numbers)})
        for header in self.names.values():
            self.send({**header, "call": next(self._numbers)})
        if self.membership is not None:
            self.tell_membership()
            for header in self._told_ranks:
                self.send(header)
        for number, call in list(self._calls.items()):
            gone = call.sealed or (call.arena is not None and call.arena.fd is None)
            if call.windowed and (gone or call.dropped is not None):
                # It may be committed, which the new writer looks for first. If not, it finds the job abandoned.
                self.send({**call.header, "call": number, "arena": None, "again": True}, call.attachments)
                why = call.dropped or DroppedSaveError(f"{died} before it had committed this save")
                self.send({"do": "abandon", "job_no": number, "error": error_to_json(why)})
            elif not call.repeatable or gone or call.dropped is not None:
                del self._calls[number]
                lost = DroppedSaveError(f"{died} during a save whose data is no longer in memory")
                self._lost.append((call, (call.dropped or lost) if call.repeatable else WindowsLostError(died)))
            else:
                call.interrupted = call.windowed
                if call.arena is not None:
                    self.tell_arena(call.arena)
                self.send({**call.header, "call": number, "again": True}, call.attachments)
        if self._closing:
            self.send({"do": "close"})

    def _forget_in_child(self) -> None:
        self.lock = threading.RLock()  # another thread may have held it
        self._channel.forget_in_child()
        self._hold(())
        if self.process is not None:
            self.process.returncode = 0  # not our child: keeps Popen from warning about it


def _say_thread(storage: Storage) -> None:
    """Say once for each class what it costs that no other process can make such a storage."""
    kind = type(storage).__qualname__
    if storage.describe() is not None or "memory://" in storage.uri or kind in _said:
        return
    _said.add(kind)
    _LOG.warning(
        "%s is written by a thread of this process, since no other process can make this %s (it has no describe(), or "
        "its class is of __main__, or its arguments are no JSON): a save that is not committed when this process is "
        "killed is lost; docs/storage.md (A storage of your own) says what to do",
        storage.uri,
        kind,
    )


def _drop_arena(reference: weakref.ref[Conversation], number: int) -> None:
    conversation = reference()
    if conversation is not None:
        conversation.drop_arena(number)


@atexit.register
def _close_all() -> None:
    deadline = time.monotonic() + _AT_EXIT_S
    for conversation in list(_LIVE):
        # A run that nobody has closed counts as killed: a snapshot of it is as good as after a kill.
        conversation.close(max(0.0, deadline - time.monotonic()), "its program has ended", rescue=True)


_BOOT = (
    "import sys,json;a=json.loads(sys.argv[1]);sys.path.extend(a['paths']);"
    "from holdfast.writer.server import main;main(a['socket'],a['trainer'])"
)
# Its own child goes on: the parent says who that is, and ends.
_BOOT_ORPHAN = (
    "import os;n=os.fork();n and (os.write(1,b'%d'%n),os._exit(0));os.dup2(os.open(os.devnull,os.O_WRONLY),1);" + _BOOT
)


# Held while the writer's end of the socket is open here: a child forked in between by another thread would keep it, and
# the death of that writer would never be noticed.
_launching = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_launching.acquire, after_in_parent=_launching.release, after_in_child=_launching.release
    )


def can_run_process() -> bool:
    """Tell whether this platform gives what the process needs: memfd, descriptor passing, a plain interpreter."""
    return (
        sys.platform.startswith("linux")
        and can_share_memory()
        and hasattr(socket, "send_fds")
        and bool(sys.executable)
        and not getattr(sys, "frozen", False)
    )


def own_paths() -> list[str]:
    """Return what the writer needs behind the standard library: not the user's working directory, not PYTHONPATH."""
    paths = [str(Path(__file__).resolve().parents[2])]
    for package in ("xxhash", "obstore"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            paths.append(str(Path(spec.origin).parents[1]))
    paths += [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    return list(dict.fromkeys(paths))


def _own_pidfd() -> int:
    """Open ourselves for the writer to watch; -1 where the system has no such thing: it goes by our socket then."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return -1


class Orphan:
    """A writer that is no child of this process, with those methods of a ``Popen`` that are used here.

    Attributes:
        pid: of the writer.
        returncode: never known.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._fd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: not within so many seconds.
        """
        if self._fd < 0:
            return
        end = select.poll()
        end.register(self._fd, select.POLLIN)
        if not end.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("the writer", timeout or 0.0)
        os.close(self._fd)
        self._fd = -1

    def kill(self) -> None:
        """Kill it, if it lives."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)


def launch_process() -> tuple[Channel, subprocess.Popen[bytes] | Orphan]:
    """Start the writer process and return our end of the channel; it is ready about 0.03 s later.

    Raises:
        HoldfastError: the interpreter could not be started.
    """
    with _launching:
        ours, theirs = socket.socketpair()
        # A descriptor of the trainer itself, opened by the trainer, cannot point to a recycled process id.
        trainer = _own_pidfd()
        options = {"socket": theirs.fileno(), "trainer": trainer, "paths": own_paths()}
        # A process that Ray has started: its children are killed when it ends in order, or by ray.kill.
        is_orphan = trainer >= 0 and os.environ.get("RAY_RAYLET_PID") == str(os.getppid())
        process: subprocess.Popen[bytes] | Orphan
        try:
            process = child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT_ORPHAN if is_orphan else _BOOT, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_orphan else subprocess.DEVNULL,
                cwd="/",
                pass_fds=[fd for fd in (theirs.fileno(), trainer) if fd >= 0],
                start_new_session=True,
            )
            if is_orphan:
                process = Orphan(int(child.communicate()[0] or -1))
        except OSError as error:
            ours.close()
            raise HoldfastError(
                f"cannot start the writer process with {sys.executable}: {error}; "
                "check the limits on processes and open files"
            ) from error
        finally:
            theirs.close()
            if trainer >= 0:
                os.close(trainer)
    return Channel(ours), process


def launch_thread(shared: HandedOver) -> tuple[Channel, threading.Thread]:
    """Start the same loop in a thread of this process."""
    from .server import WriterLoop

    ours, theirs = socket.socketpair()
    loop = WriterLoop(Channel(theirs), shared, in_trainer=True)
    thread = threading.Thread(target=loop.serve, name="holdfast-writer", daemon=True)
    thread.start()
    return Channel(ours), thread
