"""Locks of a local storage, and the removal of its directories."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator

from holdfast._fork import after_fork_in_child

from ..base import TEMPORARY, is_temporary_name, temporary_name, translate
from .beneath import POSIX, Beneath, OpenDirectory, Ops, make_durable, sweep

__all__ = [
    "NO_LOCKS", "FileLock", "lock_new", "locked", "nearest_existing", "remove_below", "remove_if_empty",
    "type_of_file_system", "unlisted_of_others",
]  # fmt: skip

NO_LOCKS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)
"""How flock(2) says that a file system, as it is mounted, has no locks."""
_LONG_IS_TYPE = ("x86_64", "aarch64", "riscv64", "ppc64le")
# NFS, Lustre, SMB (three), Ceph, GPFS, BeeGFS, AFS, 9P, FUSE, GFS2, OCFS2: other machines may have them mounted too.
_SHARED = frozenset(
    (0x6969, 0x0BD00BD0, 0x517B, 0xFF534D42, 0xFE534D42, 0x00C36400, 0x47504653, 0x19830326, 0x5346414F, 0x01021997,
     0x65735546, 0x01161970, 0x7461636F)
)  # fmt: skip
_LOCK_NAME = f"{TEMPORARY}lock"
_HELD_NAME = f"{TEMPORARY}held"
_LOCK_S = 5.0
_GONE_S = 30.0  # as long as the owner of a lease that is not heard of counts as alive
# Errors of a directory in use, being filled by another process, of another user, or no directory at all: it stays.
_STAYS = (
    errno.ENOTEMPTY,
    errno.EEXIST,
    errno.EBUSY,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.ELOOP,
)


def nearest_existing(path: str) -> str:
    """Return ``path`` or its closest ancestor that exists."""
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def unlisted_of_others(name: str) -> bool:
    """Tell whether a storage leaves a name out of its listings although nothing of Holdfast has it."""
    return name.startswith(TEMPORARY) and not is_temporary_name(name) and name not in (_LOCK_NAME, _HELD_NAME)


def lock_new(folder: OpenDirectory, name: str, fd: int) -> None:
    """Lock a temporary file that was just made, before anything is written to it.

    Raises:
        FileNotFoundError: `sweep` of another process saw the file before it was locked and removes it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise FileNotFoundError(errno.ENOENT, "swept by another process", name) from error
        return  # no locks here, and so nothing is swept either
    about = folder.lstat(name)
    if about is None or not os.path.samestat(about, os.fstat(fd)):
        raise FileNotFoundError(errno.ENOENT, "swept by another process", name)


@contextlib.contextmanager
def locked(directory: str | OpenDirectory) -> Iterator[None]:
    """Keep other holders of this lock out, on this machine and where the file system shares locks.

    The directory itself is locked, which leaves nothing behind. On a file system that machines share, a file does it:
    NFS locks for all of them only what is open for writing, and keeps the lock of a directory to its own machine,
    without a word. Where nothing can be locked, it is the name of a file that only one process can make.
    """
    where, dir_fd = (".", directory.fd) if isinstance(directory, OpenDirectory) else (directory, None)
    fd = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        if type_of_file_system(fd) in _SHARED:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        _lock(fd)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.EBADF, *NO_LOCKS, errno.EIO):
            raise
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(os.path.join(where, _LOCK_NAME), flags, 0o666, dir_fd=dir_fd)
        try:
            _lock(fd)
        except OSError as also:
            os.close(fd)
            if also.errno not in NO_LOCKS or error.errno not in (errno.EBADF, *NO_LOCKS):
                raise
            fd = -1
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(where, _LOCK_NAME), dir_fd=dir_fd)
    if fd < 0:
        with _named(os.path.join(where, _HELD_NAME), dir_fd):
            yield
        return
    try:
        yield
    finally:
        # Unlocked by hand: a child forked meanwhile has the same open file and would keep the lock after our close.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


class FileLock:
    """An flock that dies with this process and is not inherited by forked children."""

    def __init__(self, door: Beneath, inside: str, name: str) -> None:
        self._door, self._inside, self._name = door, inside, name
        self._file: int | None = None
        # A forked data loader worker that outlives the trainer would keep the lock of a dead run.
        after_fork_in_child(self.drop)

    def take(self) -> bool | None:
        """Try to lock. Return True: held; False: another process holds it; None: this file system has no locks."""
        if self._file is not None:
            return True
        try:
            with self._folder(make=True) as folder:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                file = os.open(self._name, flags, 0o666, dir_fd=folder.fd)
        except OSError as error:
            raise translate(error, "lock", self._path) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner removes the file when it releases it: a lock on a removed file protects nothing.
            if not self._is_named(file):
                os.close(file)
                return False
        except OSError as error:
            os.close(file)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT):
                return False
            if error.errno in NO_LOCKS:
                return None
            raise translate(error, "lock", self._path) from error
        self._file = file
        return True

    def seize(self) -> bool | None:
        """Remove the file of a holder that was taken over and stands still, and lock a new file."""
        with contextlib.suppress(OSError):
            self._unlink()
        return self.take()

    def release(self) -> None:
        """Remove the file and unlock it. Idempotent."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                if self._is_named(self._file):  # else it is the lock of the process that took over
                    self._unlink()
            self.drop()

    def is_in_place(self) -> bool:
        """Tell whether the lock is held, by the file that has its name."""
        try:
            return self._file is not None and self._is_named(self._file)
        except OSError:
            return False

    @property
    def _path(self) -> str:
        return f"{self._door.full(self._inside)}/{self._name}"

    def _folder(self, *, make: bool = False) -> OpenDirectory:
        try:
            return self._door.folder(self._inside)
        except FileNotFoundError:
            if not make:
                raise
            make_durable(POSIX, self._door, self._inside)
            return self._door.folder(self._inside)

    def _unlink(self) -> None:
        with self._folder() as folder:
            os.unlink(self._name, dir_fd=folder.fd)

    def _is_named(self, file: int) -> bool:
        with self._folder() as folder:
            return os.fstat(file).st_ino == os.stat(self._name, dir_fd=folder.fd, follow_symlinks=False).st_ino

    def drop(self) -> None:
        """Close this process's descriptor only."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def type_of_file_system(fd: int) -> int | None:
    """Return what statfs(2) calls the file system of an open file, None where there is no telling."""
    if not sys.platform.startswith("linux") or platform.machine() not in _LONG_IS_TYPE:
        return None
    about = (ctypes.c_long * 32)()  # struct statfs, f_type first
    try:
        if ctypes.CDLL(None).fstatfs(fd, about) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return int(about[0]) & 0xFFFFFFFF


def _lock(fd: int) -> None:
    """Lock a file that nobody holds for long; the wait for a holder that was stopped ends after `_LOCK_S`."""
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() >= until:
                raise
        time.sleep(0.001)


@contextlib.contextmanager
def _named(path: str, dir_fd: int | None) -> Iterator[None]:
    """Hold a name that only one process can make.

    A holder that dies leaves the name, which nobody holds for long: one that stays for `_GONE_S`, by the clock of the
    process that waits, is taken away.

    Raises:
        BlockingIOError: others held it, one after another, for twice as long.
    """
    seen: tuple[int, int] | None = None
    since, until = 0.0, time.monotonic() + 2 * _GONE_S
    while True:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(path, flags, 0o666, dir_fd=dir_fd)
            break
        except FileExistsError:
            now, there = time.monotonic(), _identity(path, dir_fd)
        if there is None or there != seen:
            seen, since = there, now
        elif now - since >= _GONE_S:
            _take_away(path, dir_fd, there)
        if now >= until:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)
        time.sleep(0.002)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            about = os.fstat(fd)
            if _identity(path, dir_fd) == (about.st_ino, about.st_mtime_ns):  # else it was taken away from us
                os.unlink(path, dir_fd=dir_fd)
        os.close(fd)


def _identity(path: str, dir_fd: int | None) -> tuple[int, int] | None:
    try:
        about = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return about.st_ino, about.st_mtime_ns


def _take_away(path: str, dir_fd: int | None, seen: tuple[int, int]) -> None:
    """Remove the name of a dead holder; if another process did so first and holds the name now, give it back."""
    aside = os.path.join(os.path.dirname(path), temporary_name())
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        if _identity(aside, dir_fd) != seen:
            with contextlib.suppress(OSError):
                os.link(aside, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        os.unlink(aside, dir_fd=dir_fd)


def remove_if_empty(ops: Ops, door: Beneath, inside: str) -> bool:
    """Remove a directory that is empty but for dead temporary files; tell whether it is gone."""
    try:
        with door.listed(inside) as folder:
            names = []
            with os.scandir(folder.fd) as entries:
                for entry in entries:
                    # Stops at the first entry worth keeping: a run directory may have 10 000 children.
                    if not is_temporary_name(entry.name) and entry.name not in (_LOCK_NAME, _HELD_NAME):
                        return False
                    names.append(entry.name)
            if names:
                sweep(ops, door, inside)
                with contextlib.suppress(OSError):
                    if _LOCK_NAME in names:
                        ops.unlink(folder.at(_LOCK_NAME))
                with contextlib.suppress(OSError):
                    about = os.stat(_HELD_NAME, dir_fd=folder.fd, follow_symlinks=False)
                    if time.time() - about.st_mtime > _GONE_S:
                        ops.unlink(folder.at(_HELD_NAME))
        head, _, name = inside.rpartition("/")
        with door.folder(head) as above:
            ops.rmdir(above.at(name))
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in _STAYS:
            return False
        raise
    return True


class _Level:
    """A directory that is being emptied."""

    def __init__(self, door: Beneath, inside: str) -> None:
        self.inside, self._door = inside, door
        self.removed = False
        self.folder: OpenDirectory | None = None
        self.rest: list[tuple[str, bool]] = []
        try:
            folder = door.listed(inside)
        except (FileNotFoundError, NotADirectoryError):
            return
        with folder, os.scandir(folder.fd) as entries:
            self.rest = sorted(((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries), reverse=True)

    def opened(self) -> OpenDirectory:
        if self.folder is None:
            self.folder = self._door.folder(self.inside)
        return self.folder

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()
            self.folder = None


def remove_below(ops: Ops, door: Beneath, inside: str, *, forget: Callable[[str], None]) -> None:
    """Remove everything in a directory, deepest first, following no link; the directory itself stays.

    A single directory is open at a time, however deep the tree is.
    """
    levels = [_Level(door, inside)]
    try:
        while levels:
            level = levels[-1]
            if level.rest:
                name, is_directory = level.rest.pop()
                if is_directory:
                    level.close()
                    level.removed = True
                    levels.append(_Level(door, f"{level.inside}/{name}" if level.inside else name))
                    continue
                with contextlib.suppress(FileNotFoundError):
                    ops.unlink(level.opened().at(name))
                    level.removed = True
                continue
            with contextlib.suppress(FileNotFoundError):
                if level.removed:
                    ops.fsync_dir(level.opened().here)
            level.close()
            levels.pop()
            if levels:
                forget(level.inside)
                remove_if_empty(ops, door, level.inside)
    finally:
        for level in levels:
            level.close()
