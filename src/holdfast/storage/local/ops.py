"""The system calls that change a local disk: the seam at which tests count, fail, crash and record them.

`Ops` does what `os` does and raises what `os` raises; `errors_of`, here too, translates errors, so that each errno has
its message in one place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from types import TracebackType

from holdfast._log import get_logger
from holdfast.errors import (
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
)

from .beneath import Inside

__all__ = ["POSIX", "Ops", "errors_of", "translate"]

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)  # macOS, whose fsync leaves bytes in the cache of the disk (fsync(2))
# How file systems say that they lack a call: network mounts, FUSE, some container layers.
_LACKS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_LACKING = "this file system lacks the call (the mount of a bucket?): use a local disk, or the URI of the storage"
_log = get_logger("storage")
_unsynced: set[int] = set()  # devices without fsync, which were named already


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

_KINDS: dict[int, tuple[type[StorageError], str]] = {
    errno.ENOSPC: (StorageFullError, "free some space, keep fewer checkpoints (Keep(last=...)) or use another place"),
    errno.EDQUOT: (StorageFullError, "the quota is used up: free some space, keep fewer checkpoints or raise it"),
    errno.EFBIG: (StorageFullError, "the file is larger than the file system or `ulimit -f` allows"),
    errno.EACCES: (StoragePermissionError, "give this user access to it, or use another place"),
    errno.EPERM: (StoragePermissionError, "give this user access to it, or use another place"),
    errno.EROFS: (StoragePermissionError, "the file system is mounted read-only: remount it or use another place"),
    errno.ENOENT: (StorageNotFoundError, "check the path; another process may have removed it"),
    errno.EEXIST: (StorageExistsError, "use another name or remove it"),
    errno.ENOTDIR: (StorageError, "a part of the path is a file, not a directory: use another place"),
    errno.EISDIR: (StorageError, "it is a directory: use another name"),
    errno.ENOTEMPTY: (StorageError, "the directory is not empty: another process writes into it"),
    errno.EIO: (StorageError, "the device reported an error: its data cannot be trusted; check it (dmesg)"),
    errno.EMFILE: (StorageError, "too many open files in this process: raise `ulimit -n`"),
    errno.ENFILE: (StorageError, "too many open files on this machine"),
    errno.ENAMETOOLONG: (StorageError, "use a shorter name"),
    errno.ENOSYS: (StorageError, _LACKING),
    errno.ENOTSUP: (StorageError, _LACKING),
    errno.ENOLCK: (StorageError, "this file system has no locks, or no more of them: see the mount's options"),
    errno.ESTALE: (StorageError, "the network file system lost the file: check the mount"),
    errno.ELOOP: (
        StorageError,
        "a part of the path is a symbolic link: none is followed below the directory of a run or a checkpoint, for it "
        "could lead anywhere; if you trust it, copy the directory with its links resolved (cp -rL)",
    ),
}


def translate(error: OSError, action: str, where: str) -> StorageError:
    """Return the `StorageError` for an operating system error, saying what failed, where and what to do."""
    kind, hint = _KINDS.get(error.errno or 0, (StorageError, "see the system log"))
    translated = kind(f"cannot {action} {where}: {error.strerror or error}; {hint}")
    # Handlers written for OSError look at errno; it is not part of args, which hold the message alone.
    translated.errno = error.errno
    return translated


class errors_of(contextlib.AbstractContextManager[None]):  # noqa: N801  # reads as a verb phrase: with errors_of(...)
    """Translate operating system errors of the block; Holdfast's own pass unchanged."""

    __slots__ = ("_action", "_where")

    def __init__(self, action: str, where: str) -> None:
        self._action, self._where = action, where

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(value, OSError) and not isinstance(value, StorageError):
            raise translate(value, self._action, self._where) from value
