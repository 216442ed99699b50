"""A progress bar of bytes on stderr: for slow operations on a terminal. rich is imported when it is drawn."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

Total = int | Callable[[], int | None] | None


@contextlib.contextmanager
def progress_bar(
    label: str, total: Total = None, *, show: bool | None = None, after_s: float = 0.0, counts: bool = False
) -> Iterator[Callable[[int], None]]:
    """Give a function that takes the bytes just done, from any thread, and draw the sum.

    Args:
        label: what is done, in a few words.
        total: bytes in all, or a function asked for them once the bar is drawn; None if that is not known.
        show: True or False; None draws only if stderr is a terminal.
        after_s: draw nothing before this time, so that what is quick leaves no trace.
        counts: the numbers count objects, not bytes.

    Example:
        >>> with progress_bar("load", 100, show=False) as progress:
        ...     progress(50)
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda nbytes: None
        return
    bar = _Bar(label, total, after_s, counts=counts)
    try:
        yield bar.update
    finally:
        bar.stop()


@contextlib.contextmanager
def sized_progress_bar(label: str) -> Iterator[Callable[[int | None, int], None]]:
    """Give a function that takes (bytes in all, 0) when these are known, and (None, bytes just done)."""
    total: list[int | None] = [None]
    with progress_bar(label, lambda: total[0], after_s=0.5) as bar:

        def progress(new_total: int | None, done: int) -> None:
            if new_total is None:
                bar(done)
            else:
                total[0] = new_total

        yield progress


class _Bar:
    def __init__(self, label: str, total: Total, after_s: float, *, counts: bool) -> None:
        # Names come from files, and a terminal obeys escape codes.
        self._label = "".join(c if c.isprintable() else "\ufffd" for c in label)
        self._total, self._counts = total, counts
        self._from = time.monotonic() + after_s
        self._done = 0
        self._lock = threading.Lock()
        self._drawn: Progress | None = None
        self._stopped = False

    def update(self, nbytes: int) -> None:
        """Count bytes; the first call after the pause draws the bar."""
        with self._lock:
            self._done += nbytes
            if self._stopped:
                return
            if self._drawn is None:
                if time.monotonic() < self._from:
                    return
                self._drawn = self._draw()
            self._drawn.update(self._drawn.task_ids[0], completed=self._done)

    def stop(self) -> None:
        """Leave the last line as it is."""
        with self._lock:
            self._stopped = True
            if self._drawn is not None:
                self._drawn.stop()

    def _draw(self) -> Progress:
        from rich import progress as parts
        from rich.console import Console

        total = self._total() if callable(self._total) else self._total
        drawn = parts.Progress(
            parts.TextColumn("{task.description}", markup=False),
            parts.BarColumn(),
            *(
                [parts.MofNCompleteColumn()]
                if self._counts
                else [parts.DownloadColumn(binary_units=True), parts.TransferSpeedColumn()]
            ),
            parts.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        drawn.add_task(self._label, total=total, completed=self._done)
        drawn.start()
        return drawn
