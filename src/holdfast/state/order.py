"""The order of a map-style loader: which indices make up which batch, as a function of (seed, epoch).

An order is opened at a number of samples (of this rank) and goes on from there; skipped indices are stepped over as
numbers, their samples are never loaded.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from .seeding import Stream, index_id, mix

__all__ = ["MapOrder"]

_SAMPLES_AHEAD = 4096
_BATCHES_AHEAD = 64


class MapOrder:
    """The batches of indices of one epoch of a map-style `DataLoader`.

    Attributes:
        replicas: over how many ranks the sampler splits the data set; 1 when every rank sees the same samples.
        split_known: whether ``replicas`` was read off the sampler rather than assumed.
        auto_batch: whether the loader makes batches (and collates lists of samples).
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int, epoch: int, world_size: int) -> None:
        self._epoch_key = mix(seed, epoch)
        batch_sampler: Any = loader.batch_sampler
        self.auto_batch = batch_sampler is not None
        self._batch_size: int | None = loader.batch_size
        self._drop_last = loader.drop_last
        self._sampler: Any = loader.sampler
        self._batch_sampler: Any = None
        if self.auto_batch and type(batch_sampler) is BatchSampler:
            # Both what DataLoader made itself and one passed in: three numbers say everything.
            self._sampler = batch_sampler.sampler
            self._batch_size, self._drop_last = batch_sampler.batch_size, batch_sampler.drop_last
        elif self.auto_batch:
            self._batch_sampler = batch_sampler
            self._sampler = getattr(batch_sampler, "sampler", None)
        for owner in (self._sampler, self._batch_sampler):
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(epoch)
        self.replicas, self.split_known = self._replicas(world_size)
        self._known = None if self._batch_sampler is not None else self._known_order()
        self._draws_twice = self._known is None or (
            type(self._sampler) is RandomSampler
            and (self._sampler.replacement or self._sampler.num_samples > len(self._sampler.data_source))
        )

    @property
    def sampler_name(self) -> str:
        """The type that decides the order, for comparison with a saved position."""
        return type(self._batch_sampler if self._batch_sampler is not None else self._sampler).__name__

    def num_batches(self, skip: int) -> int | None:
        """How many batches follow after ``skip`` samples of this rank; None where the sampler cannot tell."""
        try:
            if self._batch_sampler is not None:
                # Batches of unknown sizes: exact at the start only.
                return len(self._batch_sampler) if skip == 0 else None
            length = len(self._known) if self._known is not None else len(self._sampler)
        except (TypeError, NotImplementedError):
            return None
        left, size = max(0, length - skip), self._batch_size or 1
        return left // size if self._drop_last else -(-left // size)

    def batches(self, skip: int) -> Iterator[tuple[list[Any], list[int]]]:
        """Yield (indices, seeds) of each batch after ``skip`` samples; of each sample where nothing batches."""
        groups: Iterable[list[Any]]
        seen: Counter[int] = Counter()
        if self._batch_sampler is not None:
            groups = self._custom_batches(skip, seen)
        elif self._known is not None:
            if self._draws_twice:
                seen.update(_plain(self._known[:skip]))
            groups = self._slices(self._known, skip)
        else:
            indices = self._drawn(self._sampler, _SAMPLES_AHEAD)
            seen.update(index_id(index) for index in itertools.islice(indices, skip))
            groups = self._gather(indices)
        for group in groups:
            yield group, self._seeds(group, seen)

    def _seeds(self, group: list[Any], seen: Counter[int]) -> list[int]:
        """Return the seed of each sample. An index drawn again in an epoch gets another one: it is another draw."""
        key = self._epoch_key
        if not self._draws_twice:
            return [mix(key, index_id(index)) for index in group]
        seeds = []
        for index in group:
            number = index_id(index)
            seeds.append(mix(key, number, seen[number]))
            seen[number] += 1
        return seeds

    def _replicas(self, world_size: int) -> tuple[int, bool]:
        for owner in (self._batch_sampler, self._sampler):
            for name in ("num_replicas", "world_size"):
                number = getattr(owner, name, None)
                if isinstance(number, int) and number >= 1:
                    return number, True
        if type(self._sampler) in (RandomSampler, SequentialSampler) and self._batch_sampler is None:
            return 1, True
        return world_size, world_size == 1

    def _known_order(self) -> Sequence[int] | torch.Tensor | None:
        """Return the whole order at once where the sampler is torch's own; None for anybody else's."""
        sampler = self._sampler
        if type(sampler) is SequentialSampler:
            return range(len(sampler.data_source))
        if type(sampler) is DistributedSampler:
            return torch.tensor(list(sampler), dtype=torch.int64)  # a function of its own seed and the epoch
        if type(sampler) is not RandomSampler:
            return None
        generator = torch.Generator()
        generator.manual_seed(self._epoch_key)
        length, wanted = len(sampler.data_source), sampler.num_samples
        if sampler.replacement:
            return torch.randint(length, (wanted,), generator=generator)
        rounds = [torch.randperm(length, generator=generator) for _ in range(-(-wanted // length))]
        return torch.cat(rounds)[:wanted]

    def _slices(self, known: Any, skip: int) -> Iterator[list[Any]]:
        size = self._batch_size or 1
        for start in range(skip, len(known), size):
            group = _plain(known[start : start + size])
            if len(group) < size and self._drop_last:
                return
            yield group

    def _gather(self, indices: Iterator[Any]) -> Iterator[list[Any]]:
        size = self._batch_size or 1
        while group := list(itertools.islice(indices, size)):
            if len(group) < size and self._drop_last:
                return
            yield group

    def _custom_batches(self, skip: int, seen: Counter[int]) -> Iterator[list[Any]]:
        passed = 0
        for drawn in self._drawn(self._batch_sampler, _BATCHES_AHEAD):
            group = list(drawn)
            if passed < skip:
                passed += len(group)
                seen.update(index_id(index) for index in group)
                continue
            yield group

    def _drawn(self, source: Iterable[Any], ahead: int) -> Iterator[Any]:
        """Iterate over a sampler of unknown kind, its randomness a function of (seed, epoch) and of nothing else.

        It is run a stretch ahead at a time, inside its own stream of generators, so that endless samplers work and the
        generators are switched rarely.
        """
        owners = (self._sampler, self._batch_sampler)
        found = [getattr(owner, "generator", None) for owner in owners]
        own = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
        stream = Stream(self._epoch_key, list(own.values()))
        with stream:
            iterator = iter(source)
        while True:
            with stream:
                stretch = list(itertools.islice(iterator, ahead))
            yield from stretch
            if len(stretch) < ahead:
                return


def _plain(indices: Any) -> list[Any]:
    return indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)
