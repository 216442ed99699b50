"""Delete many objects by one request, also at stores that may not have that request.

Whether S3 itself, Google and Azure have the request, the client knows. Other servers that speak S3 are asked: a server
that does not understand it is not asked again by this process, and its objects are deleted singly, ten at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from holdfast._log import get_logger

from .bucket import BucketConfig
from .client import make_store
from .errors import status_of

__all__ = ["Deleter"]

_LOG = get_logger("storage")
_MANY = 1000  # in one request of S3
_UNKNOWN = (400, 404, 405, 411, 501)  # answers to a request that a server does not have
_lock = threading.Lock()
_have_none: set[tuple[str, str]] = set()


class Deleter:
    """Tries the request that deletes many objects.

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
