"""Ray Tune: Holdfast checkpoints of trials, through which Tune restarts, pauses, clones and ranks them.

Inside a trial, in place of ``ray.tune.report`` and ``ray.tune.get_checkpoint``::

    def trainable(config):
        checkpoint = holdfast.ray_tune.get_checkpoint()        # after a failure, or cloned from a better trial
        ...
        holdfast.ray_tune.report({"loss": loss}, state={"model": model, "epoch": epoch})

A state is saved as a directory that Tune copies into the trial's storage, and keeps and deletes as its
``CheckpointConfig`` says. A checkpoint that is in a storage already (of a `holdfast.Checkpointer`, say) is not copied:
Tune gets a few bytes that say where it is.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from typing import Any

from ._optional import require
from .checkpoint.handle import Checkpoint
from .checkpointer.functions import save
from .errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    SessionError,
    StorageNotFoundError,
)
from .format.manifest import Manifest
from .frameworks.reporting import scalars, scratch_directory
from .storage.resolve import from_description

__all__ = ["REFERENCE_NAME", "get_checkpoint", "report"]

REFERENCE_NAME = "holdfast-reference.json"
"""The only file in what Tune keeps of a checkpoint that stays where it is."""


def report(
    metrics: Mapping[str, Any], *, state: Mapping[Any, Any] | None = None, checkpoint: Checkpoint | None = None
) -> None:
    """Report a trial's metrics to Tune, with a checkpoint if there is one.

    Args:
        metrics: for Tune and its schedulers, which get tensors of one element as numbers; numbers and strings are noted
            in the checkpoint of a ``state`` too.
        state: saved, and handed to Tune. Anything that `holdfast.save` takes.
        checkpoint: committed already. It must stay there for as long as Tune may come back to it: the
            `Keep` of its run has to last longer than Tune's ``num_to_keep``.

    Raises:
        ConfigError: both are given, or the checkpoint is in this process's memory.
        CheckpointNotFoundError: there is no such checkpoint, or it is not committed yet.
        SessionError: called outside of a trial.
        MissingExtraError: Ray Tune is not installed.
    """
    tune = _tune("report")
    if state is not None and checkpoint is not None:
        raise ConfigError("give a state or a checkpoint, not both")
    for_tune = _without_tensors(metrics)
    if state is None and checkpoint is None:
        tune.report(for_tune)
        return
    with scratch_directory() as folder:
        directory = os.path.join(folder, "checkpoint")  # Tune copies it before its `report` returns
        if state is not None:
            save(directory, state, metrics=scalars(for_tune), ranks="this")
        else:
            assert checkpoint is not None
            os.makedirs(directory)
            with open(os.path.join(directory, REFERENCE_NAME), "w", encoding="utf-8") as file:
                json.dump(_reference(checkpoint), file)
        _make_room(tune)
        tune.report(for_tune, checkpoint=tune.Checkpoint.from_directory(directory))


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint that this trial goes on from, None at a fresh start.

    It may be of another trial: population based training clones the better ones. Its `holdfast.Checkpoint.load` checks
    every byte.

    Raises:
        CheckpointNotFoundError: Tune knows of a checkpoint that is gone.
        CorruptCheckpointError: another checkpoint is there in its place.
        SessionError: called outside of a trial.
    """
    found = _tune("get_checkpoint").get_checkpoint()
    if found is None:
        return None
    kept = Checkpoint(found.path, found.filesystem)
    if kept.manifest is not None:
        return kept
    try:
        reference = json.loads(kept.storage.read(f"{kept.directory}/{REFERENCE_NAME}"))
    except StorageNotFoundError:
        raise CheckpointNotFoundError(
            f"{kept.uri} is no checkpoint of Holdfast: report with holdfast.ray_tune.report, or read it through "
            "ray.tune.get_checkpoint()"
        ) from None
    checkpoint = Checkpoint.at(from_description(reference["storage"]), reference["name"])
    manifest = _manifest(checkpoint, "keep the checkpoints of a run for longer than Tune does, or report a state")
    if manifest.checkpoint_id != reference["checkpoint_id"]:
        raise CorruptCheckpointError(
            f"this trial goes on from {checkpoint.uri}, where another checkpoint lies now ({manifest.checkpoint_id}, "
            f"not {reference['checkpoint_id']}): give every trial a run of its own"
        )
    return checkpoint


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_tensors(one) for name, one in value.items()}
    return value.item() if callable(numel := getattr(value, "numel", None)) and numel() == 1 else value


def _make_room(tune: Any) -> None:
    """Remove what the trial left, when it died in its report, in the directory that Tune copies into next."""
    context = getattr(tune, "get_context", None)  # of early versions none says where a trial stores
    get_storage = getattr(context(), "get_storage", None) if context is not None else None
    if get_storage is None:
        return
    following = copy.copy(get_storage())
    following.current_checkpoint_index += 1
    path, filesystem = following.checkpoint_fs_path, following.storage_filesystem
    if filesystem.get_file_info(path).type.name != "NotFound":
        filesystem.delete_dir(path)


def _reference(checkpoint: Checkpoint) -> dict[str, Any]:
    storage = checkpoint.storage.describe()
    if storage is None:
        raise ConfigError(f"{checkpoint.uri} cannot be found by another process: report a state instead")
    manifest = _manifest(checkpoint, "report a checkpoint after its save is done")
    return {"storage": storage, "name": checkpoint.directory, "checkpoint_id": manifest.checkpoint_id}


def _manifest(checkpoint: Checkpoint, what_to_do: str) -> Manifest:
    try:
        manifest = checkpoint.manifest
    except (CheckpointNotFoundError, IncompleteCheckpointError) as error:
        raise CheckpointNotFoundError(f"there is no committed checkpoint at {checkpoint.uri}: {what_to_do}") from error
    if manifest is None:
        raise CheckpointNotFoundError(f"{checkpoint.uri} is no checkpoint of Holdfast: {what_to_do}")
    return manifest


def _tune(function: str) -> Any:
    tune = require("ray.tune", extra="ray-tune", purpose="holdfast.ray_tune")
    if tune.get_context().get_trial_id() is None:
        raise SessionError(f"{function}() is called by the function of a trial of Ray Tune, and nowhere else")
    return tune
