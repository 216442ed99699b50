"""The leases of names that single files have: whoever holds one is alone in writing files of that name.

A folder of directories is a run, with one lease. Single files are in no run, and trainers of several runs may share a
folder by the names of their files: so each name has a lease of its own (``lease-<of>.json``), and it is the writer that
holds it. So it lasts until the last file is there, whatever becomes of the trainer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import HoldfastError, StorageError
from holdfast.run.heartbeat import Heartbeat
from holdfast.run.lease import Lease
from holdfast.storage.base import Storage

__all__ = ["NameLeases"]

_LOG = get_logger("writer")


class NameLeases:
    """Belongs to the working thread, apart from `trainer_gone`."""

    def __init__(self) -> None:
        self._held: dict[str, Heartbeat] = {}
        # What could not be taken again after an earlier writer had died: why, and another trial.
        self._lost: dict[str, tuple[HoldfastError, Callable[[], None]]] = {}
        self._is_trainer_gone = False

    def take(
        self,
        storage: Storage,
        of: str,
        owner: Mapping[str, Any],
        *,
        wait_s: float,
        pause: Callable[[float], None],
    ) -> None:
        """Be the only one who writes files of a name.

        Args:
            storage: the folder.
            of: eight hex digits that stand for the name.
            owner: start_id and trainer_pid.
            wait_s: how long to wait for an owner that may be dead.
            pause: how to wait; may raise to give up.

        Raises:
            RunBusyError: another live process does.
        """
        if of in self._held:
            return
        try:
            lease = Lease.acquire(storage, {**owner, "pid": os.getpid()}, wait_s=wait_s, sleep=pause, of=of)
        except HoldfastError as error:
            self._lost[of] = error, partial(self.take, storage, of, owner, wait_s=wait_s, pause=pause)
            raise
        self._lost.pop(of, None)
        held = Heartbeat(lease)
        self._held = {**self._held, of: held}  # a new one: the reading thread may be walking through the other
        if self._is_trainer_gone:
            held.trainer_gone()

    def held(self, of: str | None) -> Heartbeat | None:
        """Return the lease of a name; None for a file that needs none.

        Raises:
            HoldfastError: it was not taken, or not taken again.
        """
        if of is None:
            return None
        if of in self._lost:
            error, again = self._lost[of]
            if not isinstance(error, StorageError):
                raise error
            again()  # the storage did not answer then
        if of not in self._held:
            raise HoldfastError(f"this writer does not hold the lease {of} of that file name: call take_name first")
        return self._held[of]

    def give_back(self, of: str) -> None:
        """Let others have a name; nothing to do for one that is not held. A lease that cannot go goes stale."""
        held = self._held.get(of)
        self._held = {name: one for name, one in self._held.items() if name != of}
        self._lost.pop(of, None)
        try:
            if held is not None:
                held.close()
        except Exception as error:  # noqa: BLE001 - one that fails must not keep the others, nor the writer
            _LOG.warning("a lease could not be given back, it goes stale by itself: %s", error)

    def trainer_gone(self) -> None:
        """Let others know that only this writer is left, which will end soon: they wait instead of giving up."""
        self._is_trainer_gone = True
        for held in self._held.values():
            held.trainer_gone()

    def close(self) -> None:
        """Give all of them back."""
        for of in list(self._held):
            self.give_back(of)
