"""The bar that shows how far loading a checkpoint is, where that takes long and somebody watches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from holdfast._progress import progress_bar
from holdfast.errors import CheckpointError, StorageError
from holdfast.format.commit import read_manifest
from holdfast.storage.base import Storage

__all__ = ["load_bar"]

_AFTER_S = 2.0


def load_bar(storage: Storage, *, show: bool | None = None) -> AbstractContextManager[Callable[[int], None]]:
    """Give what `holdfast.state.load.restore.load_state` takes as ``progress``, in a ``with``.

    Args:
        storage: rooted at the checkpoint.
        show: True draws from the start, False never; None draws if the checkpoint is remote, stderr is a terminal and
            two seconds have passed.

    Example:
        >>> with load_bar(storage) as progress:                                         # doctest: +SKIP
        ...     load_state(storage, state, progress=progress)
    """

    def total() -> int | None:
        try:
            return read_manifest(storage, "").total_bytes
        except (CheckpointError, StorageError):
            return None  # loading will say what is wrong

    name = storage.uri.rstrip("/").rpartition("/")[2]
    wanted = False if show is None and storage.local_root is not None else show
    return progress_bar(f"load {name}", total, show=wanted, after_s=_AFTER_S if show is None else 0.0)
