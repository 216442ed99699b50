"""The client of a bucket: obstore's store with our settings, time-outs and credentials, made when first used.

Also what has to be known of the store behind it. Some that speak S3 take the headers of conditional writes and ignore
them: two writers that create the same object are both answered that they have created it. Others compare etags without
the quotes that belong to them (radosgw up to 16 at least), and refuse the right etag. A trial write finds that out,
once for each bucket and process (`conditions_of`). And multipart uploads that a process killed in the middle of one
leaves in a bucket, unseen (`UnfinishedUploads`): obstore cannot list them, boto3 can (the extra ``s3-sweep``). Only
stores that speak S3 need it: Google and Azure forget such uploads by themselves after a week.

Errors of obstore are translated into errors of Holdfast here and nowhere else (`errors_of`), and what a passing failure
has broken is asked again (`again_if_broken`).
"""

from __future__ import annotations

import errno
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, Literal, TypeVar

from holdfast._log import get_logger
from holdfast._optional import require
from holdfast.errors import (
    ConfigError,
    HoldfastError,
    StorageConflictError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)

from ..base import TEMPORARY, Storage, StorageTraits
from ..together import together
from .bucket import BucketConfig

_FEW = 2  # a store that has never heard of a request may answer 501, which the client takes for a passing failure
# Tries, and growth of the random pauses between them: 3 s in all, mostly; and 80 s, of a hundred requests one 33 s.
_FIRST, _PATIENT = (10, 2.0), (25, 4.0)
_SHORTEST, _LONGEST = timedelta(seconds=0.1), timedelta(seconds=5)  # the lease has to be renewed soon after an outage
_first_pid: list[int] = []


class BucketClient:
    """A bucket, for a storage and its readers and writers; shared by all handles of the bucket.

    Args:
        place: which bucket, with which settings and credentials.
        limits: time-outs and tries.

    Attributes:
        place: as given.
        uri: scheme and bucket.
        tag_name: field that conditional writes compare: "version" or "e_tag".
        traits: requests wait for the network, not for a core; files of a checkpoint are small enough to be sent again,
            and to be copied by the server in one request.
    """

    traits = StorageTraits(num_parallel=16, max_file_bytes=256 << 20)

    def __init__(self, place: BucketConfig, limits: Mapping[str, float]) -> None:
        self.place, self._limits = place, limits
        self.uri = f"{place.scheme}://{place.netloc}"
        # Google compares generations, all others etags.
        self.tag_name = "version" if place.store == "GCSStore" else "e_tag"
        self._made: Any = None
        self._answers = self._is_patient = False

    @property
    def obs(self) -> Any:
        """The module obstore.

        Raises:
            StorageError: this process was forked from a process that has used obstore.
        """
        if not _first_pid:
            _first_pid.append(os.getpid())
        if _first_pid[0] != os.getpid():
            raise StorageError(
                f"{self.uri} cannot be used in a process forked from one that used an object storage: start workers "
                "with the 'spawn' or 'forkserver' method, or use object storages in the children alone"
            )
        return require("obstore", extra=self.place.extra, purpose=f"{self.place.scheme}:// locations")

    @property
    def store(self) -> Any:
        """The store of obstore; asked more patiently while it is known to answer, so that a wrong address is said soon.

        Raises:
            ConfigError: obstore refuses the settings.
        """
        patient = self._answers
        if self._made is None or patient != self._is_patient:
            try:
                self._made = make_store(self.place, self._limits, patient=patient)
                self._is_patient = patient
            except Exception as error:
                if isinstance(error, HoldfastError):
                    raise
                reason = said(str(error), tuple(self.place.secrets.values()))
                raise ConfigError(f"{self.uri}: the client refuses these settings: {reason}") from None
        return self._made

    def tag(self, meta: Any) -> str | None:
        """Return the tag of an object that conditional writes compare."""
        tag: str | None = meta.get(self.tag_name)
        # Listings of Azure leave out the quotes that belong to an etag.
        quoted = tag is None or self.place.store != "AzureStore" or tag.endswith('"')
        return tag if quoted else f'"{tag}"'

    def shown(self, key: str) -> str:
        """Return the URI of an object."""
        return f"{self.uri}/{key}"

    @contextmanager
    def errors(self, action: str, key: str, *, is_answer: bool = True) -> Iterator[None]:
        """Translate errors of the client in a block; no message shows credentials.

        Args:
            action: what the block does, for messages.
            key: of the object.
            is_answer: that the block ends well says that the store answers.
        """
        try:
            with errors_of(action, self.shown(key), self.place.secrets.values()):
                yield
        except StorageUnavailableError:
            self._answers = False  # asked in vain: what is asked next, as at the end of a run, need not wait as long
            raise
        self._answers = self._answers or is_answer


def make_store(place: BucketConfig, limits: Mapping[str, float], *, patient: bool = False, bulk: bool = False) -> Any:
    """Make the client of a place.

    Args:
        place: which bucket, with which settings and credentials.
        limits: time-outs and tries.
        patient: the store has answered a moment ago, so it may be away for a while only.
        bulk: the client is for the request that deletes many objects, at a store that may not have that request.
    """
    tries, growth = _PATIENT if patient else _FIRST
    stores = require("obstore.store", extra=place.extra, purpose=f"{place.scheme}:// locations")
    config: dict[str, Any] = {**place.options, **place.secrets}
    endpoint = str(config.get("endpoint") or config.get("base_url") or "")
    arguments: dict[str, Any] = {}
    if place.store == "S3Store":
        if endpoint:
            config.setdefault("aws_endpoint_url_s3", endpoint)  # wins over "endpoint", and may be in the environment
            # Not every store that speaks S3 has the request that deletes many objects.
            config.setdefault("disable_bulk_delete", "false" if bulk else "true")
        if not endpoint.startswith("http://"):
            config.setdefault("unsigned_payload", "true")  # TLS guards the bytes; hashing them again costs a core
        provider = _static_keys(config)
        if provider is not None:
            arguments["credential_provider"] = provider
    return getattr(stores, place.store)(
        place.bucket,
        config=config,
        client_options={
            "allow_http": endpoint.startswith("http://") or config.get("use_emulator") == "true",
            "connect_timeout": timedelta(seconds=limits.get("connect_timeout_s", 10.0)),
            "timeout": timedelta(seconds=limits.get("timeout_s", 120.0)),
        },
        retry_config={
            "max_retries": min(_FEW if bulk else 1 << 16, int(limits.get("max_retries", tries))),
            "retry_timeout": timedelta(seconds=limits.get("deadline_s", 180.0)),
            "backoff": {"init_backoff": _SHORTEST, "max_backoff": _LONGEST, "base": growth},
        },
        **arguments,
    )


def _static_keys(config: dict[str, Any]) -> Any:
    """Take the keys out of the settings into a provider: no token of the environment mixes in, no repr shows them."""
    if "access_key_id" not in config or "secret_access_key" not in config:
        return None
    keys = {
        "access_key_id": config.pop("access_key_id"),
        "secret_access_key": config.pop("secret_access_key"),
        "token": config.pop("session_token", None),
        "expires_at": None,
    }
    return lambda: dict(keys)


# ---- conditional writes


MARK = "holdfastput"
"""Name of the metadata field that says which request wrote an object (Azure allows letters and digits only)."""

_Conditions = Literal["etags", "bare etags", "none"]
_PROBES = f"{TEMPORARY}probe"
_OLD = timedelta(minutes=15)
_LOG = get_logger("storage")
_lock = threading.Lock()  # of the two below; never held while a store is asked
_known: dict[tuple[str, str], _Conditions] = {}
_asking: dict[tuple[str, str], threading.Lock] = {}


def conditions_of(client: BucketClient, prefix: str) -> bool:
    """Find out whether conditional writes are enforced, when first asked; warn once if they are not.

    Args:
        client: of the bucket.
        prefix: below which we may write.

    Raises:
        StorageError: the store could not be asked.
    """
    key = _key(client)
    with _lock:
        if (conditions := _known.get(key)) is not None:
            return conditions != "none"
        asking = _asking.setdefault(key, threading.Lock())
    with asking:  # one thread asks each store: a slow store holds up no other
        conditions = _known.get(key)
        if conditions is None:
            conditions = _known[key] = _try_out(client, prefix)
            if conditions == "none":
                _LOG.warning(
                    "%s does not enforce conditional writes: Holdfast looks before it writes instead, but two trainers "
                    "that start the same run in the same moment could both take it, and the later commit of two under "
                    "one name wins unnoticed. A single trainer loses nothing.",
                    key[0],
                )
        return conditions != "none"


def as_condition(client: BucketClient, tag: str) -> str:
    """Spell an etag as the store wants it in a condition, once `conditions_of` has asked."""
    return tag.strip('"') if _known.get(_key(client)) == "bare etags" else tag


def _key(client: BucketClient) -> tuple[str, str]:
    return client.uri, client.place.options.get("endpoint", "")


def _try_out(client: BucketClient, prefix: str) -> _Conditions:
    folder = f"{prefix}/{_PROBES}" if prefix else _PROBES
    left = _left_behind(client, folder)
    # Credentials may have the right to write without the right to delete: then the same probe serves every time.
    if left is not None:
        with suppress(StorageNotFoundError):  # another process removed it meanwhile
            if (conditions := _ask(client, folder, left)) != "none":
                return conditions
    return _ask(client, folder, f"{folder}/{uuid.uuid4().hex}")


def _left_behind(client: BucketClient, folder: str) -> str | None:
    """Return the probe of a process that could not remove it, None if there is none or listing is refused."""
    try:
        pages = again_if_broken(lambda: list(client.obs.list(client.store, folder)))
    except Exception as error:  # noqa: BLE001 - rights to write without rights to list
        _LOG.debug("%s cannot be listed: %s", folder, type(error).__name__)
        return None
    now = datetime.now(timezone.utc)
    return min((meta["path"] for page in pages for meta in page if now - meta["last_modified"] > _OLD), default=None)


def _ask(client: BucketClient, folder: str, key: str) -> _Conditions:
    obs, store = client.obs, client.store
    with client.errors("write", key):
        try:
            made = again_if_broken(lambda: obs.put(store, key, b"1", use_multipart=False, mode="create"))
        except Exception as error:
            if _is_unsupported(error):
                return "none"
            # A refusal means that the object exists: left behind, or made by our own first try, whose answer was lost.
            if not is_refusal(error):
                raise
            made = again_if_broken(lambda: obs.head(store, key))
        gone, name, tag = [key], client.tag_name, client.tag(made) or ""
        modes: list[Any] = ["create", {name: _wrong_tag(client)}, {name: tag}]
        asks: list[Callable[[], Any]] = [partial(_refuses, client, key, mode) for mode in modes]
        try:
            *refused, gone = together(client, [*asks, lambda: _with_old_ones(client, folder, key)])
            if refused == [True, True, False]:
                return "etags"
            if refused == [True, True, True] and name == "e_tag":
                bare = [_refuses(client, key, {name: text.strip('"')}) for text in (_wrong_tag(client), tag)]
                return "bare etags" if bare == [True, False] else "none"
            return "none"
        finally:
            try:
                again_if_broken(lambda: obs.delete(store, gone))
            except Exception as error:  # noqa: BLE001 - the probe stays, and the next process uses it
                _LOG.debug("the probe %s could not be removed: %s", key, type(error).__name__)


def _with_old_ones(client: BucketClient, folder: str, key: str) -> list[str]:
    """Return our probe and those of processes that were killed; all ages are by the clock of the store."""
    times = {}
    with suppress(Exception):  # rights to write without rights to list
        pages = client.obs.list(client.store, folder)
        times = {meta["path"]: meta["last_modified"] for page in pages for meta in page}
    now = times.get(key)
    return [key, *(path for path, time in times.items() if now is not None and now - time > _OLD)]


def _wrong_tag(client: BucketClient) -> str:
    return "1" if client.tag_name == "version" else '"00000000000000000000000000000000"'


def _refuses(client: BucketClient, key: str, mode: Any) -> bool:
    try:
        again_if_broken(lambda: client.obs.put(client.store, key, b"2", use_multipart=False, mode=mode))
    except Exception as error:
        if is_refusal(error):
            return True
        if _is_unsupported(error):
            return False
        raise
    return False


def _is_unsupported(error: Exception) -> bool:
    return type(error).__name__ == "NotSupportedError" or "501 Not Implemented" in str(error)


def landed(client: BucketClient, key: str, mark: str, error: Exception, *, again: bool = False) -> str | None:
    """Return the etag if the object is the one we tried to write in spite of ``error``, None if it is not.

    A request whose answer was lost is sent again by the client, or by us, and then meets its own object.
    """
    if (is_refusal(error) and not again and not was_retried(error)) or isinstance(error, (StorageError, ValueError)):
        return None
    try:
        answer = again_if_broken(lambda: client.obs.get(client.store, key, options={"head": True}))
    except Exception as unread:  # noqa: BLE001 - the caller gets the first error
        _LOG.debug("cannot tell whether %s was written: %s", key, type(unread).__name__)
        return None
    return client.tag(answer.meta) if answer.attributes.get(MARK) == mark else None


# ---- unfinished uploads


_REFUSED = frozenset({"403", "401", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"})
_UNKNOWN = frozenset({"501", "405", "NotImplemented", "MethodNotAllowed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An upload that was begun and not finished.

    Attributes:
        path: of the object, inside the storage.
        upload_id: its name at the store.
        started: seconds since 1970, by the clock of the store.
    """

    path: str
    upload_id: str
    started: float


class UnfinishedUploads:
    """Finds and removes the unfinished uploads below a storage, with its endpoint and its credentials.

    Args:
        storage: an ``s3://`` or ``oci://`` location, or ``gs://`` with HMAC keys.

    Raises:
        ConfigError: ``storage`` is another kind of storage.
        MissingExtraError: boto3 is not installed.

    Example:
        >>> uploads = UnfinishedUploads(resolve("s3://bucket/runs/gpt"))                # doctest: +SKIP
        >>> [upload.path for upload in uploads.find()]                                  # doctest: +SKIP
        ['step_00000100/model-00000-1f0c77aa90b2c3d4-1.safetensors']
    """

    def __init__(self, storage: Storage) -> None:
        from .object_storage import ObjectStorage  # here: that module imports this one

        if not isinstance(storage, ObjectStorage):
            raise ConfigError(f"{storage.uri} is no object store: unfinished uploads exist in those alone")
        place = storage._place
        if place.store != "S3Store":
            raise ConfigError(
                f"{storage.uri} does not speak S3: Google and Azure forget unfinished uploads by themselves after a "
                "week"
            )
        self._storage, self._place = storage, place
        self._prefix = f"{storage._prefix}/" if storage._prefix else ""
        try:
            self._client = _client(place)
        except HoldfastError:
            raise
        except Exception as error:  # noqa: BLE001 - of any class; only its essence may be shown: it may hold the keys
            reason = said(str(error), tuple(place.secrets.values()))
            raise ConfigError(f"{storage.uri}: boto3 refuses these settings: {reason}") from None

    def find(self) -> list[Upload]:
        """List the unfinished uploads, oldest first."""
        uploads = []
        with self._errors("list the unfinished uploads below"):
            pages = self._client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._place.bucket, Prefix=self._prefix):
                for row in page.get("Uploads", ()):
                    # Some servers have never heard of the prefix.
                    if row["Key"].startswith(self._prefix):
                        path = row["Key"][len(self._prefix) :]
                        started = row["Initiated"].timestamp()
                        uploads.append(Upload(path=path, upload_id=row["UploadId"], started=started))
        return sorted(uploads, key=lambda upload: (upload.started, upload.path))

    def remove(self, upload: Upload) -> None:
        """Abort an upload, so that the store frees its parts; fine if it is gone."""
        with self._errors("remove an unfinished upload of", upload.path):
            try:
                self._client.abort_multipart_upload(
                    Bucket=self._place.bucket, Key=self._prefix + upload.path, UploadId=upload.upload_id
                )
            except Exception as error:
                if _code(error) not in ("NoSuchUpload", "404"):
                    raise

    @contextmanager
    def _errors(self, action: str, path: str = "") -> Iterator[None]:
        where = f"{self._storage.uri}/{path}".rstrip("/")
        try:
            yield
        except HoldfastError:
            raise
        except Exception as error:
            if not type(error).__module__.startswith(("boto", "urllib3")):
                raise
            # Not chained, as everywhere else: what clients print may show signed URLs.
            raise _of_boto(error, f"cannot {action} {where}", tuple(self._place.secrets.values())) from None


def _client(place: BucketConfig) -> Any:
    boto3 = require("boto3", extra="s3-sweep", purpose="looking for unfinished uploads")
    config = require("botocore.config", extra="s3-sweep", purpose="looking for unfinished uploads")
    options, secrets = place.options, place.secrets
    endpoint = options.get("endpoint")
    virtual = options.get("virtual_hosted_style_request") == "true" or endpoint is None
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=options.get("region"),
        aws_access_key_id=secrets.get("access_key_id"),
        aws_secret_access_key=secrets.get("secret_access_key"),
        aws_session_token=secrets.get("session_token"),
        config=config.Config(
            s3={"addressing_style": "virtual" if virtual else "path"},
            retries={"mode": "standard", "max_attempts": 5},
            connect_timeout=10,
            read_timeout=60,
        ),
    )


def _code(error: Exception) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else type(error).__name__


def _of_boto(error: Exception, start: str, secrets: tuple[str, ...]) -> StorageError:
    code, reason = _code(error), said(str(error), secrets)
    if code in ("NoSuchBucket", "404"):
        return StorageNotFoundError(f"{start}: {NO_BUCKET}; create it, or check the name")
    if code in _REFUSED or "Credentials" in code:
        return StoragePermissionError(
            f"{start}: access was refused ({reason}); it needs the rights s3:ListBucketMultipartUploads and "
            "s3:AbortMultipartUpload"
        )
    if code in _UNKNOWN:
        return StorageError(f"{start}: this store cannot do it ({reason}); give the bucket the rule of docs/storage.md")
    return StorageError(f"{start}: {reason}")


_TRIES = 8
_AGAIN_S = 120.0  # no new try after this time, so that the client's own deadline is the bound of the whole
_PAUSE_S, _LONGEST_S = 0.05, 5.0

_T = TypeVar("_T")
Errors = Callable[[str], AbstractContextManager[None]]
"""Makes a block in which errors of the client are translated, from the name of the action."""

NO_BUCKET = "the bucket or container does not exist"

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})")
_FULL = ("QuotaExceeded", "StorageFull", "InsufficientStorage", "AccountStorageLimit", "XMinioStorageFull")
_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound", "FilesystemNotFound", "The specified bucket does not exist")
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "InvalidToken")
# Answers that the SDKs of the stores repeat and obstore does not: two requests met at the server (S3, radosgw), the
# request stood still too long (S3, status 400), or its signature got too old on the way (status 403).
_PASSING = ("ConditionalRequestConflict", "OperationAborted", "ConcurrentModification", "RequestTimeout")
_SKEWED = "RequestTimeTooSkewed"
_NO_CREDENTIALS = (
    "169.254.169.254", "metadata.google.internal", "latest/api/token", "latest/meta-data", "computeMetadata/v1",
    "metadata/identity/oauth2", "performing token request", "no credentials",
)  # fmt: skip
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_NO_TLS = re.compile(r"InvalidMessage\(\s*InvalidContentType")
_BROKEN = (
    "error sending request", "response body error", "connection closed", "HTTP error: connection",
    "non-partial response",  # a page of a gateway in place of the store's answer
)  # fmt: skip
# In the text that is for developers: what the error itself does not say.
_UNREACHED = {
    "kind: ConnectionRefused": "connection refused: check the endpoint, proxies in the environment, and that it runs",
    '"dns error"': "the name of the host is not known: check the endpoint, and proxies in the environment",
    "kind: ConnectionReset": "the connection was reset",
}
_TIMEOUT = ("timed out", "kind: Timeout", "TimedOut", "deadline has elapsed")


@contextmanager
def errors_of(action: str, where: str, secrets: Iterable[str] = ()) -> Iterator[None]:
    """Translate what obstore raises in the block.

    Args:
        action: the verb for messages: "read", "write", "list".
        where: URI of the object.
        secrets: values that no message may show.

    Raises:
        StorageError: or the subclass that says what to do about it.
    """
    try:
        yield
    except HoldfastError:
        raise
    except BaseException as error:
        if type(error).__module__ == "pyo3_runtime":  # a panic of the client: no Exception, it would end a thread
            raise StorageError(
                f"cannot {action} {where}: the client failed on its settings ({said(str(error), tuple(secrets))}): "
                "check endpoint, keys and region"
            ) from None
        if not isinstance(error, Exception) or not _is_of_client(error):
            raise
        # Not chained: the debug text of the client shows signed URLs, and a traceback would log them.
        raise _translated(error, action, where, tuple(secrets)) from None


def was_retried(error: BaseException) -> bool:
    """Tell whether the client sent the request more than once: it may have met the result of its own first try."""
    return re.search(r"after [1-9]\d* retries", str(error)) is not None


def is_refusal(error: BaseException) -> bool:
    """Tell whether the store has refused a write for its condition; obstore takes each status 409 for that."""
    return type(error).__name__ in ("AlreadyExistsError", "PreconditionError") and not _is_passing(error)


def has_no_tls(error: BaseException) -> bool:
    """Tell whether the two sides could not agree on a TLS connection: another try right away is in vain."""
    text = str(error)
    return _CERTIFICATE.search(text) is not None or _NO_TLS.search(text) is not None


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status behind an error of obstore."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _is_passing(error: BaseException) -> bool:
    code = _CODE.search(str(error))
    return code is not None and (code[1] in _PASSING or code[1] == _SKEWED)


def _is_of_client(error: Exception) -> bool:
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return "obstore" in modules or isinstance(error, (OSError, ValueError))


def _translated(error: Exception, action: str, where: str, secrets: tuple[str, ...]) -> StorageError:
    text, kind, status = str(error), type(error).__name__, status_of(error)
    detail = said(text, secrets)
    start = f"cannot {action} {where}"
    if any(code in text for code in _FULL) or status == 507:
        return StorageFullError(f"{start}: no space or quota is left ({detail}); free some, or keep fewer checkpoints")
    if any(code in text for code in _BUCKET_CODES):
        return StorageNotFoundError(f"{start}: {NO_BUCKET}; create it, or check the name")
    # The address of the service that lends credentials to virtual machines: the last place where the client looks.
    if any(mark in text for mark in _NO_CREDENTIALS):
        return StoragePermissionError(
            f"{start}: no credentials were found ({detail}); set them in the environment (see docs/storage.md)"
        )
    if any(f"<Code>{code}" in text for code in _EXPIRED):
        return StoragePermissionError(
            f"{start}: the credentials have expired or are not valid any more ({detail}); get new ones, and "
            "longer-lived ones for long trainings"
        )
    # No plain `StorageError`: somebody may renew it, or set the clock, while training goes on.
    if _is_passing(error):
        hint = (
            "set the clock of this machine" if f"<Code>{_SKEWED}" in text else "asked again in vain; it may work later"
        )
        return StorageUnavailableError(f"{start}: {detail}; {hint}")
    if (match := _CERTIFICATE.search(text)) is not None:
        return StorageUnavailableError(
            f"{start}: the server's certificate is refused ({match[1]}): {_what_to_do(match[1])}"
        )
    if _NO_TLS.search(text) is not None:
        return StorageUnavailableError(
            f"{start}: the endpoint is https:// and the server does not speak TLS: use http://"
        )
    if kind in ("PermissionDeniedError", "UnauthenticatedError", "PermissionError") or status in (401, 403):
        return StoragePermissionError(
            f"{start}: access was refused ({detail}); check the credentials, their rights on this bucket and prefix "
            "(without the right to list, S3 refuses also what does not exist), and the clock of this machine"
        )
    if kind == "AlreadyExistsError":
        return StorageExistsError(f"{start}: it exists; use another name or remove it")
    if kind == "PreconditionError" or status == 412:
        return StorageConflictError(f"{start}: another writer changed it; read it again and decide anew")
    if isinstance(error, FileNotFoundError) or status == 404:
        return StorageNotFoundError(f"{start}: there is no such object; check the path")
    if any(mark in text for mark in _TIMEOUT):
        return StorageUnavailableError(f"{start}: the storage did not answer in time ({detail}); it may work later")
    if status in (408, 429) or (status is not None and status >= 500) or any(mark in text for mark in _BROKEN):
        why = next((f" ({words})" for mark, words in _UNREACHED.items() if mark in text), "")
        return StorageUnavailableError(f"{start}: {detail}{why}")
    if "Encountered object with invalid path" in text:
        odd = StorageError(
            f"{start}: an object there has a name that is no path, with an empty part ('//'), '.' or '..', and the "
            f"client lists nothing beside it ({detail}); rename or delete it, with the tool that made it"
        )
        odd.errno = errno.EILSEQ
        return odd
    if status == 400 and _CODE.search(text) is None:
        # S3 answers so to a HEAD, whose answers have no body, when a session has ended.
        return StorageError(f"{start}: {detail}; no reason was given: expired credentials are the usual reason")
    return StorageError(f"{start}: {detail}")


def _what_to_do(problem: str) -> str:
    if problem.startswith("NotValidForName"):
        return "it was made out for another name than that of the endpoint; use the name that it has"
    if problem.startswith(("Expired", "NotValidYet")):
        return "its time is over or has not come; renew it, or set the clock of this machine"
    return (
        "no authority that this machine trusts has signed it; if it is your own, name the authority's certificate "
        "(PEM) in SSL_CERT_FILE, or add it to those of the system"
    )


def said(text: str, secrets: tuple[str, ...]) -> str:
    """Return the essence of a client's message: one line, no query strings, no XML, no secrets."""
    head = text.partition("\n\nDebug source")[0]
    code, message = _CODE.search(head), _MESSAGE.search(head)
    head = head.partition("<?xml")[0].partition("<Error")[0].strip().rstrip(":")
    if code is not None:
        head = f"{head}: {code[1]}" + (f", {message[1].strip()}" if message else "")
    if "kind: Timeout" in text and "timed out" not in head:
        head = f"{head} (timed out)"
    head = re.sub(r"\?[^\s\"')]*", "", " ".join(head.split()))
    for secret in secrets:
        if len(secret) > 3:
            head = head.replace(secret, "***")
    return head[:500]


class ShortAnswerError(StorageError):
    """An answer that ended early and did not say so."""


def again_if_broken(action: Callable[[], _T], *, after: Callable[[Exception, bool], _T | None] | None = None) -> _T:
    """Repeat a request that broke off, or met another one; the client itself repeats what it can repeat safely.

    Pauses grow and are random, so that many workers do not ask again at the same moment.

    Args:
        action: the request; it must be safe to repeat.
        after: asked after the last failure whether the work was done in spite of it: its result, or None. Gets the
            error, and whether there were earlier ones.
    """
    begin = time.monotonic()
    for attempt in range(_TRIES):
        try:
            return action()
        except Exception as error:
            # A request on which the client spent its whole deadline is not repeated.
            if not _is_broken(error) or attempt == _TRIES - 1 or time.monotonic() - begin > _AGAIN_S:
                result = None if after is None else after(error, attempt > 0)
                if result is None:
                    raise
                return result
        time.sleep(random.uniform(0, min(_LONGEST_S, _PAUSE_S * 2**attempt)))
    raise AssertionError("not reached")


def _is_broken(error: Exception) -> bool:
    """Tell whether a request has to be sent again, and the client did not: mostly a connection that broke."""
    if isinstance(error, ShortAnswerError) or _is_passing(error):
        return True
    if type(error).__name__ != "GenericError" or status_of(error) is not None or has_no_tls(error):
        return False
    # The client never repeats for a body that breaks off; where it did repeat, it has given up.
    return "response body error" in str(error) or not was_retried(error)
