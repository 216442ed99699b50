"""Clones of a user's `DataLoader` that take their indices from us and draw no global random numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from .seeding import SeededDataset

__all__ = ["IndexFeed", "clone_of"]


class IndexFeed:
    """What the clone of a loader takes its indices from; refilled for each epoch, so that workers can stay."""

    def __init__(self) -> None:
        self.source: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.source


# Clones whose workers persist: one per loader (and seeding), as long as the loader lives.
_Clone = tuple[DataLoader[Any], IndexFeed]
_clones: weakref.WeakKeyDictionary[DataLoader[Any], dict[bool, _Clone]] = weakref.WeakKeyDictionary()


def clone_of(loader: DataLoader[Any], *, seeded: bool) -> _Clone:
    """Return a loader like ``loader`` that takes its indices from a feed and draws no global random numbers."""
    cached = _clones.get(loader, {}).get(seeded)
    if cached is not None:
        return cached
    feed = IndexFeed()
    options: dict[str, Any] = {}
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
        options["multiprocessing_context"] = loader.multiprocessing_context
    if loader.pin_memory_device:
        options["pin_memory_device"] = loader.pin_memory_device
    if loader.batch_sampler is not None:
        options["batch_sampler"] = feed
    else:
        options["batch_size"] = None
        options["sampler"] = feed
    clone: DataLoader[Any] = DataLoader(
        SeededDataset(loader.dataset) if seeded else loader.dataset,  # type: ignore[arg-type]
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=torch.Generator(),
        **options,
    )
    if clone.persistent_workers:
        _clones.setdefault(loader, {})[seeded] = (clone, feed)
    return clone, feed
