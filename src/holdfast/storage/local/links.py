"""A symbolic link to the newest of something in a directory, swapped in one step. Nothing of ours reads through it.

Not through `Ops`: no promise rests on a link, and the model of a power cut knows none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time

from ..base import Storage, is_temporary_name, temporary_name
from .beneath import Beneath, OpenDirectory
from .local_storage import door_of
from .local_tree import make_durable
from .ops import POSIX

__all__ = ["drop_link", "link_at", "put_link", "sweep_links"]


def put_link(storage: Storage, path: str, target: str, *, durable: bool = True) -> None:
    """Let ``path`` lead to ``target``, both paths in a storage on a disk, by a relative link.

    Args:
        storage: on a disk.
        path: of the link; its folders are made.
        target: what it leads to.
        durable: wait until a power cut cannot bring the old link back; else that is up to the next fsync of the folder.

    Raises:
        FileExistsError: something that is no link has this name.
        OSError: the file system has no links.
    """
    door, prefix = _door(storage)
    inside, name = _split(path)
    below = "/".join(part for part in (prefix, inside) if part)
    text = os.path.relpath(target, inside or ".")
    for is_last in (False, True):
        try:
            with door.folder(below) as folder:
                _swap(folder, name, text)
                if durable:
                    POSIX.fsync_dir(folder.here)
            return
        except FileNotFoundError:  # the first link in this folder, or somebody has cleaned up here
            if is_last:
                raise
            make_durable(POSIX, door, below)


def link_at(storage: Storage, path: str) -> str | None:
    """Return what a link says, as it says it; None if ``path`` is none, or the storage is on no disk."""
    if storage.local_root is None:
        return None
    door, prefix = _door(storage)
    inside, name = _split(path)
    try:
        with door.folder("/".join(part for part in (prefix, inside) if part)) as folder:
            return os.readlink(name, dir_fd=folder.fd)
    except OSError:
        return None


def drop_link(storage: Storage, path: str) -> None:
    """Remove a link, and nothing but a link; idempotent."""
    if link_at(storage, path) is not None:
        storage.delete(path)


def sweep_links(storage: Storage, inside: str, *, older_s: float) -> None:
    """Remove links that processes have left which died before they could give them their names."""
    door, prefix = _door(storage)
    try:
        folder = door.listed("/".join(part for part in (prefix, inside) if part))
    except (FileNotFoundError, NotADirectoryError):
        return
    with folder:
        for name in filter(is_temporary_name, os.listdir(folder.fd)):
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's; or it is no link
                os.readlink(name, dir_fd=folder.fd)
                if os.stat(name, dir_fd=folder.fd, follow_symlinks=False).st_mtime < time.time() - older_s:
                    os.unlink(name, dir_fd=folder.fd)


def _door(storage: Storage) -> tuple[Beneath, str]:
    located = door_of(storage)
    assert located is not None
    return located


def _split(path: str) -> tuple[str, str]:
    inside, _, name = path.rpartition("/")
    return inside, name


def _swap(folder: OpenDirectory, name: str, target: str) -> None:
    try:
        if os.readlink(name, dir_fd=folder.fd) == target:
            return
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), folder.at(name)) from None
    temporary = temporary_name()
    os.symlink(target, temporary, dir_fd=folder.fd)
    try:
        os.replace(temporary, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder.fd)
        raise
