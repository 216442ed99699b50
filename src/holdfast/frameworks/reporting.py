"""Report what a framework writes, from inside the function trainer: how, after how many epochs, with which metrics.

Metrics are those in what a framework logs (`scalars`), and those of a checkpoint as experiment trackers take them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from holdfast._ranks import current_ranks
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.meeting import Alone, Meeting, meet
from holdfast.errors import ConfigError
from holdfast.trainers.function.config import CheckpointUploadMode, ValidationTaskConfig
from holdfast.trainers.function.worker.session import Session, current_session

from .places import claim, is_marker

__all__ = ["TOPICS", "epochs_between", "finite", "numbers", "reporting", "scalars", "written_together"]

TOPICS = ("written", "taken")
"""What is agreed on in the meeting."""

_TIMEOUT_S = 600.0
_numbers = itertools.count()
_PLAIN = (bool, int, float, str)


@contextlib.contextmanager
def reporting(
    metrics: Mapping[str, Any],
    *,
    sharded: bool = False,
    upload_mode: CheckpointUploadMode = CheckpointUploadMode.ASYNC,
    validation: bool | Mapping[str, Any] | ValidationTaskConfig = False,
    timeout_s: float = _TIMEOUT_S,
) -> Iterator[str]:
    """Give an empty directory to write a checkpoint into, and report it with ``metrics`` when the block ends.

    Every rank enters, equally often, and gets the same path. What is in the directory when the block ends belongs to
    the checkpoint and is gone from here afterwards. If the block raises, nothing is reported.

    Args:
        metrics: of rank 0 are kept. Read when the block ends: it may add to them.
        sharded: the files of all ranks make the checkpoint: the directory exists on all of them, and is reported when
            every rank has left the block. Else it exists on rank 0 alone, and no rank waits for another.
        upload_mode: ASYNC goes on when the directory is taken over, which costs a rename; SYNC when it is committed.
        validation: as in `holdfast.report`.
        timeout_s: how long ranks wait for one another (``sharded``).

    Raises:
        SessionError: called outside of train_func.
        ConfigError: what was written has been taken to another place.
        HoldfastError: (``sharded``) a rank failed or did not come; all ranks hear of it.
    """
    session = current_session("report")
    directory = session.new_place(f"new-{next(_numbers)}")
    if session.rank == 0 and _is_remote(session):
        claim(os.path.dirname(directory))
    if sharded or session.rank == 0:
        os.makedirs(directory, exist_ok=True)
    meeting: Meeting = Alone()
    if sharded:
        meeting = meet(current_ranks(), name="report", timeout_s=timeout_s, otherwise="report a state")
    with written_together(meeting, directory):
        yield directory
        _check_here(directory)
    checkpoint = Checkpoint.from_directory(directory) if _hands_over(session.rank, sharded=sharded) else None
    session.report(
        metrics,
        checkpoint,
        checkpoint_upload_mode=upload_mode,
        delete_local_checkpoint_after_upload=True if checkpoint is not None else None,
        validation=validation,
    )


def epochs_between(every_n_epochs: int | None, every_n_steps: int | None) -> int:
    """Return the epochs from one checkpoint to the next: 1 if neither argument is given.

    Raises:
        ConfigError: both are given, or the given number is no whole number of at least 1.
    """
    given = [number for number in (every_n_epochs, every_n_steps) if number is not None]
    if len(given) > 1 or any(type(number) is not int or number < 1 for number in given):
        raise ConfigError(
            f"ReportCallback(every_n_epochs={every_n_epochs!r}, every_n_steps={every_n_steps!r}): give one of them, "
            "every_n_epochs or every_n_steps, as a whole number of at least 1; two callbacks can do both"
        )
    return every_n_epochs or 1


def _check_here(directory: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # of a rank that writes nothing
        for entry in os.scandir(directory):
            if is_marker(entry.path):
                raise ConfigError(
                    f"{entry.name} went to the root of a HoldfastCheckpointIO(root), so there is nothing of it to "
                    "report, and the next one would replace it there: leave out that plugin, or its root"
                )


def _is_remote(session: Session) -> bool:
    root = session.context.get_storage().storage
    return root is None or root.local_root is None


def _hands_over(rank: int, *, sharded: bool) -> bool:
    """One rank of each machine hands over what all of its ranks have written."""
    return rank == 0 or (sharded and current_ranks().local_rank == 0)


@contextlib.contextmanager
def written_together(
    meeting: Meeting, directory: str, take: Callable[[], None] | None = None, *, work_s: float = 0.0
) -> Iterator[str]:
    """Give the directory to every rank; when all have left the block, rank 0 takes it. Then all go on.

    If the block raises on one rank, or a rank does not come, all of them raise, and the directory is removed.

    Args:
        meeting: of the ranks that write.
        directory: exists where a rank writes.
        take: called on rank 0; what it raises is raised on all ranks, and from now on the directory is its own.
        work_s: how long ``take`` may be at it.
    """
    written, taken = TOPICS
    try:
        try:
            yield directory
        except BaseException as error:
            with contextlib.suppress(Exception):  # the others have to hear of it; this rank raises its own
                meeting.agree(written, partial(_fail, error))
            raise
        meeting.agree(written, lambda: None)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if take is not None:
        meeting.agree(taken, lambda: None, lambda _: take(), work_s=work_s)


def _fail(error: BaseException) -> None:
    raise error


def scalars(*logged: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the numbers and strings in what a framework logged; the later mapping wins.

    One-element tensors and arrays become numbers (reading a tensor on an accelerator waits for it). Anything else,
    such as a histogram or an image, is left out: it is no metric.
    """
    found: dict[str, Any] = {}
    for mapping in logged:
        for name, value in (mapping or {}).items():
            plain = _plain(value)
            if plain is not None:
                found[str(name)] = plain
    return found


def _plain(value: Any) -> bool | int | float | str | None:
    if isinstance(value, _PLAIN):
        return value
    size = getattr(value, "numel", None)  # tensors
    size = size() if callable(size) else getattr(value, "size", None)  # arrays
    if size == 1 and callable(getattr(value, "item", None)):
        item = value.item()
        return item if isinstance(item, _PLAIN) else None
    return None


def numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in (nested) metrics, by names joined with "/"."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{name}"] = float(value)
    return found


def finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return (nested) metrics for JSON, which knows neither NaN nor infinity: these become text."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found[name] = finite(value)
        else:
            found[name] = repr(value) if isinstance(value, float) and not math.isfinite(value) else value
    return found
