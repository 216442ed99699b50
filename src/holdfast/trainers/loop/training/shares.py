"""What each rank evaluates: whole batches, dealt out in turn, so that every sample counts once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from holdfast.state.data.loaders import clone_of
from holdfast.state.data.seeding import generators_kept, seed_all
from holdfast.state.data.split import knows_its_rank

from .ranks import Ranks

__all__ = ["EvaluationShare"]


class EvaluationShare:
    """The batches of one evaluation on this rank.

    Yields (batch, whether it counts). Where there are fewer batches left than ranks, those that have none get None, or,
    with ``together``, a batch of others that does not count.

    Args:
        loader: batches; a loader that splits itself over the ranks, or that cannot be split, is used as it is.
        ranks: the processes that evaluate.
        together: all ranks have to go through the model equally often.

    Attributes:
        even: all ranks make equally many rounds.

    Example:
        >>> [batch.tolist() for batch, _ in Share(DataLoader(range(5), batch_size=2), Ranks(), together=False)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, loader: Any, ranks: Ranks, *, together: bool) -> None:
        self._loader, self._ranks, self._together = loader, ranks, together
        self._dealt = ranks.world_size > 1 and _can_be_dealt(loader)
        self.even = self._dealt or ranks.world_size == 1

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        if not self._dealt:
            for batch in self._loader:
                yield batch, True
            return
        loader, feed = clone_of(self._loader, seeded=False)
        with generators_kept():
            seed_all(0)  # whatever is drawn for the order is the same on all ranks
            every = list(loader_keys(self._loader))
        size, mine = self._ranks.world_size, self._ranks.rank
        rounds = -(-len(every) // size)
        numbers = [mine + size * number for number in range(rounds)]
        filled = [number % len(every) for number in numbers if number < len(every) or self._together]
        feed.source = (every[number] for number in filled)
        for number, batch in itertools.zip_longest(numbers, loader):
            yield batch, number < len(every)


def loader_keys(loader: DataLoader[Any]) -> Any:
    """Return the sampler that says what a loader draws: batches, or samples where nothing batches."""
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def _can_be_dealt(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and not callable(getattr(loader, "state_dict", None))
        and not knows_its_rank(loader.sampler, loader.batch_sampler)
    )
