"""Waiting for the writer, never for ever."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage

__all__ = ["answer"]


def answer(future: Future[Any], storage: Storage, timeout_s: float, *, bound: str = " (timeout_s)") -> Any:
    """Wait for the writer, but not for ever.

    Args:
        future: what the writer is to say.
        storage: named if it says nothing.
        timeout_s: how long to wait.
        bound: names the argument that ``timeout_s`` is, for the message.

    Raises:
        HoldfastError: what the writer says, or that it says nothing.
    """
    wait([future], timeout=timeout_s)
    if not future.done():
        raise HoldfastError(f"no answer after {timeout_s:.0f} s{bound}: {storage.uri} is stuck or very slow")
    return future.result()
