"""Files of this machine that change hands without a copy, and a temporary directory that is this user's alone.

A clone (FICLONE) shares blocks with its source until one of the two is written: it is instant, and either may be
written. A hard link is the same file: who truncates it empties both.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

from holdfast.errors import StoragePermissionError

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

_FICLONE = 0x40049409  # ioctl_ficlone(2): btrfs, XFS, bcachefs, OCFS2, NFS 4.2


def clone_tree(source: str, target: str) -> bool:
    """Clone a directory, or a file into the new directory ``target``, with links to files resolved.

    Returns:
        False where that is impossible (another file system, a file system that cannot share blocks, a linked directory,
        a special file); nothing is left behind then.
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


def clone_or_link_tree(source: str, target: str) -> bool | None:
    """Keep the files of the directory ``source`` under ``target`` too, whatever happens to ``source``, without a copy.

    Returns:
        True if the files of ``target`` are clones, which may be moved away; False if they are hard links, which survive
        a deletion of ``source`` and may only be read: who opens a file of ``source`` for writing writes to them too;
        None where neither is possible, and ``target`` does not exist.
    """
    if clone_tree(source, target):
        return True
    try:
        _link_tree(source, target)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        return None
    return False


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


def _link_tree(source: str, target: str) -> None:
    os.makedirs(target)
    for entry in os.scandir(source):
        new = os.path.join(target, entry.name)
        if entry.is_dir():
            _link_tree(entry.path, new)  # a link to a directory too: its files are part of the checkpoint
        else:
            os.link(os.path.realpath(entry.path), new)


def private_directory(name: str) -> Path:
    """Make ``<temporary directory>/<name>-<user id>``, unless it is there, and return it.

    Raises:
        StoragePermissionError: somebody else was first.
    """
    base = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.lstat()
    # In a shared temporary directory somebody else may have been first, to feed us files.
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or base.is_symlink():
        raise StoragePermissionError(
            f"{base} belongs to another user or others may write to it: remove it, or set TMPDIR"
        )
    return base
