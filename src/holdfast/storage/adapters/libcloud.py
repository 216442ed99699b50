"""Containers of apache-libcloud as a storage: dozens of object stores that no other adapter speaks to.

A driver of libcloud holds one connection, so each thread gets a driver of its own. Uploads are pulled by libcloud from
an iterator: a writer is a thread that feeds it through a short queue.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from holdfast._meant import removed
from holdfast._optional import require
from holdfast._outgoing import conceal
from holdfast.errors import ConfigError, StorageError

from ..base import FileReader, FileWriter, Storage
from .common import AdaptedStorage, Described, FoundObject, RangeReader, SentWriter, rebuild_options

_NAMED = "environ:"
_BLOCK = 4 << 20
_KEY, _SECRET = "HOLDFAST_LIBCLOUD_KEY", "HOLDFAST_LIBCLOUD_SECRET"
# Views under way to libcloud, 8 MiB each as a rule; then `write` waits.
_QUEUE_VIEWS = 2
# An upload of which libcloud takes no byte for so long is given up; its own socket time-out is 60 s.
_STALL_S = 600.0
_ABORT_S = 60.0
_POLL_S = 0.5


@removed(chunk_size="what is read or sent at once is chosen for each storage, leave it out")
class LibcloudObjectStore(AdaptedStorage):
    """Objects in one container of a provider of libcloud; the container must exist.

    Example:
        >>> import os, tempfile
        >>> os.makedirs(os.path.join(folder := tempfile.mkdtemp(), "runs"))
        >>> storage = LibcloudObjectStore("local", "runs", {"key": folder})
        >>> tag = storage.put("a/b.json", b"{}")
        >>> storage.read("a/b.json")
        b'{}'
    """

    def __init__(
        self, provider: str, container: str, provider_kwargs: Mapping[str, Any] | None = None, *, prefix: str = "",
        key_environ: str | None = None, secret_environ: str | None = None,
    ) -> None:  # fmt: skip
        """Name a container.

        Args:
            provider: name of libcloud's provider: "s3", "google_storage", "azure_blobs", "local" and so on.
            container: name of the container or bucket.
            provider_kwargs: arguments of the driver, such as key, secret, region, host; a value
                ``{"environ": "NAME"}`` is read from the environment where it is used.
            prefix: directory inside the container.
            key_environ: environment variable that holds the argument key.
            secret_environ: environment variable that holds the argument secret.

        Raises:
            ConfigError: libcloud knows no such provider.
            MissingExtraError: apache-libcloud is not installed.
        """
        if not container:
            raise ConfigError("LibcloudObjectStore(container=''): give the name of a container")
        if provider_kwargs is not None and not isinstance(provider_kwargs, Mapping):
            raise ConfigError(
                f"LibcloudObjectStore({provider!r}, {container!r}, {provider_kwargs!r}): the third is provider_kwargs, "
                "a dictionary; there is no chunk_size"
            )
        self._provider, self._container = provider.lower(), container
        named = {"key": key_environ, "secret": secret_environ}
        self._arguments = {
            **(provider_kwargs or {}),
            **{argument: {"environ": name} for argument, name in named.items() if name is not None},
        }
        self._environ: dict[str, str] = {}
        self._kind = _driver_class(self._provider)
        self._local = threading.local()
        path = f"/{prefix.strip('/')}" if prefix.strip("/") else ""
        self.secrets()  # they are in no message from now on
        super().__init__(prefix.strip("/"), f"libcloud://{self._provider}/{quote(container)}{path}")

    def describe(self) -> dict[str, Any] | None:
        """Return provider, container and arguments; None for arguments that JSON cannot hold."""
        plain = self._described.plain
        if plain is None:
            return None
        return {
            "kind": "libcloud",
            "provider": self._provider,
            "container": self._container,
            "provider_kwargs": plain,
            "prefix": self._root,
        }

    def secrets(self) -> dict[str, str] | None:
        """Return keys and secrets among the arguments."""
        named = {given["environ"] for given in self._arguments.values() if _is_named(given)}
        # Writer processes have an environment of their own: values of this environment are sent with the rest.
        values = {f"{_NAMED}{name}": self._environ.get(name) or os.environ.get(name) for name in named}
        found = {name: value for name, value in values.items() if value}
        conceal(found.values())
        return {**self._described.secrets, **found} or None

    @property
    def _described(self) -> Described:
        # The "key" of the local driver is a directory.
        return Described({"folder" if self._is_tree and n == "key" else n: v for n, v in self._arguments.items()})

    # -- by the names that scripts of other trainers use

    def get_uri(self, object_name: str) -> str:
        """Return the URI of an object, for messages and as a location."""
        return f"{self.uri}/{object_name}"

    def get_object_size(self, object_name: str) -> int:
        """Return the bytes of an object.

        Raises:
            StorageNotFoundError: there is no such object.
        """
        return self.stat(object_name).size

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the names of all objects that begin with ``prefix``."""
        folder = (prefix or "").rpartition("/")[0]
        return sorted(info.path for info in self.list(folder) if info.path.startswith(prefix or ""))

    def upload_object(
        self, object_name: str, filename: str | os.PathLike[str], callback: Callable[[int, int], None] | None = None
    ) -> None:
        """Store a file as an object; an object of this name is replaced.

        Args:
            object_name: its name here.
            filename: the file.
            callback: called with (bytes sent, bytes in all).
        """
        size, done = os.path.getsize(filename), 0
        target = self.replace(object_name, size) or self.create(object_name, size)
        with open(filename, "rb") as file, target as writer:
            while block := file.read(_BLOCK):
                writer.write(memoryview(block))
                done += len(block)
                if callback is not None:
                    callback(done, size)

    def download_object(
        self, object_name: str, filename: str | os.PathLike[str], overwrite: bool = False,
        callback: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """Copy an object into a file, which appears complete or not at all.

        Args:
            object_name: its name here.
            filename: the file.
            overwrite: replace an existing file.
            callback: called with (bytes received, bytes in all).

        Raises:
            FileExistsError: the file exists, and ``overwrite`` is False.
            StorageNotFoundError: there is no such object.
        """
        target = os.fspath(filename)
        if not overwrite and os.path.exists(target):
            raise FileExistsError(f"{target} is there already: pass overwrite=True to replace it")
        beside = f"{target}.{uuid.uuid4().hex}.tmp"
        try:
            with self.open(object_name) as reader, open(beside, "wb") as file:
                for start in range(0, reader.size, _BLOCK):
                    block = bytearray(min(_BLOCK, reader.size - start))
                    reader.read_into(start, memoryview(block))
                    file.write(block)
                    if callback is not None:
                        callback(start + len(block), reader.size)
            os.replace(beside, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)

    def close(self) -> None:
        """Drop the connections of this storage; the next call of a thread makes a new one."""
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _local=threading.local())

    @property
    def _driver(self) -> Any:
        """The driver of this thread, and of this process: a forked child must not share a connection."""
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.driver = self._kind(**{name: self._value(name) for name in self._arguments})
            self._local.container = None
            self._local.pid = os.getpid()
        return self._local.driver

    def _value(self, name: str) -> Any:
        given = self._arguments[name]
        if not _is_named(given):
            return int(given) if name == "port" and isinstance(given, str) else given
        value = self._environ.get(given["environ"]) or os.environ.get(given["environ"])
        if value is None:
            raise ConfigError(f"{self._uri}: environment variable {given['environ']} ({name}) is not set")
        return value

    @property
    def _bucket(self) -> Any:
        driver = self._driver
        if self._local.container is None:
            self._local.container = driver.get_container(container_name=self._container)
        return self._local.container

    def _object(self, full: str) -> Any:
        from libcloud.storage.types import ObjectDoesNotExistError, ObjectError

        try:
            return self._driver.get_object(container_name=self._container, object_name=full)
        except ObjectDoesNotExistError:
            # Drivers raise this for any unexpected answer, an expired token among them: ask another way.
            for found in () if self._is_tree else self._driver.iterate_container_objects(self._bucket, prefix=full):
                if found.name == full:
                    return found
                if found.name > full:
                    break
            raise
        except ObjectError:
            if self._is_tree:  # a directory
                raise FileNotFoundError(full) from None
            raise

    def _look(self, full: str) -> FoundObject | None:
        return _found(self._object(full), full)

    def _fetch(self, full: str) -> bytes:
        found = self._object(full)
        return b"".join(self._driver.download_object_as_stream(found)) if found.size else b""

    def _reader(self, full: str, found: FoundObject, where: str) -> FileReader:
        def fetch(offset: int, nbytes: int) -> bytes:
            return b"".join(self._driver.download_object_range_as_stream(self._object(full), offset, offset + nbytes))

        return RangeReader(where, found.size or 0, fetch=fetch, look=lambda: self._look(full), version=found)

    @property
    def _is_tree(self) -> bool:
        # The local driver writes in place; its files can be renamed, though, as those of no other provider.
        return self._provider == "local"

    @property
    def _shows_parts(self) -> bool:
        return self._is_tree

    def _rename(self, temporary: str, full: str) -> None:
        os.replace(self._disk_path(temporary), self._disk_path(full))

    def _write(self, full: str, data: bytes) -> None:
        self._upload(iter([data]), full)

    def _upload(self, chunks: Iterator[bytes], full: str) -> None:
        for last in (False, True):
            try:
                self._driver.upload_object_via_stream(
                    chunks, self._bucket, full, extra={"content_type": "application/octet-stream"}
                )
                return
            except FileNotFoundError:
                # The local driver's directory was pruned between its making and the opening of the file.
                if last:
                    raise

    def _disk_path(self, full: str) -> str:
        return os.path.join(self._driver.base_path, self._container, full)

    def _writer(self, full: str, size: int, where: str) -> FileWriter:
        return _Writer(lambda chunks: self._upload(chunks, full), self, full, where, size)

    def _scan(self, full: str, *, recursive: bool) -> Iterator[FoundObject]:
        start = f"{full}/" if full else ""
        prefix = None if self._is_tree else start or None  # the local driver warns that it looks at all files anyway
        for found in self._driver.iterate_container_objects(self._bucket, prefix=prefix):
            if found.name.startswith(start) and not found.name.endswith("/"):
                yield _found(found, found.name[len(start) :])

    def _remove(self, full: str) -> None:
        found = self._object(full)
        try:
            done = self._driver.delete_object(found)
        except FileNotFoundError:
            return  # the local driver prunes directories, as another thread may have done just before
        if not done:
            raise StorageError(f"{self._where('')}: the provider did not delete {full}")


def from_uri(uri: str) -> Storage:
    """Return the storage for "libcloud://provider/container/prefix?region=...".

    Key and secret come from the environment (`HOLDFAST_LIBCLOUD_KEY`, `HOLDFAST_LIBCLOUD_SECRET`), never from the URI.

    Raises:
        ConfigError: provider or container are missing, or the URI has a secret in it.
        MissingExtraError: apache-libcloud is not installed.
    """
    text, _, query = uri.partition("://")[2].partition("?")
    provider, _, rest = text.partition("/")
    container, _, prefix = rest.partition("/")
    arguments: dict[str, Any] = dict(parse_qsl(query))
    if not provider or not container:
        raise ConfigError(f"location {uri.partition('?')[0]!r}: give libcloud://provider/container/prefix")
    if "@" in provider or "secret" in arguments or (provider != "local" and "key" in arguments):
        raise ConfigError(f"a libcloud:// location must not hold credentials: set {_KEY} and {_SECRET}")
    for name, variable in (("key", _KEY), ("secret", _SECRET)):
        if name not in arguments and variable in os.environ:
            arguments[name] = {"environ": variable}
    return LibcloudObjectStore(provider, unquote(container), arguments, prefix=prefix)


def from_description(
    provider: str,
    container: str,
    provider_kwargs: dict[str, Any],
    prefix: str,
    secrets: dict[str, str] | None = None,
) -> LibcloudObjectStore:
    """Rebuild what `LibcloudObjectStore.describe` described.

    Raises:
        ConfigError: its credentials are not known here.
    """
    environ = {name[len(_NAMED) :]: value for name, value in (secrets or {}).items() if name.startswith(_NAMED)}
    known = rebuild_options(provider_kwargs, secrets, f"libcloud://{provider}/{container}")
    if provider == "local" and "folder" in known:
        known["key"] = known.pop("folder")
    storage = LibcloudObjectStore(provider, container, known, prefix=prefix)
    storage._environ = environ
    return storage


def _driver_class(provider: str) -> Any:
    providers = require("libcloud.storage.providers", extra="libcloud", purpose="LibcloudObjectStore")
    try:
        return providers.get_driver(provider)
    except AttributeError as error:
        known = ", ".join(sorted(str(getattr(name, "value", name)) for name in providers.DRIVERS))
        raise ConfigError(f"libcloud knows no storage provider {provider!r}: give one of {known}") from error
    except ImportError as error:
        raise ConfigError(f"libcloud's provider {provider!r} needs a package more: {error}") from error


def _is_named(given: Any) -> bool:
    return isinstance(given, Mapping) and set(given) == {"environ"}


def _found(found: Any, name: str) -> FoundObject:
    return FoundObject(name=name, size=int(found.size), modified=_moment(found.extra or {}))


def _moment(extra: Mapping[str, Any]) -> float:
    text = extra.get("modify_time") or extra.get("last_modified") or 0.0
    if isinstance(text, (int, float)):
        return float(text)
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(ValueError, TypeError):
            return parse(str(text).replace("Z", "+00:00")).timestamp()
    return 0.0


class _Abandoned(Exception):  # noqa: N818  # never leaves this module
    """The upload was given up."""


class _Writer(SentWriter):
    """Feeds an upload that runs in a thread of its own; blocks while the queue is full."""

    def __init__(self, upload: Callable[[Iterator[bytes]], None], *given: Any) -> None:
        super().__init__(*given)
        self._error: Exception | None = None
        self._chunks: queue.Queue[bytes | None] = queue.Queue(_QUEUE_VIEWS)  # None: the end of the object
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(upload,), name="holdfast-libcloud", daemon=True)
        self._thread.start()

    def _run(self, upload: Callable[[Iterator[bytes]], None]) -> None:
        try:
            upload(self._feed())
        except Exception as error:  # noqa: BLE001  # the edge of the thread: `write` and `close` raise it
            self._error = error

    def _feed(self) -> Iterator[bytes]:
        waited_from = time.monotonic()
        while True:
            if self._abandoned.is_set():
                raise _Abandoned
            try:
                chunk = self._chunks.get(timeout=_POLL_S)
            except queue.Empty:
                # Ends the thread and the connection of a writer that was dropped without `close`.
                if time.monotonic() - waited_from > _STALL_S:
                    raise _Abandoned from None
                continue
            if chunk is None:
                return
            yield chunk
            waited_from = time.monotonic()

    def _give(self, chunk: bytes | None) -> None:
        until = time.monotonic() + _STALL_S
        while True:
            if not self._thread.is_alive():
                self._raise()
                raise StorageError(f"cannot write {self._where}: the upload ended before its bytes")
            with contextlib.suppress(queue.Full):
                self._chunks.put(chunk, timeout=_POLL_S)
                return
            if time.monotonic() > until:
                raise StorageError(f"cannot write {self._where}: the provider took no bytes for {_STALL_S:.0f} s")

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _send(self, data: bytes) -> None:
        self._give(data)

    def _finish(self) -> None:
        self._give(None)
        self._thread.join(_STALL_S)
        self._raise()
        if self._thread.is_alive():
            raise StorageError(f"cannot finish {self._where}: the provider did not answer for {_STALL_S:.0f} s")

    def _give_up(self) -> None:
        self._abandoned.set()
        self._thread.join(_ABORT_S)
