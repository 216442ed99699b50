"""A process that has torch loaded and forks workers and tasks from itself, in milliseconds.

It belongs to a driver and ends with it. It starts no thread, runs no tensor operation and never touches an
accelerator: nothing of that kind survives a fork.

Driver to zygote: {"do": "fork", "id", ...} (see `forked`). Zygote to driver: {"on": "forked", "id", "pid"} with a
pidfd where the platform has them, or {"on": "not_forked", "id", "error"}; {"on": "ended", "id", "status"} with what
`os.waitpid` says, once the process and all of its session are gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import warnings

from holdfast.writer.frames import Channel, Message

from .child import end_session
from .forked import ForkedProcess

__all__ = ["Zygote", "main"]

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
    forked = zygote.serve()
    return forked.run()


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

    def serve(self) -> ForkedProcess:
        """Serve the driver until it is gone; returns only in a forked child, with nothing of the zygote left in it."""
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
                else:
                    forked = self._fork(message)
                    if forked is not None:
                        return forked

    def _fork(self, message: Message) -> ForkedProcess | None:
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
            return ForkedProcess(message)
        # From now on only the child holds its ends: readers that wait for end of file must not wait for us.
        for fd in message.fds:
            os.close(fd)
        if pid > 0:
            self._children[pid] = number
            self._tell_forked(number, pid)
        return None

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
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            end_session(pid)  # before it is reaped, while its number still belongs to it
            _, status = os.waitpid(pid, 0)
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
