"""The crash kit: kill a piece of work before each of its disk operations, and look at what is left.

A case needs a process to die in and a fresh process to look; a `ForkServer` has imported torch and Holdfast once and
forks a process in some 20 ms where a new interpreter takes seconds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from holdfast.errors import HoldfastError

from .faults import FaultyOps

__all__ = ["ArmedOps", "ForkServer", "Outcome"]

_READY_S = 120.0


class ArmedOps(FaultyOps):
    """`FaultyOps` that start to count on demand: operations before that prepare the case.

    Example:
        >>> ops = ArmedOps()
        >>> ops.arm(crash_after=None)
        >>> ops.since
        0
    """

    _armed_at = 0

    def arm(self, *, crash_after: int | None) -> None:
        """Count from here; with ``crash_after`` the process ends before the operation of that number."""
        with self._lock:
            self._armed_at = self.count
            self._crash_at = None if crash_after is None else self.count + crash_after

    @property
    def since(self) -> int:
        """Operations since `arm`."""
        return self.count - self._armed_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a case ended.

    Attributes:
        status: exit status; negative for a signal, as in `subprocess`.
        value: the result of the function (JSON), None if it did not return.
        error: traceback of its exception, "" if there was none.
        output: its output, standard error included.
    """

    status: int
    value: Any = None
    error: str = ""
    output: str = ""

    def checked(self) -> Any:
        """Return `value`.

        Raises:
            AssertionError: the function failed or its process died.
        """
        if self.status != 0 or self.error:
            raise AssertionError(f"exit status {self.status}\n{self.error}\n{self.output}")
        return self.value


class ForkServer:
    """Runs functions in forked children of a process that has imported their modules.

    Functions are named "module:function" or "/path/to/file.py:function" and take and return JSON. The server has one
    thread and one job at a time.

    Args:
        preload: modules, or files of Python, to import once.
        path: directories to put in front of ``sys.path``.

    Example:
        >>> with ForkServer(preload=()) as server:                                    # doctest: +SKIP
        ...     server.run("os:getcwd").checked()
    """

    def __init__(
        self, preload: Sequence[str] = ("torch", "holdfast.checkpointer"), path: Sequence[str | os.PathLike[str]] = ()
    ) -> None:
        source = os.fspath(Path(__file__).resolve().parents[2])
        boot = f"import sys; sys.path[:0] = {[source, *(os.fspath(directory) for directory in path)]!r}\n"
        boot += f"from holdfast.testing.crash import _serve; _serve({list(preload)!r})"
        # One thread: an OpenMP pool does not survive a fork.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", boot], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )
        self._read(_READY_S)

    def run(self, function: str, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> Outcome:
        """Run ``function(*args, **kwargs)`` in a child of its own and wait for it.

        Raises:
            HoldfastError: the server itself died.
        """
        assert self._process.stdin is not None
        line = json.dumps({"function": function, "args": args, "kwargs": kwargs, "timeout_s": timeout_s})
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return Outcome(**self._read(timeout_s + 30.0))

    def _read(self, timeout_s: float) -> dict[str, Any]:
        stream: IO[str] | None = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], timeout_s)[0]:
            self.close()
            raise HoldfastError(f"the fork server did not answer within {timeout_s:.0f} s")
        line = stream.readline()
        if not line:
            raise HoldfastError(f"the fork server died (exit status {self._process.wait()})")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the server; idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.write("\n")  # a fork of this process may keep the pipe open: its end tells nothing
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(preload: Sequence[str]) -> None:
    """Serve: for each JSON line of standard input run a child and answer with a JSON line."""
    for name in preload:
        _load(name)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    gc.freeze()  # a collection in a child would copy all of it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of children must not get between the answers
    answers.write("{}\n")
    answers.flush()
    for line in iter(sys.stdin.readline, ""):
        if not line.strip():
            break
        answers.write(json.dumps(_case(json.loads(line))) + "\n")
        answers.flush()
    os._exit(0)  # ending an interpreter with all of torch in it takes seconds


def _case(order: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            _child(order, answer.fileno(), output.fileno())
        status = _wait(pid, order["timeout_s"])
        answer.seek(0)
        output.seek(0)
        result = json.loads(answer.read() or b"{}")
        return {"status": status, "output": output.read().decode(errors="replace")[-20_000:], **result}


def _wait(pid: int, timeout_s: float) -> int:
    """Wait for a child, kill it when its time is up; return its exit status."""
    until = time.monotonic() + timeout_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.001)


def _child(order: dict[str, Any], answer: int, output: int) -> None:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        result: dict[str, Any]
        try:
            result = {"value": _find(order["function"])(*order["args"], **order["kwargs"])}
            status = 0
        except BaseException:  # noqa: BLE001 - a process edge: the caller reads the traceback
            result = {"error": traceback.format_exc()}
        os.pwrite(answer, json.dumps(result).encode(), 0)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)  # none of the server's own exit handlers


def _find(name: str) -> Any:
    home, _, function = name.rpartition(":")
    return getattr(_load(home), function)


def _load(home: str) -> ModuleType:
    if not home.endswith(".py"):
        return importlib.import_module(home)
    name = f"_holdfast_case_{Path(home).stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, home)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
