"""What a PATH argument means: a run with checkpoints below it, or one checkpoint."""

from __future__ import annotations

from holdfast.checkpoint.catalog import is_remains
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.lease import is_claim
from holdfast.checkpoint.runindex import RUN_FILE
from holdfast.errors import CheckpointNotFoundError
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve

__all__ = ["find"]


def find(path: str) -> tuple[Storage, Checkpoint | None]:
    """Return the storage rooted at ``path``, and the checkpoint if the path is one (complete or not).

    Raises:
        CheckpointNotFoundError: there is nothing.
    """
    storage = resolve(path)
    root = storage.local_root
    if root is not None and root.is_file():
        return storage, Checkpoint(path)
    children = [info.path for info in storage.list("", recursive=False) if not is_claim(info.path)]
    if not children and not (root is not None and root.is_dir()):
        raise CheckpointNotFoundError(f"there is nothing at {storage.uri}: check the path")
    if "manifest.json" in children:
        return storage, Checkpoint(path)
    if RUN_FILE not in children and is_remains(children):
        return storage, Checkpoint(path)
    # Files and no directories: nothing in there can be a checkpoint of a run.
    if children and RUN_FILE not in children and not any(child.endswith("/") for child in children):
        return storage, Checkpoint(path)
    return storage, None
