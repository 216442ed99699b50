"""Work of `report` in the background: uploads by the user's own function, and what is no local directory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from .report_queue import ReportQueue

__all__ = ["BackgroundUploads"]

_MAX_WAITING = 4


class BackgroundUploads:
    """Runs one piece of work after another on one thread and sends what it returns, in the place held for it.

    A failure stays: nothing behind it is sent any more, and `check` raises it again and again, for a report of this
    rank is missing for good.
    """

    def __init__(self, outbox: ReportQueue) -> None:
        self._outbox = outbox
        self._threads: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()
        self._failure: BaseException | None = None

    def submit(self, work: Callable[[], dict[str, Any]]) -> None:
        """Run ``work`` later; its message goes before everything that is sent from now on.

        Waits while four others wait.
        """
        while len(self._waiting) >= _MAX_WAITING:
            wait([self._waiting.popleft()])
        self.check()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "holdfast-upload")
        slot = self._outbox.hold()

        def run() -> None:
            if self._failure is not None:
                return
            try:
                self._outbox.fill(slot, work())
            except BaseException as error:  # noqa: BLE001 - a thread edge: `check` raises it
                self._failure = error

        self._waiting.append(self._threads.submit(run))

    def check(self) -> None:
        """Raise what an earlier piece of work raised."""
        if self._failure is not None:
            raise self._failure

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for all of it; False when that took longer than ``timeout_s``."""
        return not wait(self._waiting, timeout=timeout_s).not_done

    def close(self) -> None:
        """Drop what has not begun; idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
