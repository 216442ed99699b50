"""The order of a map-style loader: which indices make up which batch, as a function of (seed, epoch).

An order starts at a position, a number of samples of all ranks. Indices before it are skipped without loading their
samples. All ranks know the same order of the epoch. It is dealt out in turn (`Split`), as
`torch.utils.data.DistributedSampler` does: the first sample to rank 0, the second to rank 1, and so on. So the samples
that all ranks have had after a common step are the beginning of that order. Their number is the position, from which
any number of ranks can go on, again in turn.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from holdfast.errors import ConfigError

from .digest import indices_digest
from .seeding import Stream, generators_of, index_id, mix

_SAMPLES_AHEAD = 4096
_BATCHES_AHEAD = 64
_T = TypeVar("_T")


class MapOrder:
    """The batches of indices of one epoch of a map-style `DataLoader`.

    Args:
        loader: the loader; its sampler gets ``set_epoch``.
        seed: with ``epoch`` it seeds every draw that the sampler does not seed itself.
        epoch: number of the epoch.
        world_size: number of ranks.
        split: the part of this rank, for a sampler that does not divide samples between ranks.
        begun: the `recipe` with which this epoch was begun: it is finished in that order.
        memory: what `SamplerMemory.state_dict` returned; of this epoch if ``is_mid_epoch``, else of the one before.
        is_mid_epoch: the epoch was begun by an earlier pass.

    Attributes:
        memory: of samplers of the user's own; None where the order is torch's.
        prefix: digest of all indices up to the batch yielded last, for samplers with a memory; 0 for others.
        skipped: the same of those that were left out at the beginning; 0 where they cannot be compared.
        replicas: over how many ranks the samples are split; 1 if every rank sees the same samples.
        part: number of this rank among those that get different samples.
        recipe: what the order of the whole data set is computed from; None where only the sampler can draw it.
        divides: whether any number of ranks can go on from any position, with each sample once.
        auto_batch: whether the loader makes batches (and collates lists of samples).

    Raises:
        ConfigError: ``split`` with a batch sampler that is not torch's.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        seed: int,
        epoch: int,
        world_size: int,
        split: Split | None = None,
        begun: Mapping[str, Any] | None = None,
        memory: Mapping[str, Any] | None = None,
        is_mid_epoch: bool = False,
    ) -> None:
        self._epoch_key = mix(seed, epoch)
        batch_sampler: Any = loader.batch_sampler
        self.auto_batch = batch_sampler is not None
        self._batch_size: int | None = loader.batch_size
        self._drop_last = loader.drop_last
        self._sampler: Any = loader.sampler
        self._batch_sampler: Any = None
        if self.auto_batch and type(batch_sampler) is BatchSampler:
            # A plain batch sampler, DataLoader's own or the user's: its sampler, size and drop_last describe it.
            self._sampler = batch_sampler.sampler
            self._batch_size, self._drop_last = batch_sampler.batch_size, batch_sampler.drop_last
        elif self.auto_batch:
            self._batch_sampler = batch_sampler
            self._sampler = getattr(batch_sampler, "sampler", None)
        self._epoch = epoch
        self._set_epoch()
        self._split = self._find_split(split)
        self.replicas = self._split.num_ranks if self._split is not None else self._replicas(world_size)
        self.part = self._split.rank if self._split is not None else self._own_rank()
        self.recipe = None if self._batch_sampler is not None else self._own_recipe(epoch)
        if self.recipe is not None and begun is not None:
            self.recipe = dict(begun)
        self.divides = self._split is not None or (self.replicas == 1 and self._batch_sampler is None)
        # Draws of torch's sampler that no recipe describes (with replacement, part of an epoch, several rounds of it).
        self._torchs_draws = (
            self.recipe is None and self._batch_sampler is None and type(self._sampler) is RandomSampler
        )
        self.memory: SamplerMemory | None = None
        if self.recipe is None and not self._torchs_draws:
            from .sampler_memory import SamplerMemory  # not above: torch's own samplers are known by their recipes

            owners = [self._batch_sampler, self._sampler]
            self.memory = SamplerMemory(owners, given=memory, is_mid_epoch=is_mid_epoch)
        self.prefix = self.skipped = 0
        self._is_compared = True

    def _set_epoch(self) -> None:
        for owner in (self._sampler, self._batch_sampler):
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(self._epoch)

    @property
    def sampler_name(self) -> str:
        """The type that decides the order, for comparison with a saved position."""
        return type(self._batch_sampler if self._batch_sampler is not None else self._sampler).__name__

    def num_batches(self, start: int) -> int | None:
        """How many batches follow for this rank after ``start`` samples of all ranks; None if that is unknown."""
        try:
            if self._batch_sampler is not None:
                # Batches of unknown sizes: exact at the start only.
                return len(self._batch_sampler) if start == 0 else None
            length = self._num_samples() if self.recipe is not None else len(self._sampler)
        except (TypeError, NotImplementedError):
            return None
        if self._split is not None:
            left = self._split.num_left(length, start)
        else:
            left = max(0, length - start // self.replicas)
        size = self._batch_size or 1
        return left // size if self._drop_last else -(-left // size)

    def batches(self, start: int, *, seeded: bool = True) -> Iterator[tuple[list[Any], list[int]]]:
        """Yield (indices, seeds) of each batch of this rank; of each sample if the loader makes no batches.

        Args:
            start: samples of this epoch that all ranks together have had.
            seeded: yield the seeds; if False they may be left out, which saves a microsecond for each sample.
        """
        key, split = self._epoch_key, self._split
        if self._batch_sampler is not None:
            yield from self._custom_batches(start // self.replicas)
        elif (known := self._known_order()) is not None:
            mine = split.share(known, start) if split is not None else known[start // self.replicas :]
            for group in self._slices(mine):
                yield group, [mix(key, index_id(index)) for index in group] if seeded else []
        else:
            # Numbered before they are divided: random numbers of a sample do not depend on the number of ranks.
            own = self._numbered_from(start)
            for pairs in self._gather(own):
                if self.memory is not None:
                    self._extend([index for index, _ in pairs])
                yield [index for index, _ in pairs], [mix(key, index_id(index), nth) for index, nth in pairs]

    def _numbered_from(self, start: int) -> Iterator[tuple[Any, int]]:
        """Yield (index, how often it came before) of each sample of this rank, after ``start`` samples of all ranks."""
        split, seen = self._split, Counter[int]()
        if self._torchs_draws and (split is None or split.num_ranks == 1):
            return _numbered(self._random_draws(skip=start // self.replicas, seen=seen), seen)
        if self._torchs_draws:
            source: Iterable[Any] = self._random_draws()
        else:
            source = self._drawn(self._sampler, _SAMPLES_AHEAD)
        drawn = _numbered(source, seen)
        if split is not None:
            return split.deal(drawn, start)
        if self.memory is None:
            return itertools.islice(drawn, start // self.replicas, None)
        return self._without(drawn, start // self.replicas)

    def _without(self, drawn: Iterator[tuple[Any, int]], skip: int) -> Iterator[tuple[Any, int]]:
        """Leave out the first samples of a sampler of the user's own, batch by batch as they were given."""
        left = skip
        # Batches of another size were trained before: where they ended is not known, so nothing is to be compared.
        self._is_compared = skip % (self._batch_size or 1) == 0
        while left > 0 and (group := list(itertools.islice(drawn, min(left, self._batch_size or 1)))):
            self._extend([index for index, _ in group])
            left -= len(group)
        self.skipped = self.prefix
        yield from drawn

    def _extend(self, indices: list[Any]) -> None:
        if self._split is not None or not self._is_compared:
            return  # the part of a rank: positions are the same on all of them
        self.prefix = mix(self.prefix, indices_digest(indices))

    def _random_draws(self, *, skip: int = 0, seen: Counter[int] | None = None) -> Iterator[int]:
        """Draw as torch's `RandomSampler` does, a stretch at a time: an epoch may be as long as 10**10 samples.

        Args:
            skip: how many draws to leave out at the beginning.
            seen: counts the indices that are left out.
        """
        sampler = self._sampler
        length, wanted = len(sampler.data_source), sampler.num_samples
        generator = torch.Generator().manual_seed(self._epoch_key)
        done = 0
        while done < wanted:
            if sampler.replacement:
                num_draws = min(_SAMPLES_AHEAD, wanted - done)
                stretch = torch.randint(length, (num_draws,), generator=generator, device="cpu")
            else:
                stretch = torch.randperm(length, generator=generator, device="cpu")[: wanted - done]
            left_out = min(len(stretch), max(0, skip - done))
            if left_out and seen is not None:
                seen.update(stretch[:left_out].tolist())
            done += len(stretch)
            yield from stretch[left_out:].tolist()

    def _find_split(self, given: Split | None) -> Split | None:
        """Return how the order is divided: as the sampler does if it divides in turn, else as the caller asks."""
        sampler = self._sampler
        if self._batch_sampler is None and type(sampler) is DealtSampler:
            self._sampler = sampler.sampler
            return Split(rank=sampler.rank, num_ranks=sampler.num_replicas)
        if self._batch_sampler is None and _is_torchs_split(sampler):
            return Split(rank=sampler.rank, num_ranks=sampler.num_replicas, drop_uneven=sampler.drop_last)
        if given is None or knows_its_rank(self._batch_sampler, sampler):
            return None
        if self._batch_sampler is not None:
            raise ConfigError(
                f"how to split the batches of a {type(self._batch_sampler).__name__} over {given.num_ranks} ranks is "
                "not known: give it num_replicas and rank, or pass split=False if every rank is to have all of them "
                "(or it splits them by itself)"
            )
        # With drop_last, no sample is drawn twice to fill the last round either.
        return replace(given, drop_uneven=self._drop_last)

    def _replicas(self, world_size: int) -> int:
        for owner in (self._batch_sampler, self._sampler):
            for name in ("num_replicas", "world_size"):
                number = getattr(owner, name, None)
                if isinstance(number, int) and number >= 1:
                    return number
        plain = type(self._sampler) in (RandomSampler, SequentialSampler) and self._batch_sampler is None
        return 1 if plain else world_size

    def _own_rank(self) -> int:
        ranks = (getattr(owner, "rank", None) for owner in (self._batch_sampler, self._sampler))
        return next((rank for rank in ranks if isinstance(rank, int)), 0)

    def _own_recipe(self, epoch: int) -> dict[str, Any] | None:
        """Describe the order of the whole data set, if it is torch's own and each sample comes once."""
        sampler = self._sampler
        if type(sampler) is SequentialSampler or (_is_torchs_split(sampler) and not sampler.shuffle):
            return {"order": "sequence", "seed": 0}
        if _is_torchs_split(sampler):
            return {"order": "shuffle", "seed": sampler.seed + epoch}  # as DistributedSampler.__iter__ has it
        if type(sampler) is not RandomSampler or sampler.replacement:
            return None
        whole = sampler.num_samples == len(sampler.data_source)
        return {"order": "shuffle", "seed": self._epoch_key} if whole else None

    def _num_samples(self) -> int:
        """Number of samples of the data set whose order there is a recipe for."""
        sampler = self._sampler
        return len(sampler.dataset if _is_torchs_split(sampler) else sampler.data_source)

    def _known_order(self) -> Sequence[int] | torch.Tensor | None:
        """Return the order of the whole data set if there is a recipe for it, else None."""
        if self.recipe is None:
            return None
        length = self._num_samples()
        if self.recipe["order"] == "sequence":
            return range(length)
        generator = torch.Generator().manual_seed(int(self.recipe["seed"]))
        return torch.randperm(length, generator=generator, device="cpu")

    def _slices(self, mine: Any) -> Iterator[list[Any]]:
        size = self._batch_size or 1
        for start in range(0, len(mine), size):
            group = _plain(mine[start : start + size])
            if len(group) < size and self._drop_last:
                return
            yield group

    def _gather(self, drawn: Iterator[_T]) -> Iterator[list[_T]]:
        size = self._batch_size or 1
        while group := list(itertools.islice(drawn, size)):
            if len(group) < size and self._drop_last:
                return
            yield group

    def _custom_batches(self, skip: int) -> Iterator[tuple[list[Any], list[int]]]:
        passed = 0
        seen: Counter[int] = Counter()
        for drawn in self._drawn(self._batch_sampler, _BATCHES_AHEAD):
            group = list(drawn)
            pairs = list(_numbered(group, seen))
            self._extend(group)
            if passed < skip:
                passed += len(group)
                self.skipped = self.prefix
                continue
            yield group, [mix(self._epoch_key, index_id(index), nth) for index, nth in pairs]

    def _drawn(self, source: Iterable[Any], ahead: int) -> Iterator[Any]:
        """Iterate over a sampler of unknown kind, with draws that depend on (seed, epoch) only."""
        memory = self.memory
        if memory is not None:
            memory.begin()
            self._set_epoch()

        def held(is_first: bool) -> Sequence[Any]:
            if memory is not None:
                memory.drawn()
            may_begin_anew = is_first and (memory is None or not memory.has_changed)
            return generators_of(self._sampler, self._batch_sampler) if may_begin_anew else ()

        stream = Stream(self._epoch_key, generators_of(self._sampler, self._batch_sampler))
        yield from stream.drawn(source, ahead, held)


def _numbered(indices: Iterable[Any], seen: Counter[int] | None = None) -> Iterator[tuple[Any, int]]:
    """Yield each index and how often it came before: an index drawn again in an epoch is another draw."""
    seen = Counter() if seen is None else seen
    for index in indices.tolist() if isinstance(indices, torch.Tensor) else indices:
        number = index_id(index)
        yield index, seen[number]
        seen[number] += 1


def _is_torchs_split(sampler: Any) -> bool:
    return isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__


def _plain(indices: Any) -> list[Any]:
    return indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)


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
            return torch.cat([mine, torch.as_tensor(filling, device=mine.device).view(1)])
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
