"""Megatron-Core: what `dist_checkpointing` writes on all ranks, as one checkpoint.

On workers of the function trainer `report` calls ``dist_checkpointing.save`` on every rank and commits what they wrote;
`load` checks every byte and calls ``dist_checkpointing.load``, which cuts tensors as the sharded state dict says: with
another number of tensor- or pipeline-parallel ranks, too. In a loop of your own under torchrun a `Keeper` does both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ._optional import require
from .checkpoint.handle import Checkpoint
from .errors import ConfigError
from .frameworks.keepers import ShardCheckpoints, verified_directory
from .frameworks.reporting import reporting
from .trainers.function.config import CheckpointUploadMode

__all__ = ["Keeper", "load", "report"]


def report(
    metrics: Mapping[str, Any],
    sharded_state_dict: dict[str, Any],
    *,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.ASYNC,
    validation: bool | Mapping[str, Any] = False,
    **options: Any,
) -> None:
    """Report metrics and a sharded state dict, from a ``train_func``; every rank calls this.

    Returns when Megatron has written its files and they are taken over, which costs a rename; or, with SYNC, when they
    are committed.

    Args:
        metrics: of rank 0 are kept.
        sharded_state_dict: what ``model.sharded_state_dict()`` gives, and the optimizer's; what is not sharded in it
            is stored once.
        checkpoint_upload_mode: ASYNC or SYNC.
        validation: as in `holdfast.report`.
        options: of ``dist_checkpointing.save`` (``sharded_strategy``, ``content_metadata``...), but not
            ``async_sharded_save``: Holdfast commits what is written completely.

    Raises:
        ConfigError: ``async_sharded_save`` is on.
        SessionError: not inside of a ``train_func``.
        HoldfastError: a rank failed or did not come; all ranks hear of it.

    Example:
        >>> holdfast.megatron.report({"loss": loss}, {"model": model.sharded_state_dict()})  # doctest: +SKIP
    """
    _refuse_async(options)
    with reporting(metrics, sharded=True, upload_mode=checkpoint_upload_mode, validation=validation) as directory:
        _dist_checkpointing().save(sharded_state_dict, directory, **options)


def load(sharded_state_dict: dict[str, Any], checkpoint: str | os.PathLike[str] | Checkpoint, **options: Any) -> Any:
    """Return the state dict that a checkpoint holds for this rank; every rank calls this.

    Every byte is checked against its digest before Megatron reads it: some of its files are pickles.

    Args:
        sharded_state_dict: says which part of which tensor this rank wants.
        checkpoint: path, URI or `Checkpoint`; also any directory of ``dist_checkpointing``, which is then read as it
            is.
        options: of ``dist_checkpointing.load`` (``strict``...).

    Raises:
        CorruptCheckpointError: a file is damaged; on all ranks, and before Megatron reads anything.
    """
    with verified_directory(checkpoint) as directory:
        return _dist_checkpointing().load(sharded_state_dict, directory, **options)


class Keeper(ShardCheckpoints):
    """Keeps sharded checkpoints without the function trainer: any storage, in the background, best and last.

    Every rank makes a `Keeper` and makes the same calls. Arguments are those of `ShardCheckpoints`.

    Example:
        >>> with Keeper("s3://bucket/run", keep=Keep(last=2, best=1, metric="loss")) as keeper:  # doctest: +SKIP
        ...     loaded = keeper.load({"model": model.sharded_state_dict(), "step": 0})
    """

    def save(
        self,
        sharded_state_dict: dict[str, Any],
        *,
        step: int,
        epoch: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Let all ranks write; returns when their files are taken over, and commits in the background. As `report`."""
        _refuse_async(options)
        with self.writing(step=step, epoch=epoch, metrics=metrics) as directory:
            _dist_checkpointing().save(sharded_state_dict, directory, **options)

    def load(self, sharded_state_dict: dict[str, Any], **options: Any) -> Any:
        """Return what the newest sound checkpoint holds for this rank, None at a fresh start. As `load`."""
        with self.newest() as directory:
            return None if directory is None else _dist_checkpointing().load(sharded_state_dict, directory, **options)


def _refuse_async(options: Mapping[str, Any]) -> None:
    if options.get("async_sharded_save"):
        raise ConfigError(
            "async_sharded_save=True returns before Megatron has written its files, and half a checkpoint would be "
            "committed: leave it out; with checkpoint_upload_mode ASYNC the commit is in the background anyway"
        )


def _dist_checkpointing() -> Any:
    return require("megatron.core.dist_checkpointing", extra="megatron", purpose="holdfast.megatron")
