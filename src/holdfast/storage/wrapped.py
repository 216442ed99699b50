"""Storages and objects in other shapes: in front of another storage, seen from a directory, as files of Python.

Where a subclass changes `Storage.create`, the bytes of an object that replaces another one go through it too.
"""

from __future__ import annotations

import copy
import functools
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, TypeVar

from .base import (
    FileBatch,
    FileReader,
    FileWriter,
    ObjectInfo,
    ReplacingWriter,
    Storage,
    StorageTraits,
    check_path,
    check_prefix,
)

_IN_MEMORY = 16 << 20  # more of an object of unknown size goes to a temporary file
_PIECE = 8 << 20

_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])
_PATHS = frozenset({"path", "target", "paths"})  # arguments that are paths in the storage
_DIRECTORIES = frozenset({"prefix", "directory"})
# What is derived from an operation goes through that operation where a wrapper changes it.
_DERIVED = {
    "open": ("read", "read_tagged"),
    "stat": ("exists", "read_tagged", "sync", "sync_all"),
    "list": ("delete_tree",),
    "delete": ("delete_many", "delete_tree"),
    "delete_many": ("delete_tree",),
    "create": ("batch", "adopt", "replace"),
    "sync": ("sync_all",),
}


def _passed_on(method: _MethodT) -> _MethodT:
    """Return the method that calls the same one of the storage below, with paths as they are there."""
    name, code = method.__name__, method.__code__
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    paths = _PATHS | {"source"} if name == "copy" else _PATHS  # `adopt` has a source of this machine

    @functools.wraps(method)
    def call(self: WrappedStorage, *given: Any, **named: Any) -> Any:
        named |= zip(names, given, strict=False)
        for key in paths & named.keys():
            value = named[key]
            named[key] = [self._below(path) for path in value] if key == "paths" else self._below(value)
        for key in _DIRECTORIES & named.keys():
            named[key] = self._below(named[key], directory=True)
        return getattr(self.below, name)(**named)

    vars(call).pop("__isabstractmethod__", None)
    return call  # type: ignore[return-value]


class WrappedStorage(Storage):
    """Another storage, to which everything is passed on: a base for one that changes some of it.

    What is derived from an operation that a subclass changes (`read` from `open`, `exists` from `stat`) goes through
    the changed one. A subclass that another process shall rebuild writes its own `describe`; that of the storage below
    would leave the changes out.

    Args:
        below: the other storage.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls).keys()
        derived = {name for operation in own & _DERIVED.keys() for name in _DERIVED[operation]}
        for name in derived - own:
            setattr(cls, name, WrappedStorage._replace_through if name == "replace" else vars(Storage)[name])

    def __init__(self, below: Storage) -> None:
        self.below = below

    def _below(self, path: str, *, directory: bool = False) -> str:
        """Return a path, or a directory ("" is the root), as the storage below calls it."""
        return path

    def _above(self, info: ObjectInfo) -> ObjectInfo:
        """Return an object that the storage below describes, as this one calls it."""
        return info

    put = _passed_on(Storage.put)
    create = _passed_on(Storage.create)
    open = _passed_on(Storage.open)
    delete = _passed_on(Storage.delete)
    copy = _passed_on(Storage.copy)
    secrets = _passed_on(Storage.secrets)
    replace = _passed_on(Storage.replace)
    batch = _passed_on(Storage.batch)
    adopt = _passed_on(Storage.adopt)
    sync = _passed_on(Storage.sync)
    sync_all = _passed_on(Storage.sync_all)
    credentials_missing_in = _passed_on(Storage.credentials_missing_in)
    free_bytes = _passed_on(Storage.free_bytes)
    exists = _passed_on(Storage.exists)
    read = _passed_on(Storage.read)
    read_tagged = _passed_on(Storage.read_tagged)
    delete_many = _passed_on(Storage.delete_many)
    delete_tree = _passed_on(Storage.delete_tree)
    make_directories = _passed_on(Storage.make_directories)
    tidy = _passed_on(Storage.tidy)

    def _replace_through(self, path: str, size: int) -> ReplacingWriter | None:
        """Start a big object that replaces another one, through the `create` that a subclass has changed.

        Returns:
            None where the storage below has no such way, or that `create` does not use it.
        """
        kept, below = _KeptOpen(), self.below

        class Instead(WrappedStorage):
            def create(self, path: str, size: int) -> FileWriter:
                kept.inner = below.replace(path, size)
                return kept if kept.inner is not None else below.create(path, size)

        clone = copy.copy(self)
        clone.below = Instead(below)
        writer = clone.create(path, size)
        if kept.inner is not None:
            return _ReplacingThrough(writer, kept)
        writer.abort()
        return None

    def stat(self, path: str) -> ObjectInfo:
        """Describe an object; see `Storage.stat`."""
        return self._above(self.below.stat(self._below(path)))

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Iterate over objects; see `Storage.list`."""
        return map(self._above, self.below.list(self._below(prefix, directory=True), recursive=recursive))

    @property
    def uri(self) -> str:
        """Where the storage below is."""
        return self.below.uri

    @property
    def traits(self) -> StorageTraits:
        """How the storage below wants to be used."""
        return self.below.traits

    @property
    def conditional(self) -> bool:
        """Whether conditional puts of the storage below have one winner."""
        return self.below.conditional

    @property
    def local_root(self) -> Path | None:
        """The root of the storage below, if that is a plain local directory."""
        return self.below.local_root


class PrefixStorage(WrappedStorage):
    """A storage seen from one of its directories, as `Storage.child` returns it."""

    def __init__(self, parent: Storage, prefix: str) -> None:
        super().__init__(parent)
        self._prefix = check_path(prefix)

    def _below(self, path: str, *, directory: bool = False) -> str:
        inside = check_prefix(path) if directory else check_path(path)
        return f"{self._prefix}/{inside}" if inside else self._prefix

    def _above(self, info: ObjectInfo) -> ObjectInfo:
        return changed(info, path=info.path[len(self._prefix) + 1 :])

    def batch(self, num_files: int) -> FileBatch:
        """Start to store many small objects; see `Storage.batch`."""
        return _BatchBelow(self.below.batch(num_files), self._below)

    @property
    def uri(self) -> str:
        """The URI of the parent and the prefix."""
        return f"{self.below.uri.rstrip('/')}/{self._prefix}"

    @property
    def local_root(self) -> Path | None:
        """The directory, if the parent is local."""
        root = self.below.local_root
        return None if root is None else root / self._prefix

    def child(self, path: str) -> Storage:
        """Return the parent seen from deeper below."""
        prefix = check_prefix(path)
        return PrefixStorage(self.below, f"{self._prefix}/{prefix}") if prefix else self

    def describe(self) -> dict[str, Any] | None:
        """Return the description of the parent and the prefix."""
        parent = self.below.describe()
        return None if parent is None else {"kind": "prefix", "parent": parent, "prefix": self._prefix}


class _BatchBelow(FileBatch):
    """A batch of the storage below a prefix."""

    def __init__(self, batch: FileBatch, below: Callable[[str], str]) -> None:
        self._batch, self._below = batch, below

    def add(self, path: str, data: memoryview | bytes) -> None:
        self._batch.add(self._below(path), data)

    def close(self) -> None:
        self._batch.close()

    def abort(self) -> None:
        self._batch.abort()


class _KeptOpen(FileWriter):
    """A `ReplacingWriter` for a writer above it, whose `close` leaves it to be published.

    Attributes:
        inner: that writer; None before its object is begun, and where the storage has none.
    """

    inner: ReplacingWriter | None = None

    def write(self, view: memoryview) -> None:
        self.inner.write(view)  # type: ignore[union-attr]

    def close(self) -> None:
        pass

    def abort(self) -> None:
        if self.inner is not None:
            self.inner.abort()


class _ReplacingThrough(ReplacingWriter):
    """What a wrapper writes to a new object, as the successor of an old one."""

    def __init__(self, writer: FileWriter, kept: _KeptOpen) -> None:
        self._writer, self._kept = writer, kept

    def write(self, view: memoryview) -> None:
        self._writer.write(view)

    def publish(self, *, if_absent: bool = False, if_match: str | None = None) -> None:
        self._writer.close()
        self._kept.inner.publish(if_absent=if_absent, if_match=if_match)  # type: ignore[union-attr]

    def abort(self) -> None:
        self._writer.abort()


class InputStream(io.RawIOBase):
    """A `FileReader` as a seekable binary stream."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._reader.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes; at the end of the object with fewer, whose number is returned."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._reader.size - self._at))]
        if view:
            self._reader.read_into(self._at, view)
            self._at += len(view)
        return len(view)

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()


class OutputStream(io.RawIOBase):
    """Gathers an object of unknown size, and stores it when it is closed."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage, self._path = storage, path
        self._gathered = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - closed with this
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._gathered.write(view)
        self._size += len(view)
        return len(view)

    def close(self) -> None:
        """Store the object; durable on return; idempotent."""
        if self.closed:
            return
        try:
            self._gathered.seek(0)
            if self._size <= _PIECE:
                self._storage.put(self._path, self._gathered.read())
                return
            with self._storage.create(self._path, self._size) as writer:
                while piece := self._gathered.read(_PIECE):
                    writer.write(memoryview(piece))
        finally:
            self._drop()

    def _drop(self) -> None:
        self._gathered.close()
        super().close()

    def __del__(self) -> None:
        # Python would call `close`, and so store an object that was given up half way.
        self._drop()
