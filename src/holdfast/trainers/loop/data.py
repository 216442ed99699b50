"""The data of the trainer: how its batches are treated (`DataSpec`), the position in them, the way to the model."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast._log import get_logger
from holdfast.checkpointer.guard import Judge
from holdfast.checkpointer.ledger import LeftOut
from holdfast.checkpointer.metrics import plain_metrics
from holdfast.errors import ConfigError
from holdfast.run.data_ring import BatchSpan
from holdfast.state.accelerator import move
from holdfast.state.data.batches import ResumableBatches, batch_length, elsewhere, of_this_rank, said, with_ranks_apart
from holdfast.state.data.loaders import is_map_loader
from holdfast.state.data.seeding import generators_kept, generators_within
from holdfast.state.tree import rng

from .arguments import check_function, check_loader

_LOG = get_logger("trainers.loop")
_NAME = "train"  # of the loader, as `holdfast log` names its batches
_AHEAD = (
    "data: a batch of epoch {} is drawn and not trained, and the loader keeps its own position, which cannot go back: "
    "what goes on from here leaves it out. Save at BATCH_END or later"
)


class DataSpec:
    """A loader, and functions of its batches.

    Args:
        dataloader: batches.
        num_samples, num_tokens: of one epoch; taken so that scripts run, and not needed: what came is counted.
        batch_transforms: changes each batch before it goes to the device.
        microbatch_transforms: changes each part of a batch (see ``grad_accum``) on the device.
        split_batch: splits a batch into parts of at most so many samples; tensors in it are split without it.
        get_num_samples_in_batch: counts the samples of a batch, for `Timestamp`.
        get_num_tokens_in_batch: counts its tokens; without, these are the entries of "input_ids".

    Example:
        >>> spec = DataSpec([torch.ones(4, 2)], batch_transforms=lambda batch: batch * 2)
        >>> [spec.batch_transforms(batch).sum().item() for batch in spec.dataloader]
        [16.0]
    """

    def __init__(
        self,
        dataloader: Any,
        num_samples: int | None = None,
        num_tokens: int | None = None,
        batch_transforms: Callable[[Any], Any] | None = None,
        microbatch_transforms: Callable[[Any], Any] | None = None,
        split_batch: Callable[[Any, int], Sequence[Any]] | None = None,
        get_num_samples_in_batch: Callable[[Any], int] | None = None,
        get_num_tokens_in_batch: Callable[[Any], int] | None = None,
    ) -> None:
        self.dataloader = check_loader(dataloader, "DataSpec(dataloader)")
        if dataloader is None or isinstance(dataloader, DataSpec):
            raise ConfigError(
                f"DataSpec(dataloader={dataloader!r}): give a DataLoader, or anything that yields batches"
            )
        self.num_samples, self.num_tokens = num_samples, num_tokens

        def function(value: Any, name: str, *arguments: str) -> Any:
            return check_function(value, f"DataSpec({name})", *arguments)

        self.batch_transforms = function(batch_transforms, "batch_transforms", "batch")
        self.microbatch_transforms = function(microbatch_transforms, "microbatch_transforms", "batch")
        self.split_batch = function(split_batch, "split_batch", "batch", "size")
        self.get_num_samples_in_batch = function(get_num_samples_in_batch, "get_num_samples_in_batch", "batch")
        self.get_num_tokens_in_batch = function(get_num_tokens_in_batch, "get_num_tokens_in_batch", "batch")


class DataPosition:
    """Where training is in its data: part of every checkpoint as ``dataset_state``.

    Attributes:
        stage: what was going on when the state was saved: "" (between batches), the evaluation that has to be done
            again ("batch_eval", "epoch_eval"), or what comes after the last batch ("fit_end").
        evaluated: metrics, by label, of the evaluations that were due after the last batch and are done.
        judge: judges the metric that a guard watches; its window is part of the state.
    """

    def __init__(self, *, rank: int = 0, world_size: int = 1) -> None:
        self.stage = ""
        self.evaluated: dict[str, Mapping[str, Any]] = {}
        self.judge: Judge | None = None
        self.left_out = LeftOut(world_size)
        self._rank, self._world_size = rank, world_size
        self._stored: Mapping[str, Any] | None = None
        self._live: ResumableBatches | None = None
        self._trained = (0, 0)  # samples and batches of the epoch after the last trained batch
        self._drawn: tuple[Any, int] | None = None  # the batch that comes next, where it is drawn and not trained
        self._counted: tuple[Any, int | None] | None = None

    def open(self, loader: Any, *, seed: int, epoch: int) -> ResumableBatches:
        """Return the rest of ``epoch``: what was trained already does not come again."""
        source, live = with_state(loader), self._live
        if live is not None and live.epoch == epoch and live.goes_on(source):
            return live
        stored = self._position() if live is not None else self._stored
        is_drawn_here = _draws_here(loader)
        self._live = (_DrawnHere if is_drawn_here else ResumableBatches)(
            source, stored, seed=seed, epoch=epoch, seed_samples=not is_drawn_here,
            rank=self._rank, world_size=self._world_size, split=True,
        )  # fmt: skip
        self.trained()
        return self._live

    def is_in(self, batches: ResumableBatches) -> bool:
        """Tell whether training is in this epoch as `open` gave it; False if another position was loaded since."""
        return self._live is batches

    def trained(self) -> None:
        """Count the batch drawn last as trained."""
        self._drawn = None
        if self._live is not None:  # else another position was loaded meanwhile
            self._trained = self._live.samples, self._live.batches

    def _position(self) -> Mapping[str, Any]:
        """Return where the epoch is after the last trained batch."""
        live = self._live
        assert live is not None
        is_behind = not live.done and self._trained != (live.samples, live.batches)
        if is_behind and live.kind == "stateful":
            if (text := _AHEAD.format(live.epoch)) not in said:
                said.add(text)
                _LOG.warning("%s", text)
            is_behind = False
        return live.state_dict(at=self._trained if is_behind else None)

    def is_over(self, loader: Any, *, seed: int, epoch: int) -> bool:
        """Tell whether all batches of ``epoch`` are trained or left out, on this rank; False if nobody can know."""
        known = (self._stored or {}).get("epoch") if self._live is None else self._live.epoch
        if loader is None or known != epoch:
            return False
        live = self._live if self._live is not None else self.open(loader, seed=seed, epoch=epoch)
        # Not counted from the begin: another batch size or number of ranks may have begun it.
        left, rest = num_batches(live), range(self._trained[1], live.batches)
        if left is None:
            return False
        places = self.left_out.of_epoch(_NAME, epoch)
        return left + len(rest) == len({place for place in places if place >= self._trained[1]})

    def num_batches(self, loader: Any) -> int | None:
        """Return how many batches an epoch has on this rank; None if the loader cannot tell."""
        if self._world_size == 1 or not isinstance(loader, DataLoader):
            return num_batches(loader)
        if self._counted is None or self._counted[0] is not loader:
            epoch = ResumableBatches(
                with_state(loader), None, seed=0, epoch=0, rank=self._rank, world_size=self._world_size, split=True
            )
            self._counted = (loader, num_batches(epoch))
        return self._counted[1]

    # -- batches that are left out

    @property
    def place(self) -> tuple[BatchSpan, ...]:
        """The batch drawn last, by its place in the order of its epoch."""
        if self._live is None or not self._live.batches:
            return ()
        return (BatchSpan(_NAME, self._live.epoch, self._live.batches - 1, self._live.batches),)

    def draw(self, live: ResumableBatches, source: Iterator[Any], end: Any) -> tuple[Any, int]:
        """Return the next batch that is to be trained, or ``end``; and the samples of the epoch before it.

        Batches that are left out are drawn too, for their place counts, and move no generator.

        Args:
            live: the epoch as `open` gave it.
            source: goes through it.
            end: what to return when it is over.
        """
        if self._drawn is not None:  # by a fit() that was left before it was trained
            return self._drawn
        while self.left_out.spans and self.left_out.covers(_NAME, live.epoch, live.batches):
            with generators_kept():
                if next(source, end) is end:
                    return end, live.samples
        before = live.samples
        self._drawn = next(source, end), before
        return self._drawn

    @property
    def num_left_out(self) -> int:
        """How many batches of this epoch, or of the one that training goes on in, are left out, on this rank."""
        epoch = (self._stored or {}).get("epoch") if self._live is None else self._live.epoch
        return len(self.left_out.of_epoch(_NAME, epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last trained batch."""
        train = self._position() if self._live is not None else self._stored
        if train is not None and self._world_size > 1:
            train = with_ranks_apart(train)
        return {
            "train": train, "eval": {}, "stage": self.stage, "evaluated": plain_metrics(self.evaluated),
            "left_out": self.left_out.state_dict(),
            "guard": None if self.judge is None else self.judge.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where an earlier life was."""
        train = state["train"]
        self._stored, self._live, self._drawn = None if train is None else of_this_rank(train), None, None
        self.stage, self.evaluated = state.get("stage", ""), dict(state.get("evaluated", {}))
        self.left_out.load_state_dict(state.get("left_out", (0, ())))
        if self.judge is not None:
            self.judge.load_state_dict(state.get("guard"))

    def notes(self) -> list[str]:
        """Say what becomes of the rest of an epoch that another number of ranks has begun."""
        stored = self._stored
        if stored is None or stored["done"] or stored.get("world_size", self._world_size) == self._world_size:
            return []
        found = [elsewhere(stored, self._world_size)]
        said.update(found)
        return found


class _DrawnHere(ResumableBatches):
    """Batches whose samples draw from the generators of this process.

    The first of them may make others (``if self.rng is None``): then samples are seeded, the first one anew.
    """

    def __iter__(self) -> Iterator[Any]:
        begun, at = rng.capture(devices=False), (self._samples, self._batches)
        source = super().__iter__()
        for first in source:
            if _draws_here(self._loader):
                yield first
                yield from source
            else:
                rng.restore(begun, devices=False)
                self._seed_samples, (self._samples, self._batches) = True, at
                yield from super().__iter__()
            return


class _WithDatasetState:
    """A plain loader whose dataset knows its own position, in the manner of ``StreamingDataset``."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._dataset = loader, loader.dataset
        self._samples = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._samples += batch_length(batch)
            yield batch
        self._samples = 0

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> Any:
        return {"samples": self._samples, "dataset": self._dataset.state_dict(self._samples, True)}

    def load_state_dict(self, state: Any) -> None:
        # The position lies within the dataset from now on: what it counts as seen before its next batch is its affair.
        self._samples = state["samples"]
        self._dataset.load_state_dict(state["dataset"])


def _draws_here(loader: Any) -> bool:
    """Tell whether samples are made by index in this process: its generators, which are saved, go on exactly.

    Seeding each sample, which workers need, costs some 20 us then: more than a small model's step. Generators that the
    data set or ``collate_fn`` holds itself are not saved, so they need it too.
    """
    return (
        is_map_loader(loader)
        and loader.num_workers == 0
        and not callable(getattr(loader, "state_dict", None))
        and not generators_within(loader.dataset, loader.collate_fn)
    )


def with_state(loader: Any) -> Any:
    """Return a loader with the position that its data set knows, or the loader itself if its data set knows none."""
    if callable(getattr(loader, "state_dict", None)):
        return loader
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, IterableDataset) or not _knows_position(dataset):
        return loader
    kept = getattr(loader, "_holdfast_position", None)
    if kept is None:
        kept = loader._holdfast_position = _WithDatasetState(loader)
    return kept


def _knows_position(dataset: Any) -> bool:
    """Tell whether a dataset has ``state_dict(num_samples, from_beginning)``; a ``state_dict()`` sees no workers."""
    if not all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    try:
        inspect.signature(dataset.state_dict).bind(0, True)
    except (TypeError, ValueError):
        return False
    return True


def num_batches(loader: Any) -> int | None:
    """Return how many batches an epoch has, None if the loader cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def counts_tokens(batch: Any, spec: DataSpec | None) -> bool:
    """Tell whether a function counts tokens, or batches such as this one have any."""
    return (spec is not None and spec.get_num_tokens_in_batch is not None) or num_tokens(batch) > 0


def num_tokens(batch: Any) -> int:
    """Count tokens: the entries of "input_ids" in a dictionary, else none."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0
    return 0


def on_device(batch: Any, spec: DataSpec | None, device: torch.device, *, part: bool = False) -> Any:
    """Return a batch as the model gets it.

    Args:
        batch: as the loader gave it.
        spec: the functions it goes through.
        device: where the model is.
        part: it is not split any more.
    """
    if spec is not None and spec.batch_transforms is not None:
        batch = spec.batch_transforms(batch)
    batch = move(batch, device, non_blocking=True)
    return spec.microbatch_transforms(batch) if part and spec is not None and spec.microbatch_transforms else batch


def microbatches(
    batch: Any, count: int, split: Callable[[Any, int], Sequence[Any]] | None = None
) -> list[tuple[Any, float]]:
    """Split a batch along its first dimension into up to ``count`` parts, each with its share of the samples.

    Args:
        batch: to be split.
        count: of the parts.
        split: splits a batch into parts of so many samples, instead.

    Raises:
        ConfigError: the batch cannot be split.
    """
    if count == 1:
        return [(batch, 1.0)]
    size = _rows(batch)
    if split is not None:
        size = batch_length(batch) if size is None else size
        parts = list(split(batch, max(1, -(-size // count))))
        sizes = [batch_length(part) for part in parts]
        return [(part, length / max(1, sum(sizes))) for part, length in zip(parts, sizes, strict=True)]
    if size is None:
        raise ConfigError(f"grad_accum={count}: a batch of type {type(batch).__name__} holds no tensors to split")
    count = min(count, size)
    edges = [size * number // count for number in range(count + 1)]
    pieces = itertools.pairwise(edges)
    return [(_rows_of(batch, size, first, last), (last - first) / size) for first, last in pieces]


def _rows(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((rows for part in inner if (rows := _rows(part)) is not None), None)


def _rows_of(value: Any, size: int, first: int, last: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[first:last] if value.dim() and value.shape[0] == size else value
    if isinstance(value, Mapping):
        return type(value)({key: _rows_of(part, size, first, last) for key, part in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_rows_of(part, size, first, last) for part in value)
    if isinstance(value, (list, tuple)):
        if len(value) == size and not any(isinstance(part, torch.Tensor) for part in value):
            return value[first:last]
        return type(value)(_rows_of(part, size, first, last) for part in value)
    return value
