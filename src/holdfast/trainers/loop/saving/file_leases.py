"""Who may write the single files of a folder: a lease for each name that checkpoints have there.

A folder of directories is a run, whose lease the writer holds. Files have no writer, and trainers of several runs may
share a folder by the names of their files: so each name has a lease of its own, held by rank 0.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterable

import xxhash

from holdfast._log import get_logger
from holdfast.errors import HoldfastError
from holdfast.run.heartbeat import Heartbeat
from holdfast.run.lease import Lease, make_owner
from holdfast.storage.base import Storage

from ..training.ranks import Ranks

__all__ = ["LEASE_S", "FileLeases"]

LEASE_S = 60.0
"""How long to wait for a lease whose owner may be dead."""

_LOG = get_logger("trainer")


class FileLeases:
    """The names in one folder that only this trainer gives to files.

    Args:
        storage: the folder.
        ranks: the processes that train; all of them make the same calls.
    """

    def __init__(self, storage: Storage, ranks: Ranks) -> None:
        self._storage, self._ranks = storage, ranks
        self._held: dict[str, Heartbeat | None] = {}  # None where rank 0 holds it
        self._process = 0
        self._lock = threading.RLock()  # a finalizer may come in between
        self._writing = 0
        self._left: dict[str, Heartbeat] = {}  # to be given back when what is being written is there

    def take(self, shape: str) -> None:
        """Be the only one who writes files of this name; idempotent.

        Args:
            shape: the name, its counters left open.

        Raises:
            RunBusyError: another live process does.
        """
        if shape not in self._held:
            self._held[shape] = None
            try:
                self._ranks.lead("claim", lambda: self._lease(shape), work_s=LEASE_S)
            except BaseException:
                _give_back([self._held.pop(shape)], wait=False)  # the name would be nobody's, and yet taken
                raise

    def _lease(self, shape: str) -> None:
        with self._lock:
            self.check(shape)  # what was lost meanwhile stays in `_left`
            mine = self._left.pop(shape, None)
        if mine is not None:  # a save of ours is still being written
            mine.trainer_back()
            self._held[shape] = mine
            return
        owner = make_owner(secrets.token_hex(4))
        of = xxhash.xxh3_64_hexdigest(shape.encode())[:8]
        self._process = os.getpid()
        self._held[shape] = Heartbeat(Lease.acquire(self._storage, owner, wait_s=LEASE_S, of=of))

    def begin(self, shape: str) -> None:
        """Keep all names until `end`: a file is about to be written."""
        with self._lock:
            if shape not in self._held:
                raise HoldfastError(f"{self._storage.uri} was closed: nothing can be saved there any more")
            self._writing += 1

    def check(self, shape: str) -> None:
        """See that nobody has taken a name from us, as far as it is known.

        Raises:
            RunBusyError: somebody has.
        """
        held = self._held.get(shape) or self._left.get(shape)
        if held is not None:
            held.check()

    def confirm(self, shape: str) -> None:
        """Make sure, by one request, that nobody has taken a name from us up to now.

        Raises:
            RunBusyError: somebody has: files of this name are not ours to write or delete any more.
            StorageError: nobody can say just now.
        """
        held = self._held.get(shape) or self._left.get(shape)
        if held is not None:
            held.verify()

    def end(self) -> None:
        """Take note that the file of a `begin` is there, or never will be."""
        left: dict[str, Heartbeat] = {}
        with self._lock:
            self._writing -= 1
            if not self._writing:
                left, self._left = self._left, left
        _give_back(left.values(), wait=False)

    def release(self, *, patient: bool) -> None:
        """Let others have the names, after what is being written; idempotent. A lease that cannot go goes stale."""
        if self._process not in (0, os.getpid()):  # a forked child ends before its parent
            return
        with self._lock:
            held, self._held = self._held, {}
            if self._writing:
                for shape, one in held.items():
                    if one is not None:
                        one.trainer_gone()  # others wait for it instead of giving up
                        self._left[shape] = one
                return
        _give_back(held.values(), wait=patient)


def _give_back(held: Iterable[Heartbeat | None], *, wait: bool) -> None:
    for one in held:
        try:
            if one is not None:
                one.close(wait=wait)
        except Exception as error:  # noqa: BLE001 - one that fails must not keep the others, nor hide why all this ends
            _LOG.warning("a lease could not be given back, it goes stale by itself: %s", error)
