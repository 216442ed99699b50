"""Whether a store enforces conditional writes, and whether a write whose answer was lost has succeeded.

Some stores that speak S3 take the headers and ignore them: two writers that create the same object are both answered
that they have created it. Others compare etags without the quotes that belong to them (radosgw up to 16 at least), and
refuse the right etag. A trial write finds that out, once for each bucket and process.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, Literal

from holdfast._log import get_logger
from holdfast.errors import StorageError, StorageNotFoundError

from ..base import TEMPORARY
from ..together import together
from .client import BucketClient
from .errors import again_if_broken, was_retried

__all__ = ["MARK", "as_condition", "conditions_of", "landed"]

MARK = "holdfastput"
"""Name of the metadata field that says which request wrote an object (Azure allows letters and digits only)."""

_Conditions = Literal["etags", "bare etags", "none"]
_PROBES = f"{TEMPORARY}probe"
_OLD = timedelta(minutes=15)
_LOG = get_logger("storage")
_REFUSALS = ("AlreadyExistsError", "PreconditionError")
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
            if type(error).__name__ not in _REFUSALS:
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
        if type(error).__name__ in _REFUSALS:
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
    refused = type(error).__name__ in _REFUSALS
    if (refused and not again and not was_retried(error)) or isinstance(error, (StorageError, ValueError)):
        return None
    try:
        answer = again_if_broken(lambda: client.obs.get(client.store, key, options={"head": True}))
    except Exception as unread:  # noqa: BLE001 - the caller gets the first error
        _LOG.debug("cannot tell whether %s was written: %s", key, type(unread).__name__)
        return None
    return client.tag(answer.meta) if answer.attributes.get(MARK) == mark else None
