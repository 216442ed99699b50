"""Markers: small files at the paths a framework gives, for checkpoints that lie elsewhere.

A framework that asks the file system whether a name is free, as Lightning's ``ModelCheckpoint`` does before it appends
``-v1``, has to find something there; else two checkpoints get one name, and the second replaces the first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from holdfast._log import get_logger
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.pending_saves import TRANSIENT_ERRORS, state_of
from holdfast.errors import StorageError

from .places import move_aside

__all__ = ["drop_link", "followed", "is_marker", "mark", "unmark"]

_LOG = get_logger("frameworks")
_FIRST = b"Holdfast marker: "
_REMOTE_NAME = "_holdfast-marker"


def mark(path: str | os.PathLike[str], target: Checkpoint) -> Callable[[], None]:
    """Make a path exist, at once, for a checkpoint that is being saved; where a storage does not take it, say so.

    Returns:
        What takes away what was made here, if the save fails.
    """
    text = os.fspath(path)
    root = target.storage.local_root
    if root is not None and os.path.realpath(root / target.directory) == os.path.realpath(text):
        existed = os.path.isdir(text)
        os.makedirs(text, exist_ok=True)
        return _nothing if existed else partial(_remove_empty, text)
    if "://" in text:
        return _mark_remote(text, target)
    if not os.path.dirname(text):
        return _nothing  # a bare name lies in the root, and no file system is asked for it
    was_marked = is_marker(text)
    if not was_marked:
        move_aside(Path(text))
        os.makedirs(os.path.dirname(text), exist_ok=True)
    with open(text, "wb") as file:
        file.write(_FIRST + f"the checkpoint is {target.uri}\n".encode())
    return _nothing if was_marked else partial(unmark, text)


def unmark(path: str | os.PathLike[str]) -> None:
    """Remove the marker at a path, and nothing else."""
    if is_marker(path):
        os.unlink(path)


def is_marker(path: str | os.PathLike[str]) -> bool:
    """Tell whether there is nothing but a marker at a path."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(_FIRST)) == _FIRST
    return False


def drop_link(path: str | os.PathLike[str]) -> bool:
    """Remove a link at a path, such as ``save_last="link"`` makes; what it points to is another's checkpoint.

    Returns:
        Whether there was a link.
    """
    if "://" in os.fspath(path) or not os.path.islink(path):
        return False
    with contextlib.suppress(FileNotFoundError):  # of another rank that did the same
        os.unlink(path)
    return True


def followed(path: str | os.PathLike[str]) -> str:
    """Return what a link points to, or the path if it is none."""
    text = os.fspath(path)
    if "://" in text or not os.path.islink(text):
        return text
    return os.path.normpath(os.path.join(os.path.dirname(text), os.readlink(text)))


def _nothing() -> None:
    return None


def _remove_empty(path: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _mark_remote(uri: str, target: Checkpoint) -> Callable[[], None]:
    """Make a prefix exist by an object in it, which goes with the checkpoint."""
    storage, name = target.storage, f"{target.directory}/{_REMOTE_NAME}"
    try:
        storage.put(name, _FIRST + b"a checkpoint is or was being saved here\n")
    except TRANSIENT_ERRORS as error:
        _LOG.warning("%s looks free until its checkpoint is durable, %s: %s", uri, state_of(error), error)
        return _nothing
    fsspec = sys.modules.get("fsspec.core")  # else nobody here can ask a remote
    with contextlib.suppress(ImportError, ValueError):  # what only Holdfast can reach is not asked for either
        if fsspec is not None:
            fsspec.url_to_fs(uri)[0].invalidate_cache()  # it may remember what it has listed

    def remove() -> None:
        with contextlib.suppress(StorageError):
            storage.delete(name)

    return remove
