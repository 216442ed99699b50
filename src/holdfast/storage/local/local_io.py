"""Writing and reading local files: O_DIRECT where it helps, ordinary calls where it does not.

Many small files are written by `LocalBatch`: few system calls for each, and one wait for the disk for all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import sys
from collections.abc import Callable, Collection

from holdfast.errors import StorageError

from ..base import BLOCK, FileBatch, FileReader, FileWriter, ReplacingWriter, check_path, check_view, errors_of
from .beneath import Beneath, Inside, OpenDirectory, Ops, make_durable
from .local_tree import type_of_file_system

__all__ = [
    "LocalBatch", "LocalReader", "LocalReplacingWriter", "LocalWriter", "flush_whole", "flushes_whole", "open_new",
    "write_all",
]  # fmt: skip

# Read-ahead pays for files that are read in long runs; small ones are read whole anyway.
_READ_AHEAD_FROM = 1 << 20
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython's stable ABI: the one way in the standard library to the address of a read-only view."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a contiguous view."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def write_all(ops: Ops, fd: int, view: memoryview, offset: int) -> None:
    """Write all of ``view``, however few bytes the kernel takes at a time."""
    while len(view):
        written = ops.pwrite(fd, view, offset)
        if written <= 0:
            raise OSError(errno.EIO, "the file system took no bytes")
        view, offset = view[written:], offset + written


def open_new(ops: Ops, path: Inside) -> int:
    """Open a file that nobody has written yet; one of this name goes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return ops.open(path, flags)
    except FileExistsError:
        # Never truncated: an older file here may share its bytes with a checkpoint by a hard link.
        with contextlib.suppress(FileNotFoundError):
            ops.unlink(path)
        return ops.open(path, flags)


class LocalWriter(FileWriter):
    """Writes a file past the page cache where views and file system allow it.

    Direct writes neither evict the training data from the page cache nor cost a second copy; the file is durable
    only after `close`, direct or not, because its metadata is not written with the bytes.
    """

    def __init__(
        self, ops: Ops, folder: OpenDirectory, name: str, size: int, *, fd: int, on_abort: Callable[[], object]
    ) -> None:
        self._ops, self._size, self._fd = ops, size, fd
        self._folder, self._path = folder, folder.at(name)  # the folder is ours
        self._shown = self._path  # in messages
        self._offset = 0  # bytes on the file, padding included
        self._direct = self._refused = False
        self._ended = False  # closed or aborted: nothing left to drop
        self._on_abort = on_abort

    def write(self, view: memoryview) -> None:
        """Append ``view``: the aligned part directly, the rest through the page cache."""
        if self._fd < 0:
            raise StorageError(f"cannot write {self._shown}: the writer is closed")
        view = view.cast("B")
        check_view(self._shown, size=self._size, offset=self._offset, nbytes=len(view))
        with errors_of("write", self._shown):
            done = self._write_direct(view)
            # Padding is only needed to keep a direct write aligned.
            rest = view[done : max(done, self._size - self._offset)]
            if len(rest):
                self._set_direct(on=False)
                write_all(self._ops, self._fd, rest, self._offset + done)
        self._offset += len(view)

    def _write_direct(self, view: memoryview) -> int:
        """Write the longest aligned head of ``view`` past the page cache; return the number of bytes."""
        end = len(view) // BLOCK * BLOCK
        if end == 0 or address_of(view) % BLOCK or not self._set_direct(on=True):
            return 0
        done = 0
        # A short write that is no multiple of the block leaves an unaligned rest, which goes the other way.
        while done < end and done % BLOCK == 0:
            try:
                written = self._ops.pwrite(self._fd, view[done:end], self._offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems accept the flag and refuse the write (they want another alignment).
                self._refused = True
                return done
            if written <= 0:
                return done
            done += written
        return done

    def _set_direct(self, *, on: bool) -> bool:
        """Switch O_DIRECT if it is not as wanted; False if the file system does not have it."""
        if on and self._refused:
            return False
        if on != self._direct:
            try:
                self._ops.set_direct(self._fd, on=on)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refused = True
                return False
            self._direct = on
        return True

    def close(self) -> None:
        """Cut the padding, make bytes and name durable."""
        if self._fd < 0:
            return
        try:
            with errors_of("write", self._shown):
                self._sync()
                fd, self._fd = self._fd, -1
                self._ops.close(fd)
                self._ops.fsync_dir(self._folder.here)
            self._ended = True
            self._folder.close()
        except BaseException:
            self.abort()
            raise

    def _sync(self) -> None:
        """Cut the padding and make the bytes durable."""
        if self._offset < self._size:
            raise StorageError(
                f"cannot finish {self._shown}: {self._offset} of {self._size} bytes were written; write the rest"
            )
        self._ops.ftruncate(self._fd, self._size)
        self._ops.fsync(self._fd)

    def abort(self) -> None:
        """Remove the file, unless somebody else has put another one in its place."""
        if self._ended:
            return
        self._ended = True
        fd, self._fd = self._fd, -1
        ours = True
        with contextlib.suppress(OSError):
            if fd >= 0:
                try:
                    ours = os.path.samestat(os.fstat(fd), self._ops.lstat(self._path))
                finally:
                    self._ops.close(fd)
        # A file that cannot be removed now is in no manifest, so the next sweep of the directory takes it.
        with contextlib.suppress(OSError):
            try:
                if ours:
                    self._ops.unlink(self._path)
            finally:
                self._folder.close()
            self._on_abort()


class LocalReplacingWriter(LocalWriter, ReplacingWriter):
    """Writes a file under a temporary name, and lets it take its final name in one step.

    The file stays open and locked until then: whoever sweeps temporary files takes those of dead writers only.

    Args:
        ops, folder, name, size, fd, on_abort: of the temporary file, as for `LocalWriter`; ``fd`` is locked.
        target: its final name.
        give_name: the last step, of the directory, the temporary file, and the conditions of `publish`.
    """

    def __init__(
        self,
        ops: Ops,
        folder: OpenDirectory,
        name: str,
        size: int,
        *,
        fd: int,
        on_abort: Callable[[], object],
        target: str,
        give_name: Callable[..., object],
    ) -> None:
        super().__init__(ops, folder, name, size, fd=fd, on_abort=on_abort)
        self._shown = folder.at(target)
        self._give_name = give_name
        self._synced = self._published = False

    def publish(self, *, if_absent: bool = False, if_match: str | None = None) -> None:
        if self._published:
            return
        if self._ended:
            raise StorageError(f"cannot finish {self._shown}: it was given up before; write it again")
        with errors_of("write", self._shown):
            if not self._synced:
                try:
                    self._sync()
                    # Network file systems report at the first close what they could not store. The copy keeps the lock.
                    closing, self._fd = self._fd, os.dup(self._fd)
                    self._ops.close(closing)
                except BaseException:
                    self.abort()  # the kernel reports lost bytes once: asked again, it would call them durable
                    raise
                self._synced = True
            self._give_name(self._folder, self._path, if_absent=if_absent, if_match=if_match)
        self._ended = self._published = True
        fd, self._fd = self._fd, -1
        os.close(fd)
        self._folder.close()

    close = ReplacingWriter.close  # not that of `LocalWriter`


class LocalReader(FileReader):
    """Reads ranges of a local file with `os.preadv`: no shared position, so threads need no lock."""

    def __init__(self, path: str, *, fd: int, size: int) -> None:
        self._path, self._fd, self.size = path, fd, size
        if size >= _READ_AHEAD_FROM and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def will_read(self, offset: int, size: int) -> None:
        """Start reading a range into the page cache.

        Two threads that take turns in one file look random to the kernel, which then reads ahead nothing (measured:
        0.35 GiB/s cold without this hint, 1.5 GiB/s with it).
        """
        if self._fd >= 0 and hasattr(os, "posix_fadvise") and not (self._has(offset) and self._has(offset + size - 1)):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def _has(self, offset: int) -> bool:
        """Tell whether a byte is in the page cache: asking costs 2 us, a hint for 8 MiB that are in it 200 us."""
        if not _NOWAIT:
            return False
        try:
            return os.preadv(self._fd, [bytearray(1)], offset, _NOWAIT) == 1
        except OSError:  # EAGAIN, or a file system that cannot tell
            return False

    def read_into(self, offset: int, view: memoryview) -> None:
        if self._fd < 0:
            raise StorageError(f"cannot read {self._path}: the reader is closed")
        view = view.cast("B")
        wanted, done = len(view), 0
        with errors_of("read", self._path):
            while done < wanted:
                count = os.preadv(self._fd, [view[done:]], offset + done)
                if count == 0:
                    raise StorageError(
                        f"short read of {self._path}: {wanted} bytes at {offset} asked for, the file ends after "
                        f"{offset + done}; it was truncated or is still being written"
                    )
                done += count

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


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
        head, _, name = f"{self._prefix}/{check_path(path)}".lstrip("/").rpartition("/")
        with errors_of("write", self._door.full(f"{head}/{name}")):
            for attempt in range(_TRIES):
                try:
                    folder = self._enter(head)
                    fd = open_new(self._ops, folder.at(name))
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
