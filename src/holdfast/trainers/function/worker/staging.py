"""`RunConfig(local_dir=...)`: this rank's shares of states are stored on a disk of its node first, and brought behind.

So the memory that a state was copied into is free again at the speed of the disk. A share that its node loses before it
is brought costs that save; the next start on the node removes what is left of it.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import xxhash

from holdfast._log import get_logger
from holdfast.copying.transfer import send_entries
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.format.parts import put_part, read_part, remove_part
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage

__all__ = ["Staging"]

_LOG = get_logger("runtime")
_MOST = 2
"""Shares on the disk that are not brought yet; one more waits."""
_START = re.compile(r"([0-9a-f]{8,64})/")

Ended: TypeAlias = Callable[[BaseException | None], None]


class Staging:
    """The disk of this node in front of a run, for one rank; a thread brings what is stored there.

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
            _sweep(home, start_id)
        self.local = home.child(start_id)
        self._remote, self._rank = remote, rank
        self._room = threading.BoundedSemaphore(_MOST)
        self._stored: queue.SimpleQueue[tuple[str, str, Ended] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="holdfast-staging", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is room for another share, and take it; False if that takes longer."""
        return self._room.acquire(timeout=timeout_s)

    def give_back(self) -> None:
        """Give room back that nothing came of."""
        self._room.release()

    def bring(self, directory: str, save_id: str, ended: Ended) -> None:
        """Bring a share that is stored here; ``ended`` is called on another thread, with the error if there is one."""
        self._stored.put((directory, save_id, ended))

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until everything stored here has been brought; False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        taken = 0
        while taken < _MOST and self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
            taken += 1
        for _ in range(taken):
            self._room.release()
        return taken == _MOST

    def close(self) -> None:
        """Bring what is stored, and end. Idempotent."""
        self._stored.put(None)

    def _work(self) -> None:
        while (one := self._stored.get()) is not None:
            directory, save_id, ended = one
            try:
                self._bring(directory, save_id)
            except Exception as error:  # noqa: BLE001 - a thread edge: the report fails with it
                ended(error)
            else:
                ended(None)
            self._room.release()

    def _bring(self, directory: str, save_id: str) -> None:
        try:
            part = read_part(self.local, directory, save_id, self._rank)
            if part is None:
                raise CheckpointError(
                    f"what rank {self._rank} has stored in {self.local.uri} is gone: local_dir has to keep its files; "
                    "this save is lost"
                )
            send_entries(self.local, self._remote, directory, part.files)
            put_part(self._remote, directory, save_id, part)
        finally:
            try:
                remove_part(self.local, directory, save_id, self._rank)
            except HoldfastError as error:
                _LOG.warning("what is not needed any more in %s stays there for now: %s", self.local.uri, error)


def _sweep(home: Storage, start_id: str) -> None:
    try:
        for info in home.list("", recursive=False):
            found = _START.fullmatch(info.path)
            if found is not None and found[1] != start_id:
                home.delete_tree(info.path.rstrip("/"))
    except HoldfastError as error:
        _LOG.warning("what an earlier start has left in %s stays there: %s", home.uri, error)
