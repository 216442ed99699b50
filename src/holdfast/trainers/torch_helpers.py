"""What a training function needs to run the same on one worker and on many: devices, model, data, seeds."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
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

from holdfast._ranks import RankInfo, current_ranks
from holdfast.errors import ConfigError
from holdfast.state.accelerator import default_device, has_streams, make_current
from holdfast.state.data.order import DealtSampler, knows_its_rank
from holdfast.state.gradient_order import fix_or_warn

from .loader import PreparedLoader

__all__ = ["enable_reproducibility", "get_device", "get_devices", "prepare_data_loader", "prepare_model"]

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
