"""Files of a checkpoint for a framework that reads them itself, and checks nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from .._ranks import current_ranks
from ..checkpoint.handle import Checkpoint
from ..checkpointer.rendezvous import meet
from ..errors import CorruptCheckpointError
from .places import WORK_S

__all__ = ["verified_directory"]

_TIMEOUT_S = 600.0


@contextlib.contextmanager
def verified_directory(
    checkpoint: str | os.PathLike[str] | Checkpoint, *, timeout_s: float = _TIMEOUT_S
) -> Iterator[str]:
    """Give a local directory with the files of a checkpoint, every byte checked against its digest; to be read only.

    One rank of each machine checks. With several ranks all of them call this, and it fails on all or on none.

    Args:
        checkpoint: path, URI or handle. A foreign one has no digests, and is given as it is.
        timeout_s: how long ranks wait for one another before the checking begins.

    Raises:
        CorruptCheckpointError: a file is damaged or missing; names all.
        CheckpointNotFoundError: there is nothing.
    """
    source = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    ranks = current_ranks()
    meeting = meet(ranks, name="verified", timeout_s=timeout_s, otherwise="read it on one rank alone")
    with contextlib.ExitStack() as stack:
        found: list[str] = []
        meeting.agree("come", lambda: None)

        def check() -> None:
            found.append(stack.enter_context(source.as_directory()))
            if source.storage.local_root is not None and ranks.local_rank == 0 and source.manifest is not None:
                checked = source.verify()
                if not checked.ok:
                    raise CorruptCheckpointError(f"{source.uri} is damaged: {'; '.join(checked.problems)}")

        meeting.agree("checked", check, work_s=WORK_S)
        yield found[0]
