"""Open a run: rank 0 takes its lease, and every rank sees the storage it is in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from holdfast._ranks import rank_list
from holdfast.errors import ConfigError
from holdfast.storage.base import Storage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import RunOpened

from .options import CheckpointerOptions
from .rendezvous import Meeting
from .waiting import answer

__all__ = ["open_run", "open_together"]

_LEASE_S = 60.0
_VISIBLE_S = 5.0


def open_run(
    storage: Storage,
    client: WriterClient,
    options: CheckpointerOptions,
    start_id: str,
    remote: Storage | None,
    meeting: Meeting,
) -> RunOpened:
    """Open the run on rank 0, and see that all ranks have it before their eyes."""
    keep, timeout_s = options.keep, options.timeout_s
    lease_s = min(_LEASE_S, timeout_s)

    def open_here() -> RunOpened:
        opened: RunOpened = answer(
            client.open_run(
                storage, owner={"start_id": start_id}, keep=None if keep is None else keep.to_json(), wait_s=lease_s,
                mirror=options.mirror, remote=remote,
            ),
            remote or storage, lease_s + timeout_s,
        )  # fmt: skip
        return opened

    return open_together(meeting, storage, start_id, open_here, work_s=lease_s + timeout_s)


def open_together(
    meeting: Meeting, storage: Storage, start_id: str, open_run: Callable[[], RunOpened], *, work_s: float
) -> RunOpened:
    """Open a run on rank 0, and see that all ranks have its storage before their eyes.

    Args:
        meeting: of the ranks.
        storage: root of the run.
        start_id: of this start; part of the name of the file that rank 0 shows the others.
        open_run: opens it; called on rank 0 alone.
        work_s: how long that may take.

    Raises:
        ConfigError: naming the ranks that see another storage.
    """
    mark = f".probe-{start_id}/ranks"

    def open_here() -> dict[str, Any] | None:
        if meeting.rank > 0:
            return None
        opened = open_run()
        if meeting.world_size > 1:
            storage.put(mark, b"all ranks see this file")
        return opened.to_json()

    opened = RunOpened.from_json(meeting.agree("open", open_here, work_s=work_s))
    if meeting.world_size > 1:
        meeting.agree("place", lambda: _sees(storage, mark), lambda seen: _check_shared(seen, storage, mark))
    return opened


def _sees(storage: Storage, mark: str) -> bool:
    """Look for a file that rank 0 has made; a network file system may show it a little later."""
    until = time.monotonic() + _VISIBLE_S
    while not storage.exists(mark):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _check_shared(seen: Sequence[bool], storage: Storage, mark: str) -> None:
    storage.delete(mark)
    storage.tidy(mark.partition("/")[0])
    blind = [rank for rank, one in enumerate(seen) if not one]
    if blind:
        raise ConfigError(
            f"{rank_list(blind)} cannot see what rank 0 writes to {storage.uri}: all ranks save parts of the same "
            "checkpoints, so the run needs a place that all machines share: a network file system, or remote storage "
            "such as s3://bucket/run"
        )
