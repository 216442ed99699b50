"""A directory of a local or mounted file system as a storage.

No symbolic link below the root is followed (`beneath`).

General layout: `put` is a temporary file, fsync, barrier (fsync of the directory), rename, fsync of the directory.
`create` writes under the final name and makes bytes, size and name durable when it is closed. Directories are made
when first needed; each is durable before anything is put below it.

A symbolic link to the newest of something in a directory is swapped in one step (`put_link`). Nothing of ours reads
through it, and it does not go through `Ops`: no promise rests on a link, and the model of a power cut knows none.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import os
import stat as stat_module
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.errors import ConfigError, StorageConflictError, StorageExistsError, StorageNotFoundError

from ..base import (
    TEMPORARY,
    FileBatch,
    FileReader,
    FileWriter,
    ObjectInfo,
    ReplacingWriter,
    Storage,
    StorageTraits,
    check_path,
    check_prefix,
    copy_bytes,
    errors_of,
    is_temporary_name,
    temporary_name,
    translate,
)
from . import local_tree as tree
from .beneath import POSIX, Beneath, Inside, OpenDirectory, Ops, make_durable, sweep
from .local_io import LocalBatch, LocalReader, LocalReplacingWriter, LocalWriter, flush_whole, open_new, write_all

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LocalStorage", "absolute", "as_given", "door_of", "drop_link", "link_at", "put_link", "sweep_links"]

_T = TypeVar("_T")
_DELETING_THREADS = 16
_DELETED_BY_EACH = 64  # files, at least
# How often a directory may be pruned under a writer before it gives up.
_TRIES = 20
# Errors of link(2) that mean "not here": another device, no hard links, too many of them, not our file. Mounts of
# buckets say EIO (rclone) or EINVAL; where the device is broken, what is done instead fails as well.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EIO, errno.EINVAL)
# Errors that mean "not this file": another device, not ours to take, in use as a mount, or no rename at all.
_NO_MOVE = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EBUSY, errno.EROFS, errno.ENOTSUP, errno.ENOSYS)


class LocalStorage(Storage):
    """Files below ``root``; the directory is made at the first write.

    ``if_match`` is safe among processes that use it (the directory is locked while the etag is compared and the file
    replaced); a `put` without conditions does not take the lock. Etags are built from time, size and inode.

    Example:
        >>> import tempfile
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> tag = storage.put("step_1/manifest.json", b"{}")
        >>> [info.path for info in storage.list()]
        ['step_1/manifest.json']
    """

    traits = StorageTraits()

    def __init__(self, root: str | os.PathLike[str], *, ops: Ops = POSIX) -> None:
        if not os.fspath(root) or "\0" in os.fspath(root):
            raise ConfigError(f"LocalStorage({root!r}): give a directory")
        # Made absolute now: a later chdir of the training script must not move its checkpoints.
        self._root = absolute(os.fspath(root))
        self._door, self._prefix = Beneath(self._root), ""
        self._ops = ops
        # Directories below the top that exist durably; shared with children. A cache only: ENOENT drops the entry.
        self._ready: set[str] = set()

    def put(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        durable: bool = True,
    ) -> str:
        """Store a small file; see `Storage.put`.

        Without ``durable`` the disk is not waited for: for content that a power cut may lose.
        """
        full, inside, name = self._locate(path)
        view, ops = memoryview(data).cast("B"), self._ops

        def once(folder: OpenDirectory) -> str:
            if if_absent and folder.lstat(name) is not None:
                raise self._exists(folder.at(name))
            if if_match is not None:
                self._check_match(folder, name, if_match)
            temporary = folder.at(temporary_name())
            fd = ops.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            kept = -1
            try:
                # Locked while the file is in use: a sweep takes only files whose writer is dead. Where the file system
                # has no locks, nothing is swept either.
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_all(ops, fd, view, 0)
                if durable:
                    ops.fsync(fd)
                etag = _etag(os.fstat(fd))
                # Closed before it gets its name: network file systems report what they could not store at the first
                # close. The copy of the descriptor keeps the lock.
                kept, closing, fd = os.dup(fd), fd, -1
                ops.close(closing)
                self._give_name(folder, temporary, name=name, if_absent=if_absent, if_match=if_match, durable=durable)
            except BaseException:
                with contextlib.suppress(OSError):
                    ops.unlink(temporary)
                raise
            finally:
                if fd >= 0:
                    ops.close(fd)
                if kept >= 0:
                    os.close(kept)
            return etag

        with errors_of("write", full):
            return self._in_directory(inside, once)

    def _give_name(
        self,
        folder: OpenDirectory,
        temporary: Inside,
        *,
        name: str,
        if_absent: bool,
        if_match: str | None,
        durable: bool = True,
    ) -> None:
        """Let a finished temporary file take its name, atomically and, if wanted, durably."""
        ops = self._ops
        if durable:
            ops.fsync_dir(folder.here)  # the barrier: names of files written before are durable first
        if if_absent:
            self._publish_new(folder, temporary, name)
        elif if_match is not None:
            with tree.locked(folder):
                self._check_match(folder, name, if_match)
                ops.rename(temporary, folder.at(name))
        else:
            ops.rename(temporary, folder.at(name))
        if durable:
            ops.fsync_dir(folder.here)

    def _publish_new(self, folder: OpenDirectory, temporary: Inside, name: str) -> None:
        """Give the finished file its name unless the name is taken, atomically."""
        target = folder.at(name)
        try:
            self._ops.link(temporary, target)
        except FileExistsError:
            raise self._exists(target) from None
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            # No hard links here: cooperating processes are kept apart by the lock instead.
            with tree.locked(folder):
                there = folder.lstat(name)
                if there is None:
                    self._ops.rename(temporary, target)
                    return
                mine = folder.lstat(temporary.name)
                if mine is None or not os.path.samestat(mine, there):  # else the link was made all the same
                    raise self._exists(target) from None
        with contextlib.suppress(OSError):
            self._ops.unlink(temporary)

    def create(self, path: str, size: int) -> FileWriter:
        full, inside, name = self._locate(path)
        if size < 0:
            raise ConfigError(f"create({path!r}, size={size}): the size must not be negative")

        def once(folder: OpenDirectory) -> FileWriter:
            fd = open_new(self._ops, folder.at(name))
            return LocalWriter(self._ops, folder.dup(), name, size, fd=fd, on_abort=lambda: self._prune(inside))

        with errors_of("write", full):
            return self._in_directory(inside, once)

    def replace(self, path: str, size: int) -> ReplacingWriter:
        """Start a big file under a temporary name."""
        full, inside, name = self._locate(path)

        def once(folder: OpenDirectory) -> ReplacingWriter:
            temporary = temporary_name()
            fd = self._ops.open(folder.at(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                tree.lock_new(folder, temporary, fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._ops.unlink(folder.at(temporary))
                self._ops.close(fd)
                raise
            return LocalReplacingWriter(
                self._ops,
                folder.dup(),
                temporary,
                size,
                fd=fd,
                on_abort=lambda: self._prune(inside),
                target=name,
                give_name=partial(self._give_name, name=name),
            )

        with errors_of("write", full):
            return self._in_directory(inside, once)

    def batch(self, num_files: int) -> FileBatch:
        with errors_of("write", self._root):
            return LocalBatch(self._ops, self._door, self._prefix, self._ready, num_files)

    def open(self, path: str) -> FileReader:
        below = self._below(check_path(path))
        full = self._door.full(below)
        with errors_of("read", full):
            try:
                # O_NONBLOCK: a FIFO of this name must not hang a resume.
                fd = self._door.open(below, os.O_RDONLY | os.O_NONBLOCK)
            except NotADirectoryError as error:
                raise _not_found(full) from error
        about = os.fstat(fd)
        if not stat_module.S_ISREG(about.st_mode):
            os.close(fd)
            raise _not_found(full)
        return LocalReader(full, fd=fd, size=about.st_size)

    def stat(self, path: str) -> ObjectInfo:
        below = self._below(check_path(path))
        full = self._door.full(below)
        with errors_of("read", full):
            try:
                about = self._door.stat(below)
            except NotADirectoryError as error:
                raise _not_found(full) from error
        if not stat_module.S_ISREG(about.st_mode):
            raise _not_found(full)
        return ObjectInfo(path=path, size=about.st_size, etag=_etag(about), modified=about.st_mtime)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Iterate over files; symbolic links to directories are left out. See `Storage.list`.

        A link to a file is named, so that nothing is left out silently by a copy; opening it is refused.
        """
        prefix = check_prefix(prefix)
        pending = [prefix]
        while pending:
            inside = pending.pop()
            base = f"{inside}/" if inside else ""
            below = self._below(inside)
            with errors_of("list", self._door.full(below)):
                try:
                    folder = self._door.listed(below)
                except (FileNotFoundError, NotADirectoryError):
                    continue
            with folder:
                with errors_of("list", folder.path), os.scandir(folder.fd) as entries:
                    children = list(entries)  # types come without a stat each
                for entry in children:
                    name = entry.name
                    if name.startswith(TEMPORARY):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if recursive:
                            pending.append(base + name)
                        else:
                            yield ObjectInfo(path=f"{base}{name}/", size=0)
                        continue
                    try:
                        about = entry.stat()
                    except OSError as error:
                        if error.errno not in (errno.ENOENT, errno.ELOOP):  # gone, or a link that leads to itself
                            raise translate(error, "list", folder.path) from error
                        continue
                    if stat_module.S_ISREG(about.st_mode):
                        yield ObjectInfo(
                            path=base + name, size=about.st_size, etag=_etag(about), modified=about.st_mtime
                        )

    def delete(self, path: str) -> None:
        """Remove a file, or a link itself, and the directories this leaves empty."""
        self.delete_many((path,))

    def delete_many(self, paths: Iterable[str]) -> None:
        """Remove files, or links themselves, with one fsync for each directory; see `Storage.delete_many`.

        Where there are many, by several threads: each waits for the journal of the file system most of its time.
        """
        names: dict[str, list[str]] = {}
        for path in paths:
            _, inside, name = self._locate(path)
            names.setdefault(inside, []).append(name)
        for inside, files in names.items():
            with errors_of("delete", self._door.full(f"{inside}/{files[0]}" if inside else files[0])):
                try:
                    folder = self._door.folder(inside)
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                        continue  # a file behind a link is no object of this storage
                    raise
                with folder:
                    if not self._unlink_all(folder, files):
                        # Not pruned either: a writer may have made the directory just now for its first file.
                        continue
                    self._ops.fsync_dir(folder.here)
                self._prune(inside)

    def _unlink_all(self, folder: OpenDirectory, names: Sequence[str]) -> int:
        """Remove files of one directory; return how many of them existed."""
        num_threads = min(_DELETING_THREADS, len(names) // _DELETED_BY_EACH)
        if num_threads < 2:
            return sum([self._unlink(folder, name) for name in names])
        from concurrent.futures import ThreadPoolExecutor  # not above: few writers delete so many, and each start waits

        with ThreadPoolExecutor(num_threads, "holdfast-delete") as pool:
            shares = [names[start::num_threads] for start in range(num_threads)]
            return sum(pool.map(lambda share: sum([self._unlink(folder, name) for name in share]), shares))

    def _unlink(self, folder: OpenDirectory, name: str) -> bool:
        """Remove a file; tell whether it existed."""
        at = folder.at(name)
        try:
            self._ops.unlink(at)
        except FileNotFoundError:
            return False
        except OSError as error:
            # unlink(2) of a directory: EISDIR on Linux, EPERM elsewhere. It holds no object of that name.
            about = folder.lstat(name)
            if about is None or not stat_module.S_ISDIR(about.st_mode):
                raise translate(error, "delete", at) from error
            return False
        return True

    def delete_tree(self, prefix: str) -> None:
        """Remove everything below the directory ``prefix``; links are removed, not followed."""
        inside = self._below(check_prefix(prefix))
        with errors_of("delete", self._door.full(inside)):
            try:
                tree.remove_below(self._ops, self._door, inside, forget=self._ready.discard)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                return  # as in `delete`
            if prefix:
                self._prune(inside)

    def make_directories(self, paths: Iterable[str]) -> None:
        """Make directories without files. A directory behind a link is refused."""
        for path in paths:
            inside = self._below(check_path(path))
            with errors_of("make the directory", self._door.full(inside)):
                self._in_directory(inside, lambda _: None)

    def tidy(self, directory: str) -> None:
        """Remove temporary files of dead writers, and the directory if that leaves it empty."""
        inside = self._below(check_path(directory))
        with errors_of("delete", self._door.full(inside)):
            try:
                sweep(self._ops, self._door, inside)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                return  # as in `delete`
            self._prune(inside)

    def copy(self, source: str, target: str) -> None:
        """Hard-link a file, or copy its bytes where that is impossible."""
        (_, old_inside, old_name), (new, inside, name) = self._locate(source), self._locate(target)
        self.stat(source)

        def once(folder: OpenDirectory) -> None:
            if folder.lstat(name) is not None:
                raise self._exists(new)
            with self._door.folder(old_inside) as old:
                try:
                    self._ops.link(old.at(old_name), folder.at(name))
                except FileExistsError:
                    raise self._exists(new) from None
            self._ops.fsync_dir(folder.here)

        with errors_of("write", new):
            try:
                self._in_directory(inside, once)
            except StorageExistsError:
                raise
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                copy_bytes(self, source, target)

    def adopt(self, source: str, path: str) -> bool:
        """Make a file durable and rename it into this storage."""
        full, inside, name = self._locate(path)

        def once(folder: OpenDirectory) -> None:
            if folder.lstat(name) is not None:
                raise self._exists(folder.at(name))
            self._ops.rename(source, folder.at(name))
            self._ops.fsync_dir(folder.here)

        with errors_of("take over", source):
            about = self._ops.lstat(source)
            here = os.stat(tree.nearest_existing(os.path.dirname(full))).st_dev
            if not stat_module.S_ISREG(about.st_mode) or about.st_nlink != 1 or about.st_dev != here:
                return False
            try:
                self._fsync(source)  # before it is an object: its writer need not have done that
                self._in_directory(inside, once)
            except StorageExistsError:
                raise
            except OSError as error:
                if error.errno not in _NO_MOVE:
                    raise
                return False
        return True

    def sync(self, path: str) -> None:
        full, inside, name = self._locate(path)
        with errors_of("make durable", full):
            with self._door.folder(inside) as folder:
                self._fsync(folder.at(name))
            while len(inside) >= len(self._prefix):
                with self._door.folder(inside) as folder:
                    self._ops.fsync_dir(folder.here)
                if not inside:
                    break
                inside = inside.rpartition("/")[0]

    def sync_all(self, paths: Collection[str]) -> None:
        """Make files and their names durable, each directory once."""
        with errors_of("make durable", self._root):
            places = [self._locate(path)[1:] for path in paths]
            if flush_whole(self._ops, self._door, self._prefix, {inside for inside, _ in places}, len(places)):
                return
            folders = {""}
            for home, name in places:
                with self._door.folder(home) as folder:
                    self._fsync(folder.at(name))
                above = home
                while above not in folders:
                    folders.add(above)
                    above = above.rpartition("/")[0]
            for inside in sorted(path for path in folders if len(path) >= len(self._prefix)):
                with self._door.folder(inside) as folder:
                    self._ops.fsync_dir(folder.here)

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
        """Return the root, which is all that another process needs."""
        return {"kind": "local", "root": self._root}

    def free_bytes(self) -> int | None:
        """Return the bytes an ordinary user can still write on the file system of the root."""
        with errors_of("look at", self._root):
            about = os.statvfs(tree.nearest_existing(self._root))
        return about.f_bavail * about.f_frsize

    def child(self, path: str) -> LocalStorage:
        """Return the storage of a directory below this one, with the same `Ops`; no link to it is followed either."""
        prefix = check_prefix(path)
        clone = copy.copy(self)
        clone._root = os.path.join(self._root, prefix) if prefix else self._root
        clone._prefix = self._below(prefix)
        return clone

    def _below(self, path: str) -> str:
        """Return a path of this storage as a path below the top; "" is the root of this storage."""
        return f"{self._prefix}/{path}" if self._prefix and path else path or self._prefix

    def _locate(self, path: str) -> tuple[str, str, str]:
        """Return the absolute path of a file, for messages, its directory below the top, and its name."""
        below = self._below(check_path(path))
        inside, _, name = below.rpartition("/")
        return self._door.full(below), inside, name

    def _in_directory(self, inside: str, action: Callable[[OpenDirectory], _T]) -> _T:
        """Do ``action`` in a directory, made if missing; again if another process pruned the directory meanwhile."""
        for _ in range(_TRIES):
            try:
                if inside not in self._ready:
                    make_durable(self._ops, self._door, inside, self._ready)
                    self._ready.add(inside)
                with self._door.folder(inside) as folder:
                    return action(folder)
            except FileNotFoundError as error:
                if isinstance(error, StorageNotFoundError):
                    raise
                self._ready.clear()  # somebody may have removed directories above it as well
                missing = error
        raise missing

    def _prune(self, inside: str) -> None:
        while len(inside) > len(self._prefix) and tree.remove_if_empty(self._ops, self._door, inside):
            self._ready.discard(inside)
            inside = inside.rpartition("/")[0]

    def _check_match(self, folder: OpenDirectory, name: str, if_match: str) -> None:
        about = folder.lstat(name)
        etag = None if about is None else _etag(about)
        if etag != if_match:
            state = "it is gone" if etag is None else "another process changed it"
            raise StorageConflictError(f"cannot replace {folder.at(name)}: {state}; read it again and decide anew")

    @staticmethod
    def _exists(target: str) -> StorageExistsError:
        return StorageExistsError(f"cannot create {target}: it exists; use another name or remove it")


def absolute(path: str) -> str:
    """Return a path as an absolute one, with one slash at its head: `os.path.abspath` leaves two, as POSIX allows."""
    try:
        full = os.path.abspath(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path!r}: the current directory is not there any more: give an absolute path") from error
    return full[1:] if full.startswith("//") else full


def as_given(storage: Storage) -> Storage:
    """Return the same storage with its root as the top: links in the path to it are followed, as a user's own."""
    if not isinstance(storage, LocalStorage):
        return storage
    clone = copy.copy(storage)
    clone._door, clone._prefix, clone._ready = Beneath(storage._root), "", set()
    return clone


def door_of(storage: Storage) -> tuple[Beneath, str] | None:
    """Return the door to a storage on a disk and the storage's place below it; None for a storage on no disk.

    For operations that `Storage` does not have: a lock, names without a look at each file.
    """
    if isinstance(storage, LocalStorage):
        return storage._door, storage._prefix
    root = storage.local_root
    return None if root is None else (Beneath(os.fspath(root)), "")


def _etag(about: os.stat_result) -> str:
    return f"{about.st_mtime_ns}-{about.st_size}-{about.st_ino}"


def _not_found(full: str) -> StorageNotFoundError:
    return StorageNotFoundError(f"cannot read {full}: there is no such file; check the path")


def put_link(
    storage: Storage,
    path: str,
    target: str,
    *,
    durable: bool = True,
    over: Callable[[str | None], bool] = lambda _: True,
) -> None:
    """Let ``path`` lead to ``target``, both paths in a storage on a disk, by a relative link.

    Args:
        storage: on a disk.
        path: of the link; its folders are made.
        target: what it leads to.
        durable: wait until a power cut cannot bring the old link back; else that is up to the next fsync of the folder.
        over: tells whether to replace a link that says something else, or (None) to make one where there is none.

    Raises:
        FileExistsError: something that is no link has this name.
        OSError: the file system has no links.
    """
    door, below, name = _place_of(storage, path)
    text = os.path.relpath(target, os.path.dirname(path) or ".")
    for is_last in (False, True):
        try:
            with door.folder(below) as folder:
                try:
                    before = os.readlink(name, dir_fd=folder.fd)
                except FileNotFoundError:
                    before = None
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), folder.at(name)) from None
                if before != text:
                    if not over(before):
                        return
                    temporary = temporary_name()
                    os.symlink(text, temporary, dir_fd=folder.fd)
                    try:
                        os.replace(temporary, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
                    except BaseException:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(temporary, dir_fd=folder.fd)
                        raise
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
    door, inside, name = _place_of(storage, path)
    try:
        with door.folder(inside) as folder:
            return os.readlink(name, dir_fd=folder.fd)
    except OSError:
        return None


def drop_link(storage: Storage, path: str) -> None:
    """Remove a link, and nothing but a link; idempotent."""
    if link_at(storage, path) is not None:
        storage.delete(path)


def sweep_links(storage: Storage, inside: str, *, older_s: float) -> None:
    """Remove links that processes have left which died before they could give them their names."""
    door, below, _ = _place_of(storage, f"{inside}/")
    try:
        folder = door.listed(below)
    except (FileNotFoundError, NotADirectoryError):
        return
    with folder:
        for name in filter(is_temporary_name, os.listdir(folder.fd)):
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's; or it is no link
                os.readlink(name, dir_fd=folder.fd)
                if os.stat(name, dir_fd=folder.fd, follow_symlinks=False).st_mtime < time.time() - older_s:
                    os.unlink(name, dir_fd=folder.fd)


def _place_of(storage: Storage, path: str) -> tuple[Beneath, str, str]:
    """Return the door to a storage on a disk, the folder of ``path`` below it, and the name there."""
    located = door_of(storage)
    assert located is not None
    door, prefix = located
    inside, _, name = path.rpartition("/")
    return door, f"{prefix}/{inside}" if prefix and inside else prefix or inside, name
