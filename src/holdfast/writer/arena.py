"""Memory that trainer and writer share: what was left there by a SIGKILL of the trainer is there for the writer.

`Arena` is a block, laid out like the files it becomes. In a small one are the words of a trainer: `StepMailbox` says
how far it is, and at which step all ranks act; `StepMemory` has the steps that are done, and rows that are not yet
sent. So a step costs no system call, no message and no fsync. Where both processes die at once (a container, a power
cut) it is lost. Layout of `StepMemory`: the number of steps (8 bytes), the number of bytes of records (8 bytes), the
records. The length is written after the records.

A record is its size (4 bytes), a letter and a body. "N": JSON of the names and the `struct` codes of the rows that
follow. "V": step, epoch, time and those values. "J": JSON of a row whose values are not all numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import json
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast._fork import after_fork_in_child
from holdfast._log import get_logger
from holdfast.errors import HoldfastError
from holdfast.storage.together import wait_out

_LOG = get_logger("writer")
_NAME = "holdfast-arena"
_PAGE = 4096
_STEP = 32 << 20
# From linux/mman.h; the mmap module names neither, and its own madvise keeps the interpreter lock.
_POPULATE_READ = 22
_POPULATE_WRITE = 23
_NUMBERS = itertools.count(1)
_LIVE: weakref.WeakSet[Arena] = weakref.WeakSet()
_MAPPED: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # of arenas, which a view of them may outlive


class Arena:
    """A page-aligned block of memory, shared with the writer process where the platform can (memfd).

    A memfd needs no /dev/shm, cannot be leaked, and travels over a socket. Forked children (data loader workers) do
    not inherit the mapping: it would be copied page by page on write otherwise.

    Attributes:
        size: length in bytes, a multiple of 4096.
        fd: descriptor of the memory, None when it cannot be shared (or after `close`).
        address: where the memory is mapped in this process.

    Example:
        >>> with Arena.create(8192) as arena:
        ...     arena.view[:5] = b"hello"
        ...     bytes(arena.view[:5])
        b'hello'
    """

    def __init__(self, memory: mmap.mmap, fd: int | None, size: int) -> None:
        self._memory, self.fd, self.size = memory, fd, size
        self._view: memoryview | None = memoryview(memory)
        anchor = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping from being closed
        self.number = next(_NUMBERS)
        self.prefaulted = threading.Event()
        self._prefaulter: threading.Thread | None = None
        self._stop, self._populated = threading.Event(), threading.Event()
        self._on_close: list[Callable[[Arena], None]] = []
        _LIVE.add(self)
        _MAPPED.add(memory)
        if hasattr(mmap, "MADV_DONTFORK"):
            memory.madvise(mmap.MADV_DONTFORK)

    @classmethod
    def create(cls, size: int) -> Arena:
        """Map at least ``size`` bytes (rounded up to whole pages); nothing is touched yet.

        Raises:
            HoldfastError: the system does not give them.
        """
        size = max(_PAGE, -(-size // _PAGE) * _PAGE)
        fd = _memfd(_NAME)
        if fd is None:
            return cls(mmap.mmap(-1, size), None, size)
        try:
            os.ftruncate(fd, size)
            return cls(mmap.mmap(fd, size), fd, size)
        except BaseException as error:
            os.close(fd)
            if not isinstance(error, OSError):
                raise
            raise HoldfastError(
                f"cannot get {size} bytes of shared memory for the copy of the state ({error.strerror}): give the "
                "process more memory, or a higher limit on files (ulimit -f), which holds for this too"
            ) from error

    @classmethod
    def private(cls, size: int) -> Arena:
        """Map memory of this process alone: its fresh pages cost a fraction of shared ones, and no writer sees them.

        Raises:
            HoldfastError: the system does not give them.
        """
        size = max(_PAGE, -(-size // _PAGE) * _PAGE)
        try:
            return cls(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON), None, size)
        except OSError as error:
            raise HoldfastError(
                f"cannot get {size} bytes of memory for the copy of the state ({error.strerror}): give the process more"
            ) from error

    @classmethod
    def attach(cls, fd: int, size: int) -> Arena:
        """Map an arena that another process created; takes over ``fd``.

        Raises:
            OSError: the system does not map it now; ``fd`` stays open, to try again.
        """
        memory = mmap.mmap(fd, size)
        os.close(fd)
        return cls(memory, None, size)

    @property
    def view(self) -> memoryview:
        """The whole memory, writable."""
        if self._view is None:
            raise ValueError("this arena is closed")
        return self._view

    def prefault(self, *, allocate: bool = True) -> None:
        """Fault all pages in the background; `prefaulted` is set when done. Safe to call more than once.

        The first touch of a fresh shared page costs 10 to 40 times a warm copy, so it must not happen while the
        trainer is held.

        Args:
            allocate: the trainer's side, which creates pages; the writer's side only maps pages that exist.
        """
        if self._prefaulter is None and self._view is not None:
            prefaulter = threading.Thread(
                target=self._fault_pages, args=(allocate,), name="holdfast-prefault", daemon=True
            )
            try:
                prefaulter.start()
            except RuntimeError as error:  # no thread to be had now: the first copy faults the pages
                _LOG.debug("arena: %s", error)
                self.prefaulted.set()
            else:
                self._prefaulter = prefaulter

    def _fault_pages(self, allocate: bool) -> None:
        try:
            madvise = ctypes.CDLL(None, use_errno=True).madvise
            madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            advice = _POPULATE_WRITE if allocate else _POPULATE_READ
            for start in range(0, self.size, _STEP):
                if self._stop.is_set():
                    return
                length = min(_STEP, self.size - start)
                try:
                    if allocate and self.fd is not None and hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(self.fd, start, length)
                except OSError as error:
                    _LOG.debug("arena: fallocate of %d bytes failed: %s", length, error)
                # Older kernels (before 5.14) answer EINVAL: the pages are then faulted by the first copy.
                if madvise(self.address + start, length, advice) != 0:
                    _LOG.debug("arena: populate failed with errno %d", ctypes.get_errno())
                    break
            self.prefaulted.set()
        finally:
            self._populated.set()

    def on_close(self, callback: Callable[[Arena], None]) -> None:
        """Call ``callback`` once when this arena closes."""
        self._on_close.append(callback)

    def close(self) -> None:
        """Give the memory back; idempotent. Views that others still hold keep the mapping alive until they go."""
        if self._view is None:
            return
        self._stop.set()
        if self._prefaulter is not None:
            # At most one step of 32 MiB. Its madvise is for this mapping, and its fallocate for this descriptor, which
            # would be another file's once it is closed.
            wait_out(self._populated.wait)
            self._prefaulter.join()
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback(self)
        view, self._view = self._view, None
        try:
            view.release()
            self._memory.close()
        except BufferError:
            _LOG.debug("arena: %d bytes stay mapped until the last view of them goes", self.size)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget_in_child(self) -> None:
        self._view = self.fd = None


def _memfd(name: str) -> int | None:
    """Make memory that can be shared; None where the kernel or a sandbox has none (ENOSYS, EPERM)."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return os.memfd_create(name)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
        return None


@functools.cache
def can_share_memory() -> bool:
    """Tell whether the system makes memory that another process can map by a descriptor."""
    try:
        fd = _memfd("holdfast-probe")
    except OSError:  # out of descriptors, for now: who needs it says so
        return True
    if fd is None:
        return False
    os.close(fd)
    return True


@after_fork_in_child
def _after_fork_in_child() -> None:
    for arena in list(_LIVE):
        arena._forget_in_child()
    mapped = list(_MAPPED)
    for memory in mapped:
        # The child has no mapping here (MADV_DONTFORK), yet its copy of the mmap object would unmap the range when
        # it is collected, by then perhaps somebody else's memory. One reference too many keeps that from happening.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    if not mapped:
        return
    # mmap objects keep a duplicate of their descriptor and do not tell its number. Held by a child, it would keep
    # the memory of a dead trainer.
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith(f"/memfd:{_NAME} "):
                    os.close(int(name))


_SIZE = 256 << 10
_STEPS, _LENGTH, _HEAD, _STAMP = struct.Struct("=q"), struct.Struct("=Q"), struct.Struct("=Ic"), struct.Struct("=qqd")
_ROWS = _STEPS.size + _LENGTH.size
_CODES = {float: "d", int: "q"}
MAILBOX_BYTES: Final = 4096
NEVER: Final = (1 << 62) - 1
KINDS: Final = ("save", "stop", "settle", "rollback", "keep")
WHO_LEFT: Final = "who left"  # asked of our own writer once the mailbox says that a rank is gone

_DONE, _ACTED, _TARGET, _ARMED, _KIND, _BROKEN = range(6)


class StepMemory:
    """The trainer's side of the memory. For one thread.

    Attributes:
        arena: the memory, for `WriterClient.open_run`; None where the platform cannot share it.
    """

    def __init__(self) -> None:
        self._arena = Arena.create(_SIZE)
        self._owner = os.getpid()  # a forked child does not have that memory
        self._end = _ROWS
        self._kind: tuple[Any, ...] | None = None  # names and codes of the last record "N"
        self._packed = _STAMP
        self.arena = None if self._arena.fd is None else self._arena

    def note_step(self, step: int) -> None:
        """Leave how many steps are done."""
        if self._owner == os.getpid():
            _STEPS.pack_into(self._arena.view, 0, step)

    def add_row(self, step: int, epoch: int, moment: float, metrics: Mapping[str, Any]) -> bool:
        """Leave a row of plain values that is sent later; false if there is no room for it."""
        if self._owner != os.getpid():
            return True
        kind = (*metrics, *map(type, metrics.values()))
        if kind == self._kind or self._name(kind, metrics):
            try:
                return self._add(b"V", self._packed.pack(step, epoch, moment, *metrics.values()))
            except struct.error:  # a number of more than 64 bits
                pass
        row = {"step": step, "epoch": epoch, "time": moment, "metrics": metrics}
        return self._add(b"J", json.dumps(row).encode())

    def _name(self, kind: tuple[Any, ...], metrics: Mapping[str, Any]) -> bool:
        codes = "".join(_CODES.get(type(value), "?") for value in metrics.values())
        if "?" in codes or not self._add(b"N", json.dumps([codes, *metrics]).encode()):
            return False
        self._kind, self._packed = kind, struct.Struct(_STAMP.format + codes)
        return True

    def _add(self, letter: bytes, body: bytes) -> bool:
        start, view = self._end, self._arena.view
        end = start + _HEAD.size + len(body)
        if end > _SIZE:
            return False
        _HEAD.pack_into(view, start, len(body), letter)
        view[start + _HEAD.size : end] = body
        _LENGTH.pack_into(view, _STEPS.size, end - _ROWS)
        self._end = end
        return True

    def clear_rows(self) -> None:
        """Forget the rows: they are sent."""
        if self._end != _ROWS and self._owner == os.getpid():
            _LENGTH.pack_into(self._arena.view, _STEPS.size, 0)
            self._end, self._kind = _ROWS, None

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._owner = 0
        self._arena.close()


def steps_done(memory: memoryview) -> int:
    """Return how many steps a trainer that has died had done."""
    return int(_STEPS.unpack_from(memory)[0])


def rows_left(memory: memoryview) -> list[dict[str, Any]]:
    """Return the rows that a trainer that has died had not sent; of what is no row, nothing."""
    at, end = _ROWS, min(_ROWS + _LENGTH.unpack_from(memory, _STEPS.size)[0], len(memory))
    names: list[str] = []
    packed = _STAMP
    rows = []
    while at + _HEAD.size <= end:
        size, letter = _HEAD.unpack_from(memory, at)
        body = bytes(memory[at + _HEAD.size : at + _HEAD.size + size])
        at += _HEAD.size + size
        try:
            if letter == b"N":
                codes, *names = json.loads(body)
                packed = struct.Struct(_STAMP.format + codes)
            elif letter == b"V":
                step, epoch, moment, *values = packed.unpack(body)
                metrics = dict(zip(names, values, strict=True))
                rows.append({"step": step, "epoch": epoch, "time": moment, "metrics": metrics})
            else:
                rows.append(dict(json.loads(body)))
        except (ValueError, TypeError, RecursionError, struct.error):
            continue
    return rows


class StepMailbox:
    """The words, seen from either side. Each word has one writer, and reading one costs no more than an index.

    The trainer stores the step it has done and then looks at the target; the writer stores a target and, a moment
    later (`member`), looks at the step. So at least one of them sees what the other has stored.

    Args:
        memory: at least `MAILBOX_BYTES` of shared memory, all zero at first.

    Example:
        >>> mailbox = StepMailbox(memoryview(bytearray(MAILBOX_BYTES)))
        >>> mailbox.clear(step=3)
        >>> mailbox.propose(9, "stop")
        >>> (mailbox.target, mailbox.armed, mailbox.kind, mailbox.done)
        (9, False, 'stop', 3)
    """

    __slots__ = ("_words",)

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:MAILBOX_BYTES].cast("B").cast("q")

    # -- the trainer's words

    def clear(self, *, step: int) -> None:
        """Begin, at ``step``; before the writer knows this mailbox."""
        words = self._words
        words[_DONE], words[_ACTED], words[_TARGET], words[_ARMED] = step, -1, NEVER, -1
        words[_KIND] = words[_BROKEN] = 0

    def calls(self, step: int) -> bool:
        """Publish that ``step`` is done; tell whether all ranks are to act at it."""
        words = self._words
        words[_DONE] = step
        return step >= words[_TARGET] and words[_ACTED] != words[_TARGET]

    def act(self, step: int) -> None:
        """Publish that this rank acts at the agreed ``step``."""
        self._words[_ACTED] = step

    @property
    def done(self) -> int:
        """Steps the trainer has done."""
        return self._words[_DONE]

    @property
    def acted(self) -> int:
        """Last agreed step at which the trainer has acted, -1 before the first."""
        return self._words[_ACTED]

    # -- the writer's words

    def propose(self, step: int, kind: str) -> None:
        """Ask the trainer to stop and look at ``step``."""
        self._words[_KIND] = KINDS.index(kind)
        self._words[_TARGET] = step

    def arm(self, step: int) -> None:
        """Tell the trainer that all ranks have agreed on ``step``."""
        self._words[_ARMED] = step

    def withdraw(self) -> None:
        """Take the proposal back."""
        self._words[_TARGET] = NEVER

    def break_up(self) -> None:
        """Tell the trainer that a rank is gone: nothing can be agreed any more."""
        self._words[_BROKEN] = 1

    @property
    def target(self) -> int:
        """The proposed step, `NEVER` if there is none."""
        return self._words[_TARGET]

    @property
    def armed(self) -> bool:
        """Whether the proposed step is agreed."""
        return self._words[_ARMED] == self._words[_TARGET]

    @property
    def kind(self) -> str:
        """What all ranks are to do at the proposed step."""
        return KINDS[self._words[_KIND]]

    @property
    def broken(self) -> bool:
        """Whether a rank is gone."""
        return bool(self._words[_BROKEN])

    def close(self) -> None:
        """Let go of the memory; idempotent."""
        self._words.release()
