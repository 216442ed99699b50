"""A storage of somebody else: the eight members and no more. "box:///dir": objects in one directory of this machine."""

from __future__ import annotations

import fcntl
import os
import urllib.parse

from holdfast.errors import StorageConflictError, StorageError, StorageExistsError, StorageNotFoundError
from holdfast.storage import FileReader, FileWriter, ObjectInfo, Storage
from holdfast.storage.base import check_path, check_prefix, check_range, check_view


class BoxStorage(Storage):
    """Each object is one file, whose name is the quoted path."""

    def __init__(self, folder):
        self.folder = os.path.abspath(folder)

    @classmethod
    def from_uri(cls, uri):
        return cls(uri.partition("://")[2])

    @property
    def uri(self):
        return f"box://{self.folder}"

    def put(self, path, data, *, if_absent=False, if_match=None):
        file = self._file(path)
        os.makedirs(self.folder, exist_ok=True)
        with open(os.path.join(self.folder, ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if if_absent and os.path.exists(file):
                raise StorageExistsError(f"cannot create {self.uri}/{path}: it exists")
            if if_match is not None and self._etag(file) != if_match:
                raise StorageConflictError(f"cannot replace {self.uri}/{path}: it was changed")
            self._write(file, bytes(data))
            return self._etag(file)

    def create(self, path, size):
        return _BoxWriter(self, path, size)

    def open(self, path):
        self.stat(path)
        return _BoxReader(self._file(path), path)

    def stat(self, path):
        file = self._file(path)
        etag = self._etag(file)
        if etag is None:
            raise StorageNotFoundError(f"cannot read {self.uri}/{path}: there is no such object")
        return ObjectInfo(path=path, size=os.path.getsize(file), etag=etag, modified=os.path.getmtime(file))

    def list(self, prefix="", *, recursive=True):
        start = f"{check_prefix(prefix)}/" if prefix else ""
        seen = set()
        for name in sorted(os.listdir(self.folder)) if os.path.isdir(self.folder) else ():
            path = urllib.parse.unquote(name)
            if name.startswith(".") or not path.startswith(start):
                continue
            head, slash, _ = path[len(start) :].partition("/")
            if recursive or not slash:
                yield self.stat(path)
            elif head not in seen:
                seen.add(head)
                yield ObjectInfo(path=f"{start}{head}/", size=0)

    def delete(self, path):
        if self._etag(self._file(path)) is not None:
            os.unlink(self._file(path))

    def copy(self, source, target):
        file = self._file(target)
        with self.open(source) as reader:
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
        if os.path.exists(file):
            raise StorageExistsError(f"cannot copy to {self.uri}/{target}: it exists")
        self._write(file, data)

    def _file(self, path):
        # A dot in front would hide it; names are cut by the file system at 255 bytes.
        return os.path.join(self.folder, urllib.parse.quote(check_path(path), safe="").replace(".", "%2E"))

    def _etag(self, file):
        try:
            about = os.stat(file)
        except OSError:
            return None
        return f"{about.st_mtime_ns}-{about.st_ino}"

    def _write(self, file, data):
        temporary = os.path.join(self.folder, f".{os.urandom(8).hex()}")
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, file)


class _BoxWriter(FileWriter):
    def __init__(self, box, path, size):
        self._box, self._path, self._size = box, path, size
        self._file, self._data, self._offset = box._file(path), bytearray(), 0
        os.makedirs(box.folder, exist_ok=True)

    def write(self, view):
        view = view.cast("B")
        check_view(self._path, size=self._size, offset=self._offset, nbytes=len(view))
        self._offset += len(view)
        self._data += view

    def close(self):
        if self._data is None:
            return
        data, self._data = self._data, None
        if len(data) < self._size:
            raise StorageError(f"cannot finish {self._path}: {len(data)} of {self._size} bytes were written")
        self._box._write(self._file, data[: self._size])

    def abort(self):
        self._data = None


class _BoxReader(FileReader):
    def __init__(self, file, path):
        self._handle, self._path = open(file, "rb"), path  # noqa: SIM115
        self.size = os.fstat(self._handle.fileno()).st_size

    def read_into(self, offset, view):
        view = view.cast("B")
        check_range(self._path, size=self.size, offset=offset, nbytes=len(view))
        view[:] = os.pread(self._handle.fileno(), len(view), offset)

    def close(self):
        self._handle.close()
