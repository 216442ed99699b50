"""Buckets of S3, Google Cloud Storage, Azure and Oracle as storages, through obstore.

General layout: `bucket` says which bucket with which settings, `client` talks to it, translates what goes wrong, and
knows whether the store keeps the promise of conditional writes. Reads are parallel ranged requests with bounded memory,
of the version that was opened.
"""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast._fork import after_fork_in_child
from holdfast._log import get_logger
from holdfast._optional import require
from holdfast.errors import ConfigError, StorageError, StorageExistsError, StorageNotFoundError

from ..base import (
    TEMPORARY,
    FileReader,
    FileWriter,
    ObjectInfo,
    Storage,
    StorageTraits,
    check_condition,
    check_path,
    check_prefix,
    check_range,
    check_view,
    copy_bytes,
)
from .bucket import SECRETS, BucketConfig, find_place, looked_for, split_settings
from .client import (
    MARK,
    NO_BUCKET,
    BucketClient,
    Errors,
    ShortAnswerError,
    again_if_broken,
    as_condition,
    conditions_of,
    landed,
    make_store,
    status_of,
)

_PART_BYTES = 16 << 20
"""Every part costs the store about the same work, however large it is."""

_NUM_PARALLEL = 6
"""Parts under way at once. A file being closed and the next file being written use 2 * 7 * 16 MiB at most."""

_MAX_PARTS = 9_000  # the stores allow 10,000
_CHUNK = 4 << 20

_COPY_MAX = 5 << 30  # what the stores copy in one request
# Settings of this module, not of the client.
_OURS = ("connect_timeout_s", "deadline_s", "max_retries", "timeout_s")
# Credentials that were given by hand, by place: handles rebuilt in this process find them again. Never leaves it.
_given: dict[tuple[str, str, str], dict[str, str]] = {}


class ObjectStorage(Storage):
    """Objects below a prefix of a bucket.

    Every request has a time-out (``timeout_s``, 120 s) and is tried again with growing, random pauses (``max_retries``:
    10, and 25 where it has answered what was asked last) until ``deadline_s`` (180 s) has passed. All other options are
    settings of obstore's S3Store, GCSStore or AzureStore; what is not given comes from the environment. Credentials are
    kept out of descriptions, messages and pickles.

    Args:
        uri: "s3://bucket/prefix", "gs://", "az://", "abfs://" or "oci://".
        options: settings by name, such as ``region``, ``endpoint``, ``access_key_id``.
        secrets: credentials that come apart from the other options.

    Example:
        >>> ObjectStorage("s3://bucket/runs", {"region": "eu-west-1", "access_key_id": "k", "secret_access_key": "s"})
        ObjectStorage('s3://bucket/runs')
    """

    def __init__(
        self, uri: str, options: Mapping[str, object] | None = None, *, secrets: Mapping[str, str] | None = None
    ) -> None:
        options = dict(options or {})
        by_hand = {name: str(value) for name, value in options.items() if name in SECRETS} | dict(secrets or {})
        ours = {name: options.pop(name) for name in _OURS if name in options}
        place = find_place(uri, options, by_hand)
        self._limits = {name: float(str(value)) for name, value in ours.items()}
        if by_hand:
            _given[_vault_key(uri, place.options)] = by_hand
        self._prefix = check_prefix(place.prefix)
        self._client = BucketClient(place, self._limits)  # shared with children
        self._deleter = Deleter(place, self._limits)  # so is this
        require("obstore", extra=place.extra, purpose=f"{place.scheme}:// locations")

    # -- writing

    def put(
        self, path: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        key, obs = self._key(path), self._obs
        if not if_absent and if_match is None:
            with self._errors("write", key):
                return again_if_broken(lambda: self._tag(obs.put(self._store, key, bytes(data), use_multipart=False)))
        if not self.conditional:
            found = None
            with suppress(StorageNotFoundError):
                found = self.stat(path)
            check_condition(f"{self.uri}/{path}", found, if_absent=if_absent, if_match=if_match)
            return self.put(path, data)
        mark = uuid.uuid4().hex
        mode = (
            "create" if if_absent or if_match is None else {self._client.tag_name: as_condition(self._client, if_match)}
        )
        with self._errors("replace" if if_match else "create", key):
            # The client does not repeat what is not safe to repeat. With the mark it is: the mark
            # tells the object of our own first try from another writer's object.
            return again_if_broken(
                lambda: self._tag(
                    obs.put(self._store, key, bytes(data), use_multipart=False, mode=mode, attributes={MARK: mark})
                ),
                after=lambda error, again: landed(self._client, key, mark, error, again=again),
            )

    def create(self, path: str, size: int) -> FileWriter:
        """Start a multipart upload."""
        key = self._key(path)
        if size < 0:
            raise ConfigError(f"create({path!r}, size={size}): the size must not be negative")
        return _ObjectWriter(self._client, key, lambda action: self._errors(action, key), self._client.shown(key), size)

    def copy(self, source: str, target: str) -> None:
        """Copy on the side of the server."""
        old, new = self._key(source), self._key(target)
        if self.exists(target):
            raise StorageExistsError(f"cannot copy to {self._client.shown(new)}: it exists; use another name")
        try:
            with self._errors("copy", old):
                again_if_broken(lambda: self._obs.copy(self._store, old, new))
            return
        except StorageNotFoundError:
            pass  # if the source exists, the server does not understand unusual names in this request
        except StorageError:
            if self.stat(source).size <= _COPY_MAX:
                raise
        copy_bytes(self, source, target)

    def delete(self, path: str) -> None:
        self._delete([self._key(path)])

    def delete_many(self, paths: Iterable[str]) -> None:
        """Remove objects, a thousand in one request where the store can."""
        self._delete([self._key(path) for path in paths])

    def _delete(self, keys: list[str]) -> None:
        if not keys or self._deleter.has_deleted(self._obs, keys):
            return
        try:
            with self._errors("delete", keys[0]):
                again_if_broken(lambda: self._obs.delete(self._store, keys))
        except StorageNotFoundError as error:
            if NO_BUCKET in str(error):
                raise
            # Stores without a request for many objects: a missing object must not keep the others.
            for key in keys if len(keys) > 1 else []:
                with suppress(StorageNotFoundError), self._errors("delete", key):
                    again_if_broken(partial(self._obs.delete, self._store, key))

    # -- reading

    def open(self, path: str) -> FileReader:
        """Open the present version of an object."""
        key = self._key(path)
        return open_reader(self._client, key, lambda action: self._errors(action, key), self._client.shown(key))

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """Return the bytes of an object, nearly always in one request, or a range of them."""
        if offset or size is not None:
            return super().read(path, offset, size)
        key = self._key(path)
        with self._errors("read", key):
            return read_version(self._client, key, self._client.shown(key))[0]

    def read_tagged(self, path: str) -> tuple[bytes, str | None]:
        key = self._key(path)
        with self._errors("read", key):
            data, meta = read_version(self._client, key, self._client.shown(key))
            return data, self._tag(meta)

    def stat(self, path: str) -> ObjectInfo:
        key = self._key(path)
        with self._errors("look at", key):
            return self._info(again_if_broken(lambda: self._obs.head(self._store, key)), path)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        inside = check_prefix(prefix)
        base = "/".join(part for part in (self._prefix, inside) if part)
        skip = len(self._prefix) + 1 if self._prefix else 0
        with self._errors("list", base):
            if not recursive:
                answer = again_if_broken(lambda: self._obs.list_with_delimiter(self._store, base or None))
                for name in answer["common_prefixes"]:
                    path = name.rstrip("/")[skip:]
                    if not path.rpartition("/")[2].startswith(TEMPORARY):
                        yield ObjectInfo(path=f"{path}/", size=0)
                metas = iter(answer["objects"])
            else:
                metas = list_all(self._client, base)
            for meta in metas:
                path = meta["path"][skip:]
                # An empty object named like the directory is how web consoles make "folders".
                if path != inside and not any(part.startswith(TEMPORARY) for part in path.split("/")):
                    yield self._info(meta, path)

    # -- what it is

    @property
    def uri(self) -> str:
        """Scheme, bucket and prefix."""
        return f"{self._client.uri}/{self._prefix}" if self._prefix else self._client.uri

    @property
    def conditional(self) -> bool:
        """Whether the store enforces conditional writes; some take the headers and ignore them."""
        return conditions_of(self._client, self._prefix)

    @property
    def traits(self) -> StorageTraits:
        """Requests wait for the network; files are small enough to be sent again, and copied in one request."""
        # A thousand at once, unless the store has shown that it cannot.
        return dataclasses.replace(self._client.traits, deletes_at_once=self._deleter.at_once)

    def describe(self) -> dict[str, Any] | None:
        """Return the place and its settings, without credentials; `secrets` has those."""
        return {"kind": "object", "uri": self.uri, "options": {**self._place.options, **self._limits}}

    def secrets(self) -> dict[str, str] | None:
        """Return the credentials, for the memory of another process of ours alone."""
        return self._place.secrets or None

    def credentials_missing_in(self) -> tuple[str, ...]:
        """Name the variables and files that hold no credentials; the role of the machine may still have some."""
        return looked_for(self._place)

    def child(self, path: str) -> ObjectStorage:
        """Return the same bucket seen from deeper below, with the same connections."""
        prefix = check_prefix(path)
        clone = object.__new__(type(self))  # copy.copy would make a client anew, from what the environment says by now
        clone.__dict__.update(self.__dict__)
        clone._prefix = "/".join(part for part in (self._prefix, prefix) if part)
        return clone

    def __reduce__(self) -> tuple[Any, ...]:
        return from_options, (self.uri, {**self._place.options, **self._limits})

    # -- inside

    @property
    def _place(self) -> BucketConfig:
        return self._client.place

    @property
    def _obs(self) -> Any:
        return self._client.obs

    @property
    def _store(self) -> Any:
        return self._client.store

    def _tag(self, meta: Any) -> str | None:
        return self._client.tag(meta)

    def _info(self, meta: Any, path: str) -> ObjectInfo:
        return ObjectInfo(
            path=path, size=meta["size"], etag=self._tag(meta), modified=meta["last_modified"].timestamp()
        )

    def _key(self, path: str) -> str:
        check_path(path)
        return f"{self._prefix}/{path}" if self._prefix else path

    def _errors(self, action: str, key: str) -> AbstractContextManager[None]:
        return self._client.errors(action, key)


def from_uri(uri: str) -> Storage:
    """Return the storage of a URI with settings and credentials from the environment.

    Settings behind a "?" (of S3, as pyarrow has them: ``endpoint_override``, ``scheme``, ``region``) come first.
    """
    uri, options = split_settings(uri)
    return ObjectStorage(uri, options)


def from_options(
    uri: str, options: Mapping[str, object] | None = None, secrets: Mapping[str, str] | None = None
) -> Storage:
    """Rebuild a storage from its description; credentials that are not in it come from this process."""
    if secrets is None:
        secrets = _given.get(_vault_key(uri, options or {}))
    return ObjectStorage(uri, options, secrets=secrets)


def _vault_key(uri: str, options: Mapping[str, object]) -> tuple[str, str, str]:
    scheme, _, rest = uri.partition("://")
    return scheme, rest.partition("/")[0], str(options.get("endpoint") or "")


_LOG = get_logger("storage")
_MANY = 1000  # in one request of S3
_UNKNOWN = (400, 404, 405, 411, 501)  # answers to a request that a server does not have
_lock = threading.Lock()
_have_none: set[tuple[str, str]] = set()


class Deleter:
    """Tries the request that deletes many objects.

    Whether S3 itself, Google and Azure have the request, the client knows. Other servers that speak S3 are asked: a
    server that does not understand it is not asked again by this process, and its objects are deleted singly.

    Args:
        place: which bucket.
        limits: time-outs and tries of the client.
    """

    def __init__(self, place: BucketConfig, limits: Mapping[str, float]) -> None:
        self._place, self._limits = place, limits
        endpoint = place.options.get("endpoint", "")
        # Without an endpoint, and where the user has decided, the client for all other requests does this, too.
        self._tries = place.store == "S3Store" and bool(endpoint) and "disable_bulk_delete" not in place.options
        self._key = (f"{place.scheme}://{place.netloc}", endpoint)
        self._store_or_none: list[Any] = []

    @property
    def at_once(self) -> int:
        """How many objects a request deletes, as far as is known by now."""
        if self._tries:
            with _lock:
                return 1 if self._key in _have_none else _MANY
        decided = str(self._place.options.get("disable_bulk_delete", "false")).lower()
        return _MANY if self._place.store == "S3Store" and decided in ("false", "0", "no", "off", "") else 1

    def has_deleted(self, obs: Any, keys: list[str]) -> bool:
        """Try to delete many objects by few requests; after False some may be gone: the caller deletes all again."""
        if len(keys) < 2 or not self._tries:
            return False
        with _lock:
            if self._key in _have_none:
                return False
            if not self._store_or_none:
                self._store_or_none.append(make_store(self._place, self._limits, bulk=True))
        try:
            obs.delete(self._store_or_none[0], keys)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise  # the client panics over an answer that it does not understand
            status = status_of(error)
            _LOG.debug("%s: %d objects are deleted one by one: %s", self._key[0], len(keys), status or type(error))
            if status in _UNKNOWN and "<Code>NoSuchBucket" not in str(error):
                with _lock:
                    _have_none.add(self._key)
            return False
        return True


def _part_bytes(size: int) -> int:
    """Return how large the parts of an object of ``size`` bytes are."""
    return max(_PART_BYTES, -(-size // _MAX_PARTS))


class _ObjectWriter(FileWriter):
    """Uploads an object in parts while it is written; one request if it is small. Nothing is visible before `close`."""

    def __init__(self, client: BucketClient, key: str, errors: Errors, path: str, size: int) -> None:
        self._client, self._key, self._errors, self._path, self._size = client, key, errors, path, size
        self._mark = uuid.uuid4().hex
        self._begun = bytearray()  # the bytes before the first part is complete, to be sent again if need be
        self._upload: Any = None
        self._offset = 0  # padding included
        self._ended = False

    def write(self, view: memoryview) -> None:
        """Hand a copy of the bytes to the client; blocks while all its parts are under way."""
        if self._ended:
            raise StorageError(f"cannot write {self._path}: the writer is closed")
        view = view.cast("B")
        check_view(self._path, size=self._size, offset=self._offset, nbytes=len(view))
        content = view[: max(0, self._size - self._offset)]
        self._offset += len(view)
        if self._upload is None:
            room = _part_bytes(self._size) - len(self._begun)
            self._begun += content[:room]
            content = content[room:]
            if self._size <= _part_bytes(self._size) or len(self._begun) < _part_bytes(self._size):
                return
            with self._errors("write"):
                self._upload = again_if_broken(self._begin)
            self._begun = bytearray()
        with self._client.errors("write", self._key, is_answer=False):  # the client takes bytes before it sends them
            for begin in range(0, len(content), _CHUNK):
                # A copy: the client keeps the bytes until the part is sent, and the caller reuses its memory.
                self._upload.write(bytes(content[begin : begin + _CHUNK]))

    def _begin(self) -> Any:
        """Begin an upload in parts; with the first part the client asks the store for it."""
        upload = self._client.obs.open_writer(
            self._client.store,
            self._key,
            buffer_size=_part_bytes(self._size),
            max_concurrency=_NUM_PARALLEL,
            attributes={MARK: self._mark},
        )
        try:
            upload.write(self._begun)
        except BaseException:
            _abort(upload)  # it may have been begun: the next try begins another upload
            raise
        return upload

    def close(self) -> None:
        """Finish the upload: the object appears, whole."""
        if self._ended:
            return
        if min(self._offset, self._size) != self._size:
            self.abort()
            raise StorageError(f"cannot finish {self._path}: {self._offset} of {self._size} bytes were written")
        self._ended = True
        with self._errors("write"):
            if self._upload is None:
                data, self._begun = bytes(self._begun), bytearray()
                put = partial(self._client.obs.put, self._client.store, self._key, data, use_multipart=False)
                again_if_broken(put)
                return
            try:
                self._upload.close()
            except Exception as error:
                # The answer may have been lost, and the request repeated in vain, when all the bytes are there.
                if landed(self._client, self._key, self._mark, error, again=True) is None:
                    raise
            finally:
                self._upload = None

    def abort(self) -> None:
        """Give the upload up and let the store forget its parts."""
        if self._ended:
            return
        self._ended, self._begun = True, bytearray()
        upload, self._upload = self._upload, None
        if upload is not None:
            _abort(upload)


def _abort(upload: Any) -> None:
    # The client aborts when its block is left by an exception. A store that has gone away keeps the parts:
    # docs/storage.md has the lifecycle rule that removes them.
    with suppress(Exception):
        upload.__exit__(StorageError, StorageError("aborted"), None)


_RANGE_BYTES = 8 << 20
_NUM_RANGES = 12  # asked for at once, in this process
_FIRST_BYTES = 128 << 10
"""Bytes that opening reads: nearly every manifest, index and report is whole with that, in one request."""

_pool_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _readers() -> ThreadPoolExecutor:
    """Return the threads that read ranges, shared by the process so that their memory is bounded too."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_NUM_RANGES, thread_name_prefix="holdfast-ranges")
        return _pool


@after_fork_in_child
def _after_fork_in_child() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


def open_reader(client: BucketClient, key: str, errors: Errors, path: str) -> ObjectReader:
    """Ask for the beginning of an object: the answer tells its size and version, too.

    Args:
        client: of the bucket.
        key: of the object.
        errors: translates what the client raises.
        path: the object, for messages.
    """
    with errors("read"):
        first, meta = again_if_broken(lambda: _first(client, key, path))
    return ObjectReader(client, key, errors, path, first=first, size=meta["size"], etag=meta.get("e_tag"))


def read_version(client: BucketClient, key: str, path: str) -> tuple[bytes, Any]:
    """Return all bytes of one version of an object, and its metadata; a big object takes two requests."""
    first, meta = again_if_broken(lambda: _first(client, key, path))
    if len(first) == meta["size"]:
        return first, meta

    def get() -> tuple[bytes, Any]:
        answer = client.obs.get(client.store, key)
        data = bytes(answer.bytes())
        if len(data) != meta["size"] and answer.meta.get("e_tag") == meta.get("e_tag"):
            raise ShortAnswerError(f"cannot read {path}: the storage sent {len(data)} of {meta['size']} bytes")
        return data, answer.meta

    return again_if_broken(get)


def _first(client: BucketClient, key: str, path: str) -> tuple[bytes, Any]:
    obs, store = client.obs, client.store
    try:
        answer = obs.get(store, key, options={"range": (0, _FIRST_BYTES)})
    except Exception as error:
        # An empty object has no ranges: most servers refuse the request, others send an empty part.
        if status_of(error) != 416 and "only 0 bytes long" not in str(error):
            raise
        return b"", obs.head(store, key)
    first, meta = bytes(answer.bytes()), answer.meta
    if len(first) != min(_FIRST_BYTES, meta["size"]):
        raise ShortAnswerError(f"cannot read {path}: the storage sent {len(first)} of {meta['size']} bytes")
    return first, meta


def list_all(client: BucketClient, base: str) -> Iterator[Any]:
    """Yield the metadata of each object below a prefix; after a break the listing goes on behind the last object."""
    last: str | None = None
    pages = client.obs.list(client.store, base or None)
    broken = False

    def next_page() -> Any:
        nonlocal pages, broken
        if broken:
            pages, broken = client.obs.list(client.store, base or None, offset=last), False
        try:
            return next(pages, None)
        except Exception:
            broken = True
            raise

    while (page := again_if_broken(next_page)) is not None:
        for meta in page:
            last = meta["path"]
            yield meta


class ObjectReader(FileReader):
    """Reads ranges of the version of an object that was opened, several at once."""

    ahead_bytes = 8 * _RANGE_BYTES

    def __init__(
        self, client: BucketClient, key: str, errors: Errors, path: str, *, first: bytes, size: int, etag: str | None
    ) -> None:
        self._client, self._key, self._errors, self._path = client, key, errors, path
        self._first, self._etag, self.size = first, etag, size
        self._ahead = Ahead(self._read_range, _readers)

    def will_read(self, offset: int, size: int) -> None:
        """Begin to read a range; `read_into` takes the bytes that have arrived."""
        known = min(max(0, len(self._first) - offset), size)
        self._ahead.ask(offset + known, size - known)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` by parallel requests of at most 8 MiB."""
        target = view.cast("B")
        end = offset + len(target)
        check_range(self._path, size=self.size, offset=offset, nbytes=len(target))
        known = min(end, len(self._first)) - offset
        if known > 0:
            target[:known] = self._first[offset : offset + known]
            offset, target = offset + known, target[known:]
        taken = self._ahead.take(offset, target)
        offset, target = offset + taken, target[taken:]
        if not len(target):
            return
        if len(target) <= _RANGE_BYTES:
            self._read_range(offset, target)
            return
        pool = _readers()
        pieces = [
            pool.submit(self._read_range, begin, target[begin - offset : min(begin + _RANGE_BYTES, end) - offset])
            for begin in range(offset, end, _RANGE_BYTES)
        ]
        wait(pieces)  # each ends: every request has its deadline
        for piece in pieces:
            piece.result()

    def _fetch(self, start: int, end: int) -> Any:
        asked: dict[str, Any] = {"range": (start, end)}
        if self._etag is not None:
            asked["if_match"] = self._etag
        answer = self._client.obs.get(self._client.store, self._key, options=asked)
        if self._etag is not None and answer.meta.get("e_tag") not in (None, self._etag):
            raise StorageError(f"cannot read {self._path}: it was replaced while it was read; open it again")
        return answer.stream(min_chunk_size=1 << 20)

    def _read_range(self, offset: int, target: memoryview) -> None:
        at = 0

        def go_on() -> None:
            nonlocal at
            # Chunk by chunk as they arrive: an answer is never held twice. After a break the read goes on from there.
            for chunk in self._fetch(offset + at, offset + len(target)) if at < len(target) else ():
                data = memoryview(chunk)
                if at + len(data) > len(target):
                    raise StorageError(f"cannot read {self._path}: the storage sent more than was asked for")
                target[at : at + len(data)] = data
                at += len(data)
            if at < len(target):
                raise ShortAnswerError(
                    f"cannot read {self._path}: the storage sent {at} of {len(target)} bytes at {offset}"
                )

        with self._errors("read"):
            again_if_broken(go_on)

    def close(self) -> None:
        """Free the bytes that were read when it was opened, and ahead."""
        self._first = b""
        self._ahead.close()


_PIECE = 8 << 20
_MAX_BYTES = 96 << 20  # of one object; further ranges are read when they are wanted


@dataclass(slots=True)
class _Piece:
    start: int
    buffer: bytearray
    size: int
    arrived: Future[None]
    left: int  # bytes that no reader has taken
    users: int = 0  # threads that wait for it or copy from it


class Ahead:
    """Reads ahead in the order of the hints; each reader has its own.

    Args:
        read: fills a view from an offset on.
        pool: returns the threads that read.
    """

    def __init__(self, read: Callable[[int, memoryview], None], pool: Callable[[], ThreadPoolExecutor]) -> None:
        self._read, self._pool = read, pool
        self._pieces: list[_Piece] = []
        self._free: list[bytearray] = []
        self._lock = threading.Lock()

    def ask(self, offset: int, size: int) -> None:
        """Begin to read a range, as far as the bound of memory lets it."""
        with self._lock:
            for start in range(offset, offset + size, _PIECE):
                if _PIECE * (len(self._pieces) + 1) > _MAX_BYTES:
                    return
                length = min(_PIECE, offset + size - start)
                buffer = self._free.pop() if self._free else bytearray(_PIECE)
                arrived = self._pool().submit(self._read, start, memoryview(buffer)[:length])
                self._pieces.append(_Piece(start, buffer, length, arrived, length))

    def take(self, offset: int, target: memoryview) -> int:
        """Fill the head of ``target`` with bytes read ahead; return their number."""
        done = 0
        while done < len(target):
            piece = self._enter(offset + done)
            if piece is None:
                break
            length = 0
            try:
                if piece.arrived.exception() is not None:
                    break  # the caller reads the range anew, and gets the error
                first = offset + done - piece.start
                length = min(piece.size - first, len(target) - done)
                target[done : done + length] = memoryview(piece.buffer)[first : first + length]
                done += length
            finally:
                self._leave(piece, length or piece.size)
        return done

    def close(self) -> None:
        """Drop all ranges; requests under way end by themselves."""
        with self._lock:
            for piece in self._pieces:
                piece.arrived.cancel()
            self._pieces, self._free = [], []

    def _enter(self, offset: int) -> _Piece | None:
        with self._lock:
            piece = next((held for held in self._pieces if held.start <= offset < held.start + held.size), None)
            if piece is not None:
                piece.users += 1
            return piece

    def _leave(self, piece: _Piece, taken: int) -> None:
        with self._lock:
            piece.users -= 1
            piece.left -= taken
            if piece.left <= 0 and piece in self._pieces:
                self._pieces.remove(piece)
            if piece.left <= 0 and not piece.users:
                self._free.append(piece.buffer)
