"""What a storage refuses now and may take later: it is full, or does not answer. It costs a save, not the training."""

from __future__ import annotations

from holdfast.errors import StorageError, StorageFullError, StorageUnavailableError

__all__ = ["MAX_LOST", "TRANSIENT_ERRORS", "passing_error", "state_of"]

TRANSIENT_ERRORS = (StorageFullError, StorageUnavailableError)
"""The errors after which training may go on."""

MAX_LOST = 10
"""Saves in a row: who trains on after that trains for nothing."""


def state_of(error: StorageError | None) -> str:
    """Say in words why a save was lost."""
    return "the storage does not answer" if isinstance(error, StorageUnavailableError) else "the storage is full"


def passing_error(error: StorageError | None, lost: str) -> StorageError:
    """Return the error for a run that ends without its last save: what was lost, why, and what to do."""
    down = isinstance(error, StorageUnavailableError)
    return (StorageUnavailableError if down else StorageFullError)(
        lost + f": {'when it answers again,' if down else 'free some space and'} start the same command again, it "
        "goes on from there"
    )
