"""The data position: batches that go on where the last trained step stopped.

Three kinds of loader, from best to worst:

- ``map``: a `DataLoader` over a map-style dataset. The order is a function of (seed, epoch), the position a number of
  samples, seeking costs nothing.
- ``stateful``: the loader has ``state_dict`` and ``load_state_dict`` itself; the position holds its state.
- ``count``: any other iterable. The position is a number of batches; a resume draws and drops them, with a warning.

None of them moves the global generators that training draws from (with ``seed_samples=False`` the loader's own code
still may, as it would without Holdfast).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast._log import get_logger
from holdfast.errors import ConfigError, StateMismatchError

from ..tree.values import PerRank
from .digest import indices_digest
from .loaders import clone_of, is_map_loader, keeps_state, name_of, ordered
from .order import MapOrder, knows_its_rank, split_of
from .seeding import SampleKey, SampleKeys, Stream, generators_kept, generators_within, mix, objects_within

_logger = get_logger("data")
_END = object()
# Data sets that this process has seen a pass of.
_drawn_here: weakref.WeakSet[Any] = weakref.WeakSet()
_NUM_PREFIXES = 4096
_SHARED_COUNT = "next_epoch"  # of a data set of mosaicml-streaming, in memory that its workers share
# Remarks about data that this process has made, in the log or at the start of a run; each is made once.
said: set[str] = set()
# Loaders with state -> the epoch that they ended in this process: they go on to the next by themselves.
_ended: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class _Unread:
    """Stands for a batch that could not be read."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Given:
    """Raises what a generator says could not be read: one that raised itself could not go on behind it."""

    __slots__ = ("_batches",)

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if type(batch) is _Unread:
            raise batch.error
        return batch


class ResumableBatches:
    """The batches of one epoch of ``loader``, from ``position`` on.

    Iterating again goes on after the last yielded batch. ``len()`` is the number of batches left, where it is known.

    Args:
        loader: a `DataLoader`, an object with ``state_dict`` / ``load_state_dict``, or any iterable. A loader whose
            state holds for any number of ranks has an attribute ``elastic = True``.
        position: what `state_dict` returned in an earlier process; None, or a position in another epoch: start at the
            beginning of ``epoch``. Pass the end of the last epoch as well: a loader with its own state goes on from it.
        seed: with ``epoch`` it decides the order. A position made with another seed keeps that seed for its epoch.
        epoch: number of the epoch.
        seed_samples: seed python, NumPy and torch (CPU) from (seed, epoch, index) before each ``__getitem__``, so
            that augmentation is the same for any number of workers and after any resume (an unseeded
            ``numpy.random.default_rng()`` cannot be reached); a loader without indices gets its own stream of random
            numbers for the epoch, and so do generators that it holds. torchdata's loader has its samples seeded from
            their place in the epoch, too; workers of other loaders with a state draw as those decide.
        rank: number of this rank; only rank 0 logs remarks.
        world_size: number of ranks, to count samples over all of them.
        split: True divides the samples of a map-style loader between all ranks, (rank, num_ranks) between so many, if
            its sampler does not divide them itself; False: each rank gets all samples.
        remarks: log warnings about this loader; False for a loader of which only the length is needed.
        mismatch: called with a text where a sampler does not give the order again in which the epoch was begun, or a
            loader counts otherwise; it may raise. None: the text is logged.
        replayed: called with (index, batch) for each batch that was trained and is drawn again, to be dropped.
        is_reopened: the position is that of a pass of this process: its batches are numbered on, whatever their size.

    Raises:
        ConfigError: the loader cannot be split, or its position cannot be read.
        StateMismatchError: the position is that of another kind of loader.

    Example:
        >>> loader = DataLoader(range(6), batch_size=2)
        >>> first = ResumableBatches(loader, None, seed=1, epoch=0)
        >>> _ = next(iter(first))
        >>> [batch.tolist() for batch in ResumableBatches(loader, first.state_dict(), seed=1, epoch=0)]
        [[2, 3], [4, 5]]
    """

    def __init__(
        self,
        loader: Any,
        position: Mapping[str, Any] | None,
        *,
        seed: int,
        epoch: int,
        seed_samples: bool = True,
        rank: int = 0,
        world_size: int = 1,
        split: bool | tuple[int, int] | None = None,
        remarks: bool = True,
        mismatch: Callable[[str], None] | None = None,
        replayed: Callable[[int, Any], None] | None = None,
        is_reopened: bool = False,
    ) -> None:
        # Not a bound method: in a cycle the loader's workers would be left to the garbage collector, which takes the
        # feeder threads of their queues first, and torch then waits 5 s for each of them.
        self._mismatch = mismatch
        self._replayed = replayed
        self.kind = _kind(loader)
        self._loader = loader
        self._epoch = epoch
        self._seed_samples = seed_samples
        self._rank = rank
        self._world_size = world_size
        self._is_reopened = is_reopened
        self._samples = self._batches = 0
        self._indices = 0
        self._prefixes: dict[int, int] = {}  # digest of the indices up to a number of samples, of the last batches
        self._begun_prefix = 0  # that the position was saved with
        self._done = False
        self._inner: Any = None
        self._resumed: Any = None  # the state of this epoch that the loader was resumed from
        self._live: Any = None  # the loader while its state is that of this epoch
        self._iterator: Any = None  # of a loader without a state, while a loop over it is left
        self._carried: Any = None  # a stateful loader's state at the end of the epoch before
        self._carried_epoch = -1
        self._elastic = bool(getattr(loader, "elastic", False))
        self._is_same_world = position is None or position.get("world_size", world_size) == world_size
        current = position if position is not None and position["epoch"] == epoch else None
        self._seed = int(current["seed"]) if current is not None else seed
        own = generators_within(loader) if self.kind == "count" and seed_samples else []
        self._stream = Stream(mix(self._seed, epoch), own)
        if position is not None:
            self._check_kind(position)
            if current is None and self.kind == "stateful" and (self._elastic or self._is_same_world):
                self._carried, self._carried_epoch = position["inner"], int(position["epoch"])
        self._order: MapOrder | None = None
        if self.kind == "map":
            inner = current["inner"] if current is not None and current["inner"] is not None else {}
            memory = _own_of(position).get("memory")
            self._order = MapOrder(
                loader, seed=self._seed, epoch=epoch, world_size=world_size, begun=inner.get("recipe"),
                memory=memory, is_mid_epoch=current is not None,
                split=split_of(split or False, rank=rank, world_size=world_size),
            )  # fmt: skip
        self._passes = PassCounts(self._counter(), given=(position or {}).get("passes"))
        if current is not None:
            self._seek(current)
        if self._seed != seed:
            self._warn(
                f"epoch {epoch} was begun with data seed {self._seed}: it is finished with that seed, not {seed}"
            )
        if remarks:
            self._remarks(split)

    @property
    def samples(self) -> int:
        """Samples of this epoch yielded so far, over all ranks."""
        return self._samples

    @property
    def batches(self) -> int:
        """Batches of this epoch yielded so far, by this rank."""
        return self._batches

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._epoch

    @property
    def indices(self) -> int:
        """Digest of the indices of the batch yielded last; 0 for a loader without indices."""
        return self._indices

    def makeup(self) -> dict[str, Any]:
        """Describe the loader in plain values: batches of two loaders that differ in one of them are not comparable."""
        loader, order = self._loader, self._order
        return {
            "kind": self.kind,
            "batch size": _batch_option(loader, "batch_size"),
            # Of other kinds a change is told by the batches: what is written here of them is said when it changes.
            "drop_last": _batch_option(loader, "drop_last") if order is not None else None,
            "samples": _length(getattr(loader, "dataset", None)),
            "sampler": None if order is None else order.sampler_name,
            "ranks": self._world_size if order is None else order.replicas,
            "seed": self._seed,
        }

    @property
    def done(self) -> bool:
        """Whether the epoch was exhausted."""
        return self._done

    def has_data_of(self, loader: Any) -> bool:
        """Tell whether this pass is over the data set of ``loader``, or the loader itself if it has none."""
        return getattr(self._loader, "dataset", self._loader) is getattr(loader, "dataset", loader)

    def goes_on(self, loader: Any) -> bool:
        """Tell whether iterating again goes on with the iterator of ``loader`` that has given the batches so far.

        A loader without a state would be drawn again from its begin, and a generator has none: what it gives next is
        what comes next.
        """
        return self.kind == "count" and self._loader is loader and not self._done

    def state_dict(self, *, at: tuple[int, int] | None = None, is_over: bool = False) -> dict[str, Any]:
        """Describe how far the epoch is, as plain data. Batches that workers have prepared ahead do not count.

        Args:
            at: (samples, batches) of an earlier moment of this epoch, for a loader that can go back.
            is_over: the next epoch comes next, whether this one was exhausted or not.
        """
        samples, batches = at or (self._samples, self._batches)
        # Accelerate's loader draws a batch ahead: with the last one its state is that of the end.
        done = at is None and (self._done or getattr(self._live, "end_of_dataloader", None) is True)
        passes = self._passes.state_dict(num_batches=batches, is_over=is_over or done)
        return {
            "kind": self.kind,
            "epoch": self._epoch,
            "samples": samples,
            "batches": batches,
            "done": done,
            "seed": self._seed,
            "world_size": self._world_size,
            "inner": {**self._inner_state(), **self._memory(samples, is_over=is_over or done)}
            if self._order is not None
            else self._inner_state(),
            "elastic": self._elastic,
            **({"passes": passes} if passes else {}),
        }

    def __len__(self) -> int:
        if self._done:
            return 0
        left: int | None
        if self._order is not None:
            left = self._order.num_batches(self._samples)
            if left is None and (total := self._order.num_batches(0)) is not None:
                left = max(0, total - self._batches)
        else:
            left = max(0, len(self._loader) - self._batches)
        if left is None:
            raise TypeError(f"the number of batches left in this {name_of(self._loader)} is not known")
        return left

    def __iter__(self) -> Iterator[Any]:
        if self._done:
            return iter(())
        if self.kind == "map":
            return _Given(self._iterate_map())
        return self._iterate_stateful() if self.kind == "stateful" else self._iterate_count()

    # ---- map

    def _iterate_map(self) -> Iterator[Any]:
        order = self._order
        assert order is not None
        clone = clone_of(self._loader, seeded=self._seed_samples)
        loader, feed = clone.loader, clone.feed
        if changed := clone.changed():
            self._warn(
                f"epoch {self._epoch}: persistent workers have the data set as it was when they began, and do not see "
                f"what the script has changed of it ({', '.join(changed)}); those that a resume starts do: it is not "
                "exact. Use persistent_workers=False"
            )
        # Of each batch that workers have and that is not yielded yet, oldest first: samples, digest of the indices, and
        # of all indices up to it.
        sizes: deque[tuple[int, int, int]] = deque()
        feed.source = keys = self._keys(order, sizes)
        assert loader.generator is not None
        loader.generator.manual_seed(mix(self._seed + order.part, self._epoch, self._samples))
        # Without workers this process loads the samples, between two draws of the training loop.
        is_here = self._seed_samples and loader.num_workers == 0
        own = generators_within(self._loader.dataset, self._loader.collate_fn) if is_here else []
        guard = partial(generators_kept, own) if is_here else contextlib.nullcontext
        try:
            with generators_kept():
                iterator = iter(loader)
            while True:
                try:
                    with guard():
                        batch = next(iterator, _END)
                except Exception as error:
                    if not sizes:  # the sampler has failed
                        raise
                    # Whoever catches it and goes on leaves this batch out. An error of a worker has the worker's stack
                    # in its text; frames of torch that hold it would keep the workers until a garbage collection.
                    batch = _Unread(error.with_traceback(None) if loader.num_workers else error)
                if batch is _END:
                    break
                self._count(*sizes.popleft(), order)
                yield batch
        finally:
            keys.close()  # persistent workers hold on to it, and it to the loader
        self._done = True

    def _count(self, size: int, indices: int, prefix: int, order: MapOrder) -> None:
        self._indices = indices
        self._samples += size * order.replicas
        if prefix:
            self._prefixes[self._samples] = prefix
            if len(self._prefixes) > _NUM_PREFIXES:
                del self._prefixes[next(iter(self._prefixes))]
        self._batches += 1

    def _keys(self, order: MapOrder, sizes: deque[tuple[int, int, int]]) -> Generator[Any]:
        drawn = order.batches(self._samples, seeded=self._seed_samples)
        first = next(drawn, None)  # the samples before it are left out now
        self._check_prefix(order)
        for indices, seeds in itertools.chain([first] if first else [], drawn):
            sizes.append((len(indices), indices_digest(indices), order.prefix))
            if not self._seed_samples:
                yield indices if order.auto_batch else indices[0]
            elif order.auto_batch:
                yield SampleKeys(indices, seeds)
            else:
                yield SampleKey(indices[0], seeds[0])

    # ---- stateful and count

    def _iterate_stateful(self) -> Iterator[Any]:
        from . import stated  # not above, here and below: most loaders have no state

        loader = self._loader
        begun = self._inner if self._live is None else None
        is_believed = begun is None or self._is_believed(begun["loader"])
        self._compare_passes()
        seed = mix(self._seed, self._epoch, 3)
        with self._stream, stated.repeatable(loader, seed=seed, seeded=self._seed_samples):
            ended = _ended.pop(loader, None)
            if begun is not None and is_believed:
                self._resumed = begun["loader"]
                stated.resume(loader, self._resumed)
            elif begun is None and self._goes_on_from_carried(ended):
                # The state of a finished epoch: samplers go on from it to the next order. Reseeded, the iterator of
                # this epoch draws the same numbers as ever.
                stated.resume(loader, self._carried["loader"])
                stated.end_epoch(loader, self._carried["loader"])
                self._stream.reseed()
            if begun is None and self._live is None:
                stated.forget_start(loader)
            iterator = None
            if begun is not None and is_believed:
                iterator = stated.rest_of(loader, samples=self._samples // self._world_size)
                is_believed = iterator is not None
            iterator = iter(loader) if iterator is None else iterator
            if not is_believed:
                with stated.beginning(loader, seed=mix(seed, 0)):
                    self._leave_out(iterator, "has a state that counts other batches than this run was given")
        if begun is not None and is_believed:
            self._check_taken(loader)
        is_begun = self._batches or (ended is None and self._epoch and getattr(loader, "persistent_workers", False))
        if is_begun and self._live is None and is_believed and stated.may_draw_in_workers(loader):
            self._warn(
                f"{name_of(loader)}: the samples go on where they stopped. What its workers draw at random in a "
                "stream (a map, an augmentation) is in no state, and is not what an uninterrupted run draws from here "
                "on: draw such numbers in the training loop, or from a generator that the sample seeds", once=True,
            )  # fmt: skip
        if self._seed_samples and begun is not None and begun["rng"] is not None:
            self._stream.load_state_dict(begun["rng"])
        self._live = loader
        yield from self._draw(iterator, first=stated.beginning(loader, seed=mix(seed, self._batches)))
        self._inner, self._live = self._inner_state(), None
        _ended[loader] = self._epoch

    def _goes_on_from_carried(self, ended: int | None) -> bool:
        """Tell whether the state of the epoch before is wanted: in another process, if it is more than counts."""
        from . import stated

        carried = self._carried
        if self._live is not None or carried is None or ended == self._carried_epoch:
            return False
        return not stated.StatedPosition.of(self._loader, carried["loader"]).only_counts

    def _is_believed(self, state: Any) -> bool:
        """Compare what a state says of its position with the own count; False: the own count is all that is needed."""
        from . import stated

        position = stated.StatedPosition.of(self._loader, state)
        if not self._is_same_world:
            return True
        if position.batches not in (None, self._batches) and position.only_counts:
            return False  # torchdata 0.11 counts what it draws again twice
        name = name_of(self._loader)
        if position.batches not in (None, self._batches):
            self._say_position(f"the state of the {name} says that it has given {position.batches} batches of it")
        elif position.is_at_begin and self._batches:
            self._say_position(f"the state of the {name} says that its data set has given no sample of it")
        return True

    def _check_taken(self, loader: Any) -> None:
        """Say when a loader whose state says where it stands has taken no notice of that, or its state is not whole."""
        from . import stated

        if self._batches and (size := stated.shuffle_buffer(loader)):
            self._warn(
                f"epoch {self._epoch}: the state of a stream of datasets does not hold what lay in its shuffle buffer "
                f"(buffer_size={size}): these samples are left out of the epoch, and the rest comes in another order. "
                "Exact are a plain DataLoader over the stream, which draws the epoch again up to its position, and "
                "shuffle(buffer_size=1), which shuffles whole shards (with num_workers=0)"
            )
        if not self._is_same_world or stated.StatedPosition.of(loader, self._inner["loader"]).batches != self._batches:
            return
        with generators_kept():
            now = stated.StatedPosition.of(loader, loader.state_dict()).batches
        if now is not None and now < self._batches:
            self._say_position(f"the {name_of(loader)} says that it has given {now} batches of it")

    def _say_position(self, what: str) -> None:
        (self._mismatch or self._warn)(
            f"epoch {self._epoch}: {what}, and this run was given {self._batches}: it does not go on where it stopped"
        )

    def _iterate_count(self) -> Iterator[Any]:
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            self._compare_passes()
            with self._stream, ordered(self._loader):
                iterator = self._begin_count()
                if self._batches:
                    self._leave_out(iterator, "has no state_dict")
        for batch in self._draw(iterator):
            self._iterator = iterator  # of a loop that is left here; one that the loader breaks begins anew
            yield batch
            self._iterator = None

    def _begin_count(self) -> Iterator[Any]:
        """Return an iterator that begins anew if drawing its first batch has made generators: they are seeded, too."""
        iterator: Iterator[Any] = iter(self._loader)
        if iterator is self._loader or not self._seed_samples or getattr(self._loader, "draws_together", False):
            return iterator
        first = next(iterator, _END)
        if self._stream.adopt(generators_within(self._loader)):
            self._stream.reseed()
            counts = self._passes.numbers()
            again: Iterator[Any] = iter(self._loader)
            if again is not iterator:
                self._passes.last = counts
                return again
        return itertools.chain([] if first is _END else [first], iterator)

    def _counter(self) -> Any:
        """Return what may count its own passes, in this process and unknown to anybody: no state of it is asked for."""
        owner = getattr(self._loader, "dataset", self._loader)
        is_away = bool(_batch_option(self._loader, "num_workers")) and not hasattr(owner, _SHARED_COUNT)
        is_asked = self.kind == "stateful" and hasattr(owner, "state_dict")
        return None if self.kind == "map" or is_away or is_asked else owner

    def _compare_passes(self) -> None:
        if self._is_same_world and (differ := self._passes.begin()):
            name = type(self._passes.owner).__name__
            self._warn(
                f"epoch {self._epoch}: {name} counts its own passes, and has begun anew: {differ}. If its order "
                "depends on that, it is not the one of an uninterrupted run: set it from ck.epoch before each epoch, "
                "give the data set a state_dict, or take the loader of its library that has one (StreamingDataLoader)"
            )

    def _leave_out(self, iterator: Iterator[Any], why: str) -> None:
        """Draw what was trained once more, and drop it."""
        name = name_of(self._loader)
        self._warn(
            f"{name} {why}: drawing {self._batches} batches again to get back to the position in epoch {self._epoch}. "
            "That takes time, and is exact only if the stream repeats itself (one that shuffles without a seed does "
            "not). A map-style dataset, or a loader or data set with state_dict, seeks at once"
        )
        for drawn in range(self._batches):
            if (batch := next(iterator, _END)) is _END:
                raise StateMismatchError(
                    f"{name} ended after {drawn} batches, the position in epoch {self._epoch} is after "
                    f"{self._batches}: the data differ from those of the run that saved it"
                )
            if self._replayed is not None:
                self._replayed(drawn, batch)

    def _draw(self, iterator: Iterator[Any], *, first: Any = None) -> Iterator[Any]:
        nothing = contextlib.nullcontext()
        stream, around = self._stream if self._seed_samples else nothing, first or nothing
        while True:
            with stream, around:
                batch = next(iterator, _END)
            around = nothing
            if batch is _END:
                break
            self._samples += batch_length(batch) * self._world_size
            self._batches += 1
            yield batch
        self._done = True

    def _memory(self, samples: int, *, is_over: bool) -> dict[str, Any]:
        """Return what a sampler of the user's own needs to give this order again; {} for torch's own."""
        order = self._order
        # A position is the same on all ranks, which the memory of a sampler that knows its rank need not be.
        if order is None or order.memory is None or (self._world_size > 1 and not order.divides):
            return {}
        own = {"memory": order.memory.state_dict(is_over=is_over), "prefix": self._prefixes.get(samples, 0)}
        return {"own": own} if any(own.values()) else {}

    def _check_prefix(self, order: MapOrder) -> None:
        """Compare the indices that were left out at the beginning with those that were trained."""
        if order.skipped and self._begun_prefix not in (0, order.skipped):
            (self._mismatch or self._warn)(
                f"epoch {self._epoch}: {order.sampler_name} does not give the order again in which it was begun: "
                f"{self._samples} samples of it were trained, and they are others than it draws first now, so the rest "
                "would not hold each sample exactly once. It was made with other arguments (weights, indices), or it "
                "remembers something that is not among its own plain attributes, lists and generators"
            )

    def _inner_state(self) -> Any:
        if self._order is not None:
            order = self._order
            return {
                "dataset_length": _length(self._loader.dataset),
                "sampler": order.sampler_name,
                "batch_size": _batch_option(self._loader, "batch_size"),
                "recipe": order.recipe,
                "replicas": order.replicas,
                "divides": order.divides,
            }
        if self._live is None:
            return self._inner
        from . import stated

        with generators_kept():  # some loaders make their iterator here
            state = stated.whole_state(self._live, self._live.state_dict(), begun=self._resumed)
        return {"loader": state, "rng": self._stream.state_dict() if self._seed_samples else None}

    # ---- position

    def _check_kind(self, position: Mapping[str, Any]) -> None:
        if position["kind"] != self.kind:
            raise StateMismatchError(
                f"the data position was saved from a loader of kind {position['kind']!r}, this "
                f"{name_of(self._loader)} is of kind {self.kind!r}: use the same kind of loader until the epoch "
                f"is over, or take the state alone into a new run (holdfast.load(checkpoint, state) before it begins)"
            )

    def _seek(self, position: Mapping[str, Any]) -> None:
        self._samples, self._batches = int(position["samples"]), int(position["batches"])
        self._done, self._inner = bool(position["done"]), position["inner"]
        before = int(position.get("world_size", self._world_size))
        inner = self._inner or {}
        if self._order is not None and before == self._world_size and not self._differs(inner):
            self._begun_prefix = int(_own_of(position).get("prefix", 0))
            self._prefixes[self._samples] = self._begun_prefix
        if self._order is not None:
            self._compare_order(self._order, self._inner or {}, position)
        elif before != self._world_size and not self._done:
            self._warn(elsewhere({**position, "elastic": self._elastic}, self._world_size), once=True)
            if self.kind == "count":
                self._batches = self._batches * before // self._world_size
            elif self._elastic and self._inner is not None:
                self._inner = {**self._inner, "rng": None}
            else:
                self._samples, self._batches, self._inner = 0, 0, None

    def _differs(self, begun: Mapping[str, Any]) -> bool:
        now = self._inner_state()
        names = ("dataset_length", "sampler", "batch_size", "replicas")
        return any(begun.get(name, now[name]) != now[name] for name in names)

    def _compare_order(self, order: MapOrder, begun: Mapping[str, Any], position: Mapping[str, Any]) -> None:
        """Warn where the rest of the epoch is not what the same ranks would have drawn."""
        now = self._inner_state()
        own = order.recipe is None or begun.get("recipe", order.recipe) is None
        for name in ("dataset_length", "sampler") if own else ("dataset_length",):
            if begun.get(name, now[name]) != now[name]:
                self._warn(
                    f"{name} is {now[name]!r}, was {begun[name]!r} when epoch {self._epoch} was begun: "
                    f"the rest of the epoch cannot hold each sample exactly once"
                )
        before = int(begun.get("replicas", position.get("world_size", order.replicas)))
        is_moved = before != order.replicas
        if is_moved and not self._done:
            # Ranks that get the same samples (a tensor-parallel group, a pipeline) count once.
            moved = {**position, "world_size": before, "inner": {**begun, **now}}
            self._warn(elsewhere(moved, order.replicas), once=True)
        if is_moved and not order.divides:
            self._samples -= self._samples % order.replicas
        is_resized = begun.get("batch_size", now["batch_size"]) != now["batch_size"]
        if not (self._done or self._is_reopened) and (is_moved or is_resized):
            self._count_anew(order)

    def _count_anew(self, order: MapOrder) -> None:
        """Count in batches of this layout what was trained in another one, so that index and length belong together."""
        total, left = order.num_batches(0), order.num_batches(self._samples)
        size = _batch_option(self._loader, "batch_size")
        if total is not None and left is not None:
            self._batches = total - left
        elif size:
            self._batches = self._samples // (size * order.replicas)

    def _remarks(self, split: bool | tuple[int, int] | None) -> None:
        alike = self._order is not None and self._world_size > 1 and self._order.replicas == 1
        if alike and not (split is not None or knows_its_rank(self._loader.sampler, self._loader.batch_sampler)):
            self._warn(
                "every rank gets the same samples: give the loader a DistributedSampler to split them", once=True
            )
        if not getattr(self._loader, "in_order", True):
            self._warn("in_order=False is not used: a position is a prefix of the order", once=True)
        if self.kind == "count" and getattr(self._loader, "persistent_workers", False):
            self._warn(
                "persistent_workers=True over a data set without indices: what its workers remember of earlier epochs "
                "is lost by a resume, later epochs may differ. Use persistent_workers=False, or a map-style data set",
                once=True,
            )
        if not self._seed_samples and getattr(self._loader, "num_workers", None) != 0:
            self._warn(
                "seed_samples=False: sample ids are exact after a resume, random augmentation in workers is not",
                once=True,
            )

    def _warn(self, message: str, *, once: bool = False) -> None:
        if self._rank != 0 or (once and message in said):
            return
        said.add(message)
        _logger.warning("%s", message)


def _kind(loader: Any) -> str:
    if hasattr(loader, "base_dataloader") and not hasattr(loader.base_dataloader, "state_dict"):
        # It has both methods but no state, and shuffles with a generator that no later process can restore.
        raise ConfigError(
            f"a {name_of(loader)} of Accelerate does not tell its position: use holdfast.accelerate.Checkpointer("
            "path, accelerator), whose batches() takes it, or prepare it with use_stateful_dataloader=True (torchdata)"
        )
    if keeps_state(loader):
        return "stateful"
    return "map" if is_map_loader(loader) else "count"


def _own_of(position: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return what a position holds of a sampler of the user's own; {} if it holds nothing."""
    inner = None if position is None else position["inner"]
    own = inner.get("own") if isinstance(inner, Mapping) else None
    return own if isinstance(own, Mapping) else {}


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _batch_option(loader: Any, name: str) -> int | None:
    """Return a number or a bool of the loader, or of the batch sampler that it was given."""
    owners: tuple[Any, ...] = (loader, getattr(loader, "batch_sampler", None))
    if isinstance(loader, DataLoader) and loader.batch_size is None:  # then its own drop_last means nothing
        owners = owners[1:]
    found = next((value for owner in owners if (value := getattr(owner, name, None)) is not None), None)
    return found if isinstance(found, int) else None


def batch_length(batch: Any) -> int:
    """Return how many samples a collated batch of any structure holds: the length of its first part with a length."""
    while True:
        if isinstance(batch, torch.Tensor) or hasattr(batch, "shape"):
            return int(batch.shape[0]) if len(batch.shape) else 1
        if isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        elif isinstance(batch, (list, tuple)) and batch and not isinstance(batch[0], (str, bytes, int, float)):
            batch = batch[0]
        else:
            return len(batch) if isinstance(batch, (list, tuple)) else 1


def with_ranks_apart(position: Mapping[str, Any]) -> Mapping[str, Any]:
    """Mark the state of a loader that keeps its own as `PerRank`: the rest of a position is equal on all ranks."""
    if position["kind"] != "stateful" or isinstance(position["inner"], PerRank):
        return position
    return {**position, "inner": PerRank(position["inner"])}


def of_this_rank(position: Mapping[str, Any]) -> Mapping[str, Any]:
    """Undo `with_ranks_apart`, for a position that did not go through a checkpoint."""
    inner = position["inner"]
    return {**position, "inner": inner.value} if isinstance(inner, PerRank) else position


def elsewhere(position: Mapping[str, Any], world_size: int) -> str:
    """Return the remark for a position in an epoch from which another number of ranks goes on.

    Args:
        position: what `ResumableBatches.state_dict` returned.
        world_size: number of ranks now.
    """
    before, epoch = int(position.get("world_size", world_size)), position["epoch"]
    if position["kind"] == "map" and (position["inner"] or {}).get("divides", True):
        return (
            f"data: the rest of epoch {epoch} after {position['samples']} samples is split over {world_size} rank(s), "
            f"was {before}"
        )
    if position["kind"] == "map":
        return (
            f"data: {position['inner']['sampler']} splits epoch {epoch} over the ranks by itself ({world_size} now, "
            f"{before} before): whether its rest holds each sample exactly once is not known. A sampler that knows "
            "nothing of ranks, or a DistributedSampler, is split again exactly"
        )
    if position.get("elastic"):
        return (
            f"data: epoch {epoch} goes on with {world_size} rank(s), was {before}: its loader is elastic and splits "
            "the rest by itself"
        )
    if position["kind"] == "stateful":
        return (
            f"data: a loader with its own state has one for each of {before} rank(s), which cannot be split again over "
            f"{world_size}: epoch {epoch} begins anew. A DataLoader over a map-style data set is split again exactly"
        )
    return (
        f"data: a loader without indices cannot be split again from {before} to {world_size} rank(s): each draws as "
        f"many batches again as make {position['samples']} samples on all of them, which is exact only if rank r has "
        "every n-th sample from the r-th on"
    )


class PassCounts:
    """Counts of its own passes that a data set without a state keeps: they are compared, for a new process has others.

    A whole number that grows by exactly one in a pass of several batches is such a count; one that stands for a
    position grows by more. It is not given back: what else belongs to it is not known.

    Args:
        owner: the data set or iterable; None: there is nothing to look at.
        given: what `state_dict` returned, of this epoch or of the epoch before.
    """

    def __init__(self, owner: Any, *, given: Mapping[str, int] | None) -> None:
        self.owner, self._given = owner, dict(given or {})
        self._begun, self.last = dict[str, int](), dict[str, int]()  # a pass may be begun twice
        self._held: list[tuple[str, Any]] = []  # what the owner wraps, by name

    def begin(self) -> str:
        """Note the counts before a pass; return what differs from an uninterrupted run, "" if nothing does."""
        self._held = [] if self.owner is None else list(self._named())
        self._begun = self.last = now = self.numbers()
        if not now or self._is_known():
            return ""
        differ = [name for name, value in self._given.items() if now.get(name, value) != value]
        return ", ".join(f"{name!r} is {now[name]}, was {self._given[name]}" for name in differ)

    def state_dict(self, *, num_batches: int, is_over: bool) -> dict[str, int]:
        """Return the counts that the next pass begins with, or this one if it is not over."""
        if not self._begun:
            return self._given
        now = self.numbers()
        counts = {name for name, value in now.items() if num_batches > 1 and value == self.last.get(name, value) + 1}
        return {
            name: (now if is_over else self._begun)[name] for name in sorted(counts | self._given.keys() & now.keys())
        }

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Yield (prefix of names, object) of what the owner wraps: the stages of a pipeline count for themselves."""
        seen: Counter[str] = Counter()
        for held in objects_within(self.owner):
            # What is called for each sample counts no passes: a number that a transform has drawn may look like that.
            if held is not self.owner and hasattr(held, "__dict__") and not callable(held):
                seen[kind := type(held).__name__] += 1
                yield f"{kind}{seen[kind]}.", held

    def numbers(self) -> dict[str, int]:
        """Return the whole numbers that may be counts, by name."""
        found = {prefix + name: value for prefix, held in self._held for name, value in vars(held).items()}
        found.update(getattr(self.owner, "__dict__", {}))
        found[_SHARED_COUNT] = getattr(self.owner, _SHARED_COUNT, None)
        return {name: value for name, value in found.items() if type(value) is int}

    def _is_known(self) -> bool:
        """Tell whether this process has seen a pass of it, and note that it does now."""
        try:
            is_known = self.owner in _drawn_here
            _drawn_here.add(self.owner)
        except TypeError:
            return False
        return is_known
