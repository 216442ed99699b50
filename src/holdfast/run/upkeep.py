"""Change a run that nobody trains: with its lease, for a moment; a trainer that starts meanwhile waits for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from holdfast.errors import RunBusyError
from holdfast.storage.base import Storage

from .catalog import Catalog
from .heartbeat import Heartbeat
from .lease import Lease, make_owner

__all__ = ["upkeep"]


@contextlib.contextmanager
def upkeep(storage: Storage, *, wait_s: float = 5.0) -> Iterator[Catalog]:
    """Hold the lease of the run in ``storage`` while the body works with its catalog.

    Raises:
        RunBusyError: somebody trains it, or its last owner may still wake up and change it.
    """
    owner = {**make_owner(os.urandom(8).hex()), "trainer_alive": False}
    lease = Lease.acquire(storage, owner, wait_s=wait_s)
    beat = Heartbeat(lease)
    beat.trainer_gone()
    try:
        if lease.predecessor.may_act:
            raise RunBusyError(
                f"the last process that trained {storage.uri} is not known to be gone, so nothing is changed there: "
                "start the run once more, which draws a fence, and try again after it"
            )
        catalog = Catalog(storage, doomed=lease.predecessor.doomed)
        catalog.announce = beat.announce
        yield catalog
        if catalog.index.journal.waiting():
            catalog.index.save()  # what was deleted, and why
        beat.verify()
    finally:
        beat.close()
