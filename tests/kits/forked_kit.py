"""Interpreters that have their modules from the first moment: forked from a process that has imported them.

To import torch takes longer than most of what a test's script does, and to import a writer's modules longer than most
of what it does for a test. While `forked_interpreters` holds, a `subprocess.Popen` of
``[sys.executable, *options, "-c", code, ...]`` or ``[sys.executable, *options, "script.py", ...]`` becomes such a fork,
with environment, folder, path, arguments, umask, descriptors and session of its own; anything else is started as ever.
It is a child of this process like any other. Four things differ: modules are there before their import, at the end
nothing is taken apart after the exit functions, limits (`setrlimit`) and priority are those of the process that was
forked, and so are command line and environment in /proc. What is about one of these starts a real interpreter.

Such a fork starts real ones itself; while `forks_itself` holds in it, these are forks, too, of the process as it is.
Where writers are forked, so are those that cases of a `LastingServer` start, and forks of this process: by a process
that takes orders from anybody (`WriterServer.address`), whose children they are.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import random
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import types
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from ranks_kit import LastingServer

from holdfast.testing.faults import _find

__all__ = ["WRITERS", "WriterServer", "forked_interpreters", "forks_itself"]

WRITERS = ("-I", "-S")  # the options of a writer's interpreter (`holdfast.writer.conversation`)

_PR_SET_CHILD_SUBREAPER = 36
_LIMIT_S = 60.0
_LIBRARY = sysconfig.get_path("stdlib")  # here, once: each fork would read for it how Python was built
_TESTS = str(Path(__file__).resolve().parents[1])
_REAL = subprocess.Popen
_numbers = itertools.count()
_kept: list[Any] = []
_one_at_a_time = threading.Lock()


class WriterServer(LastingServer):
    """One for writers: has their modules.

    Attributes:
        address: of the process that forks those of cases, and of forks of this process; it ends with this process.
    """

    def __init__(self) -> None:
        super().__init__(preload=["forked_kit", "holdfast.writer.server", "holdfast.testing"])
        self.address = f"\0holdfast-writers-{os.getpid()}-{next(_numbers)}"
        self._forking = _adopted(self, "forked_kit:fork_for_anybody", self.address, os.getpid())

    def close(self) -> None:
        """End both; idempotent."""
        if self._forking:
            os.kill(self._forking, signal.SIGKILL)
            os.waitpid(self._forking, 0)
            self._forking = 0
        super().close()


@contextlib.contextmanager
def forked_interpreters(server: LastingServer | _Itself, options: tuple[str, ...] = ()) -> Iterator[None]:
    """Fork interpreters that are started with just these options from the server, until the block ends."""
    servers = {**getattr(subprocess.Popen, "servers", {}), options: server}
    address = getattr(server, "address", getattr(subprocess.Popen, "address", None))
    with mock.patch.object(subprocess, "Popen", _popen(servers, address)):
        yield


@contextlib.contextmanager
def forks_itself() -> Iterator[None]:
    """Fork interpreters that are started without options from this process, which is a fork itself."""
    with forked_interpreters(_Itself()):
        yield


class _Itself:
    """Stands where a server does."""

    is_alive = True


def _popen(servers: dict[tuple[str, ...], LastingServer | _Itself], address: str | None) -> type:
    return type("Popen", (_ForkedPopen,), {"servers": servers, "address": address})


class _ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    servers: dict[tuple[str, ...], LastingServer | _Itself]
    address: str | None
    _forking: socket.socket | None = None  # the process that has forked it says here how it ended

    def __init__(self, args: Any, *others: Any, **options: Any) -> None:
        self._has_session = bool(options.get("start_new_session"))
        super().__init__(args, *others, **options)

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Sequence[int], cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, *others: Any,
    ) -> None:  # fmt: skip
        preloads = env is not None and env.get("LD_PRELOAD") != os.environ.get("LD_PRELOAD")  # the loader's work
        is_plain = not (shell or executable or preloads or preexec_fn is not None or isinstance(args, str | bytes))
        given, program = _program(args) if is_plain else ((), [])
        server = self.servers.get(given)
        is_own = server is not None and server.is_alive  # in a fork of ours it seems dead, too
        forking = _reach(self.address) if program and given == WRITERS and not is_own else None
        if not program or not (is_own or forking):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
            )  # fmt: skip
            return
        order = {
            "program": program,
            "is_isolated": "-I" in given,
            "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()},
            "folder": os.getcwd() if cwd is None else os.path.abspath(cwd),
            "has_session": self._has_session,
            "umask": _umask(),
            "fds": list(pass_fds),
        }
        streams = [own if fd == -1 else fd for fd, own in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
        if forking is not None:
            socket.send_fds(forking, [json.dumps(order).encode()], [*streams, *pass_fds])
            self.pid, self._forking = int(forking.recv(64)), forking
        elif isinstance(server, _Itself):
            self.pid = _fork_here(order, [*streams, *pass_fds])
        else:
            assert server is not None
            self.pid = _fork(server, order, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._forking is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        try:
            status = int(self._forking.recv(64, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0) or 0)
        except BlockingIOError:
            return 0, 0
        self._forking.close()
        return self.pid, status

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self._forking is None or self.returncode is not None:
            return super()._internal_poll(*args, **options)  # type: ignore[misc,no-any-return]
        if self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]  # else another thread waits
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def _program(args: Sequence[Any]) -> tuple[tuple[str, ...], list[str]]:
    """Return an interpreter's options, and "-c" and code, or a script, with what follows; nothing for others."""
    command = [os.fsdecode(arg) for arg in args]
    if command[0] != sys.executable:
        return (), []
    options = (*itertools.takewhile(lambda word: word.startswith("-") and word != "-c", command[1:]),)
    return options, command[1 + len(options) :]


def _fork(server: LastingServer, order: dict[str, Any], fds: list[int]) -> int:
    address = f"\0holdfast-forked-{os.getpid()}-{next(_numbers)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as meeting:
        meeting.settimeout(_LIMIT_S)
        meeting.bind(address)
        meeting.listen()
        pid = _adopted(server, "forked_kit:fork_interpreter", address)
        connection, _ = meeting.accept()
        with connection:
            socket.send_fds(connection, [json.dumps(order).encode()], fds)
    return pid


def _fork_here(order: dict[str, Any], fds: list[int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: those hold nothing of use
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        subprocess.Popen = _REAL  # type: ignore[misc]
        status = _be_interpreter(order, fds)
    finally:
        os._exit(status)


def _adopted(server: LastingServer, function: str, *args: Any) -> int:
    """Run a function that forks and ends at once, and leaves its child to this process; return the child's id."""
    with _one_at_a_time:
        _adopt(True)
        try:
            return int(server.run(function, *args).checked())
        finally:
            _adopt(False)


def _reach(address: str | None) -> socket.socket | None:
    """Connect to who forks for anybody, if there is one."""
    if address is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
    except OSError:  # the tests are over, and a case is not
        connection.close()
        return None
    return connection


def _umask() -> int:
    """Return ours; asked for by `os.umask` it would be another one for a moment, for all threads."""
    with contextlib.suppress(OSError):  # a test may take /proc away
        return int(re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _adopt(is_wanted: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


# ---- in the fork


def case(address: str | None, function: str, args: list[Any], options: dict[str, Any]) -> Any:
    """In a child of a server: run a case, or fork an interpreter, whose writers are forked at the address."""
    subprocess.Popen = _popen({}, address)  # type: ignore[misc]
    return _find(function)(*args, **options)


def fork_for_anybody(address: str, owner: int) -> int:
    """In a child of the server: fork the process that forks interpreters for anybody until the owner has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as meeting:
        meeting.bind(address)
        meeting.listen(64)
        if pid := os.fork():
            return pid
        try:
            for number in (1, 2):
                os.dup2(0, number)
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd != meeting.fileno():
                    with contextlib.suppress(OSError):
                        os.close(fd)
            _serve_anybody(meeting, os.pidfd_open(owner))
        finally:
            os._exit(0)


def _serve_anybody(meeting: socket.socket, owner: int) -> None:
    waiting = selectors.DefaultSelector()
    waiting.register(meeting, selectors.EVENT_READ)
    waiting.register(owner, selectors.EVENT_READ)
    while True:
        for ready, _ in waiting.select():
            if ready.fileobj == owner:
                return
            if ready.fileobj is meeting:
                waiting.register(meeting.accept()[0], selectors.EVENT_READ)
                continue
            waiting.unregister(ready.fileobj)
            if ready.data is not None:  # one has ended
                pid, connection = ready.data
                os.close(ready.fd)
                with connection, contextlib.suppress(OSError):
                    connection.send(b"%d" % os.waitpid(pid, 0)[1])
                continue
            connection = ready.fileobj
            assert isinstance(connection, socket.socket)
            told, received, _, _ = socket.recv_fds(connection, 1 << 20, 64)
            if not told:
                connection.close()
                continue
            pid = os.fork()
            if pid == 0:
                _become_interpreter(told, received)
            for fd in received:
                os.close(fd)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            with contextlib.suppress(OSError):
                connection.send(b"%d" % pid)


def fork_interpreter(address: str) -> int:
    """In a child of the server: fork the interpreter, and leave it alone."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as there:
            there.connect(address)
            told, received, _, _ = socket.recv_fds(there, 1 << 20, 64)
        _become_interpreter(told, received)
    finally:
        os._exit(1)


def _become_interpreter(told: bytes, received: Sequence[int]) -> NoReturn:
    status = 1
    try:
        status = _be_interpreter(json.loads(told), received)
    finally:
        os._exit(status)


def _be_interpreter(order: dict[str, Any], received: Sequence[int]) -> int:
    if order["has_session"]:
        os.setsid()
    _take_descriptors(received, [0, 1, 2, *order["fds"]])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    os.umask(order["umask"])
    tempfile.tempdir = None  # that of its environment
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    signal.set_wakeup_fd(-1)
    return _run(order["program"], is_isolated=order["is_isolated"])


def _take_descriptors(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Have the received ones under the numbers that are wanted, and no others."""
    import fcntl

    above = max(*received, *wanted) + 1
    for fd, number in zip([fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in received], wanted, strict=True):
        os.dup2(fd, number, inheritable=True)
    try:
        there = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # a test has taken /proc away, and has few descriptors
        there = [*range(1024)]
    for number in there:
        if number not in wanted:
            with contextlib.suppress(OSError):
                os.close(number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or os.isatty(1))  # type: ignore[union-attr]


def _run(program: list[str], *, is_isolated: bool) -> int:
    is_code = program[0] == "-c"
    first = next(weakref.finalize._index_iter)  # type: ignore[attr-defined]
    if is_isolated:
        sys.path[:] = [path for path in sys.path if path == _LIBRARY or path.endswith((".zip", "/lib-dynload"))]
    else:
        paths = [entry for entry in sys.path if not entry.startswith(_TESTS)]
        own = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        sys.path[:] = ["" if is_code else os.path.dirname(os.path.abspath(program[0])), *own, *paths]
    sys.argv[:] = ["-c", *program[2:]] if is_code else program
    status = 0
    try:
        if is_code:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(program[1], "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if status and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    _leave_finalizers(first)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _leave_finalizers(first: int) -> None:
    """Forget what the process that was forked would do at its own end: to take torch's operators apart takes long."""
    finalize: Any = weakref.finalize
    _kept.append(finalize._registry)
    finalize._registry = {one: info for one, info in finalize._registry.items() if info.index >= first}
