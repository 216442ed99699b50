"""A lease that a thread keeps alive, the fence that its new holder draws, and changes of a run without a trainer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from holdfast._log import get_logger
from holdfast.errors import HoldfastError, RunBusyError, StorageError, StorageFullError
from holdfast.storage.base import Storage

from .catalog import Catalog
from .lease import HEARTBEAT_S, Lease, make_owner
from .reports import Attempt

__all__ = ["Heartbeat", "draw_fence", "upkeep"]

_LOG = get_logger("writer")
_SAID_AGAIN_S = 300.0
_MOMENT_S = 1.0  # a beat that does not hang takes far less


class Heartbeat:
    """Renews a lease from a thread until `close`, which gives it back.

    Attributes:
        lease: the lease.
        lost: the error that says why this process lost the lease; None while it holds it.
        on_lost: called once when the loss is found, by the thread that finds it; it may wake other threads.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.lost: HoldfastError | None = None
        self.on_lost: Callable[[], None] | None = None
        self._trainer_alive = True
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._beating = threading.Lock()
        self._complained: float | None = None  # when it was last said that the lease could not be renewed
        self._left = False  # `close` did not wait for the thread: it gives the lease back itself
        self._thread = threading.Thread(target=self._work, name="holdfast-lease", daemon=True)
        self._thread.start()

    def trainer_gone(self) -> None:
        """Note in the lease that only this writer is left, which ends soon."""
        self._trainer_alive = False
        self._wake.set()

    def check(self) -> None:
        """Raise `lost`, if the lease is known to be lost."""
        if self.lost is not None:
            raise self.lost

    def confirm(self) -> None:
        """Make sure, by one request, that the lease is still ours.

        Raises:
            RunBusyError: the lease is lost.
            StorageError: the storage does not answer.
        """
        self._beat()

    def verify(self) -> None:
        """Make sure, with one read, that no other process has taken the lease over: checkpoints committed before count.

        Raises:
            RunBusyError: another process has taken it over.
            StorageError: the storage does not answer.
        """
        self._do(self.lease.verify)

    def announce(self, doomed: Iterable[str]) -> None:
        """Write the names that are about to be deleted into the lease; see `Lease.announce`.

        Raises:
            RunBusyError, StorageError: nothing may be deleted.
        """
        self._do(lambda: self.lease.announce(doomed, trainer_alive=self._trainer_alive))

    def fenced(self) -> None:
        """Note in the lease that the fence is drawn, and make sure that the lease was ours; see `Lease.fenced`.

        Raises:
            RunBusyError: another process has taken the lease over meanwhile.
            StorageError: the storage does not answer.
        """
        self._do(lambda: self.lease.fenced(trainer_alive=self._trainer_alive))

    def close(self, *, wait: bool = True) -> None:
        """End the thread and give the lease back; without ``wait`` a beat that hangs does that when it ends."""
        self._left = not wait
        self._stop.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:  # a finalizer runs on any thread
            self._thread.join(None if wait else _MOMENT_S)
        if wait or not self._thread.is_alive():
            self.lease.release()

    def _beat(self) -> None:
        self._do(lambda: self.lease.heartbeat(trainer_alive=self._trainer_alive))

    def _do(self, act: Callable[[], object]) -> None:
        self.check()
        with self._beating:
            try:
                act()
            except StorageError:
                raise
            except HoldfastError as error:
                is_new, self.lost = self.lost is None, error
                if is_new and self.on_lost is not None:
                    self.on_lost()
                raise

    def _work(self) -> None:
        self._keep()
        if self._left:
            try:
                self.lease.release()
            except HoldfastError as error:
                _LOG.warning("the lease could not be given back, it goes stale by itself: %s", error)

    def _keep(self) -> None:
        while True:
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
            if self._stop.is_set() or self.lost is not None:
                return
            try:
                self._beat()
            except StorageError as error:
                self._complain(str(error))
            except HoldfastError as error:
                _LOG.error("%s", error)
                return
            except Exception as error:  # noqa: BLE001 - a thread edge: another process takes a lease that is not renewed
                self._complain(repr(error))
            else:
                if self._complained is not None:
                    self._complained = None
                    _LOG.warning("the lease is renewed again")

    def _complain(self, error: str) -> None:
        """Say that the lease could not be renewed: at first, and every few minutes while that goes on."""
        now = time.monotonic()
        if self._complained is None or now - self._complained > _SAID_AGAIN_S:
            self._complained = now
            _LOG.warning("the lease could not be renewed, trying again every %g s: %s", HEARTBEAT_S, error)


def draw_fence(
    heartbeat: Heartbeat,
    catalog: Catalog,
    attempt: Attempt,
    *,
    last: Attempt | None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Draw the fence if one is needed; afterwards the attempt is known to have been registered under our lease.

    Args:
        heartbeat: the lease, taken before ``catalog`` was read.
        catalog: the checkpoints.
        attempt: of this start, registered by now.
        last: the attempt before, if run.json could tell.
        more: ids by name of checkpoints of earlier attempts that are still to be copied here.

    Raises:
        RunBusyError: another process has taken the lease over meanwhile: nothing must be changed any more.
        StorageError: the storage does not answer, so that the owner is not known.
    """
    before = heartbeat.lease.predecessor
    # A missing lease was given back; or it was deleted under its owner, by hand or by a delete that came late.
    unended = last is not None and last.ended is None and last.attempt != attempt.attempt
    if before.may_act or (unended and not before.is_known):
        catalog.draw_fence(attempt.attempt, attempt.start_id, more)
        heartbeat.fenced()
        return
    catalog.admit(more, attempt.start_id)
    # A successor numbers its attempt above ours only if ours was stored before it came.
    heartbeat.verify()


@contextlib.contextmanager
def upkeep(storage: Storage, *, wait_s: float = 5.0) -> Iterator[Catalog]:
    """Hold the lease of the run in ``storage`` while the body works with its catalog.

    Raises:
        RunBusyError: a process trains the run, or its last owner may still wake up and change it.
        StorageFullError: there is no room for the lease.
    """
    owner = {**make_owner(os.urandom(8).hex()), "trainer_alive": False}
    try:
        lease = Lease.acquire(storage, owner, wait_s=wait_s)
    except StorageFullError as error:
        raise StorageFullError(
            f"{storage.uri} has no room for the lease, a small file without which nothing is changed there: remove one "
            "checkpoint, or the folder .trash, by hand first (rm -r), which no start minds"
        ) from error
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
        catalog.point_latest()
        if catalog.index.journal.waiting():
            catalog.index.save()  # the events of deletions
        beat.verify()
    finally:
        beat.close()
