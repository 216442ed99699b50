"""How an epoch is divided between the ranks, and how its rest is divided again between another number of ranks.

All ranks know the same order of the epoch, a function of seed and epoch only. It is dealt out in turn, as
`torch.utils.data.DistributedSampler` does: the first sample to rank 0, the second to rank 1, and so on. So the samples
that all ranks have had after a common step are the beginning of that order. Their number is the position, from which
any number of ranks can go on, again in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from holdfast.errors import ConfigError

__all__ = ["DealtSampler", "Split", "knows_its_rank", "split_of"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The part of one rank. Every rank gets equally many samples, else their numbers of steps would differ.

    Attributes:
        rank: number of this part.
        num_ranks: how many ranks share the samples; a round has one sample for each.
        drop_uneven: leave out a last round that does not reach all ranks; else it is filled up with the first samples
            of the epoch, which some ranks then see again.

    Example:
        >>> [list(Split(rank=rank, num_ranks=2).share(range(7), 2)) for rank in range(2)]
        [[2, 4, 6], [3, 5, 0]]
    """

    rank: int = 0
    num_ranks: int = 1
    drop_uneven: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"split: rank {self.rank} is outside of {self.num_ranks}; ranks count from 0")

    def num_left(self, length: int, start: int) -> int:
        """How many samples each rank gets from an epoch of ``length`` samples after its first ``start``."""
        left = max(0, length - start)
        return left // self.num_ranks if self.drop_uneven else -(-left // self.num_ranks)

    def share(self, order: Sequence[int] | torch.Tensor, start: int) -> Sequence[int] | torch.Tensor:
        """Return the part of this rank of a known order, after its first ``start`` samples."""
        length, want = len(order), self.num_left(len(order), start)
        mine = order[start + self.rank :: self.num_ranks][:want]
        if len(mine) == want:
            return mine
        # Only the last round can lack a sample.
        filling = order[(start + self.rank + len(mine) * self.num_ranks - length) % length]
        if isinstance(mine, torch.Tensor):
            return torch.cat([mine, torch.as_tensor(filling).view(1)])
        return [*mine, int(filling)]

    def deal(self, drawn: Iterator[_T], start: int) -> Iterator[_T]:
        """Yield this rank's part of ``drawn`` after its first ``start`` entries; all ranks draw the same."""
        first = list(itertools.islice(drawn, self.num_ranks))
        rest = itertools.islice(itertools.chain(first, drawn), start, None)
        while turn := list(itertools.islice(rest, self.num_ranks)):
            if self.rank < len(turn):
                if len(turn) == self.num_ranks or not self.drop_uneven:
                    yield turn[self.rank]
            elif not self.drop_uneven:
                yield first[(self.rank - len(turn)) % len(first)]


class DealtSampler(Sampler[Any]):
    """Deals the draws of a sampler out to the ranks, as `DistributedSampler` does with a data set.

    All ranks must draw the same: `ResumableBatches` seeds the draw from (seed, epoch). If the ranks do not divide the
    number of draws, the first draws come again at the end.
    """

    def __init__(self, sampler: Sampler[Any], *, rank: int, num_replicas: int) -> None:
        self.sampler, self.rank, self.num_replicas = sampler, rank, num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the sampler."""
        if callable(getattr(self.sampler, "set_epoch", None)):
            self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.num_replicas)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return Split(rank=self.rank, num_ranks=self.num_replicas).deal(iter(self.sampler), 0)


def knows_its_rank(*samplers: Any) -> bool:
    """Tell whether one of these samplers (or the sampler inside of it) splits the data by itself."""
    # The attributes of DistributedSampler and similar samplers; torchdata and others have world_size.
    owners = [*samplers, *(getattr(sampler, "sampler", None) for sampler in samplers)]
    return any(
        hasattr(owner, "rank") and (hasattr(owner, "num_replicas") or hasattr(owner, "world_size")) for owner in owners
    )


def split_of(split: bool | tuple[int, int], *, rank: int, world_size: int) -> Split | None:
    """Read the ``split`` argument of `Checkpointer.batches`: over all ranks, not at all, or as (rank, num_ranks).

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(split, bool):
        return Split(rank=rank, num_ranks=world_size) if split and world_size > 1 else None
    pair = split if isinstance(split, tuple) and len(split) == 2 else (None, None)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in pair):
        raise ConfigError(f"split={split!r}: give True, False, or (rank, num_ranks) of the data-parallel ranks")
    return Split(rank=split[0], num_ranks=split[1])
