"""Directories that a framework has written already, at a place of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Mapping
from typing import Any

from holdfast._ranks import current_ranks
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.rendezvous import meet
from holdfast.config import ValidationTaskConfig
from holdfast.copying.local import clone_tree
from holdfast.errors import CheckpointNotFoundError, ConfigError
from holdfast.trainers.function.types import CheckpointUploadMode
from holdfast.trainers.function.worker.session import current_session

from .places import claim

__all__ = ["all_written", "check_shared", "report_finished"]

_TIMEOUT_S = 600.0
_numbers = itertools.count()


def all_written(directory: str, *, shared: bool = False, timeout_s: float = _TIMEOUT_S) -> bool:
    """Wait until every rank has written its files; True on the rank of each directory that hands them over.

    Every rank calls this when its own files are complete. Ranks that share a directory have one of them, the lowest,
    hand it over; a rank with a directory of its own does it itself.

    Args:
        directory: where this rank wrote; it need not exist on a rank that has nothing to write.
        shared: rank 0 is to see what all have written.
        timeout_s: how long ranks wait for one another.

    Raises:
        ConfigError: (``shared``) a rank has written where rank 0 does not see it.
        HoldfastError: a rank did not come.
    """
    info = current_ranks()
    meeting = meet(info, name="written", timeout_s=timeout_s, otherwise="train with one process")

    def place() -> list[Any] | None:
        if not os.path.isdir(directory):
            return None
        found = os.stat(directory)
        names = sorted(os.listdir(directory)) if shared else []
        return [os.path.realpath(directory), found.st_dev, found.st_ino, names]

    def lowest(places: list[Any]) -> list[int]:
        if shared:
            check_shared(directory, places)
        places = [None if entry is None else entry[:3] for entry in places]
        return [rank for rank, entry in enumerate(places) if entry is not None and places.index(entry) == rank]

    return info.rank in meeting.agree("written", place, lowest)


def check_shared(directory: str, places: list[Any]) -> None:
    """Refuse directories (path, device, inode, names in it) of several ranks that differ from that of rank 0.

    Of one directory, devices differ on machines that mount it, and inodes with some file systems; names alone may come
    late to another machine.
    """
    first = places[0] or ["", 0, 0, []]
    for rank, seen in enumerate(places):
        if seen is not None and seen[2] != first[2] and (missing := sorted(set(seen[3]) - set(first[3]))):
            raise ConfigError(
                f"rank {rank} has written {missing[0]} into {directory}, and rank 0 does not see it there: with "
                "several machines output_dir must be on a file system that they share; a checkpoint would lack files"
            )


def report_finished(
    directory: str,
    metrics: Mapping[str, Any],
    *,
    inside: str,
    delete: bool = False,
    validation: bool | Mapping[str, Any] | ValidationTaskConfig = False,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Report what a framework has written, from inside the function trainer; every rank calls this, equally often.

    Returns when the framework may do with its directory what it likes. No copy is made on the way: with ``delete`` the
    directory is renamed; else its files are cloned where the file system can share blocks; else this waits until the
    writer has read them.

    Args:
        directory: what this rank (or another, into the same directory) has written.
        metrics: of rank 0 are kept.
        inside: name of the directory within the checkpoint.
        delete: the directory may be taken away.
        validation: as in `holdfast.report`.
        timeout_s: how long ranks wait for one another.

    Raises:
        CheckpointNotFoundError: no rank has written anything.
        SessionError: called outside of train_func.
        HoldfastError: a rank did not come, or the commit failed.
    """
    session = current_session("report")
    if not all_written(directory, timeout_s=timeout_s):
        if session.rank == 0:
            raise CheckpointNotFoundError(
                f"there is no {directory} to report: nothing was written on rank 0, or the framework has deleted it "
                "already (directories of an older run beside it can make it do so: use an empty place)"
            )
        session.report(metrics, validation=validation)
        return
    place = session.new_place(f"finished-{next(_numbers)}-{session.rank}")
    root = session.context.get_storage().storage
    if root is None or root.local_root is None:
        claim(os.path.dirname(place))
    os.makedirs(place)
    target = os.path.join(place, inside)
    safe = _moved(directory, target) if delete else clone_tree(directory, target)
    if not safe:
        os.symlink(os.path.abspath(directory), target)
    try:
        session.report(
            metrics,
            Checkpoint.from_directory(place),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC if safe else CheckpointUploadMode.SYNC,
            delete_local_checkpoint_after_upload=safe,
            validation=validation,
        )
    except BaseException:
        if safe and delete and os.path.isdir(target) and not os.path.lexists(directory):
            os.rename(target, directory)
        raise
    finally:
        if not safe:
            os.unlink(target)
        with contextlib.suppress(OSError):
            os.rmdir(place)
    if delete and not safe:
        shutil.rmtree(directory, ignore_errors=True)


def _moved(source: str, target: str) -> bool:
    try:
        os.rename(source, target)
    except OSError:
        return False  # another file system
    return True
