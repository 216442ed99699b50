"""Rows of metrics on their way to the disk: gathered, and written about once a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.errors import HoldfastError

__all__ = ["Answer", "ReportBuffer"]

_EVERY_S = 0.8

Answer = Callable[[list[int], BaseException | None], None]


class ReportBuffer:
    """Gathers rows and writes them from its own thread, so that a long save does not hold them up.

    The first row after a pause is written at once, later ones within a second.
    """

    def __init__(self, write: Callable[[list[dict[str, Any]]], None]) -> None:
        self._write = write
        self._rows: list[dict[str, Any]] = []
        self._calls: list[tuple[int, Answer]] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # rows came, or the end
        self._closing = self._closed = self._hurries = False
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="holdfast-reports", daemon=True)
        self._thread.start()

    def add(self, call: int, rows: list[dict[str, Any]], answer: Answer) -> None:
        """Add rows; ``answer`` is called when they are durable, or with the error.

        Raises:
            HoldfastError: the buffer is closed.
        """
        with self._lock:
            if self._closed:
                raise HoldfastError("this run is closed: nothing more can be reported to it")
            self._rows += rows
            self._calls.append((call, answer))
            self._changed.notify_all()

    def flush(self) -> None:
        """Write what has been gathered, now."""
        with self._writing:
            with self._lock:
                rows, self._rows = self._rows, []
                calls, self._calls = self._calls, []
            if not calls:
                return
            error: BaseException | None = None
            try:
                self._write(rows)
            except Exception as caught:  # noqa: BLE001 - a thread edge: whoever reported hears of it
                error = caught
            groups: dict[Answer, list[int]] = {}
            for call, answer in calls:
                groups.setdefault(answer, []).append(call)
            for answer, numbers in groups.items():
                answer(numbers, error)

    def hurry(self) -> None:
        """Let the thread write now what has been gathered."""
        with self._lock:
            self._hurries = bool(self._calls)
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._calls or self._closing)
                if self._closing:
                    return  # close() writes the rest
                self._hurries = False
            begun = time.monotonic()
            self.flush()
            with self._lock:
                pause = max(0.0, _EVERY_S - (time.monotonic() - begun))
                self._changed.wait_for(lambda: self._closing or self._hurries, pause)

    def close(self) -> None:
        """Write the rest and end the thread."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with self._lock:
            self._closed = True  # what came up to here is written below, what comes later is refused
        self.flush()


def check_rows(rows: Any) -> list[dict[str, Any]]:
    """Refuse what is not a list of rows before it meets the rows of others."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise HoldfastError(f"report takes a list of rows, not {type(rows).__name__}")
    return rows
