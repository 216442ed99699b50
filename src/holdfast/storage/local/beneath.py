"""The only way to files below a directory that the user gave, the calls that change them, directories made durably.

A checkpoint, a run or a folder of somebody else may hold symbolic links that lead anywhere. No link below the top is
followed, by any operation; links in the path *to* the top are the user's own and are followed. Where the kernel
has `openat2` (Linux 5.6), one call checks that; else directories are opened in turn, each relative to its parent.
Calls that change the disk then name a file relative to an open directory (`Inside`), so that a link that is put in the
way a moment later changes nothing either.

These calls (`Ops`) are the seam at which tests count, fail, crash and record them: each does what `os` does and raises
what `os` raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import platform
import stat as stat_module
import sys
import time
from collections.abc import Callable, Collection, Iterator
from types import TracebackType

from holdfast._log import get_logger

from ..base import is_temporary_name

__all__ = ["POSIX", "Beneath", "Inside", "OpenDirectory", "Ops", "make_durable", "sweep"]

_PATH = getattr(os, "O_PATH", 0)
_SEARCH = _PATH | os.O_DIRECTORY
_OPENAT2 = 437  # the same number on all machines but alpha and mips
_MACHINES = ("x86_64", "aarch64", "arm64", "riscv64", "ppc64le", "s390x", "loongarch64")
_RESOLVE = 0x02 | 0x04  # RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS; there is no ".." in the paths that come here
_AT_FDCWD = -100
_PATH_MAX = 4096
# Errors of a path whose directories above the top were changed since it was resolved.
_MOVED = (errno.ELOOP, errno.ENOENT, errno.ENOTDIR)
_OLD_S = 86400.0  # no writer leaves a file alone for that long, whatever the clocks say
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)  # macOS, whose fsync leaves bytes in the cache of the disk (fsync(2))
# How file systems say that they lack a call: network mounts, FUSE, some container layers.
_LACKS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_log = get_logger("storage")
_unsynced: set[int] = set()  # devices without fsync, which were named already


class _How(ctypes.Structure):
    """struct open_how of openat2(2)."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class Inside(str):
    """The absolute path of a file, for messages, that `Ops` reaches through an open directory.

    Attributes:
        dir_fd: the directory.
        name: of the entry.
        is_open: the entry is the open directory itself, and ``dir_fd`` may be read and synced.
    """

    __slots__ = ("dir_fd", "is_open", "name")

    dir_fd: int
    name: str
    is_open: bool

    @classmethod
    def of(cls, path: str, dir_fd: int, name: str, *, is_open: bool = False) -> Inside:
        """Name the entry ``name`` of an open directory."""
        entry = cls(path)
        entry.dir_fd, entry.name, entry.is_open = dir_fd, name, is_open
        return entry


class OpenDirectory:
    """A directory below the top, open; a context manager."""

    __slots__ = ("_is_readable", "fd", "path")

    def __init__(self, path: str, fd: int, *, is_readable: bool = True) -> None:
        self.path, self.fd, self._is_readable = path, fd, is_readable

    def at(self, name: str) -> Inside:
        """Name an entry."""
        return Inside.of(f"{self.path}/{name}", self.fd, name)

    @property
    def here(self) -> Inside:
        """Name the directory itself."""
        return Inside.of(self.path, self.fd, ".", is_open=self._is_readable)

    def lstat(self, name: str) -> os.stat_result | None:
        """Describe an entry, a link as a link; None if there is no such entry."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def dup(self) -> OpenDirectory:
        """Return the same directory, which is closed by itself."""
        return OpenDirectory(self.path, os.dup(self.fd), is_readable=self._is_readable)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> OpenDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Beneath:
    """Opens files and directories below ``top``.

    All paths are relative, without ".", ".." or empty parts (`holdfast.storage.base.check_path`); "" is the top.

    Args:
        top: absolute; need not exist yet.
    """

    def __init__(self, top: str) -> None:
        self.top = top
        # The top with the user's links resolved: where the kernel knows `openat2`, one call then opens everything.
        self._real: str | None = None

    def full(self, inside: str) -> str:
        """Return the absolute path, for messages."""
        return f"{self.top.rstrip('/')}/{inside}" if inside else self.top

    def open(self, inside: str, flags: int) -> int:
        """Open a file or directory that exists; return the descriptor.

        Raises:
            OSError: ELOOP if a part of the path below the top is a link.
        """
        real = self._real
        if real is not None:
            try:
                return _way()(real, inside, flags)
            except OSError as error:
                if error.errno not in _MOVED:
                    raise
                now = os.path.realpath(self.top)
                if now == real:
                    raise
        else:
            now = os.path.realpath(self.top)
        self._real = None
        fd = _way()(now, inside, flags)
        self._real = now
        return fd

    def stat(self, inside: str) -> os.stat_result:
        """Describe a file or directory.

        Raises:
            OSError: as `open`.
        """
        fd = self.open(inside, _PATH or os.O_NONBLOCK)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def folder(self, inside: str) -> OpenDirectory:
        """Open a directory to name files in it, also a directory with the right to pass but not to read."""
        try:
            return self.listed(inside)
        except PermissionError:
            return OpenDirectory(self.full(inside), self.open(inside, _SEARCH), is_readable=False)

    def listed(self, inside: str) -> OpenDirectory:
        """Open a directory to list it: `os.scandir(folder.fd)`."""
        return OpenDirectory(self.full(inside), self.open(inside, os.O_RDONLY | os.O_DIRECTORY))


def _by_parts(top: str, inside: str, flags: int) -> int:
    """Open a path part by part, without `openat2`."""
    if len(os.fsencode(top)) + len(os.fsencode(inside)) + 1 >= _PATH_MAX:  # the limit of the kernel
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), f"{top}/{inside}")
    fd = os.open(top, (_SEARCH if inside else flags) | os.O_CLOEXEC)
    parts = inside.split("/") if inside else []
    for number, part in enumerate(parts):
        wanted = (flags if number == len(parts) - 1 else _SEARCH) | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            next_fd = os.open(part, wanted, dir_fd=fd)
        except NotADirectoryError:
            # With O_DIRECTORY a link is "no directory" too.
            if stat_module.S_ISLNK(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), f"{top}/{inside}") from None
            raise
        finally:
            os.close(fd)
        fd = next_fd
    if flags & _PATH and stat_module.S_ISLNK(os.fstat(fd).st_mode):  # such an open takes the link itself
        os.close(fd)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), f"{top}/{inside}")
    return fd


def _by_kernel() -> Callable[[str, str, int], int] | None:
    """Return `openat2` as a function, None where the kernel or a sandbox has none."""
    if not sys.platform.startswith("linux") or platform.machine() not in _MACHINES:
        return None
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    syscall.restype = ctypes.c_long
    syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
    hows: dict[int, tuple[_How, int]] = {}
    size = ctypes.sizeof(_How)

    def opened(top: str, inside: str, flags: int) -> int:
        path = f"{top}/{inside}" if inside else top
        if "\0" in path:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        if flags not in hows:
            how = _How(flags | os.O_CLOEXEC, 0, _RESOLVE)
            hows[flags] = how, ctypes.addressof(how)
        while True:
            fd: int = syscall(_OPENAT2, _AT_FDCWD, os.fsencode(path), hows[flags][1], size)
            if fd >= 0:
                return fd
            code = ctypes.get_errno()
            if code not in (errno.EINTR, errno.EAGAIN):
                raise OSError(code, os.strerror(code), path)

    try:
        os.close(opened("/", "", _SEARCH))
    except OSError:
        return None
    return opened


@functools.cache
def _way() -> Callable[[str, str, int], int]:
    """Return what opens a path, chosen once, when it is first needed."""
    return _by_kernel() or _by_parts


def _at(path: str) -> tuple[str, int | None]:
    """Return a path as `os` takes it, with the directory that it is relative to."""
    return (path.name, path.dir_fd) if isinstance(path, Inside) else (path, None)


def _flush(fd: int) -> OSError | None:
    """Have the disk store what an open file or directory holds; return the error of a file system without fsync."""
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(fd, _FULL_SYNC)
            return None
        except OSError as error:
            if error.errno not in (*_LACKS, errno.ENOTTY):
                raise
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _LACKS:
            raise
        return error
    return None


def _say_unsynced(fd: int, error: OSError) -> None:
    """Warn, once for each file system, that files are not known to be durable there."""
    device = os.fstat(fd).st_dev
    if device not in _unsynced:
        _unsynced.add(device)
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            name = "a file"
        _log.warning(
            "%s: this file system has no fsync (%s): saves go on, but a power cut or the loss of the mount may take "
            "the newest ones; use a local disk, or the storage's own URI",
            name, error.strerror,
        )  # fmt: skip


class Ops:
    """Thin calls into the operating system; tests subclass it to watch or to break them.

    A path is absolute. The path of a storage's own file is an `Inside`: the call then goes by its open directory.
    """

    def open(self, path: str, flags: int) -> int:
        """Open a file for writing, permissions 0666 less the umask; reads do not come through here."""
        name, dir_fd = _at(path)
        return os.open(name, flags | os.O_CLOEXEC | (0 if dir_fd is None else os.O_NOFOLLOW), 0o666, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """Close a descriptor that `open` returned."""
        os.close(fd)

    def set_direct(self, fd: int, *, on: bool) -> None:
        """Switch O_DIRECT; changes nothing on the disk. EINVAL where the file system does not have it."""
        if not _O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        """Write some of ``view``; returns how many bytes."""
        return os.pwrite(fd, view, offset)

    def fsync(self, fd: int) -> None:
        """Make the content of a file durable, as far as the file system can; what it cannot is logged once."""
        if (error := _flush(fd)) is not None:
            _say_unsynced(fd, error)

    def fsync_dir(self, path: str) -> None:
        """Make the entries of a directory durable.

        Some network and FUSE file systems have no fsync for directories: they keep entries by themselves.
        """
        if isinstance(path, Inside) and path.is_open:
            _flush(path.dir_fd)
            return
        name, dir_fd = _at(path)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            _flush(fd)
        finally:
            os.close(fd)

    def syncfs(self, path: str, fd: int) -> None:
        """Make everything durable on the file system of an open directory; ``path`` is its name, for messages."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)

    def ftruncate(self, fd: int, size: int) -> None:
        """Cut or extend a file."""
        os.ftruncate(fd, size)

    def lstat(self, path: str) -> os.stat_result:
        """Describe an entry, a link as a link."""
        name, dir_fd = _at(path)
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        """Replace ``target`` atomically."""
        (old, old_fd), (new, new_fd) = _at(source), _at(target)
        os.replace(old, new, src_dir_fd=old_fd, dst_dir_fd=new_fd)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; EEXIST if the name is taken."""
        (old, old_fd), (new, new_fd) = _at(source), _at(target)
        os.link(old, new, src_dir_fd=old_fd, dst_dir_fd=new_fd, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        name, dir_fd = _at(path)
        os.unlink(name, dir_fd=dir_fd)

    def mkdir(self, path: str) -> None:
        """Make one directory, permissions 0777 less the umask."""
        name, dir_fd = _at(path)
        os.mkdir(name, 0o777, dir_fd=dir_fd)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        name, dir_fd = _at(path)
        os.rmdir(name, dir_fd=dir_fd)


POSIX = Ops()


def make_durable(ops: Ops, door: Beneath, inside: str, ready: Collection[str] = ()) -> None:
    """Make a directory exist, with a durable name in every ancestor, and sweep what dead writers left in it.

    The name of the deepest existing directory may not be durable yet: its maker may have died between mkdir and fsync.
    The names above it are, because each maker syncs that name before it goes one level deeper.

    Args:
        ops: the calls.
        door: of the storage.
        inside: the directory.
        ready: directories that are known to exist durably.

    Raises:
        FileNotFoundError: another process has removed a directory meanwhile.
    """
    missing: list[str] = []
    existing = inside
    while existing and existing not in ready:
        try:
            door.folder(existing).close()
        except FileNotFoundError:
            missing.append(existing)
            existing = existing.rpartition("/")[0]
        else:
            break
    if existing not in ready:
        if existing:
            # This user may have the right to pass the parent but not to read it: then its names cannot be synced.
            with door.folder(existing.rpartition("/")[0]) as above, contextlib.suppress(PermissionError):
                ops.fsync_dir(above.here)
        else:
            _make_top(ops, door.top)
    for path in reversed(missing):
        head, _, name = path.rpartition("/")
        with door.folder(head) as above:
            try:
                ops.mkdir(above.at(name))
            except FileExistsError:
                door.folder(path).close()  # fine if another process was faster; not if a file or a link is in the way
            ops.fsync_dir(above.here)
    if not missing:
        sweep(ops, door, inside)


def _make_top(ops: Ops, top: str) -> None:
    """Make the directory that the user gave, with those above it, durably: links in this path are the user's own."""
    missing, existing = [], top
    while not os.path.isdir(existing) and os.path.dirname(existing) != existing:
        missing.append(existing)
        existing = os.path.dirname(existing)
    with contextlib.suppress(PermissionError):  # as above
        ops.fsync_dir(os.path.dirname(existing))
    for path in reversed(missing):
        try:
            ops.mkdir(path)
        except FileExistsError:
            # Fine if another process was faster; not if a file is in the way.
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        ops.fsync_dir(os.path.dirname(path))


def sweep(ops: Ops, door: Beneath, inside: str) -> None:
    """Remove temporary files whose writer is dead: nobody holds their lock."""
    try:
        folder = door.listed(inside)
    except (FileNotFoundError, NotADirectoryError):
        return
    with folder:
        for name in sorted(os.listdir(folder.fd)):
            if not is_temporary_name(name):
                continue
            with contextlib.suppress(OSError), _locked_file(name, folder.fd):
                ops.unlink(folder.at(name))


@contextlib.contextmanager
def _locked_file(name: str, dir_fd: int) -> Iterator[None]:
    """Lock a file that nobody else has locked.

    NFS locks exclusively only what is open for writing (flock(2)), and its mounts may keep locks to their own machine
    (nfs(5), ``local_lock``): there the file has to be old as well.

    Raises:
        OSError: it is in use, or may be.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(name, os.O_RDONLY | flags, dir_fd=dir_fd)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EBADF or os.fstat(fd).st_mtime > time.time() - _OLD_S:
                raise
            for_writing = os.open(name, os.O_RDWR | flags, dir_fd=dir_fd)
            os.close(fd)
            fd = for_writing
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
