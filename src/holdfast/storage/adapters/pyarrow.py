"""File systems of pyarrow as a storage: S3, GCS, Azure, HDFS and whatever else a `pyarrow.fs.FileSystem` is.

Local ones become a `LocalStorage`, wrapped fsspec ones an `FsspecStorage`. Object stores are written under the final
name, which they show only when it is whole; trees get a temporary file that is moved into place. pyarrow cannot remove
a directory only if it is empty, so directories are left standing: listings leave out those without a file.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from holdfast._optional import require
from holdfast.errors import ConfigError, StorageError, StorageNotFoundError

from ..base import FileReader, FileWriter, ReplacingWriter, Storage, check_path, check_prefix
from ..local.local_storage import LocalStorage
from ..resolve import resolve
from .common import (
    AdaptedStorage,
    Described,
    FoundObject,
    RangeReader,
    SentWriter,
    client_errors,
    rebuild_options,
)

_T = TypeVar("_T")
_OBJECT_STORES = frozenset({"abfs", "gcs", "s3"})
# Classes of pyarrow.fs whose arguments are plain values, so that a description can rebuild them.
_KINDS = ("AzureFileSystem", "GcsFileSystem", "HadoopFileSystem", "S3FileSystem")
_SCHEMES = {"abfs": "abfs", "gcs": "gs", "hdfs": "hdfs", "s3": "s3"}
_PREFIX = "pyarrow+"
# What one request copies at most; nothing where not all versions of pyarrow authorize it. No limit elsewhere.
_COPIED_BYTES = {"s3": 5 << 30, "abfs": -1}
_TRIES = 20


class PyarrowStorage(AdaptedStorage):
    """Files of a pyarrow file system below ``root``.

    Example:
        >>> import tempfile, pyarrow.fs
        >>> storage = PyarrowStorage(pyarrow.fs.LocalFileSystem(), tempfile.mkdtemp())
        >>> tag = storage.put("a/b.json", b"{}")
        >>> storage.read("a/b.json")
        b'{}'
    """

    def __init__(self, filesystem: Any, root: str = "", *, uri: str | None = None) -> None:
        self.filesystem = filesystem
        Described(_client_of(filesystem))  # its credentials are in no message from now on
        super().__init__(root, uri or _uri_of(filesystem, root))

    def describe(self) -> dict[str, Any] | None:
        """Return kind, arguments and root; None for file systems that only this process has."""
        plain = Described(_client_of(self.filesystem)).plain
        return plain and {"kind": "pyarrow", "client": plain, "root": self._root, "uri": self._uri}

    def secrets(self) -> dict[str, str] | None:
        """Return keys and tokens among the arguments."""
        return Described(_client_of(self.filesystem)).secrets or None

    @property
    def _kind(self) -> str:
        fs = self.filesystem
        while fs.type_name == "subtree":
            fs = fs.base_fs
        return str(fs.type_name)

    @property
    def _is_tree(self) -> bool:
        return self._kind not in _OBJECT_STORES

    @property
    def _shows_parts(self) -> bool:
        return True  # at object stores too: see `_ArrowWriter._give_up`

    def replace(self, path: str, size: int) -> ReplacingWriter | None:
        """Start a big object that takes the place of another, by a copy at the server; see `Storage.replace`.

        None where pyarrow cannot ask for that copy: then an object that is given up takes the one before it with it.
        """
        if size > _COPIED_BYTES.get(self._kind, size):
            check_path(path)
            return None
        return super().replace(path, size)

    def _look(self, full: str) -> FoundObject | None:
        from pyarrow.fs import FileType

        info = self.filesystem.get_file_info(full)
        if info.type == FileType.NotFound:
            raise FileNotFoundError(full)
        return None if info.type != FileType.File else _found(info, full)

    def _fetch(self, full: str) -> bytes:
        for _ in range(_TRIES):
            with self.filesystem.open_input_file(full) as handle:
                size, version = handle.size(), handle.metadata()
                data: bytes = handle.read_at(size, 0)
            if self._is_tree:
                return data
            # Size and bytes are two requests of an object store, and a put may come between: look once more.
            with self.filesystem.open_input_file(full) as handle:
                after = (handle.size(), handle.metadata())
            if (size, version) == after and len(data) == size:
                return data
        raise StorageError(f"{full} is replaced faster than it can be read")

    def _reader(self, full: str, found: FoundObject, where: str) -> FileReader:
        handle = self.filesystem.open_input_file(full)

        def fetch(offset: int, nbytes: int) -> bytes:
            data: bytes = handle.read_at(nbytes, offset)
            return data

        def look() -> FoundObject | None:
            # An open file of a tree keeps its version.
            return found if self._is_tree else self._look(full)

        return RangeReader(where, found.size or 0, fetch=fetch, look=look, version=found, end=handle.close)

    def _write(self, full: str, data: bytes) -> None:
        with self._stream(full) as stream:
            stream.write(data)

    def _stream(self, full: str) -> Any:
        def start() -> Any:
            return self.filesystem.open_output_stream(full, compression=None, buffer_size=0)

        return self._in_directory(full, start) if self._is_tree else start()

    def _rename(self, temporary: str, full: str) -> None:
        if self._is_tree:
            self.filesystem.move(temporary, full)
        else:  # which cannot move on all of them, and copies and deletes on the others
            super()._rename(temporary, full)

    def _writer(self, full: str, size: int, where: str) -> FileWriter:
        if self._is_tree:
            # Removed first: readers of the older file go on reading it.
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.delete_file(full)
        return _ArrowWriter(self._stream(full), self, full, where, size)

    def _scan(self, full: str, *, recursive: bool) -> Iterator[FoundObject]:
        from pyarrow.fs import FileSelector, FileType

        if full and self.filesystem.get_file_info(full).type != FileType.Directory:
            return
        # Always recursive: a directory counts only if there is a file below it.
        for info in self.filesystem.get_file_info(FileSelector(full, recursive=True, allow_not_found=True)):
            if info.type != FileType.File:
                continue
            yield _found(info, (info.path[len(full.rstrip("/")) :] if full else info.path).lstrip("/"))

    def _remove(self, full: str) -> None:
        self.filesystem.delete_file(full)

    def _repeat(self, source: str, target: str) -> bool:
        if self._is_tree:
            self._in_directory(target, lambda: self.filesystem.copy_file(source, target))
        else:
            self.filesystem.copy_file(source, target)
        return True

    def delete_tree(self, prefix: str) -> None:
        """Remove everything below the directory ``prefix``, with its directories."""
        full = self._join(check_prefix(prefix))
        try:
            with client_errors("delete", self._where(prefix)):
                if not prefix:
                    self.filesystem.delete_dir_contents(full, missing_dir_ok=True)
                elif self._look(full) is None:
                    self.filesystem.delete_dir(full)
        except StorageNotFoundError:
            return

    def _in_directory(self, full: str, action: Callable[[], _T]) -> _T:
        """Do ``action`` in the directory of ``full``, which is made if it is missing."""
        try:
            return action()
        except FileNotFoundError:
            self.filesystem.create_dir(posixpath.dirname(full), recursive=True)
            return action()


class _ArrowWriter(SentWriter):
    def __init__(self, stream: Any, *given: Any) -> None:
        super().__init__(*given)
        self._stream = stream

    def _send(self, data: bytes) -> None:
        self._stream.write(data)

    def _finish(self) -> None:
        self._stream.close()

    def _give_up(self) -> None:
        self._stream.close()  # pyarrow has no abort in Python: the object is finished, and removed at once


def from_uri(uri: str) -> Storage:
    """Return the storage for a URI that pyarrow knows, or for "pyarrow+" and such a URI.

    Raises:
        ConfigError: pyarrow does not take it.
        MissingExtraError: pyarrow is not installed.
    """
    scheme = uri.partition("://")[0]
    fs = require("pyarrow.fs", extra="pyarrow", purpose=f"{scheme}:// locations")
    shown = re.sub(r"://[^/]*@", "://", uri).partition("?")[0]
    try:
        with client_errors("open", shown):
            filesystem, path = fs.FileSystem.from_uri(uri.removeprefix(_PREFIX))
    except StorageError as error:
        raise ConfigError(f"location {shown!r}: {error}") from error
    return _adapt(filesystem, path, shown.rstrip("/"))


def from_filesystem(filesystem: Any, path: str = "") -> Storage:
    """Return the storage at ``path`` of a pyarrow file system; a local one becomes a `LocalStorage`."""
    return _adapt(filesystem, path, None)


def from_description(client: dict[str, Any], root: str, uri: str, secrets: dict[str, str] | None = None) -> Storage:
    """Rebuild what `PyarrowStorage.describe` described.

    Raises:
        ConfigError: the kind of client is unknown, or its credentials are not known here.
    """
    return PyarrowStorage(_client_from(rebuild_options(client, secrets, uri)), root, uri=uri)


def _adapt(filesystem: Any, path: str, uri: str | None) -> Storage:
    kind = filesystem.type_name
    if kind == "local":
        return LocalStorage(os.path.expanduser(path.removeprefix("file://")) or ".")
    if kind == "subtree" and filesystem.base_fs.type_name in ("local", "subtree"):
        return _adapt(filesystem.base_fs, posixpath.join(filesystem.base_path, path.lstrip("/")), None)
    if kind == "py::holdfast":  # made by `for_pyarrow.as_pyarrow`
        handler = filesystem.handler
        shown: Storage = handler.storage.child(handler.inside(path))
        return shown
    below = getattr(getattr(filesystem, "handler", None), "fs", None)
    if below is not None and hasattr(below, "storage_options"):
        return resolve(path, filesystem=below)
    return PyarrowStorage(filesystem, path.rstrip("/") if kind == "hdfs" else path.strip("/"), uri=uri)


def _found(info: Any, name: str) -> FoundObject:
    return FoundObject(name=name, size=int(info.size), modified=(info.mtime_ns or 0) / 1e9)


def _client_of(filesystem: Any) -> dict[str, Any] | None:
    if filesystem.type_name == "subtree":
        base = _client_of(filesystem.base_fs)
        return base and {"type": "SubTreeFileSystem", "path": filesystem.base_path, "base": base}
    name = type(filesystem).__name__
    if name not in _KINDS:
        return None
    # What pickle would be given, as plain values: a dictionary of arguments.
    _, arguments = filesystem.__reduce__()[:2]
    return {"type": name, "arguments": list(arguments)}


def _client_from(description: dict[str, Any]) -> Any:
    import pyarrow.fs

    name = description.get("type")
    if name == "SubTreeFileSystem":
        return pyarrow.fs.SubTreeFileSystem(description["path"], _client_from(description["base"]))
    if name not in _KINDS:
        raise ConfigError(f"storage description: {name!r} is no file system that can be rebuilt here")
    kind = getattr(pyarrow.fs, name)
    return getattr(kind, "_reconstruct", kind)(*description["arguments"])


def _uri_of(filesystem: Any, root: str) -> str:
    prefix, fs = root.strip("/"), filesystem
    while fs.type_name == "subtree":
        prefix, fs = posixpath.join(fs.base_path.strip("/"), prefix).rstrip("/"), fs.base_fs
    return f"{_PREFIX}{_SCHEMES.get(fs.type_name, fs.type_name)}://{'/' if fs.type_name == 'local' else ''}{prefix}"
