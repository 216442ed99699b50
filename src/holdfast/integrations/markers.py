"""Markers: small files at the paths a framework gives, for checkpoints that lie elsewhere.

A framework that asks the file system whether a name is free, as Lightning's ``ModelCheckpoint`` does before it appends
``-v1``, has to find something there; else two checkpoints get one name, and the second replaces the first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ..checkpoint.handle import Checkpoint
from .aside import move_aside

__all__ = ["is_marker", "mark", "unmark"]

_FIRST = b"Holdfast marker: "
_REMOTE_NAME = "_holdfast-marker"


def mark(path: str | os.PathLike[str], target: Checkpoint) -> None:
    """Make a path exist, at once, for a checkpoint that is being saved."""
    told = os.fspath(path)
    root = target.storage.local_root
    if root is not None and os.path.realpath(root / target.directory) == os.path.realpath(told):
        os.makedirs(told, exist_ok=True)
        return
    if "://" in told:
        _mark_remote(told, target)
        return
    if not os.path.dirname(told):
        return  # a bare name is one in the root, and no file system is asked for it
    if not is_marker(told):
        move_aside(Path(told))
        os.makedirs(os.path.dirname(told), exist_ok=True)
    with open(told, "wb") as file:
        file.write(_FIRST + f"the checkpoint is {target.uri}\n".encode())


def unmark(path: str | os.PathLike[str]) -> None:
    """Remove the marker at a path, and nothing else."""
    if is_marker(path):
        os.unlink(path)


def is_marker(path: str | os.PathLike[str]) -> bool:
    """Tell whether there is nothing but a marker at a path."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(_FIRST)) == _FIRST
    return False


def _mark_remote(uri: str, target: Checkpoint) -> None:
    """Make a prefix exist by an object in it, which goes with the checkpoint."""
    target.storage.put(f"{target.directory}/{_REMOTE_NAME}", _FIRST + b"a checkpoint is or was being saved here\n")
    fsspec = sys.modules.get("fsspec.core")  # else nobody here can ask a remote
    with contextlib.suppress(ImportError, ValueError):  # what only Holdfast can reach is not asked for either
        if fsspec is not None:
            fsspec.url_to_fs(uri)[0].invalidate_cache()  # it may remember what it has listed
