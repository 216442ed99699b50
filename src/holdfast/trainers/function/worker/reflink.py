"""Copies that share blocks with their source until one of the two is written: instant, and safe to write either."""

from __future__ import annotations

import errno
import os
import shutil
import stat

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["clone_file", "clone_tree"]

_FICLONE = 0x40049409  # ioctl_ficlone(2): btrfs, XFS, bcachefs, OCFS2, NFS 4.2


def clone_tree(source: str, target: str) -> bool:
    """Clone a directory, or a file into the new directory ``target``, with links to files resolved.

    Returns:
        False where that is impossible (another file system, one that cannot share blocks, a linked directory, a
        special file); nothing is left behind then.
    """
    try:
        os.makedirs(target)
        if os.path.isdir(source):
            _clone_directory(source, target)
        else:
            clone_file(source, os.path.join(target, os.path.basename(source)))
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        return False
    return True


def clone_file(source: str, target: str) -> None:
    """Clone one file.

    Raises:
        OSError: impossible here; an empty ``target`` may be left.
    """
    if fcntl is None:
        raise OSError(errno.EOPNOTSUPP, "no FICLONE on this platform")
    # Without O_NONBLOCK a FIFO would hold us until somebody writes to it.
    old = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(old)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", source)
        new = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.ioctl(new, _FICLONE, old)
        finally:
            os.close(new)
    finally:
        os.close(old)


def _clone_directory(source: str, target: str) -> None:
    def fail(error: OSError) -> None:
        raise error

    for directory, inner, files in os.walk(source, onerror=fail):
        into = os.path.normpath(os.path.join(target, os.path.relpath(directory, source)))
        for name in inner:
            if os.path.islink(os.path.join(directory, name)):
                raise OSError(errno.ELOOP, "a link to a directory", name)
            os.mkdir(os.path.join(into, name))
        for name in files:
            clone_file(os.path.join(directory, name), os.path.join(into, name))
