"""The arena: memory that trainer and writer share, laid out like the files it becomes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable

from holdfast._fork import after_fork_in_child
from holdfast._log import get_logger
from holdfast.errors import HoldfastError

__all__ = ["Arena", "can_share_memory"]

_LOG = get_logger("writer")
_NAME = "holdfast-arena"
_PAGE = 4096
_STEP = 32 << 20
# From linux/mman.h; the mmap module names neither, and its own madvise keeps the interpreter lock.
_POPULATE_READ = 22
_POPULATE_WRITE = 23
_DONTFORK = 10
_NUMBERS = itertools.count(1)
_LIVE: weakref.WeakSet[Arena] = weakref.WeakSet()


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
        self._stop = threading.Event()
        self._on_close: list[Callable[[Arena], None]] = []
        _LIVE.add(self)
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
                target=self._populate, args=(allocate,), name="holdfast-prefault", daemon=True
            )
            try:
                prefaulter.start()
            except RuntimeError as error:  # no thread to be had now: the first copy faults the pages
                _LOG.debug("arena: %s", error)
                self.prefaulted.set()
            else:
                self._prefaulter = prefaulter

    def _populate(self, allocate: bool) -> None:
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
            # Older kernels (before 5.14) answer EINVAL: the pages are then faulted by the first copy, as without us.
            if madvise(self.address + start, length, advice) != 0:
                _LOG.debug("arena: populate failed with errno %d", ctypes.get_errno())
                break
        self.prefaulted.set()

    def on_close(self, callback: Callable[[Arena], None]) -> None:
        """Call ``callback`` once when this arena closes."""
        self._on_close.append(callback)

    def close(self) -> None:
        """Give the memory back; idempotent. Views that others still hold keep the mapping alive until they go."""
        if self._view is None:
            return
        self._stop.set()
        if self._prefaulter is not None:
            self._prefaulter.join()  # at most one step of 32 MiB; munmap under a running madvise would be a crash
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
        # The child has no mapping here (MADV_DONTFORK), yet its copy of the mmap object would unmap the range when
        # it is collected, by then perhaps somebody else's memory. One reference too many keeps that from happening.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
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
    arenas = list(_LIVE)
    for arena in arenas:
        arena._forget_in_child()
    if not arenas:
        return
    # mmap objects keep a duplicate of their descriptor and do not tell its number. Held by a child, it would keep
    # the memory of a dead trainer.
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith(f"/memfd:{_NAME} "):
                    os.close(int(name))
