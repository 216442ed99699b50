"""Translation of obstore's errors into errors of Holdfast, all in this place."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from holdfast.errors import (
    HoldfastError,
    StorageConflictError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)

__all__ = [
    "NO_BUCKET", "Errors", "ShortAnswerError", "again_if_broken", "errors_of", "has_no_tls", "is_refusal", "said",
    "status_of", "was_retried",
]  # fmt: skip

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
    except Exception as error:
        if not _is_of_client(error):
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
        return StorageUnavailableError(f"{start}: {detail}")
    if "Encountered object with invalid path" in text:
        return StorageError(
            f"{start}: an object there has a name that is no path, with an empty part ('//'), '.' or '..', and the "
            f"client lists nothing beside it ({detail}); rename or delete it, with the tool that made it"
        )
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
