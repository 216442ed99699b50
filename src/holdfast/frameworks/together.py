"""A directory that all ranks write into: taken over as a whole, or by nobody."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from functools import partial

from holdfast.checkpointer.rendezvous import Meeting

__all__ = ["TOPICS", "written_together"]

TOPICS = ("written", "taken")
"""What is agreed on in the meeting."""


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
