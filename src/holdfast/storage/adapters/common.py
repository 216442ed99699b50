"""Base of the adapters of fsspec, pyarrow and libcloud: the contract of `Storage` from a few calls of a client.

None of these clients has conditional writes. They are emulated by looking before writing, under a lock of this
process: two threads are distinguished, two machines are not, which `conditional` says and one line of the log repeats.
Etags are digests of the content, for objects small enough to be read for them, as leases and manifests are.

Errors of the clients become errors of Holdfast in one place (`translate_client`). A refusal (401, 403) is never
reported as "not found", also where a client does that itself: `fsspec`'s HTTP file system raises FileNotFoundError for
every unexpected answer, and only the cause says which answer it was.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import hashlib
import json
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

from holdfast._log import get_logger
from holdfast._outgoing import conceal, masked_client
from holdfast.errors import (
    ConfigError,
    HoldfastError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)

from ..base import (
    TEMPORARY,
    FileReader,
    FileWriter,
    ObjectInfo,
    ReplacingWriter,
    Storage,
    StorageTraits,
    check_condition,
    check_path,
    check_prefix,
    check_range,
    check_view,
    copy_bytes,
    errors_of,
    is_temporary_name,
    temporary_name,
    translate,
)
from ..memory import BytesReader

_DENIED_NAMES = frozenset(
    {
        "AuthenticationException",
        "ClientAuthenticationError",
        "DefaultCredentialsError",
        "InvalidCredsError",
        "NoAuthenticationMethods",
        "NoCredentialsError",
        "PartialCredentialsError",
    }
)
# The first two are how paramiko says that the connection broke; asyncio's own TimeoutError is another in Python 3.10.
_GONE_NAMES = frozenset({"EOFError", "SSHException", "TimeoutError"})
_MISSING_NAMES = frozenset({"ContainerDoesNotExistError", "ObjectDoesNotExistError"})
_DENIED = re.compile(
    r"\b(?:http|status|status code|code|error)\b[^\w]{0,8}(?:401|403)\b|\bforbidden\b|access.?denied"
    r"|\bunauthori[sz]ed\b|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|permission denied|invalid credentials",
    re.IGNORECASE,
)


def translate_client(error: Exception, action: str, where: str) -> StorageError:
    """Return the `StorageError` for an exception of a client, saying what failed, where and what to do."""
    chain = list(_chain(error))
    names = {base.__name__ for link in chain for base in type(link).__mro__}
    status = next(filter(None, map(_status, chain)), 0)
    text = masked_client(" ".join(str(link) for link in chain[:2] if str(link)))[:500]
    head = f"cannot {action} {where}: {text or type(error).__name__}"
    if status in (401, 403) or names & _DENIED_NAMES or any(isinstance(link, PermissionError) for link in chain):
        return StoragePermissionError(f"{head}; check the credentials and what they may do there")
    if status in (404, 410) or (not status and names & _MISSING_NAMES):
        return StorageNotFoundError(f"{head}; check the path: there is no such object")
    if status == 507:
        return StorageFullError(f"{head}; free some space or use another place")
    if status:
        kind = StorageUnavailableError if status >= 500 or status in (408, 429) else StorageError
        return kind(f"{head}; the server answered {status}: try again, and look at its log")
    if isinstance(error, FileNotFoundError):
        # With another exception as its cause it is the client's guess: the server may only have been out of reach.
        if all(isinstance(link, (FileNotFoundError, NotADirectoryError, LookupError)) for link in chain):
            return StorageNotFoundError(f"{head}; check the path: there is no such object")
        return StorageUnavailableError(f"{head}; the server could not be asked: check the network")
    if isinstance(error, OSError) and error.errno:
        translated = translate(error, action, where)
        if type(translated) is not StorageError:
            return translated
    if _DENIED.search(text):
        return StoragePermissionError(f"{head}; check the credentials and what they may do there")
    if isinstance(error, NotImplementedError):
        return StorageError(f"{head}; this file system cannot do that: use another one for checkpoints")
    is_gone = names & _GONE_NAMES or any(isinstance(link, ConnectionError) for link in chain)
    return (StorageUnavailableError if is_gone else StorageError)(f"{head} ({type(error).__name__})")


class client_errors(errors_of):  # noqa: N801  # reads as a verb phrase
    """Translate whatever a client raises in the block; Holdfast's own errors pass unchanged."""

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(value, Exception) and not isinstance(value, (HoldfastError, MemoryError)):
            translated = translate_client(value, self._action, self._where)
            # A traceback would print the client's words as they are.
            shown = [str(link) for link in _chain(value)]
            raise translated from (value if shown == [masked_client(text) for text in shown] else None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes; contexts are left out, they are often errors of what a client tried first."""
    link: BaseException | None = error
    for _ in range(8):
        if link is None:
            return
        yield link
        link = link.__cause__


def _status(error: BaseException) -> int:
    """Return the HTTP status an exception carries, 0 if it carries none: each client keeps it elsewhere."""
    response = getattr(error, "response", None)
    places = [getattr(error, name, None) for name in ("status", "status_code", "http_code", "code")]
    places += [getattr(response, name, None) for name in ("status_code", "status")]
    if isinstance(response, dict):
        places.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    for value in places:
        text = str(value)
        if isinstance(value, (int, str)) and text.isdigit() and 400 <= int(text) < 600:
            return int(text)
    return 0


_SECRET = re.compile(
    r"pass(word|wd|phrase)|secret|token|credential|signature|sas|api_?key|_key$|^p?key$|^auth|cookie|connection_?string",
    re.IGNORECASE,
)
# Credentials of clients described here, so that a handle that was pickled and comes back finds them. Never leaves us.
_known: dict[str, dict[str, str]] = {}

_T = TypeVar("_T", bound="AdaptedStorage")
_log = get_logger("storage")
_NO_PARTS = frozenset({"", ".", ".."})
# Objects up to the first size are read for their etag; up to the second they are read whole when they are opened.
_ETAG_BYTES = 64 << 10
_WHOLE_BYTES = 1 << 20
# A temporary file of a `put` lives for seconds; clocks of servers may be wrong by more than that.
_DEAD_AFTER_S = 86400.0
# A lock per object would never be freed; objects that share a lock by chance only wait for a small write.
_LOCKS = tuple(threading.Lock() for _ in range(64))
_said: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundObject:
    """A file or directory as a client describes it.

    Attributes:
        name: last part of the path when listed one level deep, else the path below the directory listed.
        size: bytes; None for a directory.
        modified: seconds since 1970; 0.0 if unknown.
    """

    name: str
    size: int | None
    modified: float = 0.0


class AdaptedStorage(Storage):
    """A client's file system below one of its directories; subclasses say how to talk to the client.

    Their methods take full paths of the client and raise what the client raises: translation happens here.
    """

    def __init__(self, root: str, uri: str) -> None:
        self._root, self._uri, self._place = root, uri, uri

    # -- for subclasses -----------------------------------------------------------------------------------------

    @abstractmethod
    def _look(self, full: str) -> FoundObject | None:
        """Describe a file; None for a directory. FileNotFoundError if the name is free."""

    @abstractmethod
    def _fetch(self, full: str) -> bytes:
        """Return a whole small file."""

    @abstractmethod
    def _reader(self, full: str, found: FoundObject, where: str) -> FileReader:
        """Open a big file for ranges."""

    @abstractmethod
    def _write(self, full: str, data: bytes) -> None:
        """Write a small file; in a tree, whose directories are made, a reader may see a part of it."""

    @abstractmethod
    def _writer(self, full: str, size: int, where: str) -> FileWriter:
        """Start a big file."""

    @abstractmethod
    def _scan(self, full: str, *, recursive: bool) -> Iterator[FoundObject]:
        """Yield the entries of a directory, links not followed; FileNotFoundError if it does not exist.

        A client that knows no directories yields all files below it, whether that is ``recursive`` or not.
        """

    @abstractmethod
    def _remove(self, full: str) -> None:
        """Remove a file and directories left empty, where the client can do the latter safely."""

    def _repeat(self, source: str, target: str) -> bool:
        """Copy a file on the server; False if the client cannot."""
        return False

    @property
    def _is_tree(self) -> bool:
        """Whether files show what was written so far, and can be renamed: not so in a store, which shows whole ones."""
        return False

    @property
    def _shows_parts(self) -> bool:
        """Whether a part of a file may have its name: while it is written, or when the writing is given up."""
        return False

    def _rename(self, temporary: str, full: str) -> None:
        """Give a file of a storage that shows parts another name; a file that has the name is replaced, in one step."""
        if not self._repeat(temporary, full):
            raise NotImplementedError
        with contextlib.suppress(Exception):  # nobody reads it, and `tidy` finds it
            self._remove(temporary)

    # -- the contract -------------------------------------------------------------------------------------------

    def put(
        self, path: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        """Store a small object; conditions hold among the threads of this process."""
        full, where, content = self._full(path), self._where(path), bytes(data)
        if not if_absent and if_match is None:
            with client_errors("write", where):
                self._store(full, content)
            return _etag(content)
        with self._on_condition(path, if_absent=if_absent, if_match=if_match), client_errors("write", where):
            self._store(full, content)
        return _etag(content)

    def _store(self, full: str, data: bytes) -> None:
        """Write a small file so that no reader sees a part of it."""
        if not self._is_tree:
            self._write(full, data)
            return
        temporary = temporary_beside(full)
        try:
            self._write(temporary, data)
            self._rename(temporary, full)
        except BaseException:
            with contextlib.suppress(Exception):
                self._remove(temporary)
            raise

    @contextlib.contextmanager
    def _on_condition(self, path: str, *, if_absent: bool, if_match: str | None) -> Iterator[None]:
        """Run the block if a condition of `put` holds, alone among the threads of this process."""
        where = self._where(path)
        self._say_unconditional()
        with _LOCKS[hash(where) % len(_LOCKS)]:
            found = None
            with contextlib.suppress(StorageNotFoundError):
                found = self.stat(path)
            check_condition(where, found, if_absent=if_absent, if_match=if_match)
            yield

    def replace(self, path: str, size: int) -> ReplacingWriter | None:
        if not self._shows_parts:
            return super().replace(path, size)
        temporary, where = temporary_beside(self._full(path)), self._where(path)
        with client_errors("write", where):
            return _Replacing(self, path, temporary, self._writer(temporary, size, where))

    def create(self, path: str, size: int) -> FileWriter:
        full, where = self._full(path), self._where(path)
        with client_errors("write", where):
            return self._writer(full, size, where)

    def open(self, path: str) -> FileReader:
        """Open an object: a small one is read at once, a big one in ranges."""
        full, where = self._full(path), self._where(path)
        found = self._found(path)
        with client_errors("read", where):
            if (found.size or 0) <= _WHOLE_BYTES:
                return BytesReader(where, self._fetch(full))
            return self._reader(full, found, where)

    def stat(self, path: str) -> ObjectInfo:
        """Describe an object; a small one is read for its etag."""
        found = self._found(path)
        size, etag = found.size or 0, None
        if size <= _ETAG_BYTES:
            with client_errors("read", self._where(path)):
                content = self._fetch(self._full(path))
            size, etag = len(content), _etag(content)
        return ObjectInfo(path=path, size=size, etag=etag, modified=found.modified)

    def exists(self, path: str) -> bool:
        try:
            self._found(path)
        except StorageNotFoundError:
            return False
        return True

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        prefix = check_prefix(prefix)
        base = f"{prefix}/" if prefix else ""
        directories: set[str] = set()
        for found in self._entries(prefix, recursive=recursive):
            if any(part.startswith(TEMPORARY) for part in found.name.split("/")):
                continue
            head, slash, _ = found.name.partition("/")
            if found.size is not None and (recursive or not slash):
                yield ObjectInfo(path=base + found.name, size=found.size, modified=found.modified)
            elif not recursive and head not in directories:
                directories.add(head)
                yield ObjectInfo(path=f"{base}{head}/", size=0)

    def delete(self, path: str) -> None:
        try:
            self._found(path)
            with client_errors("delete", self._where(path)):
                self._remove(self._full(path))
        except StorageNotFoundError:
            return

    def delete_tree(self, prefix: str) -> None:
        """Remove everything below the directory ``prefix``, files of dead writers included."""
        for found in self._entries(prefix, recursive=True):
            self._discard(prefix, found)

    def tidy(self, directory: str) -> None:
        """Remove temporary files of writers that must be dead by now."""
        for found in self._entries(directory, recursive=False):
            if is_temporary_name(found.name) and 0.0 < found.modified < time.time() - _DEAD_AFTER_S:
                self._discard(directory, found)

    def _entries(self, directory: str, *, recursive: bool) -> builtins.list[FoundObject]:
        try:
            with client_errors("list", self._where(directory)):
                found = builtins.list(self._scan(self._join(check_prefix(directory)), recursive=recursive))
        except StorageNotFoundError:
            return []
        odd = [one.name for one in found if not _NO_PARTS.isdisjoint(one.name.removesuffix("/").split("/"))]
        if not odd:
            return found
        _say_left_out(self._where(directory), odd[0])
        left_out = frozenset(odd)
        return [one for one in found if one.name not in left_out]

    def _discard(self, directory: str, found: FoundObject) -> None:
        base = self._join(check_prefix(directory))
        with contextlib.suppress(StorageNotFoundError), client_errors("delete", self._where(directory)):
            self._remove(f"{base.rstrip('/')}/{found.name}" if base else found.name)

    def copy(self, source: str, target: str) -> None:
        """Repeat an object, on the server where the client can."""
        old, new = self._full(source), self._full(target)
        self._found(source)
        if self.exists(target):
            raise StorageExistsError(f"cannot copy to {self._where(target)}: it exists; use another name")
        with client_errors("copy", self._where(target)):
            if self._repeat(old, new):
                return
        copy_bytes(self, source, target)

    @property
    def traits(self) -> StorageTraits:
        """No conditional writes; files of 256 MiB: those that were not sent completely are sent again."""
        return StorageTraits(max_file_bytes=256 << 20, copies_itself=self._can_copy(), conditional=False)

    def _can_copy(self) -> bool:
        """Tell whether the client has the server copy."""
        return type(self)._repeat is not AdaptedStorage._repeat

    @property
    def uri(self) -> str:
        """Where the root is, without credentials."""
        return self._uri

    def child(self: _T, path: str) -> _T:
        """Return the storage of a directory below this one, through the same client."""
        prefix = check_prefix(path)
        clone = copy.copy(self)
        if prefix:
            clone._root, clone._uri = self._join(prefix), f"{self._uri.removesuffix('/')}/{prefix}"
            if self._uri.endswith("://"):
                clone._uri = f"{self._uri}{prefix}"
        return clone

    # -- paths and messages -------------------------------------------------------------------------------------

    def _join(self, path: str) -> str:
        if not path or not self._root:
            return path or self._root
        return f"{self._root.rstrip('/')}/{path}"

    def _full(self, path: str) -> str:
        return self._join(check_path(path))

    def _where(self, path: str) -> str:
        return f"{self._uri.removesuffix('/')}/{path}".rstrip("/")

    def _found(self, path: str) -> FoundObject:
        where = self._where(path)
        with client_errors("read", where):
            try:
                found = self._look(self._full(path))
            except (NotADirectoryError, IsADirectoryError):
                found = None
        if found is None:
            raise StorageNotFoundError(f"cannot read {where}: there is no such object; check the path")
        return found

    def _say_unconditional(self) -> None:
        if self._place not in _said:
            _said.add(self._place)
            _log.warning(
                "%s has no conditional writes: if two machines start the same run, only its lease (checked again "
                "after it was written) tells them apart",
                self._place,
            )


class _Replacing(ReplacingWriter):
    """A file that is written beside the one that it replaces."""

    def __init__(self, storage: AdaptedStorage, path: str, temporary: str, writer: FileWriter) -> None:
        self._storage, self._path, self._temporary, self._writer = storage, path, temporary, writer
        self._ended = False

    def write(self, view: memoryview) -> None:
        self._writer.write(view)

    def publish(self, *, if_absent: bool = False, if_match: str | None = None) -> None:
        if self._ended:
            return
        self._writer.close()
        if if_absent or if_match is not None:
            with self._storage._on_condition(self._path, if_absent=if_absent, if_match=if_match):
                self._rename()
        else:
            self._rename()

    def _rename(self) -> None:
        with client_errors("write", self._storage._where(self._path)):
            self._storage._rename(self._temporary, self._storage._full(self._path))
        self._ended = True

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._writer.abort()
        with contextlib.suppress(Exception):  # the temporary file: nobody reads it
            self._storage._remove(self._temporary)


class SentWriter(FileWriter):
    """Sends one object through a client, and asks afterwards whether all of it is there.

    Subclasses say how to send bytes, how to finish, and how to give up; all three may raise what the client raises.

    Args:
        storage: of the client.
        full: path of the object there.
        where: the object, for messages.
        size: bytes of the object.
        shows_parts: whether a part of what was sent may have the name when this is given up; None: as in all of the
            storage. Where it cannot, what has the name then is the object of before, and stays.
    """

    def __init__(
        self, storage: AdaptedStorage, full: str, where: str, size: int, *, shows_parts: bool | None = None
    ) -> None:
        self._storage, self._full, self._where, self._size = storage, full, where, size
        self._has_name = storage._shows_parts if shows_parts is None else shows_parts
        self._offset = 0  # bytes written, padding included
        self._ended = False

    @abstractmethod
    def _send(self, data: bytes) -> None:
        """Send the next bytes, a copy that the client may keep."""

    @abstractmethod
    def _finish(self) -> None:
        """Tell the client that this was all, and wait for its answer."""

    @abstractmethod
    def _give_up(self) -> None:
        """End the sending."""

    def write(self, view: memoryview) -> None:
        if self._ended:
            raise StorageError(f"cannot write {self._where}: the writer is closed")
        view = view.cast("B")
        check_view(self._where, size=self._size, offset=self._offset, nbytes=len(view))
        with client_errors("write", self._where):
            # A copy: clients may keep the bytes until they are sent, and the caller reuses its memory.
            self._send(bytes(view[: max(0, self._size - self._offset)]))
        self._offset += len(view)

    def close(self) -> None:
        """Finish the object and ask the server whether all of it is there."""
        if self._ended:
            return
        try:
            if self._offset < self._size:
                raise StorageError(
                    f"cannot finish {self._where}: {self._offset} of {self._size} bytes were written; write the rest"
                )
            with client_errors("write", self._where):
                self._finish()
                found = self._storage._look(self._full)
            if found is None or found.size != self._size:
                self._has_name = True  # the client has finished it
                raise StorageError(
                    f"cannot finish {self._where}: {self._size} bytes were written, the server has "
                    f"{found.size if found else 'none'}; write it again"
                )
        except BaseException:
            self.abort()
            raise
        self._ended = True

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = True
        # An object that cannot be dropped now is in no manifest; nobody reads it, and a sweep takes it.
        with contextlib.suppress(Exception):
            self._give_up()
        if self._has_name:
            with contextlib.suppress(Exception):
                self._storage._remove(self._full)


class RangeReader(FileReader):
    """Reads ranges of an object by requests of their own, many at once.

    A server answers each request from its newest version, so the object is looked at again after each.

    Args:
        where: the object, for messages.
        size: bytes of the object.
        fetch: returns a range: ``fetch(offset, nbytes)``.
        look: describes the object by what changes with its content.
        version: what ``look`` returned when the object was opened.
        end: called by `close`.
    """

    def __init__(
        self,
        where: str,
        size: int,
        *,
        fetch: Callable[[int, int], bytes],
        look: Callable[[], object],
        version: object,
        end: Callable[[], object] | None = None,
    ) -> None:
        self._where, self.size = where, size
        self._fetch, self._look, self._version, self._end = fetch, look, version, end

    def read_into(self, offset: int, view: memoryview) -> None:
        target = view.cast("B")
        check_range(self._where, size=self.size, offset=offset, nbytes=len(target))
        if not len(target):
            return
        with client_errors("read", self._where):
            data = self._fetch(offset, len(target))
        if len(data) > len(target):
            raise StorageError(f"cannot read {self._where}: the server answers ranges with the whole object")
        check_range(self._where, size=offset + len(data), offset=offset, nbytes=len(target))
        with client_errors("read", self._where):
            now = self._look()
        if now != self._version:
            raise StorageError(f"cannot read {self._where}: it was replaced while it was read; open it again")
        target[:] = data

    def close(self) -> None:
        """End what the requests use; idempotent, errors of the client are ignored."""
        end, self._end = self._end, None
        if end is not None:
            with contextlib.suppress(Exception):
                end()


def temporary_beside(full: str) -> str:
    """Return a temporary name in the directory of ``full``, for a file that will be renamed to ``full``."""
    head, slash, _ = full.rpartition("/")
    return f"{head}{slash}{temporary_name()}"


def _etag(content: bytes) -> str | None:
    return hashlib.blake2b(content, digest_size=16).hexdigest() if len(content) <= _ETAG_BYTES else None


class Described:
    """Arguments, split into plain values and credentials.

    Attributes:
        plain: the arguments, ``{"$secret": name}`` in the place of each credential; None if JSON cannot hold them.
        secrets: the credentials by name.
    """

    __slots__ = ("plain", "secrets")

    def __init__(self, options: Any) -> None:
        self.secrets: dict[str, str] = {}
        plain = self._split(options, "", is_secret=False)
        conceal(self.secrets.values())
        try:
            text = json.dumps(plain, sort_keys=True)
            self.plain: Any = plain if json.loads(text) == plain else None
        except (TypeError, ValueError):
            self.plain = None
        if self.plain is not None and self.secrets:
            _known[text] = self.secrets

    def _split(self, value: Any, path: str, *, is_secret: bool) -> Any:
        if isinstance(value, Mapping):
            is_secret = is_secret and set(value) != {"environ"}  # the name of a variable, not its value
            return {
                name: self._split(inner, f"{path}/{name}", is_secret=is_secret or bool(_SECRET.search(str(name))))
                for name, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._split(inner, f"{path}/{n}", is_secret=is_secret) for n, inner in enumerate(value)]
        if is_secret and isinstance(value, str) and value:
            self.secrets[path] = value
            return {"$secret": path}
        return value


@cache  # once for each place
def _say_left_out(where: str, name: str) -> None:
    _log.warning(
        "%s holds an object whose name is no path, with an empty part ('//'), '.' or '..': %r. Such objects are left "
        "alone: they are not listed, read or deleted", where, name,
    )  # fmt: skip


def rebuild_options(plain: Any, secrets: Mapping[str, str] | None, where: str) -> Any:
    """Put the credentials back into the arguments of `Described.plain`.

    Args:
        plain: the arguments.
        secrets: the credentials; None: those that were described in this process.
        where: the storage, for messages.

    Raises:
        ConfigError: a credential is not known in this process.
    """
    known = secrets or _known.get(json.dumps(plain, sort_keys=True)) or {}

    def fill(value: Any) -> Any:
        if isinstance(value, Mapping):
            if set(value) != {"$secret"}:
                return {name: fill(inner) for name, inner in value.items()}
            if value["$secret"] not in known:
                name = value["$secret"].rpartition("/")[2]
                raise ConfigError(
                    f"{where}: its credentials ({name}) are never written down and not known in this process; let the "
                    "client find them in its environment or configuration instead"
                )
            return known[value["$secret"]]
        return [fill(inner) for inner in value] if isinstance(value, list) else value

    return fill(plain)
