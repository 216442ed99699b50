"""The uploading side of a mirrored run: one thread that brings to the remote what was committed on the local disk.

Training never waits for it. What it is to do next is decided by `plan`, what it does by `remote`. The
working thread of the writer tells it of commits; the trainer follows it by long polls (`follow`).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from holdfast._log import get_logger
from holdfast._units import format_duration
from holdfast.copying.transfer import TransferStopped
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.run.record import Record

from .plan import MirrorLimits, done_with, given_up, pause_s
from .remote import RemoteRun

__all__ = ["END_S", "Mirroring"]

_LOG = get_logger("writer")
END_S = 20.0
"""How long uploads go on after the trainer is gone: a successor waits three times as long for the lease."""
_SYNC_S = 15.0  # reports and what the run says about itself
_ARRIVED = 64  # names told to a follower, which asks again after each change
_GRACE_S = 5.0  # after the end of uploads, for the last words and the lease

Follower = Callable[[dict[str, Any]], None]


class Mirroring:
    """Uploads checkpoints one after another, oldest first, and tries again for ever.

    Args:
        remote: the opened remote side.
        limits: how far it may be behind.
        waiting: checkpoints of earlier lives that the remote has yet to get, oldest first.
        uploaded: local checkpoints that the remote has.
        changed: called, by the uploading thread, when local checkpoints need not stay any more.

    Attributes:
        remote: the remote side.
        limits: how far it may be behind.
        uri: where the remote side is.
    """

    def __init__(
        self,
        remote: RemoteRun,
        limits: MirrorLimits,
        *,
        waiting: Sequence[Record],
        uploaded: Collection[str],
        changed: Callable[[], object],
    ) -> None:
        self.remote, self.limits = remote, limits
        self.uri = remote.catalog.storage.uri
        self._local_changed = changed
        self._lock = threading.Condition()
        self._waiting = list(waiting)
        self._uploaded = set(uploaded)
        self._arrived: deque[str] = deque(maxlen=_ARRIVED)
        self._in_flight: str | None = None
        self._tried: set[str] = set()
        self._litter: list[str] = []  # given up half-way
        self._late: list[tuple[str, dict[str, Any], bool | None]] = []
        self._num_given_up = self._num_lately = self._failures = 0
        self._error: str | None = None
        self._upload_s = 0.0
        self._going = self._said_all = self._over = False
        self._deadline: float | None = None  # of the end
        self._next_try = self._next_sync = 0.0
        self._arrival = self._warned = time.monotonic()
        self._followers: list[Follower] = []
        self._version = time.monotonic_ns()  # higher than that of a writer before this one
        self._newest = remote.newest()
        self._give_up()
        remote.heartbeat.on_lost = self._lease_lost
        remote.first = self._bring_late
        self._thread = threading.Thread(target=self._work, name="holdfast-mirror", daemon=True)
        self._thread.start()

    # ---- told by the working thread

    def go(self) -> None:
        """Start: whatever the trainer wanted to read at either side has been read."""
        with self._lock:
            self._going = True
            self._lock.notify_all()

    @property
    def has_begun(self) -> bool:
        """Whether `go` was called: from then on checkpoints may be deleted at both sides."""
        return self._going

    def committed(self, record: Record) -> None:
        """Queue a checkpoint that was committed on the local disk."""
        with self._lock:
            if not self._waiting:
                self._arrival = self._warned = time.monotonic()
            self._waiting = [one for one in self._waiting if one.name != record.name] + [record]
            self._uploaded.discard(record.name)
            self._give_up()
            self._going = True
            self._tell()

    def look(self) -> None:
        """Learn which checkpoint is the newest: one has come to the remote without an upload."""
        newest = self.remote.newest()
        with self._lock:
            self._newest = newest
            self._tell()

    def needed(self) -> frozenset[str]:
        """Names of local checkpoints that must not go: nobody else has them yet."""
        with self._lock:
            return frozenset(record.name for record in self._waiting)

    def done_with(self, local: Collection[str]) -> list[str]:
        """Names of local checkpoints that need not stay."""
        with self._lock:
            return done_with(local, self._uploaded, self.limits)

    def has(self, name: str) -> bool:
        """Whether the remote has this checkpoint."""
        return name in self.remote.catalog.index.rows

    def late(self, name: str, metrics: Mapping[str, Any], *, pinned: bool | None = None) -> None:
        """Pass on what came late about a checkpoint that the remote has."""
        with self._lock:
            self._late.append((name, dict(metrics), pinned))
            self._sync_soon()

    def quarantine(self, name: str, reason: str) -> None:
        """Never pick this checkpoint of the remote again; while the trainer looks for one, before `go`."""
        self.remote.catalog.index.quarantine(name, reason)

    def attempt_of(self, name: str) -> int | None:
        """The attempt that saved a checkpoint of the remote; before `go`."""
        row = self.remote.catalog.index.rows.get(name)
        return None if row is None else int(row[1])

    def check(self) -> None:
        """Raise if the lease of the remote was lost."""
        self.remote.heartbeat.check()

    def trainer_gone(self) -> None:
        """Only this writer is left."""
        self.remote.heartbeat.trainer_gone()

    def close(self) -> None:
        """Upload what can be within `END_S`, bring the last words, give the lease of the remote back."""
        with self._lock:
            self._deadline = time.monotonic() + END_S
            self._going = True
            self._next_try = 0.0
            self._lock.notify_all()
        self._thread.join(END_S + _GRACE_S)
        with self._lock:
            left = [record.name for record in self._waiting]
        if self._thread.is_alive():
            _LOG.warning("%s does not answer: its lease is left to go stale", self.uri)
        if left:
            _LOG.warning(
                "not at %s, only on the local disk: %s; the next start with the same local_dir brings it there",
                self.uri, ", ".join(left),
            )  # fmt: skip

    # ---- told to the trainer, from any thread

    def follow(self, since: int | None, answer: Follower) -> None:
        """Call ``answer`` with the state once it is another than ``since``."""
        with self._lock:
            if since == self._version and not self._over:
                self._followers.append(answer)
                return
            state = self._state()
        answer(state)

    def _state(self) -> dict[str, Any]:
        newest = self._newest
        return {
            "version": self._version,
            "last_step": -1 if newest is None else newest.step,
            "created": None if newest is None else newest.created,
            "waiting": [one.name for one in self._waiting],
            "arrived": list(self._arrived),
            "given_up": self._num_given_up,
            "upload_s": self._upload_s,
            "error": self._error,
            "lost": None if (lost := self.remote.heartbeat.lost) is None else str(lost),
        }

    def _tell(self) -> None:
        """Let the followers know, and the own thread. Needs the lock."""
        self._version = max(self._version + 1, time.monotonic_ns())
        followers, self._followers = self._followers, []
        if followers:
            state = self._state()
            for answer in followers:
                answer(state)
        self._lock.notify_all()

    def _lease_lost(self) -> None:
        """Wake up: the trainer is to hear of it at its next step, not at the next look at the reports."""
        with self._lock:
            self._error = str(self.remote.heartbeat.lost)
            self._tell()

    def _sync_soon(self) -> None:
        self._next_sync = min(self._next_sync, time.monotonic() + 1.0)
        self._lock.notify_all()

    def _give_up(self) -> None:
        names = [record.name for record in self._waiting]
        for name in given_up(names, self.limits, self._in_flight):
            self._leave_out(name)
            self._num_lately += 1
            _LOG.log(
                logging.WARNING if self._num_lately == 1 else logging.INFO,
                "%s is not uploaded: %s is more than %d checkpoints behind (max_behind, when_behind='skip'); training "
                "goes on, newer ones are tried%s",
                name, self.uri, self.limits.max_behind, f" ({self._error})" if self._error else "",
            )  # fmt: skip

    def _leave_out(self, name: str) -> None:
        self._waiting = [record for record in self._waiting if record.name != name]
        self._num_given_up += 1
        if name in self._tried:
            self._litter.append(name)

    # ---- the uploading thread

    def _work(self) -> None:
        try:
            while (act := self._next()) is not None:
                self._attempt(act)
        finally:
            try:
                self.remote.close(wait=self._error is None)
            except Exception as error:  # noqa: BLE001 - a thread edge; the lease goes stale by itself
                _LOG.warning("the lease of %s could not be given back: %s", self.uri, error)
            with self._lock:
                self._over = True  # who follows from now on is answered at once
                self._tell()

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do; None at the end."""
        with self._lock:
            while True:
                now = time.monotonic()
                if self.remote.heartbeat.lost is not None:
                    return None
                if self._said_all:
                    return None
                if self._deadline is not None and (not self._waiting or now >= self._deadline):
                    return self._last_words
                if self._going and self._waiting and now >= self._next_try:
                    return self._upload
                if self._going and now >= self._next_sync:
                    return self._sync
                self._warn(now)
                moments = [self._next_sync] if self._going else []
                if self._waiting:
                    moments.append(self._warned + self.limits.warn_after_s)
                    moments += [self._next_try] if self._going else []
                if self._deadline is not None:
                    moments.append(self._deadline)
                self._lock.wait(max(0.0, min(moments) - now) + 0.001 if moments else None)

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except TransferStopped:
            pass
        except Exception as error:  # noqa: BLE001 - a thread edge: recorded, shown, tried again
            if not isinstance(error, HoldfastError):
                _LOG.exception("the mirror of %s failed", self.uri)
            self._failed(error, act)
        else:
            with self._lock:
                if self._failures and not self._said_all:
                    _LOG.warning("%s answers again", self.uri)
                    self._failures, self._error = 0, None
                    self._tell()

    def _failed(self, error: Exception, act: Callable[[], None]) -> None:
        with self._lock:
            if self.remote.heartbeat.lost is not None:
                self._error = str(error)
                self._tell()
                return
            self._failures += 1
            if self._failures == 1:
                _LOG.warning("%s could not be reached, trying again while training goes on: %s", self.uri, error)
            self._error = str(error)
            pause = pause_s(self._failures, random.random())
            self._next_try = self._next_sync = time.monotonic() + pause
            self._give_up()
            self._tell()

    def _is_to_stop(self) -> bool:
        deadline = self._deadline
        return self.remote.heartbeat.lost is not None or (deadline is not None and time.monotonic() >= deadline)

    def _upload(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            name = self._in_flight = self._waiting[0].name
            self._tried.add(name)
        problem: HoldfastError | None = None
        newest: Record | None = None
        begun = time.monotonic()
        try:
            self.remote.take(name, stop=self._is_to_stop)
            newest = self.remote.newest()
        except CheckpointError as error:
            problem = error  # trying again changes nothing
        finally:
            with self._lock:
                self._in_flight = None
        with self._lock:
            if problem is None:
                self._waiting = [record for record in self._waiting if record.name != name]
                self._uploaded.add(name)
                self._arrived.append(name)
                self._newest = newest
                self._arrival = self._warned = time.monotonic()
                self._upload_s, self._num_lately = self._arrival - begun, 0
            else:
                self._leave_out(name)
                _LOG.error("%s is not uploaded to %s: %s", name, self.uri, problem)
            self._tell()
        self._local_changed()

    def _sync(self) -> None:
        with self._lock:
            litter, self._litter = self._litter, []
            is_late = bool(self._late)
        try:
            while litter:
                self.remote.drop(litter[0])
                litter.pop(0)
            if is_late or self.remote.bring_sidecars():
                self.remote.retain()
            self.remote.bring_head()
            self.remote.bring_reports()
        finally:
            with self._lock:
                self._litter = litter + self._litter
                self._next_sync = time.monotonic() + _SYNC_S

    def _bring_late(self) -> None:
        """Tell the remote what came late, before it decides what stays there."""
        while True:
            with self._lock:
                if not self._late:
                    return
                late = self._late[0]
            self.remote.late(*late)
            with self._lock:
                self._late.pop(0)

    def _last_words(self) -> None:
        self._said_all = True
        if not (self._failures and self._waiting):  # it would not hear them either
            self._sync()

    def _warn(self, now: float) -> None:
        if not self._waiting or now - self._warned < self.limits.warn_after_s:
            return
        self._warned = now
        _LOG.warning(
            "nothing has arrived at %s for %s; %d checkpoint(s) wait on the local disk%s",
            self.uri, format_duration(now - self._arrival), len(self._waiting),
            f": {self._error}" if self._error else "",
        )  # fmt: skip
