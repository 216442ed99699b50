"""A process that has torch loaded and forks workers and tasks from itself, in milliseconds.

It belongs to a driver and ends with it. It starts no thread, runs no tensor operation and never touches an
accelerator: nothing of that kind survives a fork.

Driver to zygote: {"do": "fork", "id", "fds": names of its descriptors in order ("control", "stdout", "stderr",
"listen"), "entry": "module:function", "environment", "directory", "paths", "arguments", "use_gpu"}. Zygote to driver:
{"on": "forked", "id", "pid"} with a pidfd where the platform has them, or {"on": "not_forked", "id", "error"};
{"on": "ended", "id", "status"} with what `os.waitpid` says, once the process and all of its session are gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import os
import random
import selectors
import signal
import socket
import sys
import time
import warnings
from typing import Any

from holdfast.writer.frames import Channel, Message

# What a fresh interpreter does not leave to the kernel.
_PYTHONS_OWN: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGPIPE: signal.SIG_IGN}

_FIRST = (
    "torch",
    "torch.distributed",
    "cloudpickle",
    "holdfast.trainers.function.worker.main",
    "holdfast.trainers.function.worker.session",
)
# Nearly every training imports these when it makes an optimizer or saves, more than a second. That is too much for the
# way to the first line of train_func: they are loaded while the first workers run, for the workers after a restart.
_LATER = ("holdfast.state.save.snapshot", "holdfast.writer.client", "torch._dynamo")
_LATER_S = 5.0
_GRACE_S = 2.0
_ROUNDS = 5


def main(socket_fd: int) -> int:
    """Serve a driver; returns in forked children only, with their exit status."""
    # Batch systems and terminals signal every process of a job. Only the end of its driver ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(socket_fd, False)
    zygote = Zygote(Channel(socket.socket(fileno=socket_fd)))
    gc.disable()  # while modules load it finds nothing and takes its time
    _load(_FIRST)
    gc.enable()
    return _run_child(zygote.serve())


def _load(names: tuple[str, ...]) -> None:
    for name in names:
        # A worker that needs it raises the same error, where its user sees it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # children share these pages as long as no collection touches them


def _may_use_accelerator() -> bool:
    version = getattr(sys.modules.get("torch"), "version", None)
    return any(getattr(version, kind, None) is not None for kind in ("cuda", "hip", "xpu"))


class Zygote:
    """Forks on request and reports how its children ended."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._children: dict[int, int] = {}  # pid -> the driver's number for it
        self._loaded = False
        # Signals arrive here as bytes, so that a child's end can be waited for together with requests.
        self._signals, self._signalled = socket.socketpair()
        self._signalled.setblocking(False)
        self._signals.setblocking(False)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._selector.register(channel, selectors.EVENT_READ)

    def serve(self) -> Message:
        """Serve the driver until it is gone; returns only in a forked child, what it was asked for."""
        while True:
            idle = bool(self._children) and not self._loaded
            ready = [key.fileobj for key, _ in self._selector.select(_LATER_S if idle else None)]
            if idle and not ready:
                self._loaded = True
                # Where there may be an accelerator, load only what does not initialise it: no fork survives that.
                _load(_LATER[:2] if _may_use_accelerator() else _LATER)
            if self._signals in ready:
                self._reap()
            if self._channel in ready:
                message = self._channel.receive()
                if message is None:
                    self._end()
                elif self._fork(message):
                    return message

    def _fork(self, message: Message) -> bool:
        """Fork; return True in the child."""
        number = message.header["id"]
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            # Python warns of forks beside threads. numpy's linear algebra has threads, and stops them for the fork.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            pid = -1
            self._tell({"on": "not_forked", "id": number, "error": str(error)})
        if pid == 0:
            self._forget()
            return True
        # From now on only the child holds its ends: readers that wait for end of file must not wait for us.
        for fd in message.fds:
            os.close(fd)
        if pid > 0:
            self._children[pid] = number
            self._tell_forked(number, pid)
        return False

    def _tell_forked(self, number: int, pid: int) -> None:
        answer = {"on": "forked", "id": number, "pid": pid}
        try:
            # Opened here, where the child cannot be reaped before: the number cannot belong to another process.
            pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # old kernels, other systems
            self._tell(answer)
            return
        self._tell(answer, (pidfd,))
        os.close(pidfd)

    def _tell(self, header: dict[str, object], fds: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(OSError):  # the driver is gone: the next `receive` finds that
            self._channel.send(header, fds=fds)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._signals.recv(4096):
                pass
        for pid, number in list(self._children.items()):
            if hasattr(os, "waitid"):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                end_session(pid)  # before it is reaped, while its number still belongs to it
                _, status = os.waitpid(pid, 0)
            else:  # macOS before Python 3.13
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                end_session(pid)
            del self._children[pid]
            self._tell({"on": "ended", "id": number, "status": status})

    def _end(self) -> None:
        """End everything after the driver: children see its end too and get 2 s to end themselves, then SIGKILL."""
        self._selector.unregister(self._channel)
        deadline = time.monotonic() + _GRACE_S
        while self._children and (left := deadline - time.monotonic()) > 0:
            self._selector.select(left)
            self._reap()
        for pid in self._children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            end_session(pid)
        os._exit(0)

    def _forget(self) -> None:
        """Close in a child what belongs to the zygote, without ending the conversation."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._signals.close()
        self._signalled.close()
        self._channel.forget_in_child()
        self._children.clear()


def _run_child(message: Message) -> int:
    """Set a process up that has just been forked, call its entry, and return its exit status."""
    request = message.header
    fds = dict(zip(request["fds"], message.fds, strict=True))
    os.setsid()  # a Ctrl-C in the driver's terminal and a kill of the driver's group leave us alone
    _reset_signals()
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(fds[name], number)
        os.close(fds.pop(name))
    for fd in fds.values():
        os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # A segmentation fault leaves the Python stack in the log.
    faulthandler.enable(file=2)
    _take_place(request)
    _reseed()
    _limit_threads()
    module, _, function = request["entry"].partition(":")
    entry: Any = getattr(importlib.import_module(module), function)
    channel = Channel(socket.socket(fileno=fds["control"]))
    status = entry(channel, listen_fd=fds.get("listen", -1), use_gpu=bool(request.get("use_gpu")))
    return int(status or 0)


def _reset_signals() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # some belong to the C library
            signal.signal(number, _PYTHONS_OWN.get(number, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _take_place(request: dict[str, Any]) -> None:
    environment: dict[str, str] = request["environment"]
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    try:
        os.chdir(request["directory"])
    except OSError as error:
        print(f"holdfast: cannot go to the driver's folder {request['directory']}: {error}", file=sys.stderr)  # noqa: T201
    sys.path[:] = request["paths"]
    sys.argv[:] = request["arguments"]


def _reseed() -> None:
    """Give every child its own randomness, as a fresh interpreter has: a fork copies the zygote's generators."""
    random.seed()
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _limit_threads() -> None:
    """Tell torch what OMP_NUM_THREADS says here: its pools read the variable when the zygote loaded them."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if "torch" in sys.modules and wanted.isdigit() and int(wanted) > 0:
        sys.modules["torch"].set_num_threads(int(wanted))


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
