"""Whether a store keeps the promise of conditional writes, and what became of one whose answer was lost.

Some stores that speak S3 take the headers and ignore them: two writers that create the same object would both be told
that they have won. Others compare etags without the quotes that belong to them (radosgw up to 16 at least), and refuse
the right one. That is found out by trying, once for each bucket and process.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from holdfast._log import get_logger
from holdfast.errors import StorageError, StorageNotFoundError

from ..base import TEMPORARY
from ..together import together
from .again import again_if_broken
from .errors import was_retried

if TYPE_CHECKING:
    from .object_storage import ObjectStorage

__all__ = ["MARK", "as_condition", "conditions_of", "landed"]

MARK = "holdfastput"
"""Name of the metadata that says which request wrote an object (Azure allows letters and digits only)."""

_Conditions = Literal["etags", "bare etags", "none"]
_PROBES = f"{TEMPORARY}probe"
_OLD = timedelta(minutes=15)
_LOG = get_logger("storage")
_REFUSALS = ("AlreadyExistsError", "PreconditionError")
_lock = threading.Lock()  # of the two below; never held while a store is asked
_known: dict[tuple[str, str], _Conditions] = {}
_asking: dict[tuple[str, str], threading.Lock] = {}


def conditions_of(storage: ObjectStorage) -> bool:
    """Find out whether conditional writes are enforced, when first asked; warn once if they are not.

    Raises:
        StorageError: the store could not be asked.
    """
    key = _key(storage)
    with _lock:
        if (found := _known.get(key)) is not None:
            return found != "none"
        asking = _asking.setdefault(key, threading.Lock())
    with asking:  # one thread asks, for each store by itself: a slow one holds up nobody else
        found = _known.get(key)
        if found is None:
            found = _known[key] = _try_out(storage)
            if found == "none":
                _LOG.warning(
                    "%s does not enforce conditional writes: Holdfast looks before it writes instead, but two trainers "
                    "that start the same run in the same moment could both take it, and the later commit of two under "
                    "one name wins unnoticed. A single trainer loses nothing.",
                    key[0],
                )
        return found != "none"


def as_condition(storage: ObjectStorage, tag: str) -> str:
    """Spell an etag as the store wants it in a condition, once `conditions_of` has asked."""
    return tag.strip('"') if _known.get(_key(storage)) == "bare etags" else tag


def _key(storage: ObjectStorage) -> tuple[str, str]:
    place = storage._place
    return f"{place.scheme}://{place.netloc}", place.options.get("endpoint", "")


def _try_out(storage: ObjectStorage) -> _Conditions:
    folder = f"{storage._prefix}/{_PROBES}" if storage._prefix else _PROBES
    left = _left_behind(storage, folder)
    # Credentials may have the right to write without the one to delete: then the same one serves for ever.
    if left is not None:
        with suppress(StorageNotFoundError):  # somebody removed it meanwhile
            if (found := _ask(storage, folder, left)) != "none":
                return found
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


def _ask(storage: ObjectStorage, folder: str, key: str) -> _Conditions:
    obs, store = storage._obs, storage._store
    with storage._errors("write", key):
        try:
            made = again_if_broken(lambda: obs.put(store, key, b"1", use_multipart=False, mode="create"))
        except Exception as error:
            if _is_unsupported(error):
                return "none"
            # A refusal means that it is there: left behind, or by our own first try, whose answer was lost.
            if type(error).__name__ not in _REFUSALS:
                raise
            made = again_if_broken(lambda: obs.head(store, key))
        gone, name, tag = [key], storage._tag_name, storage._tag(made) or ""
        modes: list[Any] = ["create", {name: _wrong_tag(storage)}, {name: tag}]
        asks: list[Callable[[], Any]] = [partial(_refuses, storage, key, mode) for mode in modes]
        try:
            *refused, gone = together(storage, [*asks, lambda: _with_old_ones(storage, folder, key)])
            if refused == [True, True, False]:
                return "etags"
            if refused == [True, True, True] and name == "e_tag":
                bare = [_refuses(storage, key, {name: one.strip('"')}) for one in (_wrong_tag(storage), tag)]
                return "bare etags" if bare == [True, False] else "none"
            return "none"
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
