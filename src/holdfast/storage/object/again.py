"""Repeat requests whose connection or answer broke off: a bounded number of times, with growing, random pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from holdfast.errors import StorageError

from .errors import has_no_tls, status_of, was_retried

__all__ = ["Errors", "ShortAnswerError", "again_if_broken", "is_broken"]

_TRIES = 8
_AGAIN_S = 120.0  # no new try after this time, so that the client's own deadline is the bound of the whole
_PAUSE_S, _LONGEST_S = 0.05, 5.0

_T = TypeVar("_T")
Errors = Callable[[str], AbstractContextManager[None]]
"""Makes a block in which errors of the client are translated, from the name of the action."""


class ShortAnswerError(StorageError):
    """An answer that ended early and did not say so."""


def again_if_broken(action: Callable[[], _T], *, after: Callable[[Exception, bool], _T | None] | None = None) -> _T:
    """Repeat a request whose connection or answer broke off; the client itself repeats what it can repeat safely.

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
            if not is_broken(error) or attempt == _TRIES - 1 or time.monotonic() - begin > _AGAIN_S:
                result = None if after is None else after(error, attempt > 0)
                if result is None:
                    raise
                return result
        time.sleep(random.uniform(0, min(_LONGEST_S, _PAUSE_S * 2**attempt)))
    raise AssertionError("not reached")


def is_broken(error: Exception) -> bool:
    """Tell whether a connection broke before the whole answer was there, and the client did not ask again."""
    if isinstance(error, ShortAnswerError):
        return True
    if type(error).__name__ != "GenericError" or status_of(error) is not None or has_no_tls(error):
        return False
    # The client never repeats for a body that breaks off; where it did repeat, it has given up.
    return "response body error" in str(error) or not was_retried(error)
