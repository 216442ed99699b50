"""Objects in the memory of this process: for tests, notebooks and examples."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast._fork import after_fork_in_child
from holdfast.errors import ConfigError, StorageError, StorageExistsError, StorageNotFoundError

from .base import (
    FileReader,
    FileWriter,
    ObjectInfo,
    Storage,
    check_condition,
    check_path,
    check_prefix,
    check_range,
    check_view,
)


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    etag: str
    modified: float


@dataclass(slots=True)
class _Store:
    objects: dict[str, _Object] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    versions: Iterator[int] = field(default_factory=itertools.count)

    def set(self, path: str, data: bytes) -> str:
        etag = str(next(self.versions))
        self.objects[path] = _Object(data, etag, time.time())
        return etag


# One table for the process, so that "memory://name" means the same objects wherever it is resolved.
_stores: dict[str, _Store] = {}


@after_fork_in_child
def _after_fork_in_child() -> None:
    for store in _stores.values():
        store.lock = threading.Lock()  # another thread may have held it


class MemoryStorage(Storage):
    """Named objects of this process, behaving like an object store; gone when the process ends.

    Example:
        >>> MemoryStorage("notebook").uri
        'memory://notebook'
    """

    def __init__(self, name: str = "default") -> None:
        if not name or "/" in name:
            raise ConfigError(f"MemoryStorage({name!r}): give a name without '/', as in memory://name/prefix")
        self._name = name
        self._store = _stores.setdefault(name, _Store())

    def put(
        self, path: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        check_path(path)
        with self._store.lock:
            old = self._store.objects.get(path)
            found = None if old is None else ObjectInfo(path=path, size=len(old.data), etag=old.etag)
            check_condition(f"{self.uri}/{path}", found, if_absent=if_absent, if_match=if_match)
            return self._store.set(path, bytes(data))

    def create(self, path: str, size: int) -> FileWriter:
        return _MemoryWriter(self._store, check_path(path), size)

    def open(self, path: str) -> FileReader:
        return BytesReader(path, self._get(path).data)

    def stat(self, path: str) -> ObjectInfo:
        item = self._get(path)
        return ObjectInfo(path=path, size=len(item.data), etag=item.etag, modified=item.modified)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        start = f"{check_prefix(prefix)}/" if prefix else ""
        with self._store.lock:
            items = sorted((path, item) for path, item in self._store.objects.items() if path.startswith(start))
        directories: set[str] = set()
        for path, item in items:
            head, slash, _ = path[len(start) :].partition("/")
            if recursive or not slash:
                yield ObjectInfo(path=path, size=len(item.data), etag=item.etag, modified=item.modified)
            elif head not in directories:
                directories.add(head)
                yield ObjectInfo(path=f"{start}{head}/", size=0)

    def delete(self, path: str) -> None:
        with self._store.lock:
            self._store.objects.pop(check_path(path), None)

    def copy(self, source: str, target: str) -> None:
        check_path(target)
        data = self._get(source).data
        with self._store.lock:
            if target in self._store.objects:
                raise StorageExistsError(f"cannot copy to {self.uri}/{target}: it exists; use another name")
            self._store.set(target, data)

    @property
    def uri(self) -> str:
        """The name as a URI that `resolve` takes."""
        return f"memory://{self._name}"

    def _get(self, path: str) -> _Object:
        item = self._store.objects.get(check_path(path))
        if item is None:
            raise StorageNotFoundError(f"cannot open {self.uri}/{path}: there is no such object; check the path")
        return item


class _MemoryWriter(FileWriter):
    def __init__(self, store: _Store, path: str, size: int) -> None:
        self._store, self._path, self._size = store, path, size
        self._data: bytearray | None = bytearray()
        self._offset = 0  # bytes written, padding included

    def write(self, view: memoryview) -> None:
        if self._data is None:
            raise StorageError(f"cannot write {self._path}: the writer is closed")
        view = view.cast("B")
        check_view(self._path, size=self._size, offset=self._offset, nbytes=len(view))
        self._data += view[: self._size - self._offset]
        self._offset += len(view)

    def close(self) -> None:
        if self._data is None:
            return
        data, self._data = bytes(self._data), None
        if len(data) != self._size:
            raise StorageError(f"cannot finish {self._path}: {len(data)} of {self._size} bytes were written")
        with self._store.lock:
            self._store.set(self._path, data)

    def abort(self) -> None:
        self._data = None


class BytesReader(FileReader):
    """Ranges of an object that is in memory whole, so that it cannot change under its reader.

    Args:
        path: the object, for messages.
        data: its bytes.
    """

    def __init__(self, path: str, data: bytes) -> None:
        self._path, self._data, self.size = path, data, len(data)

    def read_into(self, offset: int, view: memoryview) -> None:
        target = view.cast("B")
        check_range(self._path, size=self.size, offset=offset, nbytes=len(target))
        target[:] = self._data[offset : offset + len(target)]

    def close(self) -> None:
        pass
