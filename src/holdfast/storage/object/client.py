"""The client of a bucket: obstore's store with our settings, time-outs and credentials."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from holdfast._optional import require

from .bucket import BucketConfig

__all__ = ["make_store"]

_FEW = 2  # a store that has never heard of a request may answer 501, which the client takes for a passing failure


def make_store(place: BucketConfig, limits: Mapping[str, float], *, bulk: bool = False) -> Any:
    """Make the client of a place.

    Args:
        place: which bucket, with which settings and credentials.
        limits: time-outs and tries.
        bulk: it is for the request that deletes many, of a store of which nobody knows whether it has that.
    """
    stores = require("obstore.store", extra=place.extra, purpose=f"{place.scheme}:// locations")
    config: dict[str, Any] = {**place.options, **place.secrets}
    endpoint = str(config.get("endpoint") or config.get("base_url") or "")
    arguments: dict[str, Any] = {}
    if place.store == "S3Store":
        if endpoint:
            config.setdefault("aws_endpoint_url_s3", endpoint)  # wins over "endpoint", and may be in the environment
            # Not every store that speaks S3 has the request that deletes many.
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
