"""A storage seen from one of its directories."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import replace as changed
from typing import TYPE_CHECKING, Any

from .base import FileReader, FileWriter, ObjectInfo, ReplacingWriter, Storage, check_path, check_prefix

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PrefixStorage"]


class PrefixStorage(Storage):
    """A storage seen from one of its directories."""

    def __init__(self, parent: Storage, prefix: str) -> None:
        self._parent, self._prefix = parent, check_path(prefix)

    def _full(self, path: str) -> str:
        return f"{self._prefix}/{check_path(path)}"

    def put(
        self, path: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        """Store a small object atomically; see `Storage.put`."""
        return self._parent.put(self._full(path), data, if_absent=if_absent, if_match=if_match)

    def create(self, path: str, size: int) -> FileWriter:
        """Start a big object; see `Storage.create`."""
        return self._parent.create(self._full(path), size)

    def replace(self, path: str, size: int) -> ReplacingWriter | None:
        """Start a big object that takes the place of another; see `Storage.replace`."""
        return self._parent.replace(self._full(path), size)

    def open(self, path: str) -> FileReader:
        """Open an object for reading; see `Storage.open`."""
        return self._parent.open(self._full(path))

    def stat(self, path: str) -> ObjectInfo:
        """Describe an object; see `Storage.stat`."""
        return changed(self._parent.stat(self._full(path)), path=path)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Iterate over objects; see `Storage.list`."""
        for info in self._parent.list(posixpath.join(self._prefix, check_prefix(prefix)), recursive=recursive):
            yield changed(info, path=info.path[len(self._prefix) + 1 :])

    def delete(self, path: str) -> None:
        """Remove an object; see `Storage.delete`."""
        self._parent.delete(self._full(path))

    def delete_many(self, paths: Iterable[str]) -> None:
        """Remove objects; see `Storage.delete_many`."""
        self._parent.delete_many([self._full(path) for path in paths])

    def read_tagged(self, path: str) -> tuple[bytes, str | None]:
        """Return content and etag; see `Storage.read_tagged`."""
        return self._parent.read_tagged(self._full(path))

    def copy(self, source: str, target: str) -> None:
        """Repeat an object; see `Storage.copy`."""
        self._parent.copy(self._full(source), self._full(target))

    def adopt(self, source: str, path: str) -> bool:
        """Take over a file of this machine; see `Storage.adopt`."""
        return self._parent.adopt(source, self._full(path))

    def sync(self, path: str) -> None:
        """Make an object durable; see `Storage.sync`."""
        self._parent.sync(self._full(path))

    def delete_tree(self, prefix: str) -> None:
        """Remove everything below ``prefix``; see `Storage.delete_tree`."""
        self._parent.delete_tree(posixpath.join(self._prefix, check_prefix(prefix)))

    def make_directories(self, paths: Iterable[str]) -> None:
        """Make directories that hold nothing; see `Storage.make_directories`."""
        self._parent.make_directories([posixpath.join(self._prefix, check_path(path)) for path in paths])

    def tidy(self, directory: str) -> None:
        """Remove what dead writers left; see `Storage.tidy`."""
        self._parent.tidy(posixpath.join(self._prefix, check_prefix(directory)))

    @property
    def uri(self) -> str:
        """The URI of the parent and the prefix."""
        return f"{self._parent.uri.rstrip('/')}/{self._prefix}"

    @property
    def local_root(self) -> Path | None:
        """The directory, if the parent is local."""
        root = self._parent.local_root
        return None if root is None else root / self._prefix

    def free_bytes(self) -> int | None:
        """Return what the parent has left."""
        return self._parent.free_bytes()

    def credentials_missing_in(self) -> tuple[str, ...]:
        """Name what of the parent holds no credentials."""
        return self._parent.credentials_missing_in()

    def child(self, path: str) -> Storage:
        """Return the parent seen from deeper below."""
        prefix = check_prefix(path)
        return PrefixStorage(self._parent, f"{self._prefix}/{prefix}") if prefix else self

    def secrets(self) -> dict[str, str] | None:
        """Return the credentials of the parent."""
        return self._parent.secrets()

    @property
    def conditional(self) -> bool:
        """Whether conditional puts of the parent have one winner."""
        return self._parent.conditional

    @property
    def num_parallel(self) -> int:
        """How many requests at once are worth it at the parent."""
        return self._parent.num_parallel

    @property
    def deletes_at_once(self) -> int:
        """How many objects one request of the parent deletes."""
        return self._parent.deletes_at_once

    @property
    def max_file_bytes(self) -> int:
        """Size at which the parent wants files split."""
        return self._parent.max_file_bytes

    @property
    def copies_itself(self) -> bool:
        """Whether the parent repeats objects by itself."""
        return self._parent.copies_itself

    def describe(self) -> dict[str, Any] | None:
        """Return the description of the parent and the prefix."""
        parent = self._parent.describe()
        return None if parent is None else {"kind": "prefix", "parent": parent, "prefix": self._prefix}
