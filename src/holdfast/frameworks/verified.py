"""Files of a checkpoint for a framework that reads them itself, and checks nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from holdfast._ranks import current_ranks
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.verify import verify
from holdfast.checkpointer.rendezvous import Alone, Meeting, meet
from holdfast.checkpointer.resume import Quarantine, first_good
from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompleteCheckpointError
from holdfast.storage.base import Storage

__all__ = ["newest_sound", "verified_directory"]

_TIMEOUT_S = 600.0
_WORK_S = 24 * 3600.0
"""How long ranks wait for a rank that downloads a checkpoint or reads its bytes, which takes as long as it takes."""


@contextlib.contextmanager
def verified_directory(
    checkpoint: str | os.PathLike[str] | Checkpoint, *, timeout_s: float = _TIMEOUT_S
) -> Iterator[str]:
    """Give a local directory with the files of a checkpoint, every byte checked against its digest; to be read only.

    One rank of each machine checks. With several ranks all of them call this, and it fails on all or on none.

    Args:
        checkpoint: path, URI or handle. A foreign checkpoint has no digests, and is given as it is.
        timeout_s: how long ranks wait for one another before the checking begins.

    Raises:
        CorruptCheckpointError: a file is damaged or missing; names all.
        CheckpointNotFoundError: there is nothing.
    """
    source = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    meeting = meet(current_ranks(), name="verified", timeout_s=timeout_s, otherwise="read it on one rank alone")
    with contextlib.ExitStack() as stack:
        found: list[str] = []
        meeting.agree("come", lambda: None)

        def check() -> None:
            found.append(stack.enter_context(source.as_directory()))
            if source.manifest is not None and (problem := _problem(source, meeting)):
                raise CorruptCheckpointError(f"{source.uri} is damaged: {problem}")

        meeting.agree("checked", check, work_s=_WORK_S)
        yield found[0]


def newest_sound(
    storage: Storage,
    *,
    candidates: Sequence[str],
    quarantined: Mapping[str, str],
    quarantine: Quarantine,
    meeting: Meeting,
    downloads: contextlib.ExitStack,
    what_else: str,
) -> tuple[Checkpoint, str] | None:
    """Return the first candidate of which every byte is sound for all ranks, and its local path; None if there is none.

    Args:
        storage: holds the candidates.
        candidates: names of committed checkpoints, newest first.
        quarantined: names known to be damaged, with reasons.
        quarantine: records a damaged checkpoint.
        meeting: of the ranks, all of which call this.
        downloads: a remote checkpoint stays on this machine until this is closed.
        what_else: the user may do if none is sound, for the error.

    Raises:
        CorruptCheckpointError: there are checkpoints and none of them is sound.
    """
    found: list[str] = []

    def attempt(checkpoint: Checkpoint) -> str | None:
        try:
            found.append(downloads.enter_context(checkpoint.as_directory()))
            return _problem(checkpoint, meeting)
        except (CorruptCheckpointError, IncompleteCheckpointError, CheckpointNotFoundError) as error:
            return str(error)

    checkpoint = first_good(
        storage, candidates=candidates, quarantined=quarantined, quarantine=quarantine, meeting=meeting,
        attempt=attempt, what_else=what_else, work_s=_WORK_S,
    )  # fmt: skip
    return None if checkpoint is None else (checkpoint, found[-1])


def _problem(checkpoint: Checkpoint, meeting: Meeting) -> str | None:
    """Say what is wrong with the bytes on a disk: one rank of each machine reads them all. A download is checked.

    Where ranks cannot tell each other, each reads for itself: all find the same.
    """
    others_hear = not isinstance(meeting, Alone)
    if checkpoint.storage.local_root is None or (others_hear and current_ranks().local_rank != 0):
        return None
    checked = verify(checkpoint.storage, checkpoint.directory, deep=True, beside=False)
    return None if checked.ok else "; ".join(checked.problems)
