"""A directory of a local or mounted file system as a storage.

General layout: `put` is a temporary file, fsync, barrier (fsync of the directory), rename, fsync of the directory.
`create` writes under the final name and makes bytes, size and name durable when it is closed. Directories are made
when first needed; each is durable before anything is put below it.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import stat as stat_module
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError, StorageConflictError, StorageExistsError, StorageNotFoundError
from . import _local_tree as tree
from ._local_io import LocalReader, LocalWriter, write_all
from .base import TEMPORARY, FileReader, FileWriter, ObjectInfo, Storage, check_path, check_prefix
from .ops import POSIX, Ops, errors_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LocalStorage"]

_T = TypeVar("_T")
_COPY_BYTES = 8 << 20
# How often a directory may be pruned under a writer before it gives up.
_TRIES = 20
# Errors of link(2) that mean "not here": another device, no hard links, too many of them, not our file.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
# Errors that mean "not this file": another device, not ours to take, or in use as a mount.
_NO_MOVE = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EBUSY, errno.EROFS)


class LocalStorage(Storage):
    """Files below ``root``; the directory is made when something is first written.

    ``if_match`` is safe among processes that use it (the directory is locked while the etag is compared and the file
    replaced); a `put` without conditions does not take the lock. Etags are built from time, size and inode.

    Example:
        >>> import tempfile
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> tag = storage.put("step_1/manifest.json", b"{}")
        >>> [info.path for info in storage.list()]
        ['step_1/manifest.json']
    """

    def __init__(self, root: str | os.PathLike[str], *, ops: Ops = POSIX) -> None:
        if not os.fspath(root) or "\0" in os.fspath(root):
            raise ConfigError(f"LocalStorage({root!r}): give a directory")
        # Made absolute now: a later chdir of the training script must not move its checkpoints.
        self._root = os.path.abspath(os.fspath(root))
        self._ops = ops
        # Directories known to exist durably; shared with children. A cache only: ENOENT drops the entry.
        self._ready: set[str] = set()

    def put(
        self, path: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        """Store a small file atomically; see `Storage.put`."""
        target = self._full(path)
        view = memoryview(data).cast("B")

        def once() -> str:
            if if_absent and os.path.lexists(target):
                raise self._exists(target)
            if if_match is not None:
                self._check_match(target, if_match)
            return self._put_once(target, view, if_absent=if_absent, if_match=if_match)

        with errors_of("write", target):
            return self._in_directory(os.path.dirname(target), once)

    def _put_once(self, target: str, view: memoryview, *, if_absent: bool, if_match: str | None) -> str:
        ops, directory = self._ops, os.path.dirname(target)
        temporary = os.path.join(directory, f"{TEMPORARY}{os.getpid()}-{os.urandom(6).hex()}")
        fd = ops.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            # Held while the file is in use: sweepers take only files whose writer is dead.
            tree.lock_quietly(fd)
            write_all(ops, fd, view, 0)
            ops.fsync(fd)
            etag = _etag(os.fstat(fd))
            ops.fsync_dir(directory)  # the barrier: names of files written before are durable first
            if if_absent:
                self._publish_new(temporary, target)
            elif if_match is not None:
                with tree.locked(directory):
                    self._check_match(target, if_match)
                    ops.rename(temporary, target)
            else:
                ops.rename(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                ops.unlink(temporary)
            raise
        finally:
            ops.close(fd)
        ops.fsync_dir(directory)
        return etag

    def _publish_new(self, temporary: str, target: str) -> None:
        """Give the finished file its name unless the name is taken, atomically."""
        try:
            self._ops.link(temporary, target)
        except FileExistsError:
            raise self._exists(target) from None
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            # No hard links here: cooperating processes are kept apart by the lock instead.
            with tree.locked(os.path.dirname(target)):
                if os.path.lexists(target):
                    raise self._exists(target) from None
                self._ops.rename(temporary, target)
            return
        with contextlib.suppress(OSError):
            self._ops.unlink(temporary)

    def create(self, path: str, size: int) -> FileWriter:
        """Start a big file under its final name; see `Storage.create`."""
        target = self._full(path)
        if size < 0:
            raise ConfigError(f"create({path!r}, size={size}): the size must not be negative")

        def once() -> FileWriter:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            try:
                fd = self._ops.open(target, flags)
            except FileExistsError:
                # Never truncated: an older file here may share its bytes with a checkpoint by a hard link.
                with contextlib.suppress(FileNotFoundError):
                    self._ops.unlink(target)
                fd = self._ops.open(target, flags)
            return LocalWriter(self._ops, target, size, fd=fd, on_abort=lambda: self._prune(os.path.dirname(target)))

        with errors_of("write", target):
            return self._in_directory(os.path.dirname(target), once)

    def open(self, path: str) -> FileReader:
        """Open a file for reading; see `Storage.open`."""
        full = self._full(path)
        with errors_of("read", full):
            try:
                # O_NONBLOCK: a FIFO put here by somebody must not hang a resume.
                fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except NotADirectoryError as error:
                raise _not_found(full) from error
        found = os.fstat(fd)
        if not stat_module.S_ISREG(found.st_mode):
            os.close(fd)
            raise _not_found(full)
        return LocalReader(full, fd=fd, size=found.st_size)

    def stat(self, path: str) -> ObjectInfo:
        """Describe a file; see `Storage.stat`."""
        full = self._full(path)
        with errors_of("read", full):
            try:
                found = os.stat(full)
            except NotADirectoryError as error:
                raise _not_found(full) from error
        if not stat_module.S_ISREG(found.st_mode):
            raise _not_found(full)
        return ObjectInfo(path=path, size=found.st_size, etag=_etag(found), modified=found.st_mtime)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Iterate over files; symbolic links to directories are not followed. See `Storage.list`."""
        prefix = check_prefix(prefix)
        pending = [prefix]
        while pending:
            inside = pending.pop()
            base = f"{inside}/" if inside else ""
            full = os.path.join(self._root, inside) if inside else self._root
            with errors_of("list", full):
                entries = tree.entries(full)
            for entry in entries:
                if entry.name.startswith(TEMPORARY):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if recursive:
                        pending.append(base + entry.name)
                    else:
                        yield ObjectInfo(path=f"{base}{entry.name}/", size=0)
                    continue
                try:
                    found = entry.stat()
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ELOOP):  # gone, or a link that leads to itself
                        raise
                    continue
                if stat_module.S_ISREG(found.st_mode):
                    path = base + entry.name
                    yield ObjectInfo(path=path, size=found.st_size, etag=_etag(found), modified=found.st_mtime)

    def delete(self, path: str) -> None:
        """Remove a file and the directories this leaves empty; see `Storage.delete`."""
        full = self._full(path)
        directory = os.path.dirname(full)
        with errors_of("delete", full):
            try:
                self._ops.unlink(full)
                self._ops.fsync_dir(directory)
            except (FileNotFoundError, NotADirectoryError):
                # Nothing pruned either: the directory may be one that a writer has just made for its first file.
                return
            except OSError:
                # unlink(2) of a directory: EISDIR on Linux, EPERM elsewhere. It holds no object of that name.
                if not os.path.isdir(full) or os.path.islink(full):
                    raise
                return
            self._prune(directory)

    def delete_tree(self, prefix: str) -> None:
        """Remove everything below the directory ``prefix``; links are removed, not followed."""
        prefix = check_prefix(prefix)
        full = os.path.join(self._root, prefix) if prefix else self._root
        with errors_of("delete", full):
            tree.remove_below(self._ops, full, forget=self._ready.discard)
            if prefix:
                self._prune(full)

    def tidy(self, directory: str) -> None:
        """Remove temporary files of dead writers, and the directory if that leaves it empty; see `Storage.tidy`."""
        full = os.path.join(self._root, check_path(directory))
        with errors_of("delete", full):
            tree.sweep(self._ops, full)
            self._prune(full)

    def copy(self, source: str, target: str) -> None:
        """Hard-link a file, or copy its bytes where that is impossible; see `Storage.copy`."""
        old, new = self._full(source), self._full(target)
        self.stat(source)
        if os.path.lexists(new):
            raise self._exists(new)
        directory = os.path.dirname(new)
        with errors_of("write", new):
            try:
                self._in_directory(directory, lambda: self._ops.link(old, new))
            except FileExistsError:
                raise self._exists(new) from None
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                self._copy_bytes(source, target)
            else:
                self._ops.fsync_dir(directory)

    def _copy_bytes(self, source: str, target: str) -> None:
        with self.open(source) as reader, self.create(target, reader.size) as writer:
            for start in range(0, reader.size, _COPY_BYTES):
                chunk = memoryview(bytearray(min(_COPY_BYTES, reader.size - start)))
                reader.read_into(start, chunk)
                writer.write(chunk)

    def adopt(self, source: str, path: str) -> bool:
        """Make a file durable and rename it into this storage; see `Storage.adopt`."""
        target = self._full(path)
        directory = os.path.dirname(target)
        with errors_of("take over", source):
            found = os.lstat(source)
            here = os.stat(tree.nearest_existing(directory)).st_dev
            if not stat_module.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_dev != here:
                return False
            if os.path.lexists(target):
                raise self._exists(target)
            try:
                self._fsync(source)  # before it is an object: whoever wrote it need not have cared
                self._in_directory(directory, lambda: self._ops.rename(source, target))
            except OSError as error:
                if error.errno not in _NO_MOVE:
                    raise
                return False
            self._ops.fsync_dir(directory)
        return True

    def sync(self, path: str) -> None:
        """Make a file and its name durable; see `Storage.sync`."""
        full = self._full(path)
        with errors_of("make durable", full):
            self._fsync(full)
            directory = os.path.dirname(full)
            while len(directory) >= len(self._root):
                self._ops.fsync_dir(directory)
                directory = os.path.dirname(directory)

    def _fsync(self, full: str) -> None:
        fd = self._ops.open(full, os.O_RDONLY)
        try:
            self._ops.fsync(fd)
        finally:
            self._ops.close(fd)

    @property
    def uri(self) -> str:
        """The absolute directory."""
        return self._root

    @property
    def local_root(self) -> Path | None:
        """The absolute directory; it need not exist yet."""
        from pathlib import Path  # not above: it would cost the start of a writer process 5 ms

        return Path(self._root)

    def describe(self) -> dict[str, Any] | None:
        """Return the root: all another process needs."""
        return {"kind": "local", "root": self._root}

    def free_bytes(self) -> int | None:
        """Return the bytes an ordinary user can still write on the file system of the root."""
        with errors_of("look at", self._root):
            found = os.statvfs(tree.nearest_existing(self._root))
        return found.f_bavail * found.f_frsize

    def child(self, path: str) -> LocalStorage:
        """Return the storage of a directory below this one, with the same `Ops`."""
        prefix = check_prefix(path)
        clone = copy.copy(self)
        clone._root = os.path.join(self._root, prefix) if prefix else self._root
        return clone

    def _full(self, path: str) -> str:
        return os.path.join(self._root, check_path(path))

    def _in_directory(self, directory: str, action: Callable[[], _T]) -> _T:
        """Do ``action`` in a directory that exists, again if another process pruned the directory meanwhile."""
        for _ in range(_TRIES):
            if directory not in self._ready:
                tree.make_durable(self._ops, directory)
                self._ready.add(directory)
            try:
                return action()
            except FileNotFoundError as error:
                if isinstance(error, StorageNotFoundError):
                    raise
                self._ready.discard(directory)
                missing = error
        raise missing

    def _prune(self, directory: str) -> None:
        while len(directory) > len(self._root) and tree.remove_if_empty(self._ops, directory):
            self._ready.discard(directory)
            directory = os.path.dirname(directory)

    def _check_match(self, target: str, if_match: str) -> None:
        try:
            found: str | None = _etag(os.stat(target))
        except FileNotFoundError:
            found = None
        if found != if_match:
            state = "it is gone" if found is None else "another process changed it"
            raise StorageConflictError(f"cannot replace {target}: {state}; read it again and decide anew")

    @staticmethod
    def _exists(target: str) -> StorageExistsError:
        return StorageExistsError(f"cannot create {target}: it exists; use another name or remove it")


def _etag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns}-{found.st_size}-{found.st_ino}"


def _not_found(full: str) -> StorageNotFoundError:
    return StorageNotFoundError(f"cannot read {full}: there is no such file; check the path")
