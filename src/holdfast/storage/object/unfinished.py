"""Find and remove unfinished multipart uploads, which a process killed in the middle of one leaves in a bucket, unseen.

The client of our storages cannot list them, boto3 can (the extra ``s3-sweep``). Only stores that speak S3 need it:
Google and Azure forget such uploads by themselves after a week.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast._optional import require
from holdfast.errors import ConfigError, HoldfastError, StorageError, StorageNotFoundError, StoragePermissionError

from ..base import Storage
from .bucket import BucketConfig
from .errors import NO_BUCKET, said
from .object_storage import ObjectStorage

__all__ = ["UnfinishedUploads", "Upload"]

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
            raise _translated(error, f"cannot {action} {where}", tuple(self._place.secrets.values())) from None


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


def _translated(error: Exception, start: str, secrets: tuple[str, ...]) -> StorageError:
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
