"""Errors of other people's clients as errors of Holdfast: one table for the adapters of fsspec, pyarrow and libcloud.

A refusal (401, 403) is never reported as "not found", also where a client does that itself: `fsspec`'s HTTP file
system raises FileNotFoundError for every unexpected answer, and only the cause says which answer it was.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import TracebackType

from holdfast._outgoing import masked_client
from holdfast.errors import (
    HoldfastError,
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)

from ..local.ops import translate

__all__ = ["client_errors", "translate_client"]

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
_GONE_NAMES = frozenset({"EOFError", "SSHException"})  # how paramiko says that the connection broke
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
    is_gone = names & _GONE_NAMES or any(isinstance(link, (ConnectionError, TimeoutError)) for link in chain)
    return (StorageUnavailableError if is_gone else StorageError)(f"{head} ({type(error).__name__})")


class client_errors(contextlib.AbstractContextManager[None]):  # noqa: N801  # reads as a verb phrase
    """Translate what a client raises in the block; Holdfast's own errors pass unchanged."""

    __slots__ = ("_action", "_where")

    def __init__(self, action: str, where: str) -> None:
        self._action, self._where = action, where

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
