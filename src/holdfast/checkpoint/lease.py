"""One lease per run: at most one process writes to a run at any time.

``lease.json`` names the owner and carries a counter that its heartbeat raises. Whoever finds it judges by the own
monotonic clock whether the counter still moves; wall clocks are only printed. On a local directory an flock on
``.lease.lock`` is held as well: the kernel drops it when the owner dies, so a killed run is taken over at once.
Where several live side by side in one folder each has a name of its own: ``lease-<of>.json``, ``.lease-<of>.lock``.

======================================  ==========================================================
what is found                           outcome
======================================  ==========================================================
nobody, released, or owner known dead   taken at once
owner's trainer alive                   `RunBusyError` at once
trainer gone, its writer still writes   waited for, up to ``wait_s``
owner on another host                   counter moves: busy; stands still for 30 s: taken over
======================================  ==========================================================
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from holdfast._units import format_duration
from holdfast.errors import (
    RunBusyError,
    StorageConflictError,
    StorageExistsError,
    StorageNotFoundError,
)
from holdfast.storage.base import ObjectInfo, Storage
from holdfast.storage.ops import translate

from ._process import birth, is_dead, machine, same_machine

__all__ = ["HEARTBEAT_S", "STALE_S", "Lease", "files_of", "is_claim", "is_of_lease", "make_owner"]

LEASE_FILE = "lease.json"
LOCK_FILE = ".lease.lock"
_CLAIM = re.compile(r"lease-[0-9a-f]{8}\.json|\.lease-[0-9a-f]{8}\.lock")
HEARTBEAT_S = 5.0
STALE_S = 30.0
_POLL_S = 0.05
_PROCESS = ("host", "boot", "pid_namespace", "trainer_pid", "trainer_pid_birth")
_log = logging.getLogger("holdfast.lease")


def is_claim(name: str) -> bool:
    """Tell whether a file directly in a folder says who writes files of one name there; it is nobody's data."""
    return _CLAIM.fullmatch(name) is not None


def files_of(storage: Storage, directory: str) -> Iterator[tuple[str, ObjectInfo]]:
    """Yield the files of a directory by their paths inside it, without those that say who writes there (`is_claim`)."""
    skip = len(directory) + 1 if directory else 0
    for info in storage.list(directory):
        if not is_claim(path := info.path[skip:]):
            yield path, info


def is_of_lease(name: str) -> bool:
    """Tell whether a file directly in a run says who writes there."""
    return name in (LEASE_FILE, LOCK_FILE) or is_claim(name)


def make_owner(start_id: str, *, trainer_pid: int | None = None) -> dict[str, Any]:
    """Describe this process as an owner.

    Args:
        start_id: identity of this start of the run.
        trainer_pid: the trainer, if this process writes for another one.
    """
    return _complete({"start_id": start_id, "trainer_pid": trainer_pid or os.getpid()})


def _complete(owner: Mapping[str, Any]) -> dict[str, Any]:
    pid = int(owner.get("pid") or os.getpid())
    trainer = int(owner.get("trainer_pid") or pid)
    return {
        **machine(),
        "pid": pid,
        "pid_birth": birth(pid),
        "trainer_pid": trainer,
        "trainer_pid_birth": birth(trainer),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        **{name: value for name, value in owner.items() if value is not None},
    }


class Lease:
    """A held lease. `heartbeat` every `HEARTBEAT_S` keeps it; `release` gives it up.

    Attributes:
        owner: what lease.json says about the holder.
        waited_s: how long it took to get it.
    """

    def __init__(self, storage: Storage, owner: dict[str, Any], *, of: str = "") -> None:
        self.owner = owner
        self.waited_s = 0.0
        self._storage, self._path = storage, _named(LEASE_FILE, of)
        root = storage.local_root
        self._lock = None if root is None else _Lock(root / _named(LOCK_FILE, of))
        self._beat = 0
        self._etag: str | None = None
        self._released = False

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
        """Take the lease of the run in ``storage``, waiting for a writer that finishes for a dead trainer.

        Args:
            storage: the run.
            owner: who takes it, from `make_owner`; missing fields are filled in.
            wait_s: longest wait for an owner that may go away by itself.
            stale_s: an owner out of sight is given up after its counter stood still for this long.
            sleep: how to wait between looks.
            of: eight hex digits that tell several leases in one folder apart.

        Raises:
            RunBusyError: somebody else holds it; the message names host, pid, since when, and what to do.
        """
        begun = time.monotonic()
        lease = cls(storage, _complete(owner), of=of)
        watch = _Watch(stale_s)
        try:
            while not lease._try(watch):
                waited = time.monotonic() - begun
                if watch.is_alive() or waited >= wait_s:
                    raise RunBusyError(_busy(storage, lease._path, watch, lease.owner, waited))
                sleep(_POLL_S)
        except BaseException:
            if lease._lock is not None:
                lease._lock.release()
            raise
        lease.waited_s = time.monotonic() - begun
        return lease

    def heartbeat(self, *, trainer_alive: bool = True) -> None:
        """Raise the counter, so that observers elsewhere see a living owner.

        Args:
            trainer_alive: False once only the writer is left: others then wait for it instead of giving up.

        Raises:
            RunBusyError: another process took the lease over; stop writing to the run.
            StorageError: the beat could not be written; try again at the next one.
        """
        if self._released:
            return
        self._beat += 1
        try:
            self._etag = self._storage.put(self._path, self._body(trainer_alive), if_match=self._etag)
        except (StorageConflictError, StorageNotFoundError) as error:
            _, found, etag = _read(self._storage, self._path)
            if self._is_mine(found):
                self._etag = etag  # our own earlier beat, whose answer was lost on the way
                return
            if found is None and self._lock is not None and self._lock.is_in_place():
                # Somebody tidied up by hand; as long as the lock is ours nobody else can have come in.
                self._etag = self._storage.put(self._path, self._body(trainer_alive))
                return
            if found is None:
                raise RunBusyError(
                    f"{self._storage.uri}: {self._path}, which says that this process writes here, was deleted: "
                    "another one may come at any moment, so this one stops. Start it again, and leave lease files alone"
                ) from error
            name = _name(found)
            raise RunBusyError(
                f"the lease of the run {self._storage.uri} was lost to {name}: this process must not write to it any "
                "more. It happens when this process stood still for longer than "
                f"{format_duration(STALE_S)}; stop one of the two"
            ) from error

    def release(self) -> None:
        """Give the lease up. Idempotent; leaves a successor's lease alone."""
        if self._released:
            return
        self._released = True
        try:
            if self._is_mine(_read(self._storage, self._path)[1]):
                self._storage.delete(self._path)
        finally:
            if self._lock is not None:
                self._lock.release()

    def _body(self, trainer_alive: bool) -> bytes:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return json.dumps({**self.owner, "beat": self._beat, "time": now, "trainer_alive": trainer_alive}).encode()

    def _try(self, watch: _Watch) -> bool:
        """Take the lease if it can be taken now; otherwise tell ``watch`` what stands in the way."""
        locked = self._lock.take() if self._lock is not None else None
        exists, found, etag = _read(self._storage, self._path)
        watch.see(found, etag, locked)
        if not watch.is_free():
            return False
        self.owner["locked"] = bool(locked)
        try:
            body = self._body(trainer_alive=True)
            if not exists:
                self._etag = self._storage.put(self._path, body, if_absent=True)
            else:
                if found is not None:
                    _log.info("taking the lease of %s over from %s", self._storage.uri, _name(found))
                self._etag = self._storage.put(self._path, body, if_match=etag)
        except (StorageExistsError, StorageConflictError):
            return False  # somebody else was faster: look again
        except StorageNotFoundError:
            if not exists:
                raise  # it was to be created: the bucket itself is not there
            return False
        # A store without conditional writes lets two pass; the last one written wins, so look once more.
        return self._is_mine(_read(self._storage, self._path)[1])

    def _is_mine(self, found: Mapping[str, Any] | None) -> bool:
        return found is not None and all(found.get(key) == self.owner[key] for key in ("start_id", "pid", "host"))


class _Watch:
    """What one observer knows about the present owner, by the observer's own clock."""

    def __init__(self, stale_s: float) -> None:
        self.owner: dict[str, Any] | None = None
        self._stale_s = stale_s
        self._locked: bool | None = None
        self._seen: Any = None
        self._since = 0.0
        self._moved = False

    def see(self, owner: dict[str, Any] | None, etag: str | None, locked: bool | None) -> None:
        """Take in one look. ``locked``: True we hold the flock, False another does, None there is none."""
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
        if self._locked is False:
            # A lock that another process of this machine holds is proof of life. One held from elsewhere may be the
            # remains of a host that died, which the file server has not noticed.
            return self.owner is not None and not here and self._is_stale
        if self.owner is None:
            return True
        if here and ((self._locked and self.owner.get("locked")) or is_dead(self.owner)):
            return True
        return self._is_stale

    def is_alive(self) -> bool:
        """Whether waiting is pointless: the owner works for a living trainer."""
        if self.owner is None or self.owner.get("trainer_alive") is False or is_dead(self.owner, "trainer_pid"):
            return False
        if same_machine(self.owner) and self._locked is not None:
            return self._locked is False
        return self._moved


class _Lock:
    """An flock that dies with this process and is not inherited by forked children."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        _locks.add(self)

    def take(self) -> bool | None:
        """Try to lock: True held, False another process holds it, None this file system has no locks."""
        if self._file is not None:
            return True
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise translate(error, "lock", str(self._path)) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The owner before removes the file when it lets go: a lock on a removed file protects nothing.
            if not self._is_named(file):
                os.close(file)
                return False
        except OSError as error:
            os.close(file)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT):
                return False
            if error.errno in (errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.ENOSYS):
                return None
            raise translate(error, "lock", str(self._path)) from error
        self._file = file
        return True

    def release(self) -> None:
        """Remove and unlock. Idempotent."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self.drop()

    def is_in_place(self) -> bool:
        """Whether the lock is held, by a file that others find under its name."""
        try:
            return self._file is not None and self._is_named(self._file)
        except OSError:
            return False

    def _is_named(self, file: int) -> bool:
        return os.fstat(file).st_ino == self._path.stat().st_ino

    def drop(self) -> None:
        """Close this process's descriptor only."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


_locks: weakref.WeakSet[_Lock] = weakref.WeakSet()


def _drop_in_child() -> None:
    # A forked data loader worker that outlives the trainer would keep the lock of a dead run.
    for lock in list(_locks):
        lock.drop()


os.register_at_fork(after_in_child=_drop_in_child)


def _named(file: str, of: str) -> str:
    stem, _, suffix = file.rpartition(".")
    return f"{stem}-{of}.{suffix}" if of else file


def _read(storage: Storage, path: str) -> tuple[bool, dict[str, Any] | None, str | None]:
    """Read lease.json: whether it exists, its owner (None when damaged too), its etag if the storage has etags."""
    try:
        etag = storage.stat(path).etag
        data = storage.read(path)
    except StorageNotFoundError:
        return False, None, None
    try:
        body = dict(json.loads(data))
        body["pid"] = int(body["pid"])
        return True, body, etag
    except (ValueError, TypeError, KeyError):
        return True, None, etag


def _name(owner: Mapping[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}"


def _busy(storage: Storage, path: str, watch: _Watch, mine: Mapping[str, Any], waited: float) -> str:
    owner = watch.owner
    head = f"{'the run' if path == LEASE_FILE else 'a file name in'} {storage.uri} is in use"
    if owner is None:
        return f"{head}: its lock is held by another process that has not written {path}; try again"
    trainer = owner.get("trainer_pid")
    who = f"{head} by {_name(owner)} (trainer {trainer}, since {owner.get('started')}, start {owner.get('start_id')})"
    if watch.is_alive() and all(owner.get(key) == mine[key] for key in _PROCESS):
        return f"{who}, by this very process: close() what saves there, or give this one another directory"
    if watch.is_alive():
        return (
            f"{who}. One process at a time writes there: wait for it, stop it with `kill {trainer}` on "
            f"{owner.get('host')}, or give this one another directory"
        )
    return (
        f"{who}; waited {format_duration(waited)} for it to finish its last save or to show that it is dead. "
        "Try again, or stop that process"
    )
