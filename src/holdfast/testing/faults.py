"""A local disk that counts, records, fails and kills on command.

Operations are numbered from 0 in the order in which they happen; one lock keeps number, effect and record together
when several threads work. The same work done by one thread has the same numbers each time.

A kill needs a process to die in, and a fresh process to look at what is left: a `ForkServer` has imported torch and
Holdfast once, and forks a process in some 20 ms where a new interpreter takes seconds.
"""

from __future__ import annotations

import contextlib
import errno
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
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from holdfast.errors import ConfigError, HoldfastError
from holdfast.storage.local.beneath import Ops
from holdfast.storage.local.local_storage import LocalStorage

CRASH_EXIT_CODE = 9
"""Exit status of a process that ``crash_at`` ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A recorded operation that took effect, or a mark (``name="mark"``, without a number of its own).

    Attributes:
        number: position in the sequence of operations.
        name: method of `Ops`.
        path: of its file or directory; for operations on an open file the path that it was opened under.
        target: new name of a rename or link; the label of a mark.
        handle: identity of an open file, unique in the log.
        offset: of a pwrite, in bytes.
        data: bytes of a pwrite.
        size: length given to ftruncate.
        created: whether an open made the file.
    """

    number: int
    name: str
    path: str = ""
    target: str = ""
    handle: int = -1
    offset: int = 0
    data: bytes = b""
    size: int = 0
    created: bool = False


class FaultyOps(Ops):
    """Numbers every operation that changes the disk, and breaks those that its arguments name.

    Example:
        >>> import tempfile
        >>> ops = FaultyOps(record=True)
        >>> storage = FaultyStorage(tempfile.mkdtemp(), ops=ops)
        >>> tag = storage.put("a", b"1")
        >>> [operation.name for operation in ops.log]
        ['fsync_dir', 'open', 'pwrite', 'fsync', 'fsync_dir', 'rename', 'fsync_dir']

    Args:
        crash_at: end the process, as `kill -9` would, before the operation of this number.
        crash_once: with ``crash_at``: path of a file made by the crash; while it exists nothing crashes again.
        crash_with: with ``crash_at``: file with the number of a process that is killed at the same moment.
        tear: with ``crash_at`` on a pwrite: its first half reaches the file.
        fail_at: number -> errno of operations that fail once.
        fail_from: (number, errno): this operation and all later ones fail.
        fail_on: name of an operation ("fsync", "mkdir", ...) -> errno; it always fails.
        events: "operation:part of the path" -> event before the first such operation: "EIO" (or another errno) fails
            it, "SIGKILL:FILE" (or another signal) is sent to the process whose number is in FILE.
        disk_bytes: size of the disk: writes beyond it are cut short, then fail with ENOSPC. Removing files written
            here gives their bytes back.
        short_write: largest number of bytes one pwrite takes.
        direct: False for a file system without O_DIRECT.
        record: keep `log`, with all bytes written, for `holdfast.testing.power_cut`.
        trace: file to which a JSON line for each operation is appended before it happens: read it in the test
            when the operations happen in another process.
    """

    def __init__(
        self,
        *,
        crash_at: int | None = None,
        crash_once: str | None = None,
        crash_with: str | None = None,
        tear: bool = False,
        fail_at: Mapping[int, int] | None = None,
        fail_from: tuple[int, int] | None = None,
        fail_on: Mapping[str, int] | None = None,
        events: Mapping[str, str] | None = None,
        disk_bytes: int | None = None,
        short_write: int | None = None,
        direct: bool = True,
        record: bool = False,
        trace: str | None = None,
    ) -> None:
        unknown = sorted(set(fail_on or ()) - _NAMES)
        if unknown:
            raise ConfigError(f"fail_on={unknown}: no such operation; use some of {sorted(_NAMES)}")
        self._crash_at, self._crash_once, self._crash_with, self._tear = crash_at, crash_once, crash_with, tear
        self._fail_at, self._fail_on = dict(fail_at or {}), dict(fail_on or {})
        self._fail_from = None if fail_from is None else (fail_from[0], fail_from[1])
        self._events = dict(events or {})
        self._disk_bytes, self._short_write, self._direct = disk_bytes, short_write, direct
        self._record, self._trace = record, trace
        self._lock = threading.RLock()
        self._files: dict[int, tuple[str, int]] = {}  # fd -> (path when opened, handle)
        self._num_handles = 0
        self.count = 0
        self.used_bytes = 0
        self.log: list[Operation] = []

    def mark(self, label: str) -> None:
        """Put a label into the log: promises made before it must survive every later crash."""
        with self._lock:
            self.log.append(Operation(number=self.count, name="mark", target=label))

    @property
    def free_bytes(self) -> int | None:
        """Bytes left on the disk of ``disk_bytes``."""
        return None if self._disk_bytes is None else max(0, self._disk_bytes - self.used_bytes)

    @contextlib.contextmanager
    def _operation(
        self, name: str, path: str, torn: Callable[[], object] | None = None, *, target: str = ""
    ) -> Iterator[int]:
        """Number an operation and apply the faults planned for it; the lock is held until its effect is recorded."""
        with self._lock:
            number = self.count
            self.count += 1
            if self._trace is not None:
                self._append_trace({"number": number, "name": name, "path": path, "pid": os.getpid()})
            if number == self._crash_at and self._first_crash():
                if self._tear and torn is not None:
                    torn()
                if self._crash_with is not None:
                    os.kill(int(Path(self._crash_with).read_text(encoding="ascii")), signal.SIGKILL)
                os._exit(CRASH_EXIT_CODE)
            code = self._fail_at.get(number) or self._fail_on.get(name)
            if code is None and self._fail_from is not None and number >= self._fail_from[0]:
                code = self._fail_from[1]
            if self._events:
                code = self._event(name, target or path) or code
            if code is not None:
                raise OSError(code, os.strerror(code), path)
            yield number

    def _event(self, name: str, path: str) -> int | None:
        """Carry out the event planned for this operation, once; return an errno if the operation has to fail."""
        for key, event in list(self._events.items()):
            operation, _, part = key.partition(":")
            if operation == name and part in path and self._first_crash():
                del self._events[key]
                sign, _, file = event.partition(":")
                if not file:
                    return int(getattr(errno, sign))
                os.kill(int(Path(file).read_text(encoding="ascii")), getattr(signal, sign))
        return None

    def _first_crash(self) -> bool:
        if self._crash_once is None:
            return True
        try:
            os.close(os.open(self._crash_once, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            return False
        return True

    def _append_trace(self, line: dict[str, Any]) -> None:
        fd = os.open(str(self._trace), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            os.write(fd, json.dumps(line).encode() + b"\n")
        finally:
            os.close(fd)

    def _note(self, number: int, name: str, path: str, **details: Any) -> None:
        if self._record:
            self.log.append(Operation(number=number, name=name, path=path, **details))

    def open(self, path: str, flags: int) -> int:
        """Open a file for writing: one operation."""
        with self._operation("open", path) as number:
            created = not os.path.lexists(path)
            fd = super().open(path, flags)
            self._num_handles += 1
            self._files[fd] = path, self._num_handles
            self._note(number, "open", path, handle=self._num_handles, created=created)
        return fd

    def close(self, fd: int) -> None:
        """Close a file: no operation, since a crash before it equals a crash before the next operation."""
        with self._lock:
            self._files.pop(fd, None)
            super().close(fd)

    def set_direct(self, fd: int, *, on: bool) -> None:
        """Switch O_DIRECT, or refuse to: no operation, for it changes nothing on the disk."""
        if on and not self._direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().set_direct(fd, on=on)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        """Write some bytes: one operation for each call."""
        path, handle = self._files[fd]
        head = view[: len(view) // 2 // 4096 * 4096 or len(view) // 2]
        with self._operation("pwrite", path, torn=lambda: Ops.pwrite(self, fd, head, offset)) as number:
            if self._short_write is not None:
                view = view[: self._short_write]
            before = os.fstat(fd).st_size
            growth = offset + len(view) - before
            if self._disk_bytes is not None and growth > (room := self._disk_bytes - self.used_bytes):
                # A full disk takes whole blocks while it can; the next call gets nothing.
                view = view[: max(0, len(view) - growth + room) // 4096 * 4096]
                if not len(view):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            written = super().pwrite(fd, view, offset)
            self.used_bytes += os.fstat(fd).st_size - before
            if self._record:
                self._note(number, "pwrite", path, handle=handle, offset=offset, data=bytes(view[:written]))
        return written

    def fsync(self, fd: int) -> None:
        """Make content durable: one operation."""
        path, handle = self._files[fd]
        with self._operation("fsync", path) as number:
            super().fsync(fd)
            self._note(number, "fsync", path, handle=handle)

    def fsync_dir(self, path: str) -> None:
        """Make entries durable: one operation."""
        with self._operation("fsync_dir", path) as number:
            super().fsync_dir(path)
            self._note(number, "fsync_dir", path)

    def syncfs(self, path: str, fd: int) -> None:
        """Make everything durable: one operation."""
        with self._operation("syncfs", path) as number:
            super().syncfs(path, fd)
            self._note(number, "syncfs", path)

    def ftruncate(self, fd: int, size: int) -> None:
        """Set the length: one operation."""
        path, handle = self._files[fd]
        with self._operation("ftruncate", path) as number:
            before = os.fstat(fd).st_size
            super().ftruncate(fd, size)
            self.used_bytes += size - before
            self._note(number, "ftruncate", path, handle=handle, size=size)

    def rename(self, source: str, target: str) -> None:
        """Replace a name: one operation."""
        with self._operation("rename", source, target=target) as number:
            freed = _last_name_bytes(target)
            super().rename(source, target)
            self.used_bytes -= freed
            self._note(number, "rename", source, target=target)

    def link(self, source: str, target: str) -> None:
        """Add a name: one operation."""
        with self._operation("link", source, target=target) as number:
            super().link(source, target)
            self._note(number, "link", source, target=target)

    def unlink(self, path: str) -> None:
        """Remove a name: one operation."""
        with self._operation("unlink", path) as number:
            freed = _last_name_bytes(path)
            super().unlink(path)
            self.used_bytes -= freed
            self._note(number, "unlink", path)

    def mkdir(self, path: str) -> None:
        """Make a directory: one operation."""
        with self._operation("mkdir", path) as number:
            super().mkdir(path)
            self._note(number, "mkdir", path)

    def rmdir(self, path: str) -> None:
        """Remove a directory: one operation."""
        with self._operation("rmdir", path) as number:
            super().rmdir(path)
            self._note(number, "rmdir", path)


_NAMES = frozenset(
    ("open", "pwrite", "fsync", "fsync_dir", "syncfs", "ftruncate", "rename", "link", "unlink", "mkdir", "rmdir")
)


def _last_name_bytes(path: str) -> int:
    """Return the bytes that are freed when this name is removed."""
    try:
        about = os.lstat(path)
    except OSError:
        return 0
    return about.st_size if about.st_nlink == 1 else 0


# Storages rebuilt in one process from one description count together, as they would on one disk.
_shared: dict[str, FaultyOps] = {}


class FaultyStorage(LocalStorage):
    """A `LocalStorage` on `FaultyOps`, which another process can rebuild: a writer process breaks in the same way.

    Takes the arguments of `FaultyOps`, or ``ops`` ready made. In the process that made it, `ops` counts; a writer
    process counts for itself, from 0. With ``record=True`` or ``ops`` it describes itself as impossible to rebuild,
    so that the writer runs as a thread of this process and its operations can be seen here.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, ops: FaultyOps | None = None, token: str = "", **faults: Any
    ) -> None:
        self._faults = faults
        # JSON has no integer keys: they come as text from another process.
        if faults.get("fail_at"):
            faults["fail_at"] = {int(number): code for number, code in faults["fail_at"].items()}
        self._rebuildable = ops is None and not faults.get("record")
        self._token = token or uuid.uuid4().hex
        self.ops = ops or _shared.setdefault(self._token, FaultyOps(**faults))
        super().__init__(root, ops=self.ops)

    def describe(self) -> dict[str, Any] | None:
        """Return root and faults; None if the operations must stay in this process."""
        if not self._rebuildable:
            return None
        faults = {name: dict(value) if isinstance(value, Mapping) else value for name, value in self._faults.items()}
        return {"kind": "holdfast.testing.faults:FaultyStorage", "root": self.uri, "token": self._token, **faults}

    def free_bytes(self) -> int | None:
        """Return what is left of ``disk_bytes``, or of the real disk."""
        return super().free_bytes() if self.ops.free_bytes is None else self.ops.free_bytes


def count_operations(work: Callable[[FaultyOps], object]) -> int:
    """Return how many operations ``work`` does with the `FaultyOps` it is given: the range of a crash sweep."""
    ops = FaultyOps()
    work(ops)
    return ops.count


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
        boot += f"from holdfast.testing.faults import _serve; _serve({list(preload)!r})"
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
