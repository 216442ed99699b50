"""The one queue of uploads: threads of the writer that bring what waits, oldest first, and outlive the trainer.

What is brought, and how, is a `Source`'s: the checkpoints of a mirrored run (`mirror`), saves that ranks have staged on
disks of their own (`staged_run`), checkpoints and files that a loop trainer names (`files`). Training never waits for a
queue; its trainer may follow it by long polls (`follow`).
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

from holdfast._log import get_logger
from holdfast._units import format_duration
from holdfast.copying.sending import TransferStopped
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.run.record import Record

from ..messages import MirrorLimits

_LOG = get_logger("writer")
END_S = 20.0
"""How long uploads of a run go on after its trainer is gone: a successor waits three times as long for the lease."""
_BETWEEN_S = 15.0  # reports and what the run says about itself
_ARRIVED = 64  # names sent to a follower, which asks again after each change
_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0
_GRACE_S = 5.0  # after the end of uploads, for the last words and the lease

Follower = Callable[[dict[str, Any]], None]
Stop = Callable[[], bool]


class Source(Protocol):
    """What a queue brings, by name. Its methods are called by the threads of the queue, never under its lock."""

    @property
    def uri(self) -> str:
        """Where it brings things to."""

    @property
    def lost(self) -> HoldfastError | None:
        """Why nothing more may be brought; None while it may. At once: asked under the lock of the queue."""

    def take(self, name: str, *, stop: Stop) -> object:
        """Bring one thing; it is at the target on return.

        Raises:
            TransferStopped: ``stop`` said so; what is complete stays.
            CheckpointError: it cannot be done, now or later.
            HoldfastError: it could not be done now, and is tried again.
        """

    def newest(self) -> Record | None:
        """Return the newest checkpoint at the target; None if there is none, or nobody asks."""


class UploadQueue:
    """Brings what waits, and tries again for ever.

    Args:
        source: brings a checkpoint, a staged save or a file.
        limits: how many may wait.
        waiting: names that wait from the start, oldest first.
        settled: called, by an uploading thread, when a name waits no more: it was brought, or cannot be.
        between: brings what is no upload, now and then and at the end.
        drop: removes what was sent of a name that was given up.
        ended: called by the last thread at the end, with whether the target answers.
        num_workers: uploads under way at once.

    Attributes:
        limits: how many may wait.
    """

    def __init__(
        self,
        source: Source,
        limits: MirrorLimits,
        *,
        waiting: Sequence[str] = (),
        settled: Callable[[str], object] = lambda name: None,
        between: Callable[[], object] | None = None,
        drop: Callable[[str], object] | None = None,
        ended: Callable[[bool], object] | None = None,
        num_workers: int = 1,
    ) -> None:
        self.limits = limits
        self._source, self._settled, self._between, self._drop, self._ended = source, settled, between, drop, ended
        self._num_workers = self._num_alive = num_workers
        self._lock = threading.Condition()
        self._waiting = list(waiting)
        self._in_flight: set[str] = set()
        self._renewed: set[str] = set()  # added once more while they were in flight
        self._arrived: deque[str] = deque(maxlen=_ARRIVED)
        self._tried: set[str] = set()
        self._litter: list[str] = []  # given up half-way
        self._num_given_up = self._num_lately = self._failures = 0
        self._error: str | None = None
        self._refused: str | None = None  # the newest cannot be brought: which, and why
        self._upload_s = 0.0
        self._going = self._is_between = self._said_all = self._over = False
        self._deadline: float | None = None  # of the end
        self._next_try = self._next_between = 0.0
        self._arrival = self._warned = time.monotonic()
        self._followers: list[Follower] = []
        self._version = time.monotonic_ns()  # higher than that of an earlier writer
        self._newest = source.newest()
        self._give_up()
        self._threads = [
            threading.Thread(target=self._work, name=f"holdfast-uploads-{number}", daemon=True)
            for number in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    # ---- for its owner, from any thread

    def go(self) -> None:
        """Start: whatever the trainer wanted to read at either side has been read."""
        with self._lock:
            self._going = True
            self._lock.notify_all()

    @property
    def has_begun(self) -> bool:
        """Whether `go` was called: from then on checkpoints may be deleted at both sides."""
        return self._going

    def add(self, name: str) -> None:
        """Queue something as the newest; what waits under this name is replaced. The queue starts, if it has not."""
        with self._lock:
            if not self._waiting:
                self._arrival = self._warned = time.monotonic()
            if name in self._in_flight:
                self._renewed.add(name)
            self._waiting = [*(other for other in self._waiting if other != name), name]
            self._give_up()
            self._going = True
            self._tell()

    def look(self) -> None:
        """Learn which checkpoint is the newest: one has come to the target without an upload."""
        newest = self._source.newest()
        with self._lock:
            self._newest = newest
            self._tell()

    def needed(self) -> frozenset[str]:
        """Names that wait: nobody else has them yet."""
        with self._lock:
            return frozenset(self._waiting)

    def call_soon(self) -> None:
        """Have ``between`` called within about a second."""
        with self._lock:
            self._next_between = min(self._next_between, time.monotonic() + 1.0)
            self._lock.notify_all()

    def wake(self) -> None:
        """Look at `Source.lost`: the trainer is to hear of it at its next step, not at the next look at the reports."""
        with self._lock:
            self._error = str(self._source.lost)
            self._tell()

    def close(self, end_s: float, advice: str) -> None:
        """Bring what can be brought within ``end_s``, and the last words; then end.

        Args:
            end_s: bound, in seconds.
            advice: where that is which was not brought, for the log.
        """
        with self._lock:
            self._deadline = time.monotonic() + end_s
            self._going = True
            self._next_try = 0.0
            self._lock.notify_all()
        until = time.monotonic() + end_s + _GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            left = list(self._waiting)
        if any(thread.is_alive() for thread in self._threads):
            _LOG.warning("%s does not answer: it is left alone, and a lease there goes stale", self._source.uri)
        if left:
            _LOG.warning("not at %s: %s; %s", self._source.uri, ", ".join(left), advice)

    # ---- what a trainer follows

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
            "waiting": list(self._waiting),
            "arrived": list(self._arrived),
            "given_up": self._num_given_up,
            "upload_s": self._upload_s,
            "error": self._error,
            "refused": self._refused,
            "lost": None if (lost := self._source.lost) is None else str(lost),
        }

    def _tell(self) -> None:
        """Let the followers know, and the own threads. Needs the lock."""
        self._version = max(self._version + 1, time.monotonic_ns())
        followers, self._followers = self._followers, []
        if followers:
            state = self._state()
            for answer in followers:
                answer(state)
        self._lock.notify_all()

    def _give_up(self) -> None:
        for name in given_up(self._waiting, self.limits, self._in_flight):
            self._leave_out(name)
            self._num_lately += 1
            _LOG.log(
                logging.WARNING if self._num_lately == 1 else logging.INFO,
                "%s is not uploaded: %s is more than %d checkpoints behind (max_behind, when_behind='skip'); training "
                "goes on, newer ones are tried%s",
                name, self._source.uri, self.limits.max_behind, f" ({self._error})" if self._error else "",
            )  # fmt: skip

    def _leave_out(self, name: str) -> None:
        self._waiting.remove(name)
        self._num_given_up += 1
        if name in self._tried and self._drop is not None:
            self._litter.append(name)

    # ---- the uploading threads

    def _work(self) -> None:
        try:
            while (act := self._next()) is not None:
                self._attempt(act)
        finally:
            with self._lock:
                self._num_alive -= 1
                is_last = self._num_alive == 0
                self._lock.notify_all()
            if is_last:
                self._end()

    def _end(self) -> None:
        try:
            if self._ended is not None:
                self._ended(self._error is None)
        except Exception as error:  # noqa: BLE001 - a thread edge; the lease goes stale by itself
            _LOG.warning("the lease of %s could not be given back: %s", self._source.uri, error)
        with self._lock:
            self._over = True  # who follows from now on is answered at once
            self._tell()

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do; None at the end."""
        with self._lock:
            while True:
                now = time.monotonic()
                if self._source.lost is not None or self._said_all:
                    return None
                if self._deadline is not None and (not self._waiting or now >= self._deadline):
                    if not self._in_flight and not self._is_between:
                        self._said_all = True
                        return self._last_words
                    self._lock.wait()  # for the other threads
                    continue
                if self._going and now >= self._next_try and (name := self._due) is not None:
                    self._in_flight.add(name)
                    self._tried.add(name)
                    return partial(self._upload, name)
                if self._is_between_due and now >= self._next_between:
                    self._is_between = True
                    return self._call_between
                self._warn(now)
                moment = min(self._moments())
                self._lock.wait(None if moment == math.inf else max(0.0, moment - now) + 0.001)

    @property
    def _due(self) -> str | None:
        """The oldest that waits; with more threads the oldest few go side by side."""
        return next((name for name in self._waiting[: self._num_workers] if name not in self._in_flight), None)

    @property
    def _is_between_due(self) -> bool:
        return self._going and not self._is_between and (self._between is not None or bool(self._litter))

    def _moments(self) -> list[float]:
        """When there may be something to do, if nobody says so before."""
        moments = [math.inf if self._deadline is None else self._deadline]
        if self._is_between_due:
            moments.append(self._next_between)
        if self._waiting:
            moments.append(self._warned + self.limits.warn_after_s)
        if self._going and self._due is not None:
            moments.append(self._next_try)
        return moments

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except TransferStopped:
            pass
        except Exception as error:  # noqa: BLE001 - a thread edge: recorded, shown, tried again
            if not isinstance(error, HoldfastError):
                _LOG.exception("the uploads to %s failed", self._source.uri)
            self._failed(error)
        else:
            with self._lock:
                if self._failures and not self._said_all:
                    _LOG.warning("%s answers again", self._source.uri)
                    self._failures, self._error = 0, None
                    self._tell()

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if self._source.lost is not None:
                self._error = str(error)
                self._tell()
                return
            self._failures += 1
            if self._failures == 1:
                _LOG.warning(
                    "%s could not be reached, trying again while training goes on: %s", self._source.uri, error
                )
            self._error = str(error)
            pause = pause_s(self._failures, random.random())
            self._next_try = self._next_between = time.monotonic() + pause
            self._give_up()
            self._tell()

    def _is_to_stop(self) -> bool:
        deadline = self._deadline
        return self._source.lost is not None or (deadline is not None and time.monotonic() >= deadline)

    def _upload(self, name: str) -> None:
        problem: HoldfastError | None = None
        newest: Record | None = None
        begun = time.monotonic()
        try:
            self._source.take(name, stop=self._is_to_stop)
            newest = self._source.newest()
        except CheckpointError as error:
            problem = error  # trying again changes nothing
        except BaseException:
            with self._lock:
                self._landed(name)
            raise
        with self._lock:
            is_renewed = self._landed(name)
            if problem is None:
                if not is_renewed and name in self._waiting:
                    self._waiting.remove(name)
                self._arrived.append(name)
                self._newest, self._refused = newest, None
                self._arrival = self._warned = time.monotonic()
                self._upload_s, self._num_lately = self._arrival - begun, 0
            else:
                if not is_renewed and name in self._waiting:
                    self._leave_out(name)
                self._refused = f"{name} cannot be brought to {self._source.uri}: {problem}"
                _LOG.error("%s is not uploaded to %s: %s", name, self._source.uri, problem)
            self._tell()
        self._settled(name)

    def _landed(self, name: str) -> bool:
        """Note that a name is not under way any more; tells whether it was added again meanwhile. Needs the lock."""
        self._in_flight.discard(name)
        self._lock.notify_all()
        is_renewed = name in self._renewed
        self._renewed.discard(name)
        return is_renewed

    def _call_between(self) -> None:
        try:
            self._bring_the_rest()
        finally:
            with self._lock:
                self._is_between = False
                self._next_between = time.monotonic() + _BETWEEN_S
                self._lock.notify_all()

    def _bring_the_rest(self) -> None:
        with self._lock:
            litter, self._litter = self._litter, []
        try:
            while litter and self._drop is not None:
                self._drop(litter[0])
                litter.pop(0)
            if self._between is not None:
                self._between()
        finally:
            with self._lock:
                self._litter = litter + self._litter

    def _last_words(self) -> None:
        if not (self._failures and self._waiting):  # it would not hear them either
            self._bring_the_rest()

    def _warn(self, now: float) -> None:
        if not self._waiting or now - self._warned < self.limits.warn_after_s:
            return
        self._warned = now
        _LOG.warning(
            "nothing has arrived at %s for %s; %d checkpoint(s) wait on the local disk%s",
            self._source.uri, format_duration(now - self._arrival), len(self._waiting),
            f": {self._error}" if self._error else "",
        )  # fmt: skip


# ---- what it decides: pure functions


def given_up(waiting: Sequence[str], limits: MirrorLimits, in_flight: Collection[str] = ()) -> list[str]:
    """List what is left out when too many wait: the oldest ones, but neither the newest nor what is under way."""
    if limits.when_behind != "skip":
        return []
    spare = [name for name in waiting[:-1] if name not in in_flight]
    return spare[: max(0, len(waiting) - limits.max_behind)]


def pause_s(failures: int, chance: float) -> float:
    """Give the seconds before the next try after ``failures`` of them in a row; ``chance`` is random in [0, 1)."""
    longest = min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + chance / 2)
