"""The iterators that `Checkpointer.batches` and `Checkpointer.enumerate` give: where a loop asks for its next batch.

Asking for the next batch is the boundary of the step before it: whatever the body did after ``ck.step()`` is done by
then, and nothing of the next batch has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .progress import Progress

__all__ = ["Batches", "NumberedBatches"]


class Batches:
    """The batches of the current epoch of one loader, from the position of the last trained step on.

    ``len()`` is the number of batches of the whole epoch, also after a resume in the middle of it. One object may be
    iterated in every epoch: ``iter()`` goes on with a pass that was left, and begins a new one after its end.

    Args:
        progress: knows the position.
        loader: what is iterated.
        name: of the loader within the run.
        split: how samples are dealt out to ranks; see `Checkpointer.batches`.
        ahead: batches that the loop draws before it trains them.
        ask: called before each batch is drawn.
        epoch_done: called with the number of finished epochs where beginning a pass ends the epoch before.
    """

    def __init__(
        self,
        progress: Progress,
        loader: Any,
        name: str,
        *,
        split: bool | tuple[int, int],
        ahead: int,
        ask: Callable[[], None],
        epoch_done: Callable[[int], None],
    ) -> None:
        self._progress, self._loader, self._name = progress, loader, name
        self._split, self._ahead = split, ahead
        self._ask, self._epoch_done = ask, epoch_done
        self._drawn: Iterator[Any] | None = None
        self._ended = False

    def __len__(self) -> int:
        return self._progress.length(self._loader, split=self._split)

    def __iter__(self) -> Iterator[Any]:
        if self._ended:
            self._drawn, self._ended = None, False
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        progress, name = self._progress, self._name
        if self._drawn is None:
            progress.turn_over(name, at_end=self._epoch_done)
        self._ask()
        if self._drawn is None:
            self._drawn = iter(progress.open(self._loader, name, split=self._split, ahead=self._ahead))
        try:
            batch = next(self._drawn)
        except StopIteration:
            self._ended = True
            progress.exhausted(name)
            raise
        progress.drew(name)
        return batch

    def __del__(self) -> None:
        # A loop that was left by `break` has no body any more: steps after it are boundaries of their own.
        if self._drawn is not None and not self._ended:
            self._progress.left_body(self._name)


class NumberedBatches:
    """Pairs of (index in the epoch, batch); the index is right after a resume in the middle of an epoch too.

    Args:
        batches: what `Checkpointer.batches` gave.
        index: tells the index of the batch drawn last.
    """

    def __init__(self, batches: Any, index: Callable[[], int]) -> None:
        self._batches, self._index = batches, index

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for batch in self._batches:
            yield self._index(), batch
