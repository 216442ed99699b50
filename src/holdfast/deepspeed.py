"""DeepSpeed: the shards of all ranks as one checkpoint of the function trainer, checked before they are read.

`report` calls ``engine.save_checkpoint`` on every rank and commits what they wrote, `load` gives it back to an engine.
The files stay DeepSpeed's own, which are pickles; `holdfast.import_checkpoint` puts the float32 weights of all ranks
together without running any of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .checkpoint.handle import Checkpoint
from .errors import CheckpointError, ConfigError
from .integrations import reporting
from .integrations.verified import verified_directory
from .runtime.types import CheckpointUploadMode

__all__ = ["TAG", "load", "report"]

TAG = "deepspeed"  # the folder in which DeepSpeed's files lie; `latest` names it


def report(
    metrics: Mapping[str, Any],
    engine: Any,
    *,
    client_state: Mapping[str, Any] | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.ASYNC,
    validation: bool | Mapping[str, Any] = False,
    **options: Any,
) -> None:
    """Report metrics and a checkpoint of an engine, from a ``train_func``; every rank calls this.

    Returns when DeepSpeed has written its files and they are taken over, which costs a rename; or, with SYNC, when they
    are committed.

    Args:
        metrics: of rank 0 are kept.
        engine: what ``deepspeed.initialize`` gave.
        client_state: plain values to go with it (step, epoch); `load` returns them.
        checkpoint_upload_mode: ASYNC or SYNC.
        validation: as in `holdfast.report`.
        options: of ``engine.save_checkpoint`` (``exclude_frozen_parameters``).

    Raises:
        ConfigError: the engine's checkpoint engine writes in the background.
        SessionError: not inside of a ``train_func``.
        HoldfastError: a rank failed or did not come; all ranks hear of it.

    Example:
        >>> holdfast.deepspeed.report({"loss": loss}, engine, client_state={"step": step})  # doctest: +SKIP
    """
    if getattr(getattr(engine, "checkpoint_engine", None), "is_decoupled", bool)():
        raise ConfigError(
            f"{type(engine.checkpoint_engine).__name__} writes after engine.save_checkpoint has returned (decoupled), "
            "and half a checkpoint would be committed: take the checkpoint writer out of DeepSpeed's configuration "
            '("checkpoint": {"writer": {"decoupled": true}}); the commit is in the background anyway'
        )
    with reporting(metrics, sharded=True, upload_mode=checkpoint_upload_mode, validation=validation) as directory:
        engine.save_checkpoint(directory, tag=TAG, client_state=dict(client_state or {}), **options)


def load(engine: Any, checkpoint: str | os.PathLike[str] | Checkpoint, **options: Any) -> dict[str, Any]:
    """Give an engine what `report` has saved, and return the client's state; every rank calls this.

    Every byte is checked against its digest first: DeepSpeed unpickles its files, and these are the ones that the run
    itself has written. Stage and number of ranks have to be those of the save, as DeepSpeed wants them.

    Args:
        engine: what ``deepspeed.initialize`` gave.
        checkpoint: path, URI or `Checkpoint`; also any directory of DeepSpeed, which is then read as it is.
        options: of ``engine.load_checkpoint`` (``load_module_only``, ``load_optimizer_states``...).

    Raises:
        CorruptCheckpointError: a file is damaged; on all ranks, and before DeepSpeed reads anything.
        CheckpointError: DeepSpeed finds nothing of its own there.
    """
    with verified_directory(checkpoint) as directory:
        path, client_state = engine.load_checkpoint(directory, **options)
    if path is None:
        raise CheckpointError(
            f"{checkpoint}: DeepSpeed has loaded nothing. It needs the directory with `latest` in it, as `report` and "
            "engine.save_checkpoint write it; its own log says what is missing"
        )
    return dict(client_state or {})
