"""How much of an arena is filled while a save is being written: the writing follows the copying."""

from __future__ import annotations

import threading

from holdfast.errors import HoldfastError

__all__ = ["Watermark"]


class Watermark:
    """A mark in the arena that only rises; whoever needs bytes waits until it has passed them.

    Args:
        filled: bytes of the arena that are complete already.
        size: bytes at which the job is complete: sealed.
    """

    def __init__(self, filled: int, size: int) -> None:
        self._filled, self._size = filled, size
        self._changed = threading.Condition()
        self._why: str | None = None

    @property
    def sealed(self) -> bool:
        """True once everything is there: from then on the job is finished whatever happens to the trainer."""
        return self._filled >= self._size

    def rise(self, filled: int) -> None:
        """Move the mark."""
        with self._changed:
            self._filled = max(self._filled, filled)
            self._changed.notify_all()

    def abandon(self, why: str) -> None:
        """Drop the job, unless it is sealed."""
        with self._changed:
            if not self.sealed:
                self._why = why
                self._changed.notify_all()

    def wait(self, end: int) -> None:
        """Wait until the bytes before ``end`` are there.

        Raises:
            HoldfastError: the job was abandoned.
        """
        with self._changed:
            # Unbounded on purpose: the end of the trainer, or of its connection, abandons the job.
            self._changed.wait_for(lambda: self._why is not None or self._filled >= min(end, self._size))
            if self._why is not None:
                raise HoldfastError(self._why)
