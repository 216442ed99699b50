"""The client of a bucket: obstore's store with our settings, time-outs and credentials, made when first used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from holdfast._optional import require
from holdfast.errors import ConfigError, HoldfastError, StorageError

from ..base import StorageTraits
from .bucket import BucketConfig
from .errors import errors_of, said

__all__ = ["BucketClient", "make_store"]

_FEW = 2  # a store that has never heard of a request may answer 501, which the client takes for a passing failure
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
        """The store of obstore.

        Raises:
            ConfigError: obstore refuses the settings.
        """
        if self._made is None:
            try:
                self._made = make_store(self.place, self._limits)
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

    def errors(self, action: str, key: str) -> AbstractContextManager[None]:
        """Translate errors of the client in a block; no message shows credentials."""
        return errors_of(action, self.shown(key), self.place.secrets.values())


def make_store(place: BucketConfig, limits: Mapping[str, float], *, bulk: bool = False) -> Any:
    """Make the client of a place.

    Args:
        place: which bucket, with which settings and credentials.
        limits: time-outs and tries.
        bulk: the client is for the request that deletes many objects, at a store that may not have that request.
    """
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
            "max_retries": min(_FEW if bulk else 1 << 16, int(limits.get("max_retries", 10))),
            "retry_timeout": timedelta(seconds=limits.get("deadline_s", 180.0)),
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
