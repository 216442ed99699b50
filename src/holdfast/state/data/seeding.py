"""Randomness of the data side, kept apart from that of training.

Every seed here is a stable hash of (seed, epoch, ...), so that the augmentation of a sample depends on the sample,
not on the process that loads it or on when the run was last started.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import operator
import os
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from ..tree import rng

_MASK = (1 << 64) - 1
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MOST_OBJECTS, _MOST_DEPTH = 4096, 8
_MOST_ITEMS, _FEW_ITEMS = 256, 16  # of a list that is looked into; that is looked into at once
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


def generators_within(*owners: Any) -> list[Any]:
    """Return the generators that a data set, or a ``collate_fn``, holds: in what it wraps, its transforms, closures.

    Those of a device are not the data side's: workers cannot reach them.
    """
    found = {id(held): held for held in objects_within(*owners) if isinstance(held, _KINDS)}
    return [held for held in found.values() if not isinstance(held, torch.Generator) or held.device.type == "cpu"]


def objects_within(*owners: Any) -> Iterator[Any]:
    """Yield what a data set, or a ``collate_fn``, holds, as far as it may hold generators; itself first.

    What long lists hold comes last, the longest at the end: they are records of data, which would use up the bound.
    """
    seen: set[int] = set()
    classes: set[type] = set()
    order = itertools.count()
    waiting = [(0, next(order), owner, 0) for owner in owners]
    kinds = (*_KINDS, list, tuple, dict, partial)
    while waiting and len(seen) < _MOST_OBJECTS:
        length, _, owner, depth = heapq.heappop(waiting)
        if isinstance(owner, _KINDS):
            yield owner
        elif id(owner) not in seen and depth < _MOST_DEPTH:
            seen.add(id(owner))
            yield owner
            if isinstance(owner, (list, tuple, dict)) and len(owner) > _FEW_ITEMS:
                length = max(length, len(owner))
            if type(owner) not in classes:
                classes.add(type(owner))
                yield from (
                    held for kind in type(owner).__mro__ for held in vars(kind).values() if isinstance(held, _KINDS)
                )
            for value in _held(owner):
                if isinstance(value, kinds) or (hasattr(value, "__dict__") and not isinstance(value, torch.Tensor)):
                    heapq.heappush(waiting, (length, next(order), value, depth + 1))


def _held(owner: Any) -> list[Any]:
    if isinstance(owner, (list, tuple, dict)):
        values = owner.values() if isinstance(owner, dict) else owner
        return list(values) if len(owner) <= _MOST_ITEMS else []
    if isinstance(owner, (torch.nn.Module, type, ModuleType)) or _is_grains_pool(owner):
        return []
    if isinstance(owner, partial):
        return [owner.func, *owner.args, *owner.keywords.values()]
    if isinstance(owner, MethodType):
        return [owner.__self__]
    held = list(getattr(owner, "__dict__", {}).values())
    if isinstance(owner, FunctionType):
        for cell in owner.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # a variable that has no value yet
                continue
        held += [*(owner.__defaults__ or ()), *(owner.__kwdefaults__ or {}).values()]
    return held


def _is_grains_pool(owner: Any) -> bool:
    """Tell whether grain (as of 0.2) seeds these generators itself, for each sample, and uses them in its threads."""
    return type(owner).__module__.startswith("grain.") and hasattr(owner, "acquire_rng")


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

    def adopt(self, generators: Sequence[Any]) -> bool:
        """Treat these generators alike from now on; returns whether one of them is new. Only inside ``with``."""
        known = {id(generator) for generator in self._generators}
        new = [generator for generator in generators if id(generator) not in known]
        self._generators += new
        if self._outer is not None:
            self._outer[1].extend(map(take_generator, new))
        return bool(new)

    def drawn(
        self, source: Iterable[Any], ahead: int, held: Callable[[bool], Sequence[Any]] | None = None
    ) -> Iterator[Any]:
        """Iterate over a sampler inside this stream.

        It runs ``ahead`` entries at a time, so that endless samplers work and the generators are switched rarely.

        Args:
            source: the sampler.
            ahead: how many entries are drawn at a time.
            held: asked after each stretch, with True after the first, for generators that drawing may have made: they
                are seeded like the others, and the stretch is drawn anew.
        """
        with self:
            iterator = iter(source)
        is_first = True
        while True:
            with self:
                stretch = list(itertools.islice(iterator, ahead))
            if held is not None and (late := held(is_first)):
                with self:
                    if self.adopt(late):
                        self.reseed()
                        iterator = iter(source)
                        stretch = list(itertools.islice(iterator, ahead))
            is_first = False
            yield from stretch
            if len(stretch) < ahead:
                return

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


class _Own:
    """The generators that an object of the data side holds, seeded before each call of it."""

    __slots__ = ("_found", "_owner", "_process")

    def __init__(self, owner: Any) -> None:
        self._owner, self._found = owner, generators_within(owner)
        self._process = 0

    @property
    def is_settled(self) -> bool:
        """Whether this process has made a call."""
        return self._process == os.getpid()

    def call(self, seed: int, function: Callable[[Any], Any], given: Any) -> Any:
        """Return ``function(given)``, with the generators seeded.

        The first call in a process may make them (``if self.rng is None``), from numbers that depend on the process,
        and a ``worker_init_fn`` has made others: they are seeded too, and what was drawn from them is drawn again.
        """
        if self.is_settled:
            self.seed(seed)
            return function(given)
        before, kept = _take(), _copied(given)
        self._found = generators_within(self._owner)
        self.seed(seed)
        result = function(given)
        known, self._found = {id(generator) for generator in self._found}, generators_within(self._owner)
        self._process = os.getpid()
        if known.issuperset(map(id, self._found)):
            return result
        _put(before)
        self.seed(seed)
        return function(kept)

    def seed(self, seed: int) -> None:
        """Seed them."""
        for number, generator in enumerate(self._found):
            _seed_own(generator, mix(seed, 1, number))


def _copied(given: Any) -> Any:
    try:
        return copy.deepcopy(given)
    except Exception:  # noqa: BLE001 - an object of the user's that cannot be copied: it is given again
        return given


class SeededCollate:
    """The user's ``collate_fn`` with the generators that it holds seeded from the last sample of the batch."""

    __slots__ = ("_inner", "_own")

    def __init__(self, inner: Callable[[Any], Any]) -> None:
        self._inner, self._own = inner, _Own(inner)

    def __call__(self, samples: Any) -> Any:
        """Return the batch of these samples, which this process has just loaded."""
        return self._own.call(mix(torch.initial_seed(), 2), self._inner, samples)

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededCollate, (self._inner,)


class SeededDataset:
    """The user's map-style dataset with the generators seeded before each sample.

    The generators stay as the last sample left them, so a random ``collate_fn`` is a function of the batch as well; in
    the training process the caller restores them once per batch. A dataset with ``__getitems__`` loads a
    batch in one call: it is seeded once for the batch, from all of its indices, so its randomness depends on the batch
    boundaries. Generators that the data set holds itself are seeded as the global ones are (`_Own`).
    Attributes are read from and set on the user's dataset (a ``worker_init_fn`` opens files there).
    """

    __slots__ = ("_inner", "_own")
    _inner: Any
    _own: _Own

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_own", _Own(inner))

    def __getitem__(self, key: SampleKey) -> Any:
        seed_all(key.seed)
        return self._own.call(key.seed, partial(operator.getitem, self._inner), key.index)

    def __getitems__(self, keys: SampleKeys) -> Any:
        inner = self._inner
        if _loads_batches(inner):
            seed = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(keys.seeds)}Q", *keys.seeds))
            seed_all(seed)
            return self._own.call(seed, inner.__getitems__, keys.indices)
        own = self._own
        samples: list[Any] = []
        for index, seed in zip(keys.indices, keys.seeds, strict=True):
            if samples or own.is_settled:
                seed_all(seed)
                own.seed(seed)
                samples.append(inner[index])
            else:
                samples.append(self[SampleKey(index, seed)])
        return samples

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededDataset, (self._inner,)


class _StatedDataset(SeededDataset):
    """The same of a data set with a state, which torchdata's loader saves."""

    __slots__ = ()

    def state_dict(self) -> Any:
        return self._inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._inner.load_state_dict(state)

    def __reduce__(self) -> tuple[Any, ...]:
        return _StatedDataset, (self._inner,)


def seeded_dataset(dataset: Any) -> Any:
    """Return a map-style data set that takes the messages of a loader whose samples are seeded."""
    return (_StatedDataset if hasattr(dataset, "state_dict") else SeededDataset)(dataset)


def seeded_collate(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a ``collate_fn`` whose generators are seeded; torch's own functions draw nothing."""
    is_torchs = getattr(collate_fn, "__module__", "").startswith("torch.utils.data")
    return collate_fn if is_torchs else SeededCollate(collate_fn)
