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
        self._writing = threading.Lock()
        self._some = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="holdfast-reports", daemon=True)
        self._thread.start()

    def add(self, call: int, rows: list[dict[str, Any]], answer: Answer) -> None:
        """Add rows; ``answer`` is called when they are durable, or with the error."""
        with self._lock:
            self._rows += rows
            self._calls.append((call, answer))
        self._some.set()

    def flush(self) -> None:
        """Write what has been gathered, now."""
        with self._writing:
            with self._lock:
                rows, self._rows = self._rows, []
                calls, self._calls = self._calls, []
                self._some.clear()
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

    def _work(self) -> None:
        while True:
            self._some.wait()
            if self._stop.is_set():
                return
            begun = time.monotonic()
            self.flush()
            self._stop.wait(max(0.0, _EVERY_S - (time.monotonic() - begun)))

    def close(self) -> None:
        """Write the rest and end the thread."""
        self._stop.set()
        self._some.set()
        self._thread.join()
        self.flush()


def check_rows(rows: Any) -> list[dict[str, Any]]:
    """Refuse what is not a list of rows before it meets the rows of others."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise HoldfastError(f"report takes a list of rows, not {type(rows).__name__}")
    return rows
