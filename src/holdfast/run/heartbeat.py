"""A lease that a thread keeps alive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from holdfast._log import get_logger
from holdfast.errors import HoldfastError, StorageError

from .lease import HEARTBEAT_S, Lease

__all__ = ["Heartbeat"]

_LOG = get_logger("writer")
_MOMENT_S = 1.0  # a beat that does not hang takes far less


class Heartbeat:
    """Renews a lease until `close`, which gives it back.

    Attributes:
        lease: the lease.
        lost: why it is not ours any more; None while it is.
        on_lost: called once when that is found out, by the thread that does; whoever sleeps may be woken by it.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.lost: HoldfastError | None = None
        self.on_lost: Callable[[], None] | None = None
        self._trainer_alive = True
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._beating = threading.Lock()
        self._left = False  # nobody waits for the thread: it gives the lease back itself
        self._thread = threading.Thread(target=self._work, name="holdfast-lease", daemon=True)
        self._thread.start()

    def trainer_gone(self) -> None:
        """Let others know that only this writer is left, which will end soon."""
        self._trainer_alive = False
        self._wake.set()

    def trainer_back(self) -> None:
        """Let others know that the trainer writes again."""
        self._trainer_alive = True
        self._wake.set()

    def check(self) -> None:
        """Raise what took the lease away, as far as it is known."""
        if self.lost is not None:
            raise self.lost

    def confirm(self) -> None:
        """Make sure, by one request, that the lease is still ours.

        Raises:
            RunBusyError: it is not.
            StorageError: nobody can say just now.
        """
        self.check()
        self._beat()

    def verify(self) -> None:
        """Make sure, by reading, that nobody has taken the lease over up to now: what was committed before counts.

        Raises:
            RunBusyError: somebody has.
            StorageError: nobody can say just now.
        """
        self.check()
        self._do(self.lease.verify)

    def announce(self, doomed: Iterable[str]) -> None:
        """Say what is about to be deleted, and make sure that it still may be; see `Lease.announce`.

        Raises:
            RunBusyError, StorageError: nothing may be deleted.
        """
        self.check()
        self._do(lambda: self.lease.announce(doomed, trainer_alive=self._trainer_alive))

    def fenced(self) -> None:
        """Say that the fence is drawn, and make sure that it was drawn in time; see `Lease.fenced`.

        Raises:
            RunBusyError: somebody else has taken the lease over meanwhile.
            StorageError: nobody can say just now.
        """
        self.check()
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
                _LOG.warning("the lease could not be renewed, trying again in %g s: %s", HEARTBEAT_S, error)
            except HoldfastError as error:
                _LOG.error("%s", error)
                return
            except Exception as error:  # noqa: BLE001 - a thread edge: a lease nobody renews is taken by another
                _LOG.warning("the lease could not be renewed, trying again in %g s: %r", HEARTBEAT_S, error)
