"""Turn a copy of the zygote into a process like a fresh interpreter: what a forked child does before its work.

The request for it: {"do": "fork", "fds": names of its descriptors in order ("control", "stdout", "stderr",
"listen"), "entry": "module:function", "environment", "directory", "paths", "arguments", "use_gpu"}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import os
import random
import signal
import socket
import sys
from typing import Any

from holdfast.writer.frames import Channel, Message

__all__ = ["ForkedProcess"]

# What a fresh interpreter does not leave to the kernel.
_PYTHONS_OWN: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGPIPE: signal.SIG_IGN}


class ForkedProcess:
    """A child that has just been forked."""

    def __init__(self, message: Message) -> None:
        self._request = message.header
        self._fds = dict(zip(message.header["fds"], message.fds, strict=True))

    def run(self) -> int:
        """Set this process up, call the entry, and return the exit status."""
        request = self._request
        os.setsid()  # a Ctrl-C in the driver's terminal and a kill of the driver's group leave us alone
        _reset_signals()
        self._take_output()
        _take_place(request)
        _reseed()
        _limit_threads()
        module, _, function = request["entry"].partition(":")
        entry: Any = getattr(importlib.import_module(module), function)
        channel = Channel(socket.socket(fileno=self._fds["control"]))
        status = entry(channel, listen_fd=self._fds.get("listen", -1), use_gpu=bool(request.get("use_gpu")))
        return int(status or 0)

    def _take_output(self) -> None:
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(self._fds[name], number)
            os.close(self._fds.pop(name))
        for fd in self._fds.values():
            os.set_inheritable(fd, False)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        # A segmentation fault leaves the Python stack in the log.
        faulthandler.enable(file=2)


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
