"""Loaders that keep their own position: torchdata's, node pipelines, and loaders over streams of `datasets`.

`StatedPosition` is what such a state says of itself. `repeatable` lets torchdata's loaders draw the same samples in
every process. `rest_of` and `end_epoch` are for loaders that otherwise take the end of an epoch for the begin of the
next one (node pipelines, litdata's), or the next one for an end (MosaicML's). `forget_start` lets the next epoch of a
stream begin at its begin, and `whole_state` is a state of a stream that holds for all of its workers.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from .loaders import ordered
from .seeding import SampleKey, SampleKeys, Stream, generators_of, index_id, mix, seeded_collate, seeded_dataset

_MOST_DEPTH, _MOST_ITEMS = 4, 256
_MOST_STEPS = 64  # of a stream: each map, filter or shuffle is one
_ENTRIES_AHEAD = 64
_STREAM = "examples_iterable"  # key of the state of an IterableDataset of `datasets` (3 to 5)

# Loaders whose workers have begun from a state.
_resumed: weakref.WeakSet[Any] = weakref.WeakSet()
# What stands for the samplers of torchdata's loaders while iterators are made.
_stand_ins: weakref.WeakKeyDictionary[Any, _RepeatableSampler] = weakref.WeakKeyDictionary()
_keyed: weakref.WeakKeyDictionary[Any, _KeyedSampler] = weakref.WeakKeyDictionary()
_NUMBER, _INNER = "number", "inner"  # of entries, and the state of what gives them


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedPosition:
    """What the state of a loader says of its position in an epoch.

    Attributes:
        batches: given in this epoch; None: it does not say.
        is_at_begin: its data set, in every worker, says that it has given no sample.
        only_counts: there is nothing in it but counts: the loader draws that many batches again.
    """

    batches: int | None = None
    is_at_begin: bool = False
    only_counts: bool = False

    @classmethod
    def of(cls, loader: Any, state: Any) -> StatedPosition:
        """Read a state of torchdata's loader (as of 0.11) or of a data set of `datasets`; others say nothing."""
        try:
            # Not by isinstance: Accelerate's loaders pass for torchdata's, and count the batches of all ranks.
            if not _is_torchdatas(loader):
                return cls(is_at_begin=_is_at_begin([state]))
            if _is_of_nodes(loader):
                return cls(batches=int(state["num_yielded"]))
            snapshot = state.get("_snapshot")
            if snapshot is None:
                batches, since, workers = state["_num_yielded"], 0, [state]
            else:
                since, workers = state["_steps_since_snapshot"], list(snapshot["_worker_snapshots"].values())
                batches = snapshot["_snapshot_step"] + since
            kept = [worker["dataset_state"] for worker in workers]
            kept += [(worker["fetcher_state"] or {}).get("dataset_iter_state") for worker in workers]
            only_counts = isinstance(loader.dataset, IterableDataset) and not any(one is not None for one in kept)
            is_at_begin = batches > since and _is_at_begin(kept)
            return cls(batches=int(batches), is_at_begin=is_at_begin, only_counts=only_counts)
        except (KeyError, TypeError, AttributeError):
            return cls()  # of another version


def resume(loader: Any, state: Any) -> None:
    """Let a loader go on from a state; `forget_start` ends that."""
    loader.load_state_dict(state)
    with contextlib.suppress(TypeError):
        _resumed.add(loader)


def rest_of(loader: Any, *, samples: int) -> Iterator[Any] | None:
    """Iterate over what is left of the epoch that a loader was resumed in, if only its end.

    Args:
        loader: any loader.
        samples: that this rank was given in the epoch.

    Returns:
        None if the loader cannot find the place: it begins the epoch anew when it is iterated.
    """
    if _is_litdatas(loader) and not (loader.restore and _resumes_right(loader)):
        # It takes a state of a whole epoch's samples for the begin of the next one, and counts each batch as full.
        loader.restore = False
        is_endless = getattr(loader.dataset, "_iterate_over_all", True) is False  # by weights: of no known length
        if not is_endless and samples >= len(loader.dataset):
            return iter(())
        loader.current_epoch -= 1
        return None
    rest: Iterator[Any]
    if not _is_of_nodes(loader):
        rest = iter(loader)
        return rest
    # It begins anew where its state is at an end, and draws a batch to find out. Whoever asked for its state before it
    # was resumed made an iterator, which it would go on with.
    begins_anew, loader.restart_on_stop_iteration, loader._iter_for_state_dict = (
        loader.restart_on_stop_iteration, False, False,
    )  # fmt: skip
    try:
        rest = iter(loader)
    finally:
        loader.restart_on_stop_iteration = begins_anew
    # Nodes count an epoch if something was asked of them in it, which they do not know after a resume.
    for node in _nodes_within(loader.root):
        if getattr(node, "_num_yielded", 0) and getattr(node, "_started", None) is False:
            node._started = True
    return rest


def _resumes_right(loader: Any) -> bool:
    """Tell whether litdata's loader finds its place in the middle of an epoch, in every life.

    Data sets that it combines until all have ended are right in one life only; those that it combines by weights draw
    other ones in workers, from generators that begin anew.
    """
    until_all_ended = getattr(loader.dataset, "_iterate_over_all", None)
    return until_all_ended is None or not (until_all_ended or loader.num_workers)


def end_epoch(loader: Any, state: Any) -> None:
    """Let a loader that was resumed at the end of an epoch, from ``state``, begin the next one when it is iterated."""
    if _is_of_nodes(loader):
        next(rest_of(loader, samples=0) or iter(()), None)
    elif _is_mosaics(loader) and isinstance(state, Mapping):  # its next pass would be the rest of that epoch: nothing
        loader.load_state_dict({**state, "epoch": state["epoch"] + 1, "sample_in_epoch": 0})
    else:
        loader.state_dict()  # torchdata's loader makes the iterator of the old epoch here


def begin_next(loader: Any, state: Any) -> None:
    """Let a loader begin the epoch after the one that ``state`` belongs to, however far that was, when it is iterated.

    It draws from the generators of the process where it makes an iterator to do so.
    """
    resume(loader, state)
    if _is_torchdatas(loader) and not _is_of_nodes(loader):
        next(iter(loader), None)  # the rest of that epoch; the next iterator is of the next one
    else:
        end_epoch(loader, state)
    forget_start(loader)


class _RepeatableSampler:
    """A sampler without a state, whose order depends on a seed and on nothing else.

    Attributes:
        seed: of the epoch that the next iteration belongs to.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.seed = 0

    def __iter__(self) -> Iterator[Any]:
        # Begun when the first entry is asked for: torchdata makes iterators that it does not use.
        stream = Stream(self.seed, generators_of(self._sampler, getattr(self._sampler, "sampler", None)))
        yield from stream.drawn(self._sampler, _ENTRIES_AHEAD)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _Keys:
    """The entries of torchdata's index sampler as messages that carry the seeds of the samples."""

    def __init__(self, entries: Iterator[Any], *, number: int, seed: int | None, is_batched: bool) -> None:
        self._entries, self.number, self._seed, self._is_batched = entries, number, seed, is_batched

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        entry, number = next(self._entries), self.number
        self.number += 1
        if self._seed is None:
            return entry
        if not self._is_batched:
            return SampleKey(entry, mix(self._seed, index_id(entry), number))
        indices, first = list(entry), number << 32  # a sample that comes again in the epoch is drawn anew
        return SampleKeys(
            indices, [mix(self._seed, index_id(index), first + place) for place, index in enumerate(indices)]
        )


class _StatedKeys(_Keys):
    """The same of an iterator with a state: how many entries there were is part of it."""

    def state_dict(self) -> dict[str, Any]:
        return {_NUMBER: self.number, _INNER: self._entries.state_dict()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self.number, inner = _number_within(state)
        self._entries.load_state_dict(inner)  # type: ignore[attr-defined]


class _KeyedSampler:
    """The index sampler of torchdata's loader, whose entries carry the seeds of their samples.

    Attributes:
        seed: of the epoch that the next iteration belongs to; None: entries are given as they are.
    """

    def __init__(self, sampler: Any, *, is_batched: bool) -> None:
        self._sampler, self._is_batched = sampler, is_batched
        self.seed: int | None = None
        self._begin = 0
        self._last: _Keys | None = None

    def __iter__(self) -> Iterator[Any]:
        entries: Iterator[Any] = iter(self._sampler)
        kind = _StatedKeys if hasattr(entries, "state_dict") else _Keys
        self._last = kind(entries, number=self._begin, seed=self.seed, is_batched=self._is_batched)
        self._begin = 0
        return self._last

    def __len__(self) -> int:
        return len(self._sampler)


class _StatedKeyedSampler(_KeyedSampler):
    """The same of a sampler that has a state itself."""

    def state_dict(self) -> dict[str, Any]:
        return {_NUMBER: 0 if self._last is None else self._last.number, _INNER: self._sampler.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._begin, inner = _number_within(state)
        self._sampler.load_state_dict(inner)


def _number_within(state: Any) -> tuple[int, Any]:
    """Return the number of entries that a state counts, and the state of what is within; others are that themselves."""
    if isinstance(state, Mapping) and set(state) == {_NUMBER, _INNER}:
        return int(state[_NUMBER]), state[_INNER]
    return 0, state


@contextlib.contextmanager
def repeatable(loader: Any, *, seed: int, seeded: bool = True) -> Iterator[None]:
    """Let torchdata's loaders make iterators that give the same samples, in the same order, each time.

    torchdata (as of 0.11) begins a sampler without a state once more after a resume, and leaves out the first indices:
    of one that draws from the generators of the process this would be another order than the one that was begun. What
    samples of a map-style data set draw is nowhere in its state, and the seed of its workers moves the generator that
    the loader shares with its sampler. So samples are seeded here as in a loader of torch's, by their place in the
    epoch, and the workers from a generator of their own.

    Args:
        loader: any loader; of others nothing is changed.
        seed: of the epoch.
        seeded: seed the samples.
    """
    if _is_of_nodes(loader):
        for node in _nodes_within(loader.root):
            if hasattr(node, "epoch_updater") and not hasattr(node.sampler, "state_dict"):
                if type(node.sampler) is not _NodeSampler:
                    node.sampler = _NodeSampler(node.sampler)
                node.sampler.seed = seed
    if not (hasattr(loader, "__dict__") and _is_torchdatas(loader) and hasattr(loader, "dataset")):
        yield
        return
    with contextlib.ExitStack() as undo:
        undo.enter_context(ordered(loader))
        put = partial(_put, undo)
        put(loader, "generator", torch.Generator().manual_seed(seed & ((1 << 63) - 1)))
        if not isinstance(loader.dataset, IterableDataset):
            name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            _stand_in(loader, name, seed, put)
            keyed = _keyed.get(loader)
            if keyed is None:
                kind = _StatedKeyedSampler if hasattr(vars(loader)[name], "state_dict") else _KeyedSampler
                # Workers that stay keep it.
                keyed = _keyed[loader] = kind(vars(loader)[name], is_batched=name == "batch_sampler")
            keyed.seed = mix(seed, 5) if seeded else None
            put(loader, name, keyed)
            if seeded:
                put(loader, "dataset", seeded_dataset(loader.dataset))
                put(loader, "collate_fn", seeded_collate(loader.collate_fn))
        yield


@contextlib.contextmanager
def beginning(loader: Any, *, seed: int) -> Iterator[None]:
    """Let a loader that begins its iterator when the first batch is asked for draw the seed of workers apart.

    torch draws it from its global generator, which by then has the state that it had behind the batches before.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(ordered(loader))
        is_torchs = isinstance(loader, DataLoader) and not _is_torchdatas(loader)
        if is_torchs and vars(loader).get("generator", loader) is None:  # those of Accelerate pass for torch's
            _put(undo, loader, "generator", torch.Generator().manual_seed(seed & ((1 << 63) - 1)))
        yield


def _put(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``undo``; torch forbids to set some."""
    undo.callback(vars(owner).__setitem__, name, vars(owner)[name])
    vars(owner)[name] = value


def _stand_in(loader: Any, name: str, seed: int, put: Any) -> None:
    """Put a sampler in the place of one that has no state, and may draw from the generators of the process."""
    owner, sampler = loader, vars(loader)[name]
    if _is_torchdatas(sampler):  # its iterator has a state, with that of the inner one
        owner, name = sampler, "sampler"
        sampler = vars(sampler).get(name)
    if type(sampler) in (type(None), SequentialSampler) or _is_torchdatas(sampler) or hasattr(sampler, "state_dict"):
        return
    stand_in = _stand_ins.get(loader)
    if stand_in is None:
        stand_in = _stand_ins[loader] = _RepeatableSampler(sampler)  # workers that stay keep it
    stand_in.seed = seed
    put(owner, name, stand_in)


class _NodeSampler:
    """The sampler of a node pipeline: its order depends on a seed, and on the epoch that its node counts and saves.

    Nodes ask for it in threads, so torch's own samplers get a generator in place of the global ones, which would move
    those of training. A sampler of another kind is drawn as it is there.

    Attributes:
        seed: of the epochs to come.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._epoch = self.seed = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if callable(getattr(self._sampler, "set_epoch", None)):
            self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return self._drawn(mix(self.seed, self._epoch, 4))

    def _drawn(self, seed: int) -> Iterator[Any]:
        if (own := _with_generator(self._sampler, seed)) is not None:
            yield from own
        elif threading.current_thread() is threading.main_thread():
            stand_in = _RepeatableSampler(self._sampler)
            stand_in.seed = seed
            yield from stand_in
        else:
            yield from self._sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _with_generator(sampler: Any, seed: int) -> Any:
    """Return a copy of one of torch's samplers that draws from a generator of its own; None for any other sampler."""
    if not type(sampler).__module__.startswith("torch.utils.data"):
        return None
    own = copy.copy(sampler)
    if type(sampler) is BatchSampler:
        own.sampler = _with_generator(sampler.sampler, seed)
        return None if own.sampler is None else own
    if hasattr(sampler, "generator"):
        own.generator = torch.Generator().manual_seed(seed)
    return own


def _is_of_nodes(loader: Any) -> bool:
    """Tell whether this is the loader of a pipeline of `torchdata.nodes` (as of 0.11)."""
    return hasattr(loader, "restart_on_stop_iteration") and hasattr(loader, "root") and _is_torchdatas(loader)


def _nodes_within(root: Any) -> list[Any]:
    """Return the nodes of a pipeline, and what torchdata iterates them with."""
    found, seen, waiting = [], set(), [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ITEMS:
            waiting += value.values() if isinstance(value, dict) else value
        elif id(value) not in seen and hasattr(value, "__dict__") and _is_torchdatas(value):
            seen.add(id(value))
            found.append(value)
            waiting += vars(value).values()
    return found


def _is_torchdatas(value: Any) -> bool:
    return _is_of("torchdata.", value)


def _is_litdatas(loader: Any) -> bool:
    """Tell whether this is the loader of litdata (as of 0.2.76)."""
    return hasattr(loader, "restore") and hasattr(loader, "current_epoch") and _is_of("litdata.", loader)


def _is_mosaics(loader: Any) -> bool:
    """Tell whether this is the loader of mosaicml-streaming (as of 0.13)."""
    return hasattr(loader, "num_samples_yielded") and _is_of("streaming.", loader)


def _is_of(package: str, value: Any) -> bool:
    return any(kind.__module__.startswith(package) for kind in type(value).__mro__)


def forget_start(loader: Any) -> None:
    """Let the next pass over streams of `datasets`, and of litdata, begin at their begin.

    What their ``load_state_dict`` was given is where each later pass of the same number begins, too (as of 5.2):
    whoever calls no ``set_epoch`` would never see again what comes before it. Persistent workers hold streams of their
    own: they are started anew.
    """
    if _is_litdatas(loader):
        loader.restore = False  # left so where the epoch of a resume is left before its end
    streams = _streams_within(loader)
    for stream in streams:
        stream._starting_state_dict = None
    if streams and getattr(loader, "persistent_workers", False) and loader in _resumed:
        loader.load_state_dict({})  # torchdata's word for a fresh start
    _resumed.discard(loader)


def shuffle_buffer(loader: Any) -> int:
    """Return the size of the largest shuffle buffer of a loader's streams of `datasets` (3 to 5): no state holds it."""
    buffers = (step for step in _steps_within(loader) if "Buffer" in type(step).__name__)
    sizes = (getattr(step, "buffer_size", None) for step in buffers)
    largest = max((size for size in sizes if isinstance(size, int)), default=0)
    return largest if largest > 1 else 0


def may_draw_in_workers(loader: Any) -> bool:
    """Tell whether workers run code of the user's over a stream: what that draws at random is in no state."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, IterableDataset) or not getattr(loader, "num_workers", 0):
        return False
    if not type(dataset).__module__.startswith(("datasets.", "litdata.", "streaming.")):
        return True
    has_steps = any(callable(getattr(step, "function", None)) for step in _steps_within(loader))
    return has_steps or bool(getattr(dataset, "transform", None))


def _steps_within(loader: Any) -> Iterator[Any]:
    """Yield the steps (maps, filters, shuffles) of a loader's streams of `datasets` (3 to 5)."""
    seen, waiting = set(), [(stream, 0) for stream in _streams_within(loader)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ITEMS:
            waiting += [(item, depth) for item in (value.values() if isinstance(value, dict) else value)]
        elif id(value) not in seen and depth < _MOST_STEPS and type(value).__module__.startswith("datasets."):
            seen.add(id(value))
            yield value
            waiting += [(item, depth + 1) for item in getattr(value, "__dict__", {}).values()]


def whole_state(loader: Any, state: Any, *, begun: Any) -> Any:
    """Return a state of a loader over a stream of `datasets` or of litdata that holds for each of its workers.

    After a resume litdata's loader says that its data set is in the first epoch, if that is iterated in workers. In
    torchdata's, a worker that has given no batch yet in this process says that it is at the begin of the stream, with
    generators that are not those of a worker (as of 5.2). It is where it was resumed, or has yet to begin.

    Args:
        loader: any loader; states of others are returned as they are.
        state: what its ``state_dict`` returned.
        begun: the state that it was resumed from in this epoch; None: it has begun at its begin.
    """
    if _is_litdatas(loader) and "current_epoch" in state["dataset"]:
        return {**state, "dataset": {**state["dataset"], "current_epoch": state["current_epoch"]}}
    if not _is_torchdatas(loader) or not isinstance(state, Mapping):
        return state
    snapshot: Any = state.get("_snapshot")
    try:
        workers = snapshot["_worker_snapshots"]
        before = {} if begun is None else begun["_snapshot"]["_worker_snapshots"]
        since = snapshot["_snapshot_step"] - (0 if begun is None else StatedPosition.of(loader, begun).batches)
        idle = [name for name, worker in workers.items() if _is_at_begin([worker["dataset_state"]])]
    except (KeyError, TypeError, AttributeError):
        return state  # without workers, or of another version
    # All of them, and batches were given: such a state does not say where it is, see `StatedPosition.is_at_begin`.
    if not idle or since >= len(workers) or (since > 0 and len(idle) == len(workers)):
        return state
    put = {name: before.get(name, {**workers[name], "dataset_state": None}) for name in idle}
    return {**state, "_snapshot": {**snapshot, "_worker_snapshots": {**workers, **put}}}


def _streams_within(owner: Any) -> list[Any]:
    """Return the streams of `datasets` that a loader is, has, or wraps."""
    found, seen, waiting = [], set(), [(owner, 0)]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or depth > _MOST_DEPTH:
            continue
        seen.add(id(value))
        if type(value).__module__.startswith("datasets.") and hasattr(value, "_starting_state_dict"):
            found.append(value)
        elif isinstance(value, (list, tuple, dict)):
            items = value.values() if isinstance(value, dict) else value
            waiting += [(item, depth + 1) for item in items] if len(value) <= _MOST_ITEMS else []
        elif isinstance(value, IterableDataset) or depth == 0:
            waiting += [(item, depth + 1) for item in getattr(value, "__dict__", {}).values()]
    return found


def _is_at_begin(states: list[Any]) -> bool:
    """Tell whether there are states of `datasets`, and all numbers of places in them are 0."""
    streams = [state[_STREAM] for state in states if isinstance(state, Mapping) and _STREAM in state]
    return bool(streams) and not any(_has_moved(stream) for stream in streams)


def _has_moved(state: Any) -> bool:
    if isinstance(state, Mapping):
        # An interleaved stream has a generator too, which is never at 0.
        return any(_has_moved(value) for name, value in state.items() if name != "bit_generator_state")
    if isinstance(state, (list, tuple)):
        return any(_has_moved(value) for value in state)
    return isinstance(state, int) and bool(state)
