"""One lease per run: at most one process writes to a run at any time.

``lease.json`` names the owner and holds a counter that the owner's heartbeat raises. A process that wants the lease
judges by its own monotonic clock whether the counter moves; wall clocks are only printed. On a local directory the
owner holds an flock on ``.lease.lock`` too: the kernel drops it when the owner dies, so a killed run is taken over at
once. Several leases in one folder have names of their own: ``lease-<of>.json``, ``.lease-<of>.lock``.

======================================  ==========================================================
found                                   outcome
======================================  ==========================================================
nobody, released, or owner known dead   taken at once
owner's trainer alive                   `RunBusyError` at once
an earlier life of our SLURM job        waited for, up to ``wait_s``: the scheduler ends it, or has
trainer gone, its writer still writes   waited for, up to ``wait_s``; for 60 s at most if the counter
                                        stands still
owner on another host                   counter moves: busy; stands still for 30 s: taken over
======================================  ==========================================================

An owner that stands still may wake up after it was taken over, at any instruction. Three rules keep it from doing harm,
and docs/reliability.md says why they suffice: lease.json changes by compare-and-swap only; an owner that is about to
delete writes the names into it first (`Lease.announce`), so a successor knows what its predecessor may still delete;
and a successor of an owner that is not known to be dead draws a fence (`holdfast.run.fence`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from holdfast._log import get_logger
from holdfast._ranks import job_life
from holdfast._units import format_duration
from holdfast.errors import (
    HoldfastError,
    RunBusyError,
    StorageConflictError,
    StorageError,
    StorageExistsError,
    StorageNotFoundError,
    StorageUnavailableError,
)
from holdfast.storage.base import ObjectInfo, Storage, errors_of
from holdfast.storage.local import local_tree as tree
from holdfast.storage.local.beneath import Beneath
from holdfast.storage.local.local_storage import LocalStorage, door_of
from holdfast.storage.together import together

from .fence import is_fence
from .names import LEASE_FILE
from .process import birth, is_dead, is_pid, machine, same_machine

LOCK_FILE = ".lease.lock"
_CLAIM = re.compile(r"lease-[0-9a-f]{8}\.json|\.lease-[0-9a-f]{8}\.lock")
HEARTBEAT_S = 5.0
STALE_S = 30.0
_QUIET_S = 60.0  # for an owner that does not show that it is finishing its last save
_LOOK_AGAIN_S = (0.1, 0.3, 0.6)
"""Pauses between looks at a lease.json that cannot be read."""
_POLL_S = 0.05
_SAID_AGAIN_S = 300.0
_MOMENT_S = 1.0  # a beat that does not hang takes far less
_MAX_BYTES = 4 << 20
_PROCESS = ("host", "boot", "pid_namespace", "trainer_pid", "trainer_pid_birth")
_log, _beat_log = get_logger("lease"), get_logger("writer")


def is_claim(name: str) -> bool:
    """Return whether a file directly in a folder belongs to the lease of a file name (`Lease.acquire`, ``of``)."""
    return _CLAIM.fullmatch(name) is not None


def files_of(storage: Storage, directory: str) -> Iterator[tuple[str, ObjectInfo]]:
    """Yield the files of a directory by their paths inside it, without those of leases (`is_claim`)."""
    skip = len(directory) + 1 if directory else 0
    for info in storage.list(directory):
        if not is_claim(path := info.path[skip:]):
            yield path, info


def is_of_lease(name: str) -> bool:
    """Return whether a file directly in a run belongs to a lease or is a fence."""
    return name in (LEASE_FILE, LOCK_FILE) or is_claim(name) or is_fence(name)


def announced(storage: Storage) -> frozenset[str]:
    """Return the names that the owner of a run may be deleting now (`Lease.announce`), for other processes.

    Raises:
        StorageError: the storage does not answer.
    """
    try:
        owner = _parse(storage.read(LEASE_FILE))
    except StorageNotFoundError:
        return frozenset()
    if owner is None or (owner.get("released") is True and owner.get("fence_due") is not True):
        return frozenset()
    names = owner.get("doomed")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def owner_of(storage: Storage) -> tuple[dict[str, Any] | None, float | None]:
    """Return the owner that lease.json names, and when it was last heard of (seconds since 1970); for display.

    The owner has ``alive`` added: True or False if this machine can tell, else None.

    Raises:
        StorageError: the storage does not answer.
    """
    try:
        owner, at = _parse(storage.read(LEASE_FILE)), storage.stat(LEASE_FILE).modified
    except StorageNotFoundError:
        return None, None
    if owner is None or owner.get("released") is True:
        return None, None
    alive = None if not same_machine(owner) else not is_dead(owner)
    return {**owner, "alive": alive}, at


def make_owner(start_id: str, *, trainer_pid: int | None = None) -> dict[str, Any]:
    """Describe this process as an owner.

    Args:
        start_id: identity of this start of the run.
        trainer_pid: process id of the trainer, if this process is its writer.
    """
    return _complete({"start_id": start_id, "trainer_pid": trainer_pid or os.getpid()})


def _complete(owner: Mapping[str, Any]) -> dict[str, Any]:
    pid = int(owner.get("pid") or os.getpid())
    trainer = int(owner.get("trainer_pid") or pid)
    job = job_life()
    return {
        **machine(),
        **({} if job is None else {"slurm_job": job[0], "slurm_restarts": job[1]}),
        "pid": pid,
        "pid_birth": birth(pid),
        "trainer_pid": trainer,
        "trainer_pid_birth": birth(trainer),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        **{name: value for name, value in owner.items() if value is not None},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Predecessor:
    """The previous owner, as far as it matters to the present owner of a lease.

    Attributes:
        may_act: it may still change the run: it has not given the lease back and is not known to be dead.
        is_known: lease.json existed.
        doomed: names that it, or an earlier owner, may still be deleting (`Lease.announce`).
    """

    may_act: bool = False
    is_known: bool = False
    doomed: tuple[str, ...] = ()


class Lease:
    """A lease that this process holds. `heartbeat` every `HEARTBEAT_S` keeps it; `release` gives it up.

    Attributes:
        owner: the fields of lease.json about this process.
        waited_s: seconds for which another process held it during `acquire`.
        predecessor: the previous owner.
    """

    def __init__(self, storage: Storage, owner: dict[str, Any], *, of: str = "") -> None:
        self.owner = owner
        self.waited_s = 0.0
        self.predecessor = Predecessor()
        self._storage, self._path, self._of = storage, _named(LEASE_FILE, of), of
        self._door = door_of(storage)
        self._lock = None if self._door is None else tree.FileLock(*self._door, _named(LOCK_FILE, of))
        self._beat = 0
        self._etag: str | None = None
        self._released = False
        self._doomed: tuple[str, ...] = ()
        self._is_fenced = True

    @classmethod
    def acquire(
        cls,
        storage: Storage,
        owner: Mapping[str, Any],
        *,
        wait_s: float = 60.0,
        stale_s: float = STALE_S,
        sleep: Callable[[float], None] = time.sleep,
        of: str = "",
    ) -> Lease:
        """Take the lease of the run in ``storage``; wait while the writer of a dead trainer finishes.

        Args:
            storage: the run.
            owner: this process, from `make_owner`; missing fields are filled in.
            wait_s: longest wait for the writer of a dead trainer whose counter moves; for another owner that may give
                the lease back by itself 60 seconds at most.
            stale_s: seconds without a change of the counter after which an owner on another machine is taken over.
            sleep: waits between looks; may raise to give up.
            of: eight hex digits that distinguish several leases in one folder; "" for the run's.

        Raises:
            RunBusyError: another process holds it; the message names host, pid and start time, and what to do.
        """
        begun = time.monotonic()
        first_look: float | None = None  # when the first try failed: the requests alone may take seconds
        lease = cls(storage, _complete(owner), of=of)
        watch, is_told = _Watch(stale_s), False
        try:
            while not lease._try(watch):
                first_look = first_look or time.monotonic()
                waited = time.monotonic() - begun
                limit_s = wait_s if watch.is_finishing() else min(wait_s, _QUIET_S)
                if (watch.is_alive() and not _is_earlier_life(watch.owner, lease.owner)) or waited >= limit_s:
                    raise RunBusyError(_busy(storage, lease._path, watch, lease.owner, waited))
                if waited >= _QUIET_S and not is_told:
                    is_told = True
                    _log.warning(
                        "%s: the writer of a trainer that has died still writes its last save; it is waited for, %s "
                        "at most", storage.uri, format_duration(wait_s),
                    )  # fmt: skip
                sleep(_POLL_S)
        except BaseException:
            if lease._lock is not None:
                lease._lock.release()
            raise
        lease.waited_s = 0.0 if first_look is None else time.monotonic() - first_look
        return lease

    def heartbeat(self, *, trainer_alive: bool = True) -> None:
        """Raise the counter, so that other machines see a living owner.

        Args:
            trainer_alive: False once only the writer is left; a new trainer then waits for it instead of failing.

        Raises:
            RunBusyError: another process took the lease over; stop writing to the run.
            StorageError: the counter could not be written; try again at the next heartbeat.
        """
        self._renew(trainer_alive, durable=True)

    def _renew(self, trainer_alive: bool, *, durable: bool) -> None:
        if self._released:
            return
        self._beat += 1
        try:
            body, storage = self._body(trainer_alive), self._storage
            if durable or self._etag is None or not isinstance(storage, LocalStorage):
                self._etag = storage.put(self._path, body, if_match=self._etag)
            else:
                self._etag = storage.put(self._path, body, if_match=self._etag, durable=False)
        except (StorageConflictError, StorageNotFoundError) as error:
            exists, found, etag = self._look()
            if found is not None and self._is_mine(found):
                self._etag = etag  # an earlier write of ours whose answer was lost
                if found.get("beat") != self._beat:  # it may lack names that are announced by this call
                    self._etag = self._storage.put(self._path, self._body(trainer_alive), if_match=etag)
                return
            if found is None and self._lock is not None and self._lock.is_in_place():
                # A user removed the file by hand: a process that takes over removes our lock first, which is in place.
                condition: dict[str, Any] = {"if_match": etag} if exists else {"if_absent": True}
                self._etag = self._storage.put(self._path, self._body(trainer_alive), **condition)
                return
            raise (self._unreadable() if exists and found is None else self._lost(found)) from error

    def announce(self, doomed: Iterable[str], *, trainer_alive: bool = True) -> None:
        """Write the names that are about to be deleted into the lease; they replace those announced before.

        Only announced names may be deleted. A process that takes the lease over later reads them and does not count
        them. If this call fails, nothing may be deleted any more.

        Raises:
            RunBusyError, StorageError: as `heartbeat`; do not delete.
        """
        before = self._doomed
        self._doomed = tuple(sorted(doomed))
        try:
            # On a disk the file has to be visible, not durable: a power cut ends this process too, and its deletions.
            self._renew(trainer_alive, durable=False)
        except BaseException:
            # It may have been written all the same: names announced before stay until the next announcement.
            self._doomed = tuple(sorted({*before, *self._doomed}))
            raise

    def fenced(self, *, trainer_alive: bool = True) -> None:
        """Note in the lease that the fence which `predecessor` called for is drawn: a successor need not draw it.

        Raises:
            RunBusyError, StorageError: as `heartbeat`.
        """
        self._is_fenced, self._doomed = True, ()
        self.heartbeat(trainer_alive=trainer_alive)

    def verify(self) -> None:
        """Make sure, with one read, that no other process has taken the lease over up to now.

        Raises:
            RunBusyError: another process has taken it over.
            StorageError: the storage does not answer.
        """
        exists = True
        try:
            found = _parse(self._storage.read(self._path))  # one request: only the owner matters
        except StorageNotFoundError:
            exists, found = False, None
        if found is None:
            exists, found, _ = self._look()
        if found is None or not self._is_mine(found):
            if found is None and self._lock is not None and self._lock.is_in_place():
                return  # `heartbeat` puts the file back
            raise self._unreadable() if exists and found is None else self._lost(found)

    def _look(self) -> tuple[bool, dict[str, Any] | None, str | None]:
        """Read lease.json; what is no lease is asked for again: a store may serve a part, an error page, or nothing."""
        look = _read(self._storage, self._path)
        for pause_s in () if self._lock is not None and self._lock.is_in_place() else _LOOK_AGAIN_S:
            if look[1] is not None:
                break
            time.sleep(pause_s)
            look = _read(self._storage, self._path)
        return look

    def _unreadable(self) -> StorageUnavailableError:
        where, looks = f"{self._storage.uri}/{self._path}", len(_LOOK_AGAIN_S) + 1
        return StorageUnavailableError(  # as if nothing was answered: that costs saves, not the training
            f"{where} is there and is no lease of Holdfast, at {looks} looks: "
            "another program wrote it, or the storage returns damaged content. Whether this process still owns "
            "the run is not known, so nothing is committed or deleted now; it is asked again later. If it stays so: "
            "stop this process, look at the file, delete it and start again"
        )

    def release(self) -> None:
        """Give the lease up. Idempotent; a successor's lease stays, whenever the successor comes."""
        if self._released:
            return
        self._released = True
        try:
            if self._door is None or not self._is_fenced:
                self._say_released(delete=bool(self._of))
            else:
                self._delete(*self._door)
        finally:
            if self._lock is not None:
                self._lock.release()

    def _delete(self, door: Beneath, inside: str) -> None:
        with (
            errors_of("delete", f"{self._storage.uri}/{self._path}"),
            contextlib.suppress(FileNotFoundError),
            door.folder(inside) as folder,
            tree.locked(folder),  # as the swap itself
        ):
            if self._is_mine(_read(self._storage, self._path)[1]):
                self._storage.delete(self._path)

    def _say_released(self, *, delete: bool) -> None:
        # No store deletes on a condition. A delete that comes late would remove the lease of a successor, and a third
        # process would then find no owner. So the file of a run stays, marked as released; a fence that was not drawn
        # is left to the successor. The lease of a file name is removed: single files are replaced conditionally.
        exists, found, etag = _read(self._storage, self._path)
        if not exists or not self._is_mine(found):
            return
        with contextlib.suppress(StorageConflictError, StorageNotFoundError):
            body = {**json.loads(self._body(trainer_alive=False)), "released": True}
            self._storage.put(self._path, json.dumps(body).encode(), if_match=etag)
            if delete:
                self._storage.delete(self._path)

    def _lost(self, found: Mapping[str, Any] | None) -> RunBusyError:
        if found is None:
            return RunBusyError(
                f"{self._storage.uri}: {self._path}, which says that this process writes here, was deleted: "
                "another process may come at any moment, so this one stops. Start it again, and leave lease files alone"
            )
        return RunBusyError(
            f"the lease of the run {self._storage.uri} was lost to {_name(found)}: this process must not write to it "
            "any more, and what it was saving does not count. It happens when this process stood still for longer than "
            f"{format_duration(STALE_S)}; stop one of the two"
        )

    def _body(self, trainer_alive: bool) -> bytes:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        body: dict[str, Any] = {**self.owner, "beat": self._beat, "time": now, "trainer_alive": trainer_alive}
        if self._doomed:
            body["doomed"] = self._doomed
        if not self._is_fenced:
            body["fence_due"] = True
        return json.dumps(body).encode()

    def _try(self, watch: _Watch) -> bool:
        """Take the lease if that is possible now; ``watch`` gets the owner that was found."""
        locked = self._lock.take() if self._lock is not None else None
        # Whether the storage has conditional writes may have to be tried out, which takes requests too.
        looks: list[Callable[[], Any]] = [lambda: _read(self._storage, self._path), lambda: self._storage.conditional]
        (exists, found, etag), compares = together(self._storage, looks)
        watch.see(found, etag, locked)
        if not watch.is_free():
            return False
        self.owner["locked"] = bool(locked)
        self._inherit(exists, found, gone=watch.is_gone())
        try:
            body = self._body(trainer_alive=self.owner.get("trainer_alive") is not False)
            if not exists:
                self._etag = self._storage.put(self._path, body, if_absent=True)
            else:
                if found is not None:
                    _log.info("taking the lease of %s over from %s", self._storage.uri, _name(found))
                self._etag = self._storage.put(self._path, body, if_match=etag)
        except (StorageExistsError, StorageConflictError):
            return False  # another process was faster: look again
        except StorageNotFoundError:
            if not exists:
                raise  # the bucket itself does not exist
            return False
        except StorageError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            return False  # an owner that stands still holds the lock, between comparing and swapping
        # A store without conditional writes lets two processes write; the last write wins, so look once more.
        if not compares and not self._is_mine(_read(self._storage, self._path)[1]):
            return False
        if locked is False and self._lock is not None:
            self.owner["locked"] = bool(self._lock.seize())
        return True

    def _inherit(self, exists: bool, found: Mapping[str, Any] | None, *, gone: bool) -> None:
        """Set `predecessor`; its names are written with the lease itself."""
        fields = found or {}
        # Requests of a dead process may still be on their way to a store; on a disk there are none.
        # A damaged file and a free lock: the file was being written when the power failed.
        gone = gone or (found is None and self._lock is not None and self._lock.is_in_place())
        is_over = not exists or fields.get("released") is True or (gone and self._storage.local_root is not None)
        may_act = fields.get("fence_due") is True or not is_over
        names = fields.get("doomed") if may_act else None  # otherwise no process deletes them any more
        doomed = tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()
        self.predecessor = Predecessor(may_act=may_act, is_known=exists, doomed=doomed)
        self._is_fenced, self._doomed = not may_act or bool(self._of), doomed  # only runs have fences

    def _is_mine(self, found: Mapping[str, Any] | None) -> bool:
        return found is not None and all(found.get(key) == self.owner[key] for key in ("start_id", "pid", "host"))


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
        self._do(lambda: self.lease.heartbeat(trainer_alive=self._trainer_alive))

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
                _beat_log.warning("the lease could not be given back, it goes stale by itself: %s", error)

    def _keep(self) -> None:
        while True:
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
            if self._stop.is_set() or self.lost is not None:
                return
            try:
                self.confirm()
            except StorageError as error:
                self._complain(str(error))
            except HoldfastError as error:
                _beat_log.error("%s", error)
                return
            except Exception as error:  # noqa: BLE001 - a thread edge: another process takes a lease that is not renewed
                self._complain(repr(error))
            else:
                if self._complained is not None:
                    self._complained = None
                    _beat_log.warning("the lease is renewed again")

    def _complain(self, error: str) -> None:
        """Say that the lease could not be renewed: at first, and every few minutes while that goes on."""
        now = time.monotonic()
        if self._complained is None or now - self._complained > _SAID_AGAIN_S:
            self._complained = now
            _beat_log.warning("the lease could not be renewed, trying again every %g s: %s", HEARTBEAT_S, error)


class _Watch:
    """The present owner as this process sees it, by its own clock."""

    def __init__(self, stale_s: float) -> None:
        self.owner: dict[str, Any] | None = None
        self._stale_s = stale_s
        self._locked: bool | None = None
        self._seen: Any = None
        self._since = 0.0
        self._moved = False

    def see(self, owner: dict[str, Any] | None, etag: str | None, locked: bool | None) -> None:
        """Note the owner found. ``locked``: True if we hold the flock, False if another does, None without locks."""
        identity = None if owner is None else (owner.get("start_id"), owner.get("pid"))
        before = None if self.owner is None else (self.owner.get("start_id"), self.owner.get("pid"))
        beat = (identity, etag if owner is None else owner.get("beat"))
        if beat != self._seen or self._since == 0.0:
            self._moved = self._since != 0.0 and owner is not None and identity == before
            self._seen, self._since = beat, time.monotonic()
        self.owner, self._locked = owner, locked

    @property
    def _is_stale(self) -> bool:
        return time.monotonic() - self._since >= self._stale_s

    def is_free(self) -> bool:
        """Whether the lease may be taken now."""
        here = self.owner is not None and same_machine(self.owner)
        if self.owner is not None and self.owner.get("released") is True:
            return True
        if self._locked is False and not self._is_stray:
            # A lock that a process of this machine holds proves that it lives. A lock held from another machine may
            # be left over from a host that died, which the file server has not noticed.
            return self.owner is not None and not here and self._is_stale
        return self.owner is None or self.is_gone() or self._is_stale

    @property
    def _is_stray(self) -> bool:
        """Whether a process that is not the owner, which has no lock, holds the lock: it stands still elsewhere."""
        return self._locked is False and self.owner is not None and self.owner.get("locked") is False

    def is_gone(self) -> bool:
        """Whether the owner is known to be dead."""
        if self.owner is None or not same_machine(self.owner):
            return False
        return bool(self._locked and self.owner.get("locked")) or is_dead(self.owner)

    def is_alive(self) -> bool:
        """Whether waiting is pointless: the owner works for a living trainer."""
        if self.owner is None or self.owner.get("trainer_alive") is False or is_dead(self.owner, "trainer_pid"):
            return False
        if same_machine(self.owner) and self._locked is not None and not self._is_stray:
            return self._locked is False
        return self._moved

    def is_finishing(self) -> bool:
        """Whether the owner shows that it works, and its trainer is gone: it gives the lease back when it is done."""
        return self.owner is not None and not self._is_stale and not self.is_alive()


def _named(file: str, of: str) -> str:
    stem, _, suffix = file.rpartition(".")
    return f"{stem}-{of}.{suffix}" if of else file


def _read(storage: Storage, path: str) -> tuple[bool, dict[str, Any] | None, str | None]:
    """Read lease.json: whether it exists, its owner (None when damaged too), its etag if the storage has etags."""
    try:
        if storage.local_root is None:
            data, etag = storage.read_tagged(path)  # one request
        else:
            about = storage.stat(path)
            data, etag = storage.read(path) if about.size <= _MAX_BYTES else b"", about.etag
    except StorageNotFoundError:
        return False, None, None
    return True, _parse(data), etag


def _parse(data: bytes) -> dict[str, Any] | None:
    """Parse the content of a lease; None if it is damaged, or no lease of Holdfast."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    sound = isinstance(body, dict) and all(isinstance(body.get(key), str) for key in ("host", "start_id"))
    # A value that is no process id must not reach a system call, nor advice such as `kill`.
    return body if sound and is_pid(body.get("pid")) and is_pid(body.get("trainer_pid", body["pid"])) else None


def _name(owner: Mapping[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}"


def _is_earlier_life(owner: Mapping[str, Any] | None, mine: Mapping[str, Any]) -> bool:
    """Tell whether SLURM has requeued the owner's job and then started this process."""
    if owner is None or mine.get("slurm_job") is None or owner.get("slurm_job") != mine["slurm_job"]:
        return False
    before = owner.get("slurm_restarts")
    return type(before) is int and before < mine["slurm_restarts"]


def _busy(storage: Storage, path: str, watch: _Watch, mine: Mapping[str, Any], waited: float) -> str:
    owner = watch.owner
    head = f"{'the run' if path == LEASE_FILE else 'a file name in'} {storage.uri} is in use"
    if owner is None:
        return f"{head}: its lock is held by another process that has not written {path}; try again"
    trainer = owner.get("trainer_pid")
    who = f"{head} by {_name(owner)} (trainer {trainer}, since {owner.get('started')}, start {owner.get('start_id')})"
    if watch.is_alive() and _is_earlier_life(owner, mine):
        job = mine["slurm_job"].rpartition("/")[2]
        return (
            f"{who}: an earlier life of the same SLURM job, which has not ended since the job was requeued; waited "
            f"{format_duration(waited)} for it. SLURM has lost the node that it runs on, and not ended it there: stop "
            f"it with `kill {trainer}` on {owner.get('host')}, then `scontrol requeue {job}`"
        )
    if watch.is_alive() and all(owner.get(key) == mine[key] for key in _PROCESS):
        return f"{who}, by this very process: close() what saves there (a notebook: restart it), or use another path"
    if watch.is_alive():
        return (
            f"{who}. One process at a time writes there: wait for it, stop it with `kill {trainer}` on "
            f"{owner.get('host')}, or give this one another directory"
        )
    return (
        f"{who}; waited {format_duration(waited)} for it to finish its last save or to show that it is dead. "
        "Try again, or stop that process"
    )
