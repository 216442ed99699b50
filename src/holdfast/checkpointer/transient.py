"""Errors of a storage that may go away: it is full, or does not answer. They cost a save, not the training.

`LostSaves` is the one policy of all front doors for saves that end with such an error.
"""

from __future__ import annotations

from holdfast.errors import StorageError, StorageFullError, StorageUnavailableError

__all__ = ["MAX_LOST", "TRANSIENT_ERRORS", "LostSaves", "passing_error", "state_of"]

TRANSIENT_ERRORS = (StorageFullError, StorageUnavailableError)
"""The errors after which training may go on."""

MAX_LOST = 10
"""Saves in a row: who trains on after that trains for nothing."""


class LostSaves:
    """Counts the saves that a storage did not take: each costs itself, the tenth in a row ends the training.

    Attributes:
        total: saves lost so far.
        in_a_row: of these, since the last save that became durable.
        error: why the newest save was lost; None once a later save is durable.
    """

    def __init__(self) -> None:
        self.total = self.in_a_row = 0
        self.error: StorageError | None = None

    def durable(self) -> None:
        """Note that a save is durable: those lost before it were not the end."""
        self.in_a_row, self.error = 0, None

    def add(self, error: StorageError, *, limit: int | None = MAX_LOST) -> None:
        """Count a lost save.

        Args:
            error: one of `TRANSIENT_ERRORS`.
            limit: the number in a row from which training must not go on; None for no limit.

        Raises:
            StorageError: ``error``, at the limit.
        """
        self.total += 1
        self.in_a_row += 1
        self.error = error
        if limit is not None and self.in_a_row >= limit:
            raise error


def state_of(error: BaseException | None) -> str:
    """Return in words why a save was lost."""
    return "the storage does not answer" if isinstance(error, StorageUnavailableError) else "the storage is full"


def passing_error(error: BaseException | None, lost: str) -> StorageError:
    """Return the error for a run that ends without its last save: what was lost, why, and what to do."""
    down = isinstance(error, StorageUnavailableError)
    return (StorageUnavailableError if down else StorageFullError)(
        lost + f": {'when it answers again,' if down else 'free some space and'} start the same command again, it "
        "goes on from there"
    )
