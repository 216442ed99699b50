"""One helper thread for the work beside the writing: digests, small files, the fsync of finished files."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["SerialExecutor"]

T = TypeVar("T")


class SerialExecutor:
    """Runs calls one after another on one daemon thread.

    Not a `ThreadPoolExecutor`: that one refuses work while the interpreter shuts down, which is when a writer thread
    finishes the last save, and already once the main thread has returned, which a trainer in another thread survives.
    """

    def __init__(self, name: str = "holdfast-side") -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> Future[T]:
        """Queue ``call``; its result or exception comes through the future."""
        future: Future[T] = Future()
        self._queue.put((future, call))
        return future

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - a thread edge: the future carries it
                    future.set_exception(error)
            del item, future, call  # while idle it must not keep a state's memory alive

    def close(self, *, wait: bool = True) -> None:
        """End the thread after what is queued; idempotent.

        Args:
            wait: return when it has ended.
        """
        self._queue.put(None)
        if wait:
            self._thread.join()
