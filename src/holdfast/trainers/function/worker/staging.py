"""`RunConfig(local_dir=...)`: this rank's shares of states are stored on a disk of its node, and then uploaded.

So the memory that a state was copied into is free again at the speed of the disk. If this worker dies, its node uploads
what is stored (`holdfast.trainers.function.unfinished`). If the node dies, that save is lost; the next start there
removes what is left of it, and says so.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import xxhash

from holdfast._log import get_logger
from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.writer.serial_executor import SerialExecutor

from ..unfinished import bring_share, left_share

__all__ = ["Staging"]

_LOG = get_logger("trainers.function")
_MOST = 2
"""Shares on the disk that are not uploaded yet; another share waits."""
_START = re.compile(r"([0-9a-f]{8,64})/")

Ended: TypeAlias = Callable[[BaseException | None], None]


class Staging:
    """The disk of this node in front of a run, for a rank; a thread uploads what is stored there.

    Args:
        folder: `local_dir`, which other runs may use too.
        remote: root of the run.
        rank: of this worker.
        start_id: of this attempt.
        sweeps: this rank removes what earlier attempts have left in it.

    Attributes:
        local: where shares are stored; directories have the names that they get in the run.
    """

    def __init__(self, folder: str, remote: Storage, *, rank: int, start_id: str, sweeps: bool) -> None:
        home = LocalStorage(folder).child(xxhash.xxh3_64_hexdigest(remote.uri.encode()))
        if sweeps:
            _sweep(home, start_id, remote)
        self.local = home.child(start_id)
        self._remote, self._rank = remote, rank
        self._room = threading.BoundedSemaphore(_MOST)
        self._executor = SerialExecutor("holdfast-staging")

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is room for another share, and take it; return False if that takes longer."""
        return self._room.acquire(timeout=timeout_s)

    def give_back(self) -> None:
        """Give back the room of a share that was not stored."""
        self._room.release()

    def left(self, go: Mapping[str, Any]) -> dict[str, Any]:
        """Describe where the share of a checkpoint will be, so that the node can finish it if this worker dies."""
        return left_share(
            folder=str(self.local.local_root), directory=go["directory"], save_id=go["save_id"], rank=self._rank
        )

    def bring(self, directory: str, save_id: str, ended: Ended) -> None:
        """Upload a share that is stored here; ``ended`` is called on another thread, with the error if there is one."""
        self._executor.run(partial(self._bring, directory, save_id, ended))

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until everything stored here is uploaded; return False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        taken = 0
        while taken < _MOST and self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
            taken += 1
        for _ in range(taken):
            self._room.release()
        return taken == _MOST

    def close(self) -> None:
        """End after what is stored is uploaded, without waiting for that. Idempotent."""
        self._executor.close(wait=False)

    def _bring(self, directory: str, save_id: str, ended: Ended) -> None:
        failure: Exception | None = None
        try:
            bring_share(self.local, self._remote, directory=directory, save_id=save_id, rank=self._rank)
        except Exception as error:  # noqa: BLE001 - a thread edge: the report fails with it
            failure = error
        try:
            ended(failure)
        finally:
            self._room.release()


def _sweep(home: Storage, start_id: str, remote: Storage) -> None:
    try:
        for info in home.list("", recursive=False):
            found = _START.fullmatch(info.path)
            if found is not None and found[1] != start_id:
                lost = sorted({info.path.split("/")[1] for info in home.list(found[1])})
                home.delete_tree(info.path.rstrip("/"))
                if lost:
                    _LOG.warning(
                        "%s: shares of %s were stored by an earlier start and never brought to %s; they are removed",
                        home.uri, ", ".join(lost), remote.uri,
                    )  # fmt: skip
    except HoldfastError as error:
        _LOG.warning("what an earlier start has left in %s stays there: %s", home.uri, error)
