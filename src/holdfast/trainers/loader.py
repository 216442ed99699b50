"""`PreparedLoader`: a data loader of one rank that moves its batches and knows where it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from holdfast._log import get_logger
from holdfast.state.accelerator import has_streams
from holdfast.state.data.batches import ResumableBatches, of_this_rank, with_ranks_apart

__all__ = ["PreparedLoader", "Transfer"]

_logger = get_logger("data")


class PreparedLoader:
    """What `prepare_data_loader` returns: iterate over it once per epoch, put it into the state to resume inside one.

    Each new iteration is the next epoch: ``set_epoch`` of the sampler is called by itself. A call of your own
    (``loader.sampler.set_epoch(epoch)``, ``loader.set_epoch(epoch)``) before an iteration decides instead. The order
    and, with ``seed_samples``, random augmentation are functions of (seed, epoch), so an epoch that is resumed in the
    middle goes on exactly as it would have.

    Everything else (``dataset``, ``sampler``, ``batch_size`` ...) is that of the loader inside.

    Attributes:
        loader: the loader inside.
        epoch: number of the epoch that an iteration is in, else of the one that the next iteration begins.
        elastic: its state holds for any number of ranks, which `Checkpointer.batches` wants to know.

    Example:
        >>> make = lambda: PreparedLoader(DataLoader(range(6), batch_size=2), seed=1)
        >>> loader = make()
        >>> batches = iter(loader); _ = next(batches)
        >>> again = make(); again.load_state_dict(loader.state_dict())
        >>> [batch.tolist() for batch in again], again.epoch
        ([[2, 3], [4, 5]], 0)
    """

    elastic = True

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        seed: int,
        device: torch.device | None = None,
        auto_transfer: bool = True,
        seed_samples: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Wrap a loader whose sampler is split over the ranks already; see `prepare_data_loader`."""
        self.loader = loader
        self._seed = seed
        self._transfer = Transfer(device, overlap=auto_transfer) if device is not None else None
        self._options: dict[str, Any] = {"seed_samples": seed_samples, "rank": rank, "world_size": world_size}
        self._epoch = 0
        self._loaded: Mapping[str, Any] | None = None  # the position that the next iteration goes on from
        self._previous: Mapping[str, Any] | None = None  # where the epoch before ended: a loader with state goes on
        self._batches: ResumableBatches | None = None  # of the newest iteration
        self._from: Mapping[str, Any] | None = None  # the position it went on from
        self._begun_after = 0  # batches of the epoch before those of the newest iteration
        self._over = True  # whether it has ended, by itself or by a `break`
        self._is_loaded = self._is_first = False  # no iteration since a load; the newest one is the first since then
        self._is_saved = False  # a state was taken since the newest iteration began
        self._num_loads = 0
        self._chosen: int | None = None
        self._announced = self._sampler_epoch()

    @property
    def epoch(self) -> int:
        """See the class."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Decide which epoch the next iteration is."""
        self._chosen = epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches = self._begin()
        begun = self._from, self._begun_after, self._num_loads
        try:
            for batch in batches:
                yield batch if self._transfer is None else self._transfer(batch)
                if self._batches is not batches and self._num_loads == begun[2]:
                    self._go_back(batches, *begun[:2])
        finally:
            if self._batches is batches:
                self._end()  # exhausted, left by `break`, or dropped

    def _begin(self) -> ResumableBatches:
        if not self._over:
            self._end()
        position, wanted = self._loaded, self._wanted()
        self._loaded, self._chosen = None, None
        if wanted is not None and position is not None and wanted != position["epoch"]:
            if self._options["rank"] == 0:
                _logger.warning(
                    "the position after %d batches of epoch %d is not used: set_epoch(%d) was called",
                    position["batches"], position["epoch"], wanted,
                )  # fmt: skip
            position = None
        if wanted is not None:
            self._epoch = wanted
        before = position if position is not None else self._previous
        self._batches = ResumableBatches(self.loader, before, seed=self._seed, epoch=self._epoch, **self._options)
        self._from, self._over = position, False
        self._is_first = self._is_loaded and (wanted is None or position is not None)
        self._is_loaded = self._is_saved = False
        self._begun_after = self._batches.batches
        self._set_sampler_epoch(self._epoch)
        return self._batches

    def _end(self) -> None:
        """Count the epoch as done, wherever it was left."""
        batches, position = self._batches, self._from
        assert batches is not None
        self._over, self._from = True, None
        if self._is_first and self._was_a_look(batches):
            self._loaded, self._is_loaded = position, True
        else:
            self._previous = batches.state_dict(is_over=True)
            self._epoch += 1

    def _go_back(self, batches: ResumableBatches, position: Mapping[str, Any] | None, begun_after: int) -> None:
        """Go on with a loop within which another one over this loader has begun: the other one does not count."""
        if self._is_saved and self._options["rank"] == 0:
            _logger.warning(
                "this loader was iterated inside of its own loop, and a state was taken before the outer loop went on: "
                "a resume from that leaves out the rest of epoch %d. Save before the inner loop, or give that a loader "
                "of its own", batches.epoch,
            )  # fmt: skip
        self._batches, self._from, self._begun_after = batches, position, begun_after
        self._over = self._is_first = self._is_saved = False
        self._loaded, self._epoch = None, batches.epoch
        self._set_sampler_epoch(self._epoch)

    def _was_a_look(self, batches: ResumableBatches) -> bool:
        """Tell whether an iteration was `next(iter(loader))`, which must not use up what a resume begins with."""
        return not batches.done and batches.batches <= self._begun_after + 1

    def state_dict(self) -> dict[str, Any]:
        """Describe the position: inside of an epoch as long as its iteration is not over."""
        position, epoch = self._loaded, self._epoch
        self._is_saved = True
        if not self._over and self._batches is not None:
            position, self._is_first = self._batches.state_dict(), False  # it is no look
        elif (wanted := self._wanted()) is not None:
            epoch = wanted
        if position is None:
            position = self._previous
        if position is not None and self._options["world_size"] > 1:
            position = with_ranks_apart(position)
        return {"epoch": epoch, "seed": self._seed, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` described, with the next iteration. One that runs is forgotten."""
        position = state["position"]
        if position is not None:
            position = of_this_rank(position)
        sampler = self.loader.sampler
        if type(sampler) is DistributedSampler and sampler.seed == self._seed:
            sampler.seed = int(state["seed"])
        self._seed, self._epoch = int(state["seed"]), int(state["epoch"])
        self._batches, self._from, self._over, self._chosen = None, None, True, None
        self._is_loaded, self._num_loads = True, self._num_loads + 1
        inside = position is not None and position["epoch"] == self._epoch
        self._loaded = position if inside else None
        self._previous = None if inside else position
        self._announced = self._sampler_epoch()

    def _wanted(self) -> int | None:
        """The epoch that the user asked for, of this object or of the sampler, since the last iteration began."""
        if self._chosen is None and self._sampler_epoch() != self._announced:
            return self._sampler_epoch()
        return self._chosen

    def _sampler_epoch(self) -> int | None:
        epoch = getattr(self.loader.sampler, "epoch", None)
        return epoch if isinstance(epoch, int) else None

    def _set_sampler_epoch(self, epoch: int) -> None:
        owners: tuple[Any, ...] = (self.loader.sampler, self.loader.batch_sampler)
        for owner in owners:
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(epoch)
        self._announced = self._sampler_epoch()

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not made yet: while it is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        return f"PreparedLoader({self.loader!r}, epoch={self._epoch})"


class Transfer:
    """Moves every tensor of a batch to a device.

    With ``overlap`` a device with streams copies on one of its own, beside the kernels that still run for the batch
    before; that needs ``pin_memory=True`` of the loader. The batch may be used at once either way.
    """

    def __init__(self, device: torch.device, *, overlap: bool = True) -> None:
        self.device = device
        self._overlap = overlap and has_streams(device)
        self._stream: Any = None

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device; what is there already is not copied."""
        if not self._overlap:
            return self._move(batch)
        module = torch.get_device_module(self.device)
        if self._stream is None:
            self._stream = module.Stream(self.device)
        with module.stream(self._stream):
            moved = self._move(batch)
        current = module.current_stream(self.device)
        current.wait_stream(self._stream)
        _record(moved, current)
        return moved

    def _move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.device, non_blocking=self._overlap)
        if callable(getattr(value, "to", None)):  # PackedSequence (a tuple too), BatchEncoding, graphs
            return value.to(self.device)
        if isinstance(value, tuple):
            items = [self._move(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [self._move(item) for item in value]
        if type(value) is dict:
            return {key: self._move(item) for key, item in value.items()}
        if isinstance(value, Mapping):
            moved = {key: self._move(item) for key, item in value.items()}
            try:
                return type(value)(moved)  # type: ignore[call-arg]
            except TypeError:
                return moved
        return value


def _record(value: Any, stream: Any) -> None:
    """Keep the memory of a batch from being reused before ``stream`` is done with it."""
    if isinstance(value, torch.Tensor):
        value.record_stream(stream)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _record(item, stream)
    elif isinstance(value, Mapping):
        for item in value.values():
            _record(item, stream)
