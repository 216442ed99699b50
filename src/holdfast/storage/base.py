"""What a storage is: operations that a disk and an object store can both keep.

There is no rename, no mkdir and no append, because object stores have none. Paths are relative to the root of the
storage, separated by "/", without "." or ".." or empty parts.

`errors_of` translates errors of the operating system, so that each errno has its message in one place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from holdfast.errors import (
    ConfigError,
    StorageConflictError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
)

_EndingT = TypeVar("_EndingT", bound="_Ending")

BLOCK = 4096
"""Unit of views given to `FileWriter.write`, in bytes."""

_COPY_BYTES = 32 << 20  # a store answers several requests for as much at a time
_NOW_TRAITS = frozenset({"num_parallel", "max_file_bytes", "copies_itself", "deletes_at_once"})

TEMPORARY = ".tmp-"
"""First characters of names a storage keeps to itself: never listed, refused in paths."""
_OF_WRITERS = re.compile(re.escape(TEMPORARY) + r"\d+-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object, or (path ends with "/") one directory of a listing that is not recursive.

    Attributes:
        path: path inside the storage.
        size: bytes; 0 for a directory.
        etag: changes whenever the content is replaced; None where the listing does not know it.
        modified: seconds since 1970 by the clock of the storage; 0.0 if unknown.
    """

    path: str
    size: int
    etag: str | None = None
    modified: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTraits:
    """What is good to know of a storage before it is used. The defaults are those of a local disk.

    Attributes:
        num_parallel: how many requests at once are worth it; 1 where no request takes long enough to send another one
            meanwhile. Where it is more than 1, all methods may be called by several threads.
        max_file_bytes: size at which the files of a checkpoint are split.
        copies_itself: whether `Storage.copy` repeats an object where it is; False if its bytes would come here and go
            back.
        deletes_at_once: how many objects one request of `Storage.delete_many` deletes, as far as that is known by now.
        conditional: whether `Storage.put` with a condition has one winner among all processes and machines; where only
            the store knows, `Storage.conditional` asks it.
    """

    num_parallel: int = 1
    max_file_bytes: int = 4 << 30
    copies_itself: bool = True
    deletes_at_once: int = 1
    conditional: bool = True


class _Ending(ABC):
    """Closed when the body of a ``with`` ends well, aborted when it does not."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    def __enter__(self: _EndingT) -> _EndingT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class FileWriter(_Ending):
    """Writes one object of known size from start to end; used by one thread at a time."""

    @abstractmethod
    def write(self, view: memoryview) -> None:
        """Append ``view``.

        All views but the last are multiples of 4096 bytes. The last one may reach past the size given to
        `Storage.create`, padded to a multiple of 4096: what is past the size is not stored. The memory is the caller's
        again on return.
        """

    @abstractmethod
    def close(self) -> None:
        """Make the object durable and end the writer; idempotent.

        Raises:
            StorageError: the bytes could not be made durable, or fewer than ``size`` were written; the object is
                dropped.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drop the object and end the writer; idempotent, never raises for a storage that has gone away."""


class ReplacingWriter(FileWriter):
    """Writes a big object that takes its name in one step: until then readers see the object before it, or none."""

    @abstractmethod
    def publish(self, *, if_absent: bool = False, if_match: str | None = None) -> None:
        """Make what was written durable and let it take the name; may be called again when a condition has failed.

        Args:
            if_absent: only if there is no object yet.
            if_match: only if the object there has this etag.

        Raises:
            StorageExistsError: ``if_absent`` and there is an object.
            StorageConflictError: the object is gone or its etag is not ``if_match``.
            StorageError: the bytes could not be made durable, or fewer than ``size`` were written.
        """

    def close(self) -> None:
        """Publish the object, whatever has the name, unless that was done; idempotent. What cannot be is dropped."""
        try:
            self.publish()
        except BaseException:
            self.abort()
            raise


class FileBatch(_Ending):
    """Writes many small objects, which are durable together; used by one thread at a time."""

    @abstractmethod
    def add(self, path: str, data: memoryview | bytes) -> None:
        """Store one object; an older object of this name is replaced. The memory is the caller's again on return."""

    @abstractmethod
    def close(self) -> None:
        """Make all objects durable and end the batch; idempotent.

        Raises:
            StorageError: they could not all be made durable.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the batch; objects that were added may be there or not; idempotent."""


class _SeparateFiles(FileBatch):
    """A batch for storages without a faster way: each object is durable when it is added."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def add(self, path: str, data: memoryview | bytes) -> None:
        with self._storage.create(path, len(data)) as writer:
            if len(data):
                writer.write(memoryview(data))

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


class FileReader(ABC):
    """Reads ranges of one object; `read_into` may be called by many threads at once.

    Attributes:
        size: bytes in the object when it was opened.
        ahead_bytes: how far ahead of the reading it is worth to announce ranges.
    """

    size: int
    ahead_bytes: int = 32 << 20

    @abstractmethod
    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset`` on.

        Raises:
            StorageError: the object ends before ``view`` is full, or it could not be read.
        """

    def will_read(self, offset: int, size: int) -> None:  # noqa: B027 - a hint: most storages have no use for it
        """Hint that this range is read soon."""

    @abstractmethod
    def close(self) -> None:
        """Release the handles and memory of the reader; idempotent."""

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Storage(ABC):
    """A tree of objects.

    Eight members have to be written: `put` commits (small, atomic), `create` takes the bulk of the bytes, `open` gives
    them back in ranges, `stat` and `list` find them, `delete` removes them, `copy` repeats an unchanged file without
    moving its bytes through this machine, and `uri` says where they are. `traits` says how the storage wants to be
    used, `describe` how another process gets at it: the process that writes checkpoints, and outlives the trainer.
    Everything else has a default, and is for storages with a faster way. Subclass `holdfast.testing.StorageTests` to
    prove a new storage; docs/storage.md has one, whole.

    Example:
        >>> from holdfast.storage import MemoryStorage
        >>> storage = MemoryStorage("doc")
        >>> tag = storage.put("a/b.json", b"{}")
        >>> storage.read("a/b.json")
        b'{}'
    """

    _made: tuple[str, str, str] | None = None  # "module:function" of an entry point, the URI it was given, `uri` then

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if moved := sorted(_NOW_TRAITS & vars(cls).keys()):
            raise ConfigError(
                f"class {cls.__qualname__} defines {', '.join(moved)}: these are fields of one value now; define "
                f"traits = holdfast.storage.StorageTraits({', '.join(f'{name}=...' for name in moved)})"
            )
        writer = next(base for base in cls.__mro__ if "describe" in vars(base))
        if writer is not cls and issubclass(writer, Storage):
            # Another process would rebuild the class that wrote the description, without what this one adds.
            cls.describe = Storage.describe  # type: ignore[method-assign]

    @abstractmethod
    def put(
        self, path: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        """Store a small object: all or nothing for every reader, durable on return.

        Whatever was written earlier in the same directory is durable before this object becomes visible, which
        makes a manifest that is written last a commit.

        Args:
            path: where.
            data: the whole content.
            if_absent: only if there is no object yet.
            if_match: only if the object has this etag.

        Returns:
            The etag of the new content, None where the storage has no etags.

        Raises:
            StorageExistsError: ``if_absent`` and there is an object.
            StorageConflictError: the object is gone or its etag is not ``if_match``.
        """

    @abstractmethod
    def create(self, path: str, size: int) -> FileWriter:
        """Start a big object of ``size`` bytes under its final name; an older object there is replaced.

        The object counts only after `FileWriter.close`; until then readers may or may not see a part of it.
        """

    @abstractmethod
    def open(self, path: str) -> FileReader:
        """Open an object for reading.

        Raises:
            StorageNotFoundError: there is no object.
        """

    @abstractmethod
    def stat(self, path: str) -> ObjectInfo:
        """Describe an object; a directory is none.

        Raises:
            StorageNotFoundError: there is no object.
        """

    @abstractmethod
    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Iterate over the objects below the directory ``prefix``, in no particular order.

        With ``recursive=False`` only over its children, where directories appear as ``ObjectInfo(path="a/b/",
        size=0)``. A directory that does not exist has no objects.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove an object, durably; fine if there is none. Directories left empty go too."""

    @abstractmethod
    def copy(self, source: str, target: str) -> None:
        """Repeat a file that Holdfast wrote, durably and without moving its bytes where the storage can.

        Raises:
            StorageNotFoundError: there is no ``source``.
            StorageExistsError: there is a ``target``.
        """

    @property
    @abstractmethod
    def uri(self) -> str:
        """Where the root is, in the form `resolve` takes: "/abs/runs/gpt", "memory://name"."""

    @property
    def traits(self) -> StorageTraits:
        """How this storage wants to be used; a class attribute will do. Contacts nobody."""
        return StorageTraits()

    def describe(self) -> dict[str, Any] | None:
        """Return JSON from which `from_description` rebuilds this storage in another process, None if it cannot.

        ``{"kind": "module:Class", ...}``: the class is called with the other values by keyword, and with ``secrets`` if
        there are any. "module:Class.method" names a class method that makes the storage. By default, what an entry
        point made of a URI is described by that URI; anything else has no description, and is written by a thread of
        the process that trains, which dies with it.
        """
        if self._made is None:
            return None
        kind, given, uri = self._made
        root = {"kind": kind, "uri": given}
        if self.uri == uri:
            return root
        below = self.uri.removeprefix(f"{uri.rstrip('/')}/")  # a copy of the storage, rooted deeper
        return None if below == self.uri else {"kind": "prefix", "parent": root, "prefix": below}

    def secrets(self) -> dict[str, str] | None:
        """Return the credentials that `describe` leaves out: sent to our own processes, never written."""
        return None

    def replace(self, path: str, size: int) -> ReplacingWriter | None:
        """Start a big object of ``size`` bytes that replaces the object at ``path`` in one step.

        Returns:
            None where `put` and `create` already do that: at stores, whose objects are there whole or not at all.
        """
        check_path(path)
        return None

    def batch(self, num_files: int) -> FileBatch:
        """Start to store about ``num_files`` small objects, of a few MiB at most, that are made durable together.

        Like `create` for each of them otherwise: they count only after `FileBatch.close`.
        """
        return _SeparateFiles(self)

    def adopt(self, source: str, path: str) -> bool:
        """Take over a file of this machine as an object, durably and without copying, where the storage can.

        Only where the bytes are then the object's alone: no link to them is left under another name.

        Args:
            source: absolute path of the file; it is gone on success. An `Inside` names it by its open directory.
            path: where, inside the storage; there must be no object.

        Returns:
            False if it cannot be done here, for this file; then nothing has changed.

        Raises:
            StorageNotFoundError: there is no ``source``.
            StorageExistsError: there is an object at ``path``.
        """
        check_path(path)
        return False

    def sync(self, path: str) -> None:
        """Make an object durable that was not written through a storage; nothing to do where all objects are.

        Raises:
            StorageNotFoundError: there is no object.
        """
        self.stat(path)

    def sync_all(self, paths: Collection[str]) -> None:
        """Make many objects durable that were not written through a storage; see `sync`."""
        for path in paths:
            self.sync(path)

    @property
    def local_root(self) -> Path | None:
        """The root as a directory, if this is a plain local one."""
        return None

    def credentials_missing_in(self) -> tuple[str, ...]:
        """Name the variables and files in which credentials were looked for; () if some were found or none are needed.

        Contacts nobody.
        """
        return ()

    @property
    def conditional(self) -> bool:
        """Whether `put` with a condition has one winner among all processes and machines, as the lease of a run wants.

        Where it is False (clients without such writes, servers that ignore the headers) Holdfast looks before it
        writes. Object stores are asked, once for each bucket and process: that writes a small object and removes it.

        Raises:
            StorageError: the store could not be asked.
        """
        return self.traits.conditional

    def free_bytes(self) -> int | None:
        """Return the bytes that can still be written, None if unknown."""
        return None

    def child(self, path: str) -> Storage:
        """Return the same storage rooted deeper; ``path`` need not exist."""
        prefix = check_prefix(path)
        from .wrapped import PrefixStorage  # not above: that module imports this one

        return PrefixStorage(self, prefix) if prefix else self

    def exists(self, path: str) -> bool:
        """Tell whether there is an object (not a directory) at ``path``."""
        try:
            self.stat(path)
        except StorageNotFoundError:
            return False
        return True

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """Return ``size`` bytes from ``offset`` on, up to the end if ``size`` is None."""
        with self.open(path) as reader:
            buffer = bytearray(max(0, reader.size - offset) if size is None else size)
            if buffer:
                reader.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_tagged(self, path: str) -> tuple[bytes, str | None]:
        """Return the whole content and an etag that is no newer than it: for a `put` with ``if_match``."""
        etag = self.stat(path).etag
        return self.read(path), etag

    def delete_many(self, paths: Iterable[str]) -> None:
        """Remove objects, durably and in no particular order; fine if some are not there.

        After an error some of them are gone.
        """
        for path in paths:
            self.delete(path)

    def delete_tree(self, prefix: str) -> None:
        """Remove every object below the directory ``prefix``; "" empties the storage."""
        self.delete_many([info.path for info in self.list(prefix)])

    def make_directories(self, paths: Iterable[str]) -> None:  # noqa: B027 - objects lie in no directories
        """Make directories without files on a local disk; does nothing elsewhere, since a bucket has no directories."""

    def tidy(self, directory: str) -> None:  # noqa: B027 - nothing to do where a put leaves nothing behind
        """Remove what dead writers left directly in ``directory``: unfinished `put`s, and itself if it is empty."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"


def check_condition(where: str, found: ObjectInfo | None, *, if_absent: bool, if_match: str | None) -> None:
    """Refuse a `Storage.put` whose condition does not hold: for storages that look before they write.

    Args:
        where: the object, for messages.
        found: what is there; None for nothing.
        if_absent: as given.
        if_match: as given.

    Raises:
        StorageExistsError: ``if_absent`` and there is an object.
        StorageConflictError: the object is gone or its etag is not ``if_match``.
    """
    if if_absent and found is not None:
        raise StorageExistsError(f"cannot create {where}: it exists; use another name or remove it")
    if if_match is not None and (found is None or found.etag != if_match):
        what = "it is gone" if found is None else "another writer changed it"
        raise StorageConflictError(f"cannot replace {where}: {what}; read it again and decide anew")


def copy_bytes(storage: Storage, source: str, target: str) -> None:
    """Repeat an object by reading and writing its bytes, durably; an older ``target`` is replaced."""
    with storage.open(source) as reader, storage.create(target, reader.size) as writer:
        _pass_bytes(reader, writer)


def copy_over(storage: Storage, source: str, target: str) -> None:
    """Repeat an object by its bytes in place of ``target``, which stays as it is until the new one is whole."""
    with (
        storage.open(source) as reader,
        storage.replace(target, reader.size) or storage.create(target, reader.size) as writer,
    ):
        _pass_bytes(reader, writer)


def _pass_bytes(reader: FileReader, writer: FileWriter) -> None:
    buffer = memoryview(bytearray(min(_COPY_BYTES, reader.size)))
    for start in range(0, reader.size, _COPY_BYTES):
        chunk = buffer[: min(_COPY_BYTES, reader.size - start)]
        reader.read_into(start, chunk)
        writer.write(chunk)


def temporary_name() -> str:
    """Return a new name for what takes its own name when it is complete."""
    return f"{TEMPORARY}{os.getpid()}-{os.urandom(6).hex()}"


def is_temporary_name(name: str) -> bool:
    """Tell whether `temporary_name` may have made this: anything else that starts with `TEMPORARY` is a user's."""
    return _OF_WRITERS.fullmatch(name) is not None


def check_path(path: str) -> str:
    """Return ``path`` if it names an object inside a storage.

    Raises:
        ConfigError: it is empty, absolute, leaves the storage or uses a reserved name.
    """
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(f"storage path {path!r}: give a relative path such as 'step_100/manifest.json'")
    for part in path.split("/"):
        if part in ("", ".", ".."):
            raise ConfigError(
                f"storage path {path!r}: give a relative path without empty parts, '.' or '..', separated by '/'"
            )
        if part.startswith(TEMPORARY):
            raise ConfigError(f"storage path {path!r}: names that start with {TEMPORARY!r} are reserved; use another")
    return path


def check_prefix(prefix: str) -> str:
    """Return the directory ``prefix`` without a trailing "/"; "" is the root.

    Raises:
        ConfigError: as `check_path`.
    """
    prefix = prefix[:-1] if isinstance(prefix, str) and prefix.endswith("/") and prefix != "/" else prefix
    return "" if prefix == "" else check_path(prefix)


def check_view(path: str, *, size: int, offset: int, nbytes: int) -> None:
    """Refuse a view that breaks the rules of `FileWriter.write`.

    Raises:
        ConfigError: it comes after a view that had to be the last, or reaches past the padded size.
    """
    if offset % BLOCK or offset + nbytes > -(-size // BLOCK) * BLOCK:
        raise ConfigError(
            f"cannot write {nbytes} bytes at {offset} of {path} (size {size}): all views but the last must be "
            f"multiples of {BLOCK} bytes, the last may be padded to a multiple"
        )


def check_range(path: str, *, size: int, offset: int, nbytes: int) -> None:
    """Refuse a range that leaves its object, or bytes that end before the range does.

    Args:
        path: the object, for messages.
        size: bytes of the object, or where the bytes of an answer end.
        offset: first byte of the range.
        nbytes: bytes of the range.

    Raises:
        StorageError: the range begins before the object or ends behind it.
    """
    if offset < 0 or offset + nbytes > size:
        raise StorageError(f"short read of {path}: {nbytes} bytes at {offset} asked for, the object ends at {size}")


_LACKING = "this file system lacks the call (the mount of a bucket?): use a local disk, or the URI of the storage"
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
    if error.errno == errno.ENOSPC and _has_no_inodes(where):
        hint = "the disk has space, but no inodes for more files (`df -i`): remove some files, or use another place"
    translated = kind(f"cannot {action} {where}: {error.strerror or error}; {hint}")
    # Handlers written for OSError look at errno; it is not part of args, which hold the message alone.
    translated.errno = error.errno
    return translated


def _has_no_inodes(path: str) -> bool:
    for folder in Path(path).parents:  # up to one that is there: without inodes no directory was made either
        with contextlib.suppress(OSError):
            found = os.statvfs(folder)
            return found.f_files > 0 and found.f_favail == 0 and found.f_bavail > 0
    return False


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
