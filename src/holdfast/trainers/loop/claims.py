"""Who may write the single files of a folder: a lease for each name that checkpoints have there.

A folder of directories is a run, whose lease the writer holds. Files have no writer, and trainers of several runs may
share a folder by the names of their files: so each name has a lease of its own, held by rank 0.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading

import xxhash

from ...checkpoint.heartbeat import Heartbeat
from ...checkpoint.lease import Lease, make_owner
from ...errors import HoldfastError
from ...storage.base import Storage
from .ranks import Ranks

__all__ = ["LEASE_S", "Claims"]

LEASE_S = 60.0
"""How long to wait for a lease whose owner may be dead."""

_LOG = logging.getLogger("holdfast.trainer")


class Claims:
    """The names in one folder that only this trainer gives to files.

    Args:
        storage: the folder.
        ranks: the processes that train; all of them make the same calls.
    """

    def __init__(self, storage: Storage, ranks: Ranks) -> None:
        self._storage, self._ranks = storage, ranks
        self._held: dict[str, Heartbeat | None] = {}  # None where rank 0 holds it
        self._process = 0
        self._lock = threading.Lock()
        self._writing = 0
        self._left: list[Heartbeat] = []  # to be given back when what is being written is there

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
                _give_back([self._held.pop(shape)], wait=False)
                raise

    def _lease(self, shape: str) -> None:
        owner = make_owner(secrets.token_hex(4))
        of = xxhash.xxh3_64_hexdigest(shape.encode())[:8]
        self._process = os.getpid()
        self._held[shape] = Heartbeat(Lease.acquire(self._storage, owner, wait_s=LEASE_S, of=of))

    def begin(self, shape: str) -> Heartbeat | None:
        """Keep all names until `end`: a file is about to be written; what is returned knows if its name was lost."""
        with self._lock:
            if shape not in self._held:
                raise HoldfastError(f"{self._storage.uri} was closed: nothing can be saved there any more")
            self._writing += 1
            return self._held[shape]

    def end(self) -> None:
        """Take note that the file of a `begin` is there, or never will be."""
        with self._lock:
            self._writing -= 1
            left = self._left if not self._writing else []
            self._left = [] if left else self._left
        _give_back(left, wait=False)

    def release(self, *, patient: bool) -> None:
        """Let others have the names, after what is being written; idempotent. A lease that cannot go goes stale."""
        if self._process not in (0, os.getpid()):  # a forked child ends before its parent
            return
        with self._lock:
            held, self._held = list(self._held.values()), {}
            if self._writing:
                self._left += [one for one in held if one is not None]
                return
        _give_back(held, wait=patient)


def _give_back(held: list[Heartbeat] | list[Heartbeat | None], *, wait: bool) -> None:
    for one in held:
        try:
            if one is not None:
                one.close(wait=wait)
        except HoldfastError as error:
            _LOG.warning("a lease could not be given back, it goes stale by itself: %s", error)
