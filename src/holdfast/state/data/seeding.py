"""Randomness of the data side, kept apart from that of training.

Every seed here is a stable hash of (seed, epoch, ...), so that the augmentation of a sample depends on the sample,
not on the process that loads it or on when the run was last started.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from ..tree import rng

__all__ = [
    "SampleKey", "SampleKeys", "SeededDataset", "Stream", "generators_kept", "generators_of", "generators_within",
    "index_id", "mix", "put_generator", "seed_all", "take_generator",
]  # fmt: skip

_MASK = (1 << 64) - 1
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MOST_OBJECTS = 64
_pack3 = struct.Struct("<QQQ").pack


def mix(first: int, second: int = 0, third: int = 0) -> int:
    """Hash three whole numbers (each modulo 2**64) to 64 bits, the same on every platform and release."""
    return xxhash.xxh3_64_intdigest(_pack3(first & _MASK, second & _MASK, third & _MASK))


def index_id(index: Any) -> int:
    """Return an integer for a dataset index of any kind (int, str, tuple, list of ints ...)."""
    try:
        return int(index.__index__())
    except AttributeError:
        return xxhash.xxh3_64_intdigest(repr(index).encode())


def seed_all(seed: int) -> None:
    """Seed the generators of python, NumPy and torch (CPU) from 64 bits.

    torch's default generator is seeded directly: `torch.manual_seed` also visits every accelerator, 100 x the cost.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


_State = tuple[Any, Any, torch.Tensor]


def _take() -> _State:
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _put(state: _State) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.default_generator.set_state(state[2])


@contextmanager
def generators_kept(others: Sequence[Any] = ()) -> Iterator[None]:
    """Leave the generators of python, NumPy and torch (CPU), and others, as they were on entry. About 0.1 ms."""
    before = _take()
    others_before = [take_generator(generator) for generator in others]
    try:
        yield
    finally:
        _put(before)
        for generator, state in zip(others, others_before, strict=True):
            put_generator(generator, state)


def generators_of(*owners: object) -> list[Any]:
    """Return the generators that these objects hold as attributes: torch's, NumPy's, python's; each generator once.

    Attributes named ``generator`` come first, the others in the order in which they were set.
    """
    named = [getattr(owner, "generator", None) for owner in owners]
    others = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    return list({id(held): held for held in [*named, *others] if isinstance(held, _KINDS)}.values())


def generators_within(dataset: Any) -> list[Any]:
    """Return the generators that a data set holds, those of what it wraps and of its transforms included."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [(dataset, 0)]
    while waiting and len(seen) < _MOST_OBJECTS:
        owner, depth = waiting.pop(0)
        if isinstance(owner, _KINDS):
            found[id(owner)] = owner
        elif id(owner) not in seen and depth < 4:
            seen.add(id(owner))
            if isinstance(owner, (list, tuple)):
                held = list(owner) if len(owner) <= _MOST_OBJECTS else []
            elif isinstance(owner, (torch.nn.Module, type, ModuleType)):
                held = []
            else:
                held = list(getattr(owner, "__dict__", {}).values())
            inner = [value for value in held if hasattr(value, "__dict__") or isinstance(value, (*_KINDS, list, tuple))]
            waiting += [(value, depth + 1) for value in inner]
    return list(found.values())


def take_generator(generator: Any) -> Any:
    """Return the state of one of these generators."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def put_generator(generator: Any, state: Any) -> None:
    """Set what `take_generator` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed_own(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        generator.seed(seed)


class Stream:
    """Private states of the global generators: code inside ``with stream:`` draws from them, other code does not.

    Seeded at the first entry; each later entry goes on where the last entry stopped. ``generators`` are further
    generators that belong to the data side (a sampler's own, see `generators_of`) and are treated alike.
    """

    def __init__(self, seed: int, generators: Sequence[Any] = ()) -> None:
        self._seed = seed
        self._generators = list(generators)
        self._inner: tuple[_State, list[Any]] | None = None
        self._outer: tuple[_State, list[Any]] | None = None

    def __enter__(self) -> Stream:
        self._outer = (_take(), [take_generator(generator) for generator in self._generators])
        if self._inner is None:
            self.reseed()
        else:
            self._switch(self._inner)
        return self

    def __exit__(self, *_: object) -> None:
        self._inner = (_take(), [take_generator(generator) for generator in self._generators])
        if self._outer is not None:
            self._switch(self._outer)

    def reseed(self) -> None:
        """Go back to the first states; only inside ``with``."""
        seed_all(self._seed)
        for number, generator in enumerate(self._generators):
            _seed_own(generator, mix(self._seed, 1, number))

    def _switch(self, state: tuple[_State, list[Any]]) -> None:
        _put(state[0])
        for generator, own in zip(self._generators, state[1], strict=True):
            put_generator(generator, own)

    def state_dict(self) -> dict[str, Any]:
        """Describe the states of the three global generators at the next entry."""
        with self:
            return rng.capture(devices=False)

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Go on from the states that `state_dict` described; returns a line for each that could not be restored."""
        with self:
            return rng.restore(state)


def _loads_batches(dataset: Any) -> bool:
    """Tell whether the user wrote a batched fetch; the method of torch's `Subset` only calls that of its dataset."""
    while type(dataset) is torch.utils.data.Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


class SampleKey(NamedTuple):
    """The message to a worker for one sample."""

    index: Any
    seed: int


class SampleKeys(NamedTuple):
    """The message to a worker for one batch."""

    indices: list[Any]
    seeds: list[int]


class SeededDataset:
    """The user's map-style dataset with the generators seeded before each sample.

    The generators stay as the last sample left them, so a random ``collate_fn`` is a function of the batch as well; in
    the training process the caller restores them once per batch. A dataset with ``__getitems__`` loads a
    batch in one call: it is seeded once for the batch, from all of its indices, so its randomness depends on the batch
    boundaries. Generators that the data set holds itself are seeded as the global ones are.
    Attributes are read from and set on the user's dataset (a ``worker_init_fn`` opens files there).
    """

    __slots__ = ("_inner", "_own")
    _inner: Any
    _own: list[Any]

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_own", generators_within(inner))

    def _seed(self, seed: int) -> None:
        seed_all(seed)
        for number, generator in enumerate(self._own):
            _seed_own(generator, mix(seed, 1, number))

    def __getitem__(self, key: SampleKey) -> Any:
        self._seed(key.seed)
        return self._inner[key.index]

    def __getitems__(self, keys: SampleKeys) -> Any:
        inner = self._inner
        if _loads_batches(inner):
            self._seed(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(keys.seeds)}Q", *keys.seeds)))
            return inner.__getitems__(keys.indices)
        samples = []
        for index, seed in zip(keys.indices, keys.seeds, strict=True):
            self._seed(seed)
            samples.append(inner[index])
        return samples

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededDataset, (self._inner,)
