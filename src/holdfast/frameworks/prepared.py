"""What `accelerate.Accelerator.prepare` gives back: the live objects in it, and the data in our own order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from holdfast._log import get_logger
from holdfast.errors import ConfigError, UnsupportedStateError

__all__ = ["OneByOne", "objects_of", "own_loader", "say_late", "told_when_last"]

_LOG = get_logger("accelerate")
_LOADER = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
           "prefetch_factor", "persistent_workers")  # fmt: skip


def objects_of(accelerator: Any) -> dict[str, Any]:
    """Return all that an `Accelerator` has prepared and registered, unwrapped, under the names of its own files.

    Models, optimizers, schedulers, the gradient scaler, and the objects of ``register_for_checkpointing``.

    Raises:
        ConfigError: it is no Accelerator, or nothing is prepared yet.
        UnsupportedStateError: an engine keeps the state to itself.
    """
    if not hasattr(accelerator, "distributed_type"):
        raise ConfigError(f"accelerator={accelerator!r}: give the Accelerator that has prepared the training")
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise UnsupportedStateError(
            f"the state of an Accelerator with {kind} is kept by that engine: report the directories of its own "
            "checkpoints (holdfast.deepspeed, holdfast.megatron)"
        )
    if not accelerator._models:
        raise ConfigError(
            "this Accelerator has prepared no model: make the Checkpointer after accelerator.prepare(...)"
        )
    groups = {
        "model": accelerator._models,
        "optimizer": [wrapper.optimizer for wrapper in accelerator._optimizers],
        "scheduler": [wrapper.scheduler for wrapper in accelerator._schedulers],
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
    }
    found = {
        name if number == 0 else f"{name}_{number}": item
        for name, group in groups.items()
        for number, item in enumerate(group)
    }
    custom = {
        f"custom_checkpoint_{number}": registered for number, registered in enumerate(accelerator._custom_objects)
    }
    return {**found, **custom}


def say_late(accelerator: Any, found: frozenset[str]) -> frozenset[str]:
    """Return the names of `objects_of` now, and say which came after ``found``, too late to be saved."""
    now = frozenset(objects_of(accelerator))
    if late := sorted(now - found):
        _LOG.warning(
            "%s NOT saved: prepared or registered after the Checkpointer was made; make it after accelerator.prepare "
            "and register_for_checkpointing", ", ".join(late),
        )  # fmt: skip
    return now


def own_loader(prepared: Any) -> tuple[DataLoader[Any], tuple[int, int] | bool] | None:
    """Return the loader that ``prepared`` was made of, and its part (rank, num_ranks); None where it is not known.

    The batches of that loader are those of one rank. Its position can be kept exactly and for any number of ranks: the
    order is known, not only how far it has been gone.
    """
    inner = getattr(prepared, "base_dataloader", None)
    if type(prepared).__name__ != "DataLoaderShard" or type(inner) is not DataLoader:
        return None
    batches: Any = inner.batch_sampler
    size: int | None = getattr(batches, "batch_size", None)
    part: tuple[int, int] | bool = False
    if type(batches).__name__ == "BatchSamplerShard":
        part = batches.process_index, batches.num_processes
        size = batches.batch_size // batches.num_processes if batches.split_batches else batches.batch_size
        batches = batches.batch_sampler
    if isinstance(inner.dataset, IterableDataset) or type(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    # Accelerate's own seedable sampler is a RandomSampler that follows the epoch: so do we.
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None
    loader: DataLoader[Any] = DataLoader(
        inner.dataset,
        batch_size=size,
        sampler=None if shuffles else sampler,
        shuffle=shuffles or None,
        drop_last=batches.drop_last,
        **{name: getattr(inner, name) for name in _LOADER},
    )
    return loader, part


def told_when_last(
    batches: Iterator[Any], prepared: Any, *, left: Callable[[], int | None], to_device: Callable[[Any], Any]
) -> Iterator[Any]:
    """Yield batches on their device; Accelerate, which steps the optimizer at the last batch, hears of it first.

    Args:
        batches: of the loader that ``prepared`` was made of.
        prepared: the loader that Accelerate knows.
        left: number of batches that follow the newest.
        to_device: brings a batch to its device.
    """
    prepared.begin()
    try:
        for batch in batches:
            prepared.end_of_dataloader = left() == 0
            yield to_device(batch)
    finally:
        prepared.end()


class OneByOne:
    """A prepared loader of which only the number of batches drawn is known."""

    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared

    def __iter__(self) -> Iterator[Any]:
        return iter(self._prepared)

    def __len__(self) -> int:
        return len(self._prepared)
