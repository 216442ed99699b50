"""Whether a store keeps the promise of conditional writes, and what became of one whose answer was lost.

Some stores that speak S3 take the headers and ignore them: two writers that create the same object would both be told
that they have won. That is found out by trying, once for each bucket and process.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from .._log import get_logger
from ..errors import StorageError, StorageNotFoundError
from ._object_again import again_if_broken
from ._object_errors import was_retried
from .base import TEMPORARY
from .together import together

if TYPE_CHECKING:
    from .object import ObjectStorage

__all__ = ["MARK", "conditions_of", "landed"]

MARK = "holdfastput"
"""Name of the metadata that says which request wrote an object (Azure allows letters and digits only)."""

_PROBES = f"{TEMPORARY}probe"
_OLD = timedelta(minutes=15)
_LOG = get_logger("storage")
_REFUSALS = ("AlreadyExistsError", "PreconditionError")
_lock = threading.Lock()  # of the two below; never held while a store is asked
_known: dict[tuple[str, str], bool] = {}
_asking: dict[tuple[str, str], threading.Lock] = {}


def conditions_of(storage: ObjectStorage) -> bool:
    """Find out whether conditional writes are enforced, when first asked; warn once if they are not.

    Raises:
        StorageError: the store could not be asked.
    """
    place = storage._place
    key = (f"{place.scheme}://{place.netloc}", place.options.get("endpoint", ""))
    with _lock:
        if (found := _known.get(key)) is not None:
            return found
        asking = _asking.setdefault(key, threading.Lock())
    with asking:  # one thread asks, for each store by itself: a slow one holds up nobody else
        found = _known.get(key)
        if found is None:
            found = _known[key] = _try_out(storage)
            if not found:
                _LOG.warning(
                    "%s does not enforce conditional writes: Holdfast looks before it writes instead, but two trainers "
                    "that start the same run in the same moment could both take it, and the later commit of two under "
                    "one name wins unnoticed. A single trainer loses nothing.",
                    key[0],
                )
        return found


def _try_out(storage: ObjectStorage) -> bool:
    folder = f"{storage._prefix}/{_PROBES}" if storage._prefix else _PROBES
    left = _left_behind(storage, folder)
    # Credentials may have the right to write without the one to delete: then the same one serves for ever.
    if left is not None:
        with suppress(StorageNotFoundError):  # somebody removed it meanwhile
            if _ask(storage, folder, left):
                return True
    return _ask(storage, folder, f"{folder}/{uuid.uuid4().hex}")


def _left_behind(storage: ObjectStorage, folder: str) -> str | None:
    """Return the probe of a process that could not remove it, None if there is none or nobody may look."""
    try:
        pages = again_if_broken(lambda: list(storage._obs.list(storage._store, folder)))
    except Exception as error:  # noqa: BLE001 - rights to write without those to list
        _LOG.debug("%s cannot be listed: %s", folder, type(error).__name__)
        return None
    now = datetime.now(timezone.utc)
    return min((meta["path"] for page in pages for meta in page if now - meta["last_modified"] > _OLD), default=None)


def _ask(storage: ObjectStorage, folder: str, key: str) -> bool:
    obs, store = storage._obs, storage._store
    with storage._errors("write", key):
        try:
            again_if_broken(lambda: obs.put(store, key, b"1", use_multipart=False, mode="create"))
        except Exception as error:
            if _is_unsupported(error):
                return False
            # A refusal means that it is there: left behind, or by our own first try, whose answer was lost.
            if type(error).__name__ not in _REFUSALS:
                raise
        gone = [key]
        modes: list[Any] = ["create", {storage._tag_name: _wrong_tag(storage)}]
        asks: list[Callable[[], Any]] = [partial(_refuses, storage, key, mode) for mode in modes]
        try:
            *refused, gone = together(storage, [*asks, lambda: _with_old_ones(storage, folder, key)])
            return all(refused)
        finally:
            try:
                again_if_broken(lambda: obs.delete(store, gone))
            except Exception as error:  # noqa: BLE001 - it stays, and the next process uses it
                _LOG.debug("the probe %s could not be removed: %s", key, type(error).__name__)


def _with_old_ones(storage: ObjectStorage, folder: str, key: str) -> list[str]:
    """Return our probe and those of processes that were killed; all ages are by the clock of the store."""
    found = {}
    with suppress(Exception):  # rights to write without those to list
        pages = storage._obs.list(storage._store, folder)
        found = {meta["path"]: meta["last_modified"] for page in pages for meta in page}
    now = found.get(key)
    return [key, *(path for path, time in found.items() if now is not None and now - time > _OLD)]


def _wrong_tag(storage: ObjectStorage) -> str:
    return "1" if storage._tag_name == "version" else '"00000000000000000000000000000000"'


def _refuses(storage: ObjectStorage, key: str, mode: Any) -> bool:
    try:
        again_if_broken(lambda: storage._obs.put(storage._store, key, b"2", use_multipart=False, mode=mode))
    except Exception as error:
        if type(error).__name__ in _REFUSALS:
            return True
        if _is_unsupported(error):
            return False
        raise
    return False


def _is_unsupported(error: Exception) -> bool:
    return type(error).__name__ == "NotSupportedError" or "501 Not Implemented" in str(error)


def landed(storage: ObjectStorage, key: str, mark: str, error: Exception, *, again: bool = False) -> str | None:
    """Return the etag if the object is the one we tried to write in spite of ``error``, None if it is not.

    A request whose answer was lost is sent again by the client, or by us (``again``), and then meets what it wrote
    itself.
    """
    refused = type(error).__name__ in _REFUSALS
    if (refused and not again and not was_retried(error)) or isinstance(error, (StorageError, ValueError)):
        return None
    try:
        found = again_if_broken(lambda: storage._obs.get(storage._store, key, options={"head": True}))
    except Exception as unread:  # noqa: BLE001 - the first error is what the caller hears of
        _LOG.debug("cannot tell whether %s was written: %s", key, type(unread).__name__)
        return None
    return storage._tag(found.meta) if found.attributes.get(MARK) == mark else None
