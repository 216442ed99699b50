"""What a training function needs to run the same on one worker and on many: devices, model, data, seeds.

`PreparedLoader` is the data loader of one rank, which moves its batches and knows where it is.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from holdfast._log import get_logger
from holdfast._ranks import RankInfo, current_ranks
from holdfast.errors import ConfigError
from holdfast.state.accelerator import default_device, has_streams, make_current, move
from holdfast.state.data.batches import ResumableBatches, of_this_rank, with_ranks_apart
from holdfast.state.data.order import DealtSampler, knows_its_rank
from holdfast.state.gradient_order import fix_or_warn

_logger = get_logger("data")
_seed: int | None = None  # what `enable_reproducibility` was given


def get_device() -> torch.device:
    """Return the device of this worker: its GPU, or other accelerator, where it has one, else the CPU."""
    return default_device(current_ranks().local_rank)


def get_devices() -> list[torch.device]:
    """Return all devices of this worker."""
    return [get_device()]


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Move a model to this worker's device and, with more than one worker, wrap it for data-parallel training.

    Every rank calls it. DDP then adds gradients in one order from the first step on, so that a resume is exact with any
    number of workers (docs/parallel.md). Holdfast stores names without the wrapper's ``module.``, so checkpoints fit
    any number of workers.

    Args:
        model: the model; one that is wrapped already is only moved.
        move_to_device: True: to `get_device`; or the device.
        parallel_strategy: "ddp", "fsdp" or None. With "fsdp" every worker has a part of each parameter (FSDP2); make
            the optimizer afterwards, and shard large blocks by themselves first (`fully_shard` of torch), else all of
            the model is gathered at once.
        parallel_strategy_kwargs: arguments for `torch.nn.parallel.DistributedDataParallel`, or for
            `torch.distributed.fsdp.fully_shard`.

    Raises:
        ConfigError: an unknown strategy, or several ranks without a process group.
    """
    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ConfigError(f"prepare_model(parallel_strategy={parallel_strategy!r}): use 'ddp', 'fsdp' or None")
    device = _target(move_to_device)
    if device is not None:
        make_current(device)
        model = model.to(device)
    ranks = current_ranks()
    if parallel_strategy is None or ranks.world_size == 1 or isinstance(model, DistributedDataParallel):
        return model
    _need_group(ranks, "prepare_model")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model  # nothing to average; DDP refuses such a model
    if parallel_strategy == "fsdp":
        return _shard(model, ranks, dict(parallel_strategy_kwargs or {}))
    options: dict[str, Any] = {}
    if device is not None and has_streams(device):
        options = {"device_ids": [device], "output_device": device}
    wrapped = DistributedDataParallel(model, **{**options, **(parallel_strategy_kwargs or {})})
    fix_or_warn(wrapped, leads=ranks.rank == 0)
    return wrapped


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool | torch.device = True,
    auto_transfer: bool = True,
    *,
    seed: int | None = None,
    seed_samples: bool = True,
) -> PreparedLoader:
    """Split a loader over the workers, move its batches to the device, and make its position resumable.

    Every rank calls it. The result is iterated over once per epoch; put it into ``report(state=...)`` to resume
    in the middle of one.

    Args:
        data_loader: any `torch.utils.data.DataLoader`; ``batch_size`` is that of one worker.
        add_dist_sampler: with several workers give each its part of a map-style data set: shuffled if the loader
            shuffles, in order if it does not; what another sampler draws is dealt out. A loader with a sampler that
            knows its rank, or an `IterableDataset`, is left as it is.
        move_to_device: True: batches go to `get_device`; or the device.
        auto_transfer: copy to a GPU beside the computation (with ``pin_memory=True``).
        seed: decides the order together with the epoch; must be the same on all ranks. Default: that of
            `enable_reproducibility`, else that of a `DistributedSampler` given, else 0 with several workers, and with
            one worker it follows `torch.manual_seed`.
        seed_samples: also make random augmentation in ``__getitem__`` a function of (seed, epoch, index), so that it
            is the same after a resume.

    Raises:
        ConfigError: not a DataLoader, or one that cannot be split.
    """
    if isinstance(data_loader, PreparedLoader):
        raise ConfigError("prepare_data_loader: this loader is prepared already")
    if not isinstance(data_loader, DataLoader):
        raise ConfigError(
            f"prepare_data_loader takes a torch.utils.data.DataLoader, not {type(data_loader).__name__}: move its "
            "batches with get_device() yourself"
        )
    ranks = current_ranks()
    if seed is None:
        given = getattr(data_loader.sampler, "seed", 0) if ranks.world_size > 1 else torch.initial_seed() % (1 << 62)
        seed = _seed if _seed is not None else given if isinstance(given, int) else 0
    if add_dist_sampler and ranks.world_size > 1:
        data_loader = _split(data_loader, ranks, seed)
    device = _target(move_to_device)
    return PreparedLoader(
        data_loader,
        seed=seed,
        device=device if device is None or device.type != "cpu" else None,
        auto_transfer=auto_transfer,
        seed_samples=seed_samples,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )


def enable_reproducibility(seed: int = 0) -> None:
    """Make runs repeatable: seed python, NumPy and torch, and use deterministic kernels, which are slower."""
    global _seed
    import numpy as np

    _seed = seed
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # See https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def _shard(model: nn.Module, ranks: RankInfo, options: dict[str, Any]) -> nn.Module:
    """Shard a model over all ranks, on the kind of device that its parameters are on."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise ConfigError(
            f"prepare_model(parallel_strategy='fsdp') needs torch 2.6 or newer, this is {torch.__version__}: upgrade "
            "it, or use 'ddp'"
        ) from error
    if "mesh" not in options:
        kind = next(model.parameters()).device.type
        options["mesh"] = init_device_mesh(kind, (ranks.world_size,))
    fully_shard(model, **options)
    return model


def _split(loader: DataLoader[Any], ranks: RankInfo, seed: int) -> DataLoader[Any]:
    """Return a loader like ``loader`` for the part of this rank."""
    if isinstance(loader.dataset, IterableDataset) or knows_its_rank(loader.sampler, loader.batch_sampler):
        return loader
    custom = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    if custom or type(loader).__iter__ is not DataLoader.__iter__:
        what = f"batch_sampler {type(loader.batch_sampler).__name__}" if custom else type(loader).__name__
        raise ConfigError(
            f"prepare_data_loader: how to split a loader with its own {what} over {ranks.world_size} workers is not "
            "known: give it a sampler with num_replicas and rank, or pass add_dist_sampler=False to let every worker "
            "have all of it"
        )
    inner: Any = loader.batch_sampler
    sampler: Any = inner.sampler if inner is not None else loader.sampler
    if type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not _draws_otherwise(sampler)):
        sampler = DistributedSampler(
            loader.dataset,
            num_replicas=ranks.world_size,
            rank=ranks.rank,
            shuffle=type(sampler) is RandomSampler,
            seed=seed,
        )
    else:
        sampler = DealtSampler(sampler, rank=ranks.rank, num_replicas=ranks.world_size)
    options: dict[str, Any] = {}
    if loader.num_workers > 0:
        options = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
        options["multiprocessing_context"] = loader.multiprocessing_context
    if loader.pin_memory_device:
        options["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(
        loader.dataset,
        batch_size=inner.batch_size if inner is not None else None,
        drop_last=inner.drop_last if inner is not None else False,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **options,
    )


def _draws_otherwise(sampler: RandomSampler) -> bool:
    """Whether a random sampler is more than a shuffle of the whole data set."""
    return sampler.replacement or sampler.num_samples != len(sampler.data_source)


def _target(move_to_device: bool | torch.device) -> torch.device | None:
    if isinstance(move_to_device, torch.device):
        return move_to_device
    return get_device() if move_to_device else None


def _need_group(ranks: RankInfo, function: str) -> None:
    if not torch.distributed.is_initialized():
        raise ConfigError(
            f"{function}: this is rank {ranks.rank} of {ranks.world_size}, but there is no process group: TorchTrainer "
            "makes one, under another launcher call torch.distributed.init_process_group first"
        )


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
        ([[2, 3], [4, 5]], 1)
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
            return move(batch, self.device, non_blocking=False)
        module = torch.get_device_module(self.device)
        if self._stream is None:
            self._stream = module.Stream(self.device)
        with module.stream(self._stream):
            moved = move(batch, self.device, non_blocking=True)
        current = module.current_stream(self.device)
        current.wait_stream(self._stream)
        _record(moved, current)
        return moved


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
