"""Hugging Face Accelerate: a `Checkpointer` bound to an `Accelerator`, and reports of what it writes itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ._log import get_logger
from ._optional import require
from .checkpoint.handle import Checkpoint
from .checkpointer.checkpointer import Checkpointer as _Checkpointer
from .errors import ConfigError, UnsupportedStateError
from .frameworks import reporting
from .frameworks.directory_checkpoints import verified_directory
from .trainers.function.worker.session import get_checkpoint

__all__ = ["Checkpointer", "load_state", "report_model", "report_state"]

_PURPOSE = "holdfast.accelerate"
_LOG = get_logger("accelerate")
_LOADER = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
           "prefetch_factor", "persistent_workers")  # fmt: skip


class Checkpointer(_Checkpointer):
    """A `holdfast.Checkpointer` of everything that an `Accelerator` has prepared, on any number of ranks.

    Models, optimizers, schedulers and the gradient scaler are found in the accelerator, unwrapped, and so are the
    objects of ``register_for_checkpointing``. Make it after both.

    Args:
        path: root of the run: a path or a URI.
        accelerator: the `Accelerator`.
        state: what else to save; see docs/state.md.
        **options: those of `holdfast.Checkpointer`.

    Raises:
        ConfigError: nothing is prepared, or a name is taken.

    Example:
        >>> with Checkpointer("runs/a", accelerator, every=500) as ck:                      # doctest: +SKIP
        ...     for epoch in ck.epochs(3):
        ...         for batch in ck.batches(loader):
        ...             with accelerator.accumulate(model):
        ...                 train_one(batch)
        ...                 ck.step()
    """

    def __init__(
        self, path: str | os.PathLike[str], accelerator: Any, state: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        found = _objects_of(accelerator)
        if taken := sorted(found.keys() & (state or {}).keys()):
            raise ConfigError(
                f"state has {taken}, and so has the accelerator: what it prepared is saved under that name"
            )
        super().__init__(path, {**found, **(state or {})}, **options)
        self.accelerator, self._found = accelerator, frozenset(found)
        self._loaders: dict[int, Any] = {}  # id of a prepared loader -> the loader and its parts

    def step(self, **metrics: Any) -> None:
        """Record one finished optimizer step; does nothing where gradients only gather (``accelerator.accumulate``)."""
        if self.accelerator.sync_gradients:
            self._found = _say_late(self.accelerator, self._found)
            super().step(**metrics)

    def batches(
        self, loader: Any, *, name: str = "train", split: bool | tuple[int, int] = True, ahead: int = 0
    ) -> Iterator[Any]:
        """Yield the batches of a prepared loader, on their device, from the position of the last trained step.

        The batches are as large as Accelerate makes them and split over the ranks as there; their order is that of
        `holdfast.Checkpointer.batches`: a function of the run's seed and the epoch, so that the position is exact, and
        holds for another number of ranks. Of loaders whose order is unknown (an iterable dataset, ``dispatch_batches``,
        custom batch samplers) the position is the number of batches; a loader with ``use_stateful_dataloader`` keeps
        its own.

        Args:
            loader: from ``accelerator.prepare``.
            name: tells several training loaders apart.
            split: as in `holdfast.Checkpointer.batches`, for a loader that was not prepared.
            ahead: as in `holdfast.Checkpointer.batches`.
        """
        if not hasattr(loader, "gradient_state"):
            return super().batches(loader, name=name, split=split, ahead=ahead)
        if getattr(loader, "use_stateful_dataloader", False):
            return super().batches(loader, name=name, ahead=ahead)
        _, own = self._loaders.setdefault(id(loader), (loader, _own_loader(loader)))
        if own is None:
            return super().batches(_OneByOne(loader), name=name, ahead=ahead)
        plain, part = own
        return _told_when_last(
            super().batches(plain, name=name, split=part, ahead=ahead),
            loader,
            left=partial(self._progress.left, name),
            to_device=partial(_to_device, loader),
        )


def report_state(accelerator: Any, metrics: Mapping[str, Any], *, validation: bool = False, **options: Any) -> None:
    """Report what ``accelerator.save_state`` writes, from a ``train_func``; every rank calls it.

    Args:
        accelerator: the `Accelerator`.
        metrics: of rank 0 are kept.
        validation: as in `holdfast.report`.
        **options: of ``save_state``.

    Raises:
        ConfigError: the accelerator names its checkpoints itself.
        SessionError: called outside of train_func.
    """
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ConfigError(
            "automatic_checkpoint_naming=True makes Accelerate choose (and delete) directories of its own: leave it "
            "out, the run numbers its checkpoints and keeps what CheckpointConfig says"
        )
    with reporting(metrics, sharded=True, validation=validation) as directory:
        accelerator.save_state(directory, **options)


def report_model(
    accelerator: Any, model: Any, metrics: Mapping[str, Any], *, validation: bool = False, **options: Any
) -> None:
    """Report what ``accelerator.save_model`` writes of a prepared model: weights only. Else like `report_state`."""
    with reporting(metrics, sharded=True, validation=validation) as directory:
        accelerator.save_model(model, directory, **options)


def load_state(accelerator: Any, checkpoint: Checkpoint | None = None, **options: Any) -> Checkpoint | None:
    """Load what `report_state` reported, with ``accelerator.load_state``; every rank calls it, after ``prepare``.

    Every byte is checked against its digest first.

    Args:
        accelerator: the `Accelerator`.
        checkpoint: which; default: `holdfast.get_checkpoint`.
        **options: of ``accelerator.load_state``.

    Returns:
        The checkpoint loaded, whose ``metrics`` hold step and epoch; None if there is none.
    """
    checkpoint = checkpoint or get_checkpoint()
    if checkpoint is not None:
        with verified_directory(checkpoint) as directory:
            accelerator.load_state(directory, **options)
    return checkpoint


def _to_device(prepared: Any, batch: Any) -> Any:
    if prepared.device is None:
        return batch
    return require("accelerate.utils", extra="accelerate", purpose=_PURPOSE).send_to_device(batch, prepared.device)


def _objects_of(accelerator: Any) -> dict[str, Any]:
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


def _say_late(accelerator: Any, found: frozenset[str]) -> frozenset[str]:
    """Return the names of `_objects_of` now, and say which came after ``found``, too late to be saved."""
    now = frozenset(_objects_of(accelerator))
    if late := sorted(now - found):
        _LOG.warning(
            "%s NOT saved: prepared or registered after the Checkpointer was made; make it after accelerator.prepare "
            "and register_for_checkpointing", ", ".join(late),
        )  # fmt: skip
    return now


def _own_loader(prepared: Any) -> tuple[DataLoader[Any], tuple[int, int] | bool] | None:
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


def _told_when_last(
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


class _OneByOne:
    """A prepared loader of which only the number of batches drawn is known."""

    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared

    def __iter__(self) -> Iterator[Any]:
        return iter(self._prepared)

    def __len__(self) -> int:
        return len(self._prepared)
