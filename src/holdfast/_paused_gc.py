"""Stop the garbage collector where many objects are made that all stay: reading a big index, importing modules."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ._fork import after_fork_in_child


class _Pauses:
    """Who has paused the collector of this process: the first of all threads stops it, the last lets it go on.

    A signal or a finalizer may come in between any two steps of the thread that holds the lock, and pause as well:
    hence a lock that it can take again, and an order of steps in which the inner pause changes nothing.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0
        self.stopped = False  # by us: it was running

    def forget(self) -> None:
        """Begin anew in a forked child, where the threads that have paused are not."""
        if self.depth and self.stopped:
            gc.enable()
        self.lock, self.depth = threading.RLock(), 0


_PAUSES = _Pauses()
after_fork_in_child(_PAUSES.forget)


@contextmanager
def paused_gc() -> Iterator[None]:
    """Keep the garbage collector from searching a million new containers that all stay: two thirds of the time."""
    pauses = _PAUSES
    with pauses.lock:
        pauses.depth += 1
        if pauses.depth == 1:
            pauses.stopped = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with pauses.lock:
            if pauses.depth == 1 and pauses.stopped:
                gc.enable()
            pauses.depth = max(0, pauses.depth - 1)  # a forked child leaves what its parent has entered
