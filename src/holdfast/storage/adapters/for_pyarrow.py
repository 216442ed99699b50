"""A storage as a file system of pyarrow, which scripts for Ray Train give to `pyarrow.fs.copy_files`.

The other way round, from a file system of pyarrow to a storage, is `holdfast.storage.adapters.pyarrow`. Paths are
those of `Checkpoint.path` and `Result.path`: absolute on a local disk, else the URI without its scheme. Directories are
as in a bucket: a directory exists while a file is below it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.fs

from holdfast.errors import ConfigError, StorageNotFoundError

from ..base import ObjectInfo, Storage, copy_over
from ..resolve import from_description, resolve, split_uri
from ..wrapped import InputStream, OutputStream


def as_pyarrow(storage: Storage) -> pyarrow.fs.FileSystem:
    """Return the file system of pyarrow in which a storage can be read and written."""
    if storage.local_root is not None:
        return pyarrow.fs.LocalFileSystem()
    given = getattr(storage, "filesystem", None)
    is_plain = isinstance(given, pyarrow.fs.FileSystem) and given.type_name in ("s3", "gcs", "abfs")
    if is_plain:  # the path in it is the URI without its scheme
        return given
    return pyarrow.fs.PyFileSystem(StorageHandler(storage))


class StorageHandler(pyarrow.fs.FileSystemHandler):  # type: ignore[misc]
    """Answers pyarrow for a storage.

    Args:
        storage: the storage to show, under the path of its URI.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._base = split_uri(storage.uri)[1].strip("/")

    def inside(self, path: str) -> str:
        """Return the path inside the storage.

        Raises:
            ConfigError: the path lies outside of the storage.
        """
        text = path.strip("/")
        if text == self._base:
            return ""
        if not text.startswith(f"{self._base}/"):
            raise ConfigError(
                f"path {path!r} is outside of {self.storage.uri}, which is all that this file system shows: open a "
                "file system of your own for it (pyarrow.fs.FileSystem.from_uri)"
            )
        return text[len(self._base) + 1 :]

    def _is_above(self, path: str) -> bool:
        return f"{self._base}/".startswith(f"{path.strip('/')}/") or not path.strip("/")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageHandler) and other.storage.uri == self.storage.uri

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.storage.uri)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.storage.describe(), self.storage.uri)

    # -- looking

    def get_type_name(self) -> str:
        return "holdfast"

    def normalize_path(self, path: str) -> str:
        return path.rstrip("/")

    def get_file_info(self, paths: list[str]) -> list[Any]:
        return [self._info(path) for path in paths]

    def get_file_info_selector(self, selector: Any) -> list[Any]:
        base = selector.base_dir.rstrip("/")
        place = self.inside(base)
        children = list(self._children(base, place, recursive=selector.recursive))
        if not children and not selector.allow_not_found and place:
            if self.storage.exists(place):
                raise NotADirectoryError(f"{base} is a file")
            raise FileNotFoundError(f"there is no directory {base}")
        return children

    def _info(self, path: str) -> Any:
        if self._is_above(path):
            return _folder(path)
        place = self.inside(path)
        if place:
            try:
                return _file(path, self.storage.stat(place))
            except StorageNotFoundError:
                pass
        is_there = not place or next(iter(self.storage.list(place)), None) is not None
        kind = pyarrow.fs.FileType.Directory if is_there else pyarrow.fs.FileType.NotFound
        return pyarrow.fs.FileInfo(path, kind)

    def _children(self, base: str, place: str, *, recursive: bool) -> Iterator[Any]:
        seen: set[str] = set()
        for info in self.storage.list(place, recursive=recursive):
            name = info.path[len(place) + 1 :] if place else info.path
            if name.endswith("/"):
                yield _folder(posixpath.join(base, name.rstrip("/")))
                continue
            parts = name.split("/")
            for depth in range(1, len(parts)):
                above = "/".join(parts[:depth])
                if above not in seen:
                    seen.add(above)
                    yield _folder(posixpath.join(base, above))
            yield _file(posixpath.join(base, name), info)

    # -- reading

    def open_input_stream(self, path: str) -> Any:
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> Any:
        return pyarrow.PythonFile(InputStream(self.storage.open(self.inside(path))), mode="r")

    # -- changing

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        """Open a new file; it exists once it is closed."""
        return pyarrow.PythonFile(OutputStream(self.storage, self.inside(path)), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        """Refuse: no object store appends."""
        raise NotImplementedError(f"{path}: nothing can be appended here; write the file anew")

    def create_dir(self, path: str, recursive: bool) -> None:
        """Do nothing: a directory exists with its first file."""
        if not self._is_above(path):
            self.inside(path)

    def delete_file(self, path: str) -> None:
        place = self.inside(path)
        self.storage.stat(place)
        self.storage.delete(place)

    def delete_dir(self, path: str) -> None:
        self.delete_dir_contents(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        if not (place := self.inside(path)):
            self.delete_root_dir_contents()
        if not missing_dir_ok and next(iter(self.storage.list(place)), None) is None:
            raise FileNotFoundError(f"there is no directory {path}")
        self.storage.delete_tree(place)

    def delete_root_dir_contents(self) -> None:
        """Refuse to delete everything."""
        raise ConfigError(f"not deleting everything in {self.storage.uri}: name a directory in it")

    def copy_file(self, src: str, dest: str) -> None:
        """Copy a file; a file that has the target's name is replaced."""
        source, target = self.inside(src), self.inside(dest)
        self.storage.stat(source)
        if source == target:
            return
        if not self.storage.exists(target):
            self.storage.copy(source, target)
        else:
            copy_over(self.storage, source, target)

    def move(self, src: str, dest: str) -> None:
        if not self.storage.exists(self.inside(src)):
            raise NotImplementedError(f"{src}: only files can be moved here, and no file has this name")
        if self.inside(src) != self.inside(dest):
            self.copy_file(src, dest)
            self.delete_file(src)


def _file(path: str, info: ObjectInfo) -> Any:
    known = {"mtime_ns": int(info.modified * 1e9)} if info.modified else {}
    return pyarrow.fs.FileInfo(path, pyarrow.fs.FileType.File, size=info.size, **known)


def _folder(path: str) -> Any:
    return pyarrow.fs.FileInfo(path, pyarrow.fs.FileType.Directory)


def _rebuild(description: dict[str, Any] | None, uri: str) -> StorageHandler:
    return StorageHandler(from_description(description) if description is not None else resolve(uri))
