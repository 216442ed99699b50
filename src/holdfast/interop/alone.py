"""Commit a checkpoint that belongs to no run, from tensors that come one at a time."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.identity import manifest_fields, new_start_id
from holdfast.errors import CheckpointExistsError
from holdfast.format.codec import dumps
from holdfast.format.commit import PartSummary, commit, look_before
from holdfast.format.names import MANIFEST_NAME

from .part import DirectPartWriter, Row

__all__ = ["check_free", "write_alone"]


def check_free(target: Checkpoint, *, overwrite: bool) -> None:
    """Refuse to replace a committed checkpoint, before any work is done.

    Raises:
        CheckpointExistsError: there is one, and ``overwrite`` is false.
    """
    if not overwrite and target.storage.exists(f"{target.directory}/{MANIFEST_NAME}"):
        raise CheckpointExistsError(
            f"{target.uri} is a committed checkpoint already: pass overwrite=True (--overwrite) to replace it, or use "
            "another name"
        )


def write_alone(
    target: Checkpoint,
    rows: list[Row],
    aliases: Mapping[str, str],
    tree: Any,
    *,
    step: int | None = None,
    epoch: float | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write and commit; durable on return. After a failure there is what was there before.

    Args:
        target: where.
        rows: the tensors.
        aliases: name of a tied tensor -> name of the one it is stored as.
        tree: the structure as typed JSON.
        step: training step to record.
        epoch: epoch to record.
        extra: plain data for the manifest.
        overwrite: replace a committed checkpoint.
        progress: told the bytes of tensors just written.

    Raises:
        CheckpointExistsError: there is one, and ``overwrite`` is false.
    """
    # Nobody holds a lease here: what others have left, or are about to commit, goes after a commit that shuts them out.
    replaced = look_before(target.storage, target.directory)
    writer = DirectPartWriter(target.storage, target.directory, f"{new_start_id()}-1", progress=progress)
    try:
        part = writer.write(rows, aliases)
        state = writer.state(dumps(tree))
        fields = manifest_fields(
            run_id=None,
            checkpoint_id=uuid.uuid4().hex,
            parent=None,
            attempt=1,
            step=step,
            epoch=epoch,
            metrics={},
        )
        summary = PartSummary(writer=0, files=(*part.files, state))
        allowed = replaced if overwrite or replaced.etag == "" else None
        commit(target.storage, target.directory, {**fields, "extra": dict(extra or {})}, [summary], overwrite=allowed)
    except BaseException:
        writer.discard()
        raise
