"""Loaders with persistent workers draw the same from torch's generator in every life.

A `DataLoader` draws the seed of its workers from torch's global generator when it makes its iterator: in each epoch, or
with ``persistent_workers=True`` once in the life of the process (`torch.utils.data.dataloader`, as of torch 2.13). A
resumed process makes it again, so the generator that training draws from would move in one life and not in the other.
While a run is open, such loaders draw that one number from a generator of their own.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["PersistentWorkerSeeds"]

_lock = threading.Lock()
_users = 0
_before: Any = None


class PersistentWorkerSeeds:
    """Keeps the worker seeds of loaders with persistent workers out of torch's global generator, from `begin` to `end`.

    Runs may overlap; the last one that ends puts torch's own method back.
    """

    def __init__(self) -> None:
        self._open = False

    def begin(self) -> None:
        """Take part; idempotent."""
        global _users, _before
        with _lock:
            if self._open:
                return
            self._open = True
            _users += 1
            if _users == 1:
                _before = DataLoader._get_iterator
                DataLoader._get_iterator = _get_iterator  # type: ignore[method-assign, assignment]

    def end(self) -> None:
        """Leave; idempotent."""
        global _users
        with _lock:
            if not self._open:
                return
            self._open = False
            _users -= 1
            if _users == 0 and DataLoader._get_iterator is _get_iterator:
                DataLoader._get_iterator = _before  # type: ignore[method-assign]


def _get_iterator(loader: DataLoader[Any]) -> Any:
    own = loader.persistent_workers and loader.num_workers > 0 and loader.generator is None
    if not own:
        return _before(loader)
    # Only the seed of the workers comes from here: a sampler that shuffles draws from its own generator in each epoch.
    loader.generator = torch.Generator().manual_seed(torch.initial_seed() & ((1 << 63) - 1))
    try:
        return _before(loader)
    finally:
        loader.generator = None
