"""torch's own `DataLoader`, made to draw the same in every process of a run.

`clone_of` makes a loader that takes its indices from an `IndexFeed` and draws no global random numbers.

`unwrapped` takes the loader out of the wrapper that Lightning Fabric puts around it.

`PersistentWorkerSeeds` is for loaders that a script iterates itself: torch draws the seed of their workers from its
global generator when it makes an iterator, in each epoch, or with ``persistent_workers=True`` once in a process
(`torch.utils.data.dataloader`, as of torch 2.13). A resumed process makes the iterator again, so it would draw from the
generator of training where the first process did not. While a run is open, such loaders draw that number from a
generator of their own.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .seeding import seeded_collate, seeded_dataset

_PLAIN = (bool, int, float, str, type(None))


def is_map_loader(loader: Any) -> bool:
    """Tell whether a loader is torch's over a data set that is read by index, iterated as torch does.

    A subclass that only prepares arguments is one; with its own ``__iter__`` its order is unknown.
    """
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
    )


def keeps_state(loader: Any) -> bool:
    """Tell whether a loader keeps its own position, in a ``state_dict`` that it takes back."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def name_of(loader: Any) -> str:
    """Return the class of the user's loader, for messages; a class of ours that stands for one has `named_as`."""
    return type(getattr(loader, "named_as", loader)).__name__


def unwrapped(loader: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return the loader that ``Fabric.setup_dataloaders`` has wrapped, and what moves its batches to the device.

    The wrapper counts the epochs of its process for the sampler, from 0 in each, and has no position; of the loader
    within both are known. Any other loader is returned as it is, with None.
    """
    inner = vars(loader).get("_dataloader") if type(loader).__name__ == "_FabricDataLoader" else None
    if inner is None:
        return loader, None
    device, move = loader.device, sys.modules[type(loader).__module__].move_data_to_device
    return inner, None if device is None else lambda batch: move(batch, device)


@contextlib.contextmanager
def ordered(loader: Any) -> Iterator[None]:
    """Let a loader make an iterator with ``in_order=True``: which worker is the first to give a batch is chance."""
    options = getattr(loader, "__dict__", {})
    if options.get("in_order", True):
        yield
        return
    options["in_order"] = True  # torch forbids to set some attributes
    try:
        yield
    finally:
        options["in_order"] = False


class IndexFeed:
    """The sampler of a clone: yields the indices of one epoch after another, so that workers can stay."""

    def __init__(self) -> None:
        self.source: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.source


@dataclass(slots=True)
class Clone:
    """A loader like the user's that takes its indices from a feed and draws no global random numbers.

    Attributes:
        loader: it.
        feed: where its indices come from.
        held: numbers and text that its data set held when persistent workers began with a copy of it; None: there are
            none, or it is known that they differ.
    """

    loader: DataLoader[Any]
    feed: IndexFeed
    held: dict[str, Any] | None

    def changed(self) -> list[str]:
        """Return the names of what the script has changed of the data set since its workers began, the first time."""
        if self.held is None:
            return []
        now, before = _plain_attributes(self.loader.dataset), self.held
        differ = [name for name, value in now.items() if name not in before or before[name] not in (value,)]
        self.held = None if differ else before
        return differ


# Clones with persistent workers, by loader and ``seeded``; they live as long as the loader.
_clones: weakref.WeakKeyDictionary[DataLoader[Any], dict[bool, Clone]] = weakref.WeakKeyDictionary()


def clone_of(loader: DataLoader[Any], *, seeded: bool) -> Clone:
    """Return the clone of ``loader``; with persistent workers the same one each time."""
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
    like: DataLoader[Any] = DataLoader(
        seeded_dataset(loader.dataset) if seeded else loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=seeded_collate(loader.collate_fn) if seeded else loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=torch.Generator(),
        **options,
    )
    if type(loader)._get_iterator is not DataLoader._get_iterator:  # torch_geometric makes its batches there
        made, like = like, copy.copy(loader)
        vars(like).update(vars(made))
    clone = Clone(like, feed, _plain_attributes(loader.dataset) if like.persistent_workers else None)
    if like.persistent_workers:
        _clones.setdefault(loader, {})[seeded] = clone
    return clone


def _plain_attributes(dataset: Any) -> dict[str, Any]:
    """Return numbers and text that a data set holds, and those that it wraps."""
    found: dict[str, Any] = {}
    for _ in range(4):
        held = {name: value for name, value in getattr(dataset, "__dict__", {}).items() if type(value) in _PLAIN}
        found = {**held, **found}
        dataset = getattr(dataset, "dataset", None)
    return found


_lock = threading.Lock()
_users = 0
_before: Any = None


class PersistentWorkerSeeds:
    """Keeps the worker seeds of loaders with persistent workers out of torch's global generator, from `begin` to `end`.

    Runs may overlap; the last run that ends puts torch's own method back.
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
