"""Any file system of fsspec as a storage: objects that a program holds, and schemes with no adapter of their own.

General layout. Object stores (no ``mv`` of their own) are written under the final name, which they show only when it is
whole. Trees (SFTP, SMB, FTP, WebHDFS and others with a ``mv``) get a temporary file that is moved into place;
directories are made when needed, and pruned where ``rmdir`` is known to refuse a directory with content. Clients that
are not asynchronous inside are used by one thread at a time: most of them, paramiko among them, mix up answers
otherwise.
"""

from __future__ import annotations

import contextlib
import io
import posixpath
import re
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from holdfast._optional import require
from holdfast._outgoing import masked
from holdfast.errors import ConfigError, MissingExtraError, StorageError

from ..base import FileReader, FileWriter, Storage, check_range
from ..local.local_storage import LocalStorage
from ..resolve import importable, load, resolve
from .common import (
    AdaptedStorage,
    Described,
    FoundObject,
    RangeReader,
    SentWriter,
    client_errors,
    rebuild_options,
    temporary_beside,
)

# Protocols whose rmdir removes nothing but an empty directory, as fsspec asks for: checked in their code.
_SAFE_RMDIR = frozenset({"file", "local", "ftp", "sftp", "smb", "ssh", "webhdfs"})
# They answer from copies of their own: a manifest or a lease may be out of date there.
_CACHES = frozenset({"blockcache", "cached", "filecache", "simplecache"})
# Where clients keep what changes with the content.
_VERSION_KEYS = ("size", "ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified", "updated")
_TIMEOUT_S = 60.0
_PREFIX = "fsspec+"

_guards: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_guards_lock = threading.Lock()


class FsspecStorage(AdaptedStorage):
    """Files of an fsspec file system below ``root``; connected when first used.

    Example:
        >>> import fsspec
        >>> storage = FsspecStorage(fsspec.filesystem("memory"), "/doc-example")
        >>> tag = storage.put("a/b.json", b"{}")
        >>> storage.read("a/b.json")
        b'{}'
    """

    def __init__(self, filesystem: Any, root: str = "", *, uri: str | None = None) -> None:
        if isinstance(filesystem, _Recipe):
            self._recipe, self._client = filesystem, None
        else:
            self._recipe, self._client = _Recipe.of(filesystem), filesystem
            _bound_waits(filesystem)
        Described(self._recipe.arguments)  # its credentials are in no message from now on
        super().__init__(root, uri or _uri_of(filesystem, root))

    @property
    def filesystem(self) -> Any:
        """The fsspec file system, made now if it was not used before."""
        if self._client is None:
            self._client = self._recipe.make()
        return self._client

    def describe(self) -> dict[str, Any] | None:
        """Return class, arguments and root; None for memory, arguments JSON cannot hold, and classes of a script."""
        described = Described(self._recipe.arguments)
        if "memory" in self._recipe.protocols or described.plain is None or not importable(self._recipe.kind):
            return None
        return {
            "kind": "fsspec",
            "client": f"{self._recipe.kind.__module__}:{self._recipe.kind.__qualname__}",
            "arguments": described.plain,
            "root": self._root,
            "uri": self._uri,
        }

    def secrets(self) -> dict[str, str] | None:
        """Return passwords, keys and tokens among the arguments."""
        return Described(self._recipe.arguments).secrets or None

    @property
    def _is_tree(self) -> bool:
        return self._recipe.renames

    @property
    def _shows_parts(self) -> bool:
        return self._is_tree or "memory" in self._recipe.protocols  # whose files are there from `open` on

    def _look(self, full: str) -> FoundObject | None:
        with _guarded(self.filesystem) as fs:
            fs.invalidate_cache()
            info = fs.info(full)
        return _found(info, full)

    def _fetch(self, full: str) -> bytes:
        with _guarded(self.filesystem) as fs:
            if not hasattr(fs, "ftp"):
                return bytes(fs.cat_file(full))
            with fs.open(full, "rb") as handle:
                if hasattr(handle, "prefetch"):  # SFTP: all requests at once, without a wait for each answer
                    handle.prefetch(fs.info(full)["size"])
                return bytes(handle.read())

    def _reader(self, full: str, found: FoundObject, where: str) -> FileReader:
        fs, size = self.filesystem, found.size or 0
        if fs.async_impl:

            def fetch(offset: int, nbytes: int) -> bytes:
                return bytes(fs.cat_file(full, start=offset, end=offset + nbytes))

            def look() -> list[Any]:
                fs.invalidate_cache()
                info = fs.info(full)
                return [info.get(key) for key in _VERSION_KEYS]

            return RangeReader(where, size, fetch=fetch, look=look, version=look())
        with _guarded(fs):
            handle = fs.open(full, "rb")
        return HandleReader(handle, _guard(fs), where=where, size=size)

    def _write(self, full: str, data: bytes) -> None:
        with _guarded(self.filesystem) as fs:
            if self._is_tree:
                self._in_directory(fs, full, lambda: _write(fs, full, data))
            else:
                fs.pipe_file(full, data)

    def _rename(self, temporary: str, full: str) -> None:
        if not self._is_tree:
            super()._rename(temporary, full)
            return
        with _guarded(self.filesystem) as fs:
            _replace(fs, temporary, full)

    def _writer(self, full: str, size: int, where: str) -> FileWriter:
        with _guarded(self.filesystem) as fs:
            if self._is_tree:
                # Removed first: readers of the older file go on reading it, where the server can do that.
                with contextlib.suppress(FileNotFoundError):
                    fs.rm_file(full)
                handle = self._in_directory(fs, full, lambda: fs.open(full, "wb"))
            else:
                handle = fs.open(full, "wb")
        shows_parts = self._shows_parts or not _is_uploaded(handle)
        return HandleWriter(handle, _guard(fs), self, full, where, size, shows_parts=shows_parts)

    def _scan(self, full: str, *, recursive: bool) -> Iterator[FoundObject]:
        with _guarded(self.filesystem) as fs:
            fs.invalidate_cache()
            top, pending = full.rstrip("/"), [full]
            while pending:
                directory = pending.pop()
                try:
                    entries = fs.ls(directory, detail=True)
                except (FileNotFoundError, NotADirectoryError) as error:
                    if directory == full or error.__cause__ is not None:
                        raise
                    continue  # removed meanwhile
                for info in entries:
                    name = str(info["name"]).rstrip("/")
                    if name == directory.rstrip("/"):
                        continue  # `ls` of a file gives the file, and some stores list a marker of the directory
                    path = name.removeprefix(top).lstrip("/") if top else name.lstrip("/")
                    if info.get("type") == "directory":
                        if recursive:
                            pending.append(name)
                        else:
                            yield FoundObject(name=path, size=None)
                    elif (found := _found(info, path)) is not None:
                        yield FoundObject(name=path, size=found.size, modified=found.modified)

    def _remove(self, full: str) -> None:
        with _guarded(self.filesystem) as fs:
            fs.invalidate_cache()
            fs.rm_file(full)
            self._prune(fs, posixpath.dirname(full))

    def _can_copy(self) -> bool:
        """Tell whether the file system has a copy of its own."""
        from fsspec.asyn import AsyncFileSystem
        from fsspec.spec import AbstractFileSystem

        kind = type(self.filesystem)
        own = kind.cp_file is not AbstractFileSystem.cp_file
        return own or (issubclass(kind, AsyncFileSystem) and kind._cp_file is not AsyncFileSystem._cp_file)

    def _repeat(self, source: str, target: str) -> bool:
        with _guarded(self.filesystem) as fs:
            try:
                if self._is_tree:
                    self._in_directory(fs, target, lambda: fs.cp_file(source, target))
                else:
                    fs.cp_file(source, target)
            except NotImplementedError:
                return False
        return True

    def _in_directory(self, fs: Any, full: str, action: Any) -> Any:
        """Do ``action`` in the directory of ``full``, made if missing; again if it was pruned meanwhile."""
        for last in (False, False, False, True):
            try:
                return action()
            except FileNotFoundError:
                if last:
                    raise
                _make_directory(fs, posixpath.dirname(full))
        raise AssertionError

    def _prune(self, fs: Any, directory: str) -> None:
        """Remove directories that are empty, up to the root of the storage."""
        if not self._is_tree or not self._recipe.protocols & _SAFE_RMDIR:
            return
        root = self._root.rstrip("/")
        while len(directory) > len(root) and directory.strip("/"):
            try:
                fs.rmdir(directory)
            except OSError:
                return  # not empty, or of another user: an empty directory may stay
            directory = posixpath.dirname(directory)


class _Recipe:
    """How to make a file system: class, arguments, protocols, and whether the class renames files."""

    def __init__(self, kind: type[Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        from fsspec.spec import AbstractFileSystem

        self.kind, self.args, self.options = kind, args, options
        named = kind.protocol
        self.protocols = frozenset((named,) if isinstance(named, str) else named)
        self.renames = getattr(kind, "mv", None) is not AbstractFileSystem.mv

    @classmethod
    def of(cls, filesystem: Any) -> _Recipe:
        return cls(type(filesystem), tuple(filesystem.storage_args), dict(filesystem.storage_options))

    @property
    def arguments(self) -> dict[str, Any]:
        return {"args": list(self.args), "options": self.options}

    def make(self) -> Any:
        made = self.kind(*self.args, **self.options)
        _bound_waits(made)
        return made


def from_uri(uri: str) -> Storage:
    """Return the storage for a URI of a scheme that fsspec knows, or of "fsspec+" and such a scheme.

    Raises:
        ConfigError: fsspec does not know the scheme.
        MissingExtraError: fsspec, or the package it needs for the scheme, is not installed.
    """
    scheme, _, rest = uri.partition("://")
    plain = f"{scheme.removeprefix(_PREFIX)}://{rest}"
    fsspec = require("fsspec", extra="fsspec", purpose=f"{scheme}:// locations")
    name = scheme.removeprefix(_PREFIX)
    if name not in fsspec.registry and name not in fsspec.available_protocols():
        raise ConfigError(
            f"location {_without_password(uri)!r}: no storage knows this scheme, nor does fsspec: check its spelling "
            "(s3://, gs://, az://, ...: docs/storage.md)"
        )
    if name in _CACHES or "::" in rest:
        raise ConfigError(f"location {_without_password(uri)!r}: chained and cached file systems serve old content")
    try:
        kind = fsspec.get_filesystem_class(name)
    except ImportError as error:
        raise MissingExtraError(f"{scheme}:// locations need a package of their own: {error}") from error
    try:
        root = str(kind._strip_protocol(plain))
        recipe = _Recipe(kind, (), dict(kind._get_kwargs_from_urls(plain)))
    except Exception as error:  # noqa: BLE001 - of some twenty packages; their words quote what may be a password
        raise ConfigError(
            f"location {_without_password(uri)!r}: {kind.__name__} of fsspec does not take this URL "
            f"({type(error).__name__}); write {scheme}://HOST/PATH, or give filesystem="
        ) from None
    if "?" in root:
        raise ConfigError(
            f"location {_without_password(uri)!r}: files below a URL cannot all have its query; give what stands in it "
            "as options of a file system object (filesystem=)"
        )
    return _adapt(None, recipe, root.rstrip("/") or root, _without_password(uri).rstrip("/"))


def from_filesystem(filesystem: Any, path: str = "") -> Storage:
    """Return the storage at ``path`` of an fsspec file system; a local one becomes a `LocalStorage`.

    Raises:
        ConfigError: the file system caches, and would serve old content.
    """
    root = str(filesystem._strip_protocol(path)) if path else ""
    return _adapt(filesystem, _Recipe.of(filesystem), root, None)


def from_description(
    client: str, arguments: dict[str, Any], root: str, uri: str, secrets: dict[str, str] | None = None
) -> Storage:
    """Rebuild what `FsspecStorage.describe` described.

    Raises:
        ConfigError: the class named cannot be imported or is no file system of fsspec, or its credentials are not known
            here.
    """
    from fsspec.spec import AbstractFileSystem

    kind = load(client)
    if not (isinstance(kind, type) and issubclass(kind, AbstractFileSystem)):
        raise ConfigError(f"storage description: {client!r} is no file system of fsspec")
    known = rebuild_options(arguments, secrets, uri)
    return FsspecStorage(_Recipe(kind, tuple(known["args"]), known["options"]), root, uri=uri)


def _adapt(filesystem: Any, recipe: _Recipe, root: str, uri: str | None) -> Storage:
    if recipe.protocols & _CACHES:
        raise ConfigError(
            f"filesystem=<{recipe.kind.__qualname__}>: it serves old content from its cache; give the one below it"
        )
    if "dir" in recipe.protocols and filesystem is not None:
        below = f"{str(filesystem.path).rstrip('/')}/{root.lstrip('/')}".rstrip("/")
        return from_filesystem(filesystem.fs, below or "/")
    if recipe.protocols & {"file", "local"}:
        return LocalStorage(root or ".")
    if any(base.__name__ == "ArrowFSWrapper" for base in recipe.kind.__mro__):
        # Its rmdir removes what is in the directory, too; pyarrow itself says so.
        return resolve(root, filesystem=(filesystem or recipe.make()).fs)
    return FsspecStorage(filesystem if filesystem is not None else recipe, root, uri=uri)


def _found(info: dict[str, Any], name: str) -> FoundObject | None:
    if info.get("type") == "directory":
        return None
    size = info.get("size")
    if size is None:
        raise StorageError(f"the server does not tell the size of {name}: it cannot hold checkpoints")
    times = (info.get(key) for key in ("mtime", "LastModified", "last_modified", "modified", "updated", "created"))
    return FoundObject(name=name, size=int(size), modified=next((t for t in map(_seconds, times) if t), 0.0))


def _seconds(moment: Any) -> float:
    if isinstance(moment, (int, float)):
        return float(moment)
    return float(moment.timestamp()) if hasattr(moment, "timestamp") else 0.0


def _write(fs: Any, full: str, data: bytes) -> None:
    with fs.open(full, "wb") as handle:
        if hasattr(handle, "set_pipelined"):
            handle.set_pipelined(True)
        handle.write(data)


def _make_directory(fs: Any, directory: str) -> None:
    """Make a directory and those above it; another process may make each at the same moment."""
    if not directory.strip("/") or fs.isdir(directory):
        return
    _make_directory(fs, posixpath.dirname(directory))
    try:
        fs.mkdir(directory, create_parents=False)
    except OSError:
        # SFTP servers call a directory that is there already "Failure".
        if not fs.isdir(directory):
            raise


def _replace(fs: Any, temporary: str, full: str) -> None:
    try:
        fs.mv(temporary, full)
    except OSError:
        # Servers that rename only to a free name (SMB, some FTP): readers see no object for a moment.
        if not fs.exists(temporary) or not fs.exists(full):
            raise
        aside = temporary_beside(full)
        fs.mv(full, aside)
        try:
            fs.mv(temporary, full)
        except BaseException:
            fs.mv(aside, full)  # if that fails as well, the error names where the old object is
            raise
        with contextlib.suppress(OSError):  # nobody reads it, and `tidy` finds it
            fs.rm_file(aside)


def _guard(fs: Any) -> threading.RLock:
    with _guards_lock:
        return _guards.setdefault(fs, threading.RLock())


@contextlib.contextmanager
def _guarded(fs: Any) -> Iterator[Any]:
    """Give the file system to one thread at a time, unless it is made for many; connect again if it was cut off."""
    if fs.async_impl:
        yield fs
        return
    with _guard(fs):
        ask: Any = getattr(getattr(fs, "client", None), "get_transport", None)
        if ask is not None and (ask() is None or not ask().is_active()):
            fs._connect()
            _bound_waits(fs)
        yield fs


def _bound_waits(fs: Any) -> None:
    """Give SSH connections a time limit: paramiko waits for ever by default."""
    channel = getattr(getattr(fs, "ftp", None), "get_channel", None)
    if channel is not None and channel() is not None:
        channel().settimeout(_TIMEOUT_S)
        transport = fs.client.get_transport()
        transport.set_keepalive(int(_TIMEOUT_S / 2))
        with contextlib.suppress(OSError, AttributeError):  # a proxy command is no socket
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _uri_of(filesystem: Any, root: str) -> str:
    """Name a file system in the form `from_uri` takes, without credentials."""
    protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    options = filesystem.storage_options
    host = options.get("host") or getattr(filesystem, "host", None)
    if host:
        user = f"{options['username']}@" if options.get("username") else ""
        port = f":{options['port']}" if options.get("port") else ""
        return f"{_PREFIX}{protocol}://{user}{host}{port}/{root.lstrip('/')}".rstrip("/")
    return f"{_PREFIX}{_without_password(filesystem.unstrip_protocol(root))}"


def _without_password(uri: str) -> str:
    without = re.sub(r"^([^:/]+://):@|^([^:/]+://)[^/@:]+:@", r"\1\2", uri)  # a token alone, in place of the user
    return masked(re.sub(r"^([^:/]+://[^/@:]*):(?!\d+/).*@", r"\1@", without))


def _is_uploaded(handle: Any) -> bool:
    """Tell whether what is written is an object only when the handle is closed, as those of fsspec for stores are."""
    return hasattr(handle, "autocommit")


class HandleWriter(SentWriter):
    """Writes through an open handle, one thread of the client at a time."""

    def __init__(self, handle: Any, guard: threading.RLock, *given: Any, shows_parts: bool) -> None:
        super().__init__(*given, shows_parts=shows_parts)
        self._handle, self._guard = handle, guard
        if hasattr(handle, "set_pipelined"):
            handle.set_pipelined(True)  # SFTP: does not wait for the answer to each 32 KiB; close sees the errors

    def _send(self, data: bytes) -> None:
        with self._guard:
            self._handle.write(data)

    def _finish(self) -> None:
        with self._guard:
            self._handle.close()

    def _give_up(self) -> None:
        handle = self._handle
        with self._guard:
            try:
                if hasattr(handle, "discard"):
                    handle.discard()
            finally:
                if _is_uploaded(handle) and not handle.closed:
                    handle.closed = True  # a buffered upload would be finished when it is collected
                else:
                    handle.close()


class HandleReader(FileReader):
    """Reads ranges through one open handle, which keeps its version of the file."""

    def __init__(self, handle: Any, guard: threading.RLock, *, where: str, size: int) -> None:
        self._handle: Any = handle
        self._guard, self._where, self.size = guard, where, size

    def read_into(self, offset: int, view: memoryview) -> None:
        target = view.cast("B")
        check_range(self._where, size=self.size, offset=offset, nbytes=len(target))
        with client_errors("read", self._where), self._guard:
            if self._handle is None:
                raise StorageError(f"cannot read {self._where}: the reader is closed")
            done = self._read(offset, target)
        check_range(self._where, size=offset + done, offset=offset, nbytes=len(target))

    def _read(self, offset: int, target: memoryview) -> int:
        handle = self._handle
        if isinstance(handle, io.BytesIO):
            # fsspec's memory file: its position is shared by all who opened it, and its bytes are at hand.
            with handle.getbuffer() as content:
                part = content[offset : offset + len(target)]
                target[: len(part)] = part
                return len(part)
        if hasattr(handle, "readv"):
            data = b"".join(handle.readv([(offset, len(target))])) if len(target) else b""
            target[: len(data)] = data
            return len(data)
        handle.seek(offset)
        done = 0
        while done < len(target):
            data = handle.read(len(target) - done)
            if not data:
                break
            target[done : done + len(data)] = data
            done += len(data)
        return done

    def close(self) -> None:
        with self._guard:
            handle, self._handle = self._handle, None
            if handle is not None and not isinstance(handle, io.BytesIO):
                with contextlib.suppress(Exception):
                    handle.close()
