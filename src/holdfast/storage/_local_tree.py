"""Directories of a local storage: made durably, listed, swept of dead temporary files, removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator

from .base import TEMPORARY
from .ops import Ops

__all__ = [
    "entries",
    "lock_quietly",
    "locked",
    "make_durable",
    "nearest_existing",
    "remove_below",
    "remove_if_empty",
    "sweep",
]

_LOCK_NAME = f"{TEMPORARY}lock"


def entries(directory: str) -> list[os.DirEntry[str]]:
    """Return the entries of a directory; none if it does not exist. Types come without a stat each."""
    try:
        with os.scandir(directory) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def nearest_existing(path: str) -> str:
    """Return ``path`` or its closest ancestor that exists."""
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def make_durable(ops: Ops, directory: str) -> None:
    """Make ``directory`` exist, with a durable name in every ancestor, and sweep what dead writers left in it.

    The name of the deepest directory found may not be durable yet: its maker may have died between mkdir and fsync.
    Everything above it is, because each maker syncs that name before it goes one deeper.
    """
    missing, found = [], directory
    while not os.path.isdir(found) and os.path.dirname(found) != found:
        missing.append(found)
        found = os.path.dirname(found)
    # The place above may be one that this user can pass but not read: then its names are not ours to sync.
    with contextlib.suppress(PermissionError):
        ops.fsync_dir(os.path.dirname(found))
    for path in reversed(missing):
        try:
            ops.mkdir(path)
        except FileExistsError:
            # Fine if another process was faster; not if a file is in the way.
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        ops.fsync_dir(os.path.dirname(path))
    if not missing:
        sweep(ops, directory)


def sweep(ops: Ops, directory: str) -> None:
    """Remove temporary files whose writer is dead: nobody holds their lock."""
    for entry in sorted(entries(directory), key=lambda item: item.name):
        if not entry.name.startswith(TEMPORARY) or entry.name == _LOCK_NAME:
            continue
        with contextlib.suppress(OSError):
            fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ops.unlink(entry.path)
            finally:
                os.close(fd)


def lock_quietly(fd: int) -> None:
    """Lock a file of our own; file systems without locks do without (there nothing is swept either)."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def locked(directory: str) -> Iterator[None]:
    """Keep other holders of this lock out, on this machine and where the file system shares locks.

    The directory itself is locked, which leaves nothing behind; NFS locks only what is open for writing, so there a
    file does it.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOTSUP):
            raise
        fd = os.open(os.path.join(directory, _LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        # Unlocked by hand: a child forked meanwhile has the same open file and would keep the lock after our close.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def remove_if_empty(ops: Ops, directory: str) -> bool:
    """Remove a directory that holds nothing but dead temporary files; tell whether it is gone."""
    try:
        with os.scandir(directory) as found:
            names = []
            for entry in found:
                # Stops at the first thing worth keeping: a run directory may have 10 000 children.
                if not entry.name.startswith(TEMPORARY):
                    return False
                names.append(entry.name)
        if names:
            sweep(ops, directory)
            with contextlib.suppress(OSError):
                if _LOCK_NAME in names:
                    ops.unlink(os.path.join(directory, _LOCK_NAME))
        ops.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        # In use, on its way of being filled by somebody else, or not ours: an empty directory harms nobody.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.EACCES, errno.EPERM, errno.ENOTDIR):
            return False
        raise
    return True


def remove_below(ops: Ops, directory: str, *, forget: Callable[[str], None]) -> None:
    """Remove everything in ``directory``, deepest first, following no link; the directory itself stays."""
    removed = False
    for entry in sorted(entries(directory), key=lambda item: item.name):
        with contextlib.suppress(FileNotFoundError):
            if entry.is_dir(follow_symlinks=False):
                remove_below(ops, entry.path, forget=forget)
                forget(entry.path)
                remove_if_empty(ops, entry.path)
            else:
                ops.unlink(entry.path)
            removed = True
    if removed:
        ops.fsync_dir(directory)
