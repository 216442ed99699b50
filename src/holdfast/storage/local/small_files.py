"""Write many small files to a local disk: few system calls for each, and one wait for the disk for all."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Collection

from ..base import FileBatch, check_path
from .beneath import Beneath, OpenDirectory
from .local_io import write_all
from .local_tree import make_durable, type_of_file_system
from .ops import Ops, errors_of

__all__ = ["LocalBatch", "flush_whole", "flushes_whole"]

_TRIES = 20
# From this many files on, one flush of the whole file system, bytes of others included, costs less than an fsync for
# each file.
_MANY = 64
_SINCE = (5, 8)
# ext4, xfs, btrfs, f2fs, tmpfs
_KNOWN = frozenset((0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994))


class LocalBatch(FileBatch):
    """Writes files under their final names, below one directory; no link in it is followed.

    The bytes are made durable either file by file, or for `_MANY` files by syncfs(2), where `flushes_whole` says
    that it works. Names of files and of directories are durable at the end only.
    """

    def __init__(self, ops: Ops, door: Beneath, prefix: str, ready: set[str], num_files: int) -> None:
        self._ops, self._door, self._prefix, self._ready = ops, door, prefix, ready
        self._folder: OpenDirectory | None = None
        self._inside = ""
        self._touched: dict[str, bool] = {}  # directories with new entries -> whether the flush reaches them
        make_durable(ops, door, prefix)
        # Open from before the first byte is written: it receives an error of any write.
        self._whole: OpenDirectory | None = door.listed(prefix)
        if num_files < _MANY or not flushes_whole(self._whole.fd):
            self._whole.close()
            self._whole = None

    def add(self, path: str, data: memoryview | bytes) -> None:
        """Write one file."""
        head, _, name = f"{self._prefix}/{check_path(path)}".lstrip("/").rpartition("/")
        with errors_of("write", self._door.full(f"{head}/{name}")):
            for attempt in range(_TRIES):
                try:
                    fd, folder = self._create(head, name)
                    break
                except FileNotFoundError:  # pruned by another process, between our mkdir and our open
                    self._leave()
                    if attempt == _TRIES - 1:
                        raise
            try:
                write_all(self._ops, fd, memoryview(data), 0)
                if not self._touched[head]:
                    self._ops.fsync(fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._ops.unlink(folder.at(name))
                raise
            finally:
                self._ops.close(fd)

    def _create(self, head: str, name: str) -> tuple[int, OpenDirectory]:
        folder = self._enter(head)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return self._ops.open(folder.at(name), flags), folder
        except FileExistsError:
            # Never truncated: an older file here may share its bytes with a checkpoint by a hard link.
            with contextlib.suppress(FileNotFoundError):
                self._ops.unlink(folder.at(name))
            return self._ops.open(folder.at(name), flags), folder

    def _enter(self, inside: str) -> OpenDirectory:
        """Open a directory, made if need be; the directory that was used last stays open."""
        if self._folder is not None and self._inside == inside:
            return self._folder
        self._leave()
        try:
            folder = self._door.folder(inside)
        except FileNotFoundError:
            head, _, name = inside.rpartition("/")
            if not inside:
                make_durable(self._ops, self._door, "")
            else:
                with contextlib.suppress(FileExistsError):
                    self._ops.mkdir(self._enter(head).at(name))
            self._leave()
            folder = self._door.folder(inside)
        self._folder, self._inside = folder, inside
        self._touched[inside] = self._whole is not None and _device(folder.fd) == _device(self._whole.fd)
        return folder

    def _leave(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def close(self) -> None:
        """Make all files and their names durable."""
        self._leave()
        try:
            with errors_of("write", self._door.full(self._prefix)):
                if self._whole is not None and any(self._touched.values()):
                    self._ops.syncfs(self._whole.here, self._whole.fd)
                for inside in [path for path, is_reached in self._touched.items() if not is_reached]:
                    with self._door.folder(inside) as folder:
                        self._ops.fsync_dir(folder.here)
            self._ready.update(self._touched)
            self._touched = {}
        finally:
            self.abort()

    def abort(self) -> None:
        """End without waiting for the disk."""
        self._leave()
        whole, self._whole = self._whole, None
        if whole is not None:
            whole.close()


def flush_whole(ops: Ops, door: Beneath, inside: str, directories: Collection[str], num_files: int) -> bool:
    """Make many files durable by one call; False where that does not work, or for too few files.

    Args:
        ops: the calls.
        door: of the storage.
        inside: its root.
        directories: those that hold the files.
        num_files: how many.
    """
    if num_files < _MANY:
        return False
    with door.listed(inside) as folder:
        here = _device(folder.fd)
        if not flushes_whole(folder.fd) or any(door.stat(directory).st_dev != here for directory in directories):
            return False
        ops.syncfs(folder.here, folder.fd)
    return True


def _device(fd: int) -> int:
    """Return the number of the file system: another may be mounted below the root, which a flush does not reach."""
    return os.fstat(fd).st_dev


def flushes_whole(fd: int) -> bool:
    """Tell whether syncfs(2) makes everything durable here, and reports when it could not.

    Before Linux 5.8 it returned success whatever the disk said; network and FUSE file systems need not pass it on. So
    the answer is True only for known local file systems on newer kernels.
    """
    if not sys.platform.startswith("linux"):
        return False
    version = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    if version < _SINCE:
        return False
    return type_of_file_system(fd) in _KNOWN
