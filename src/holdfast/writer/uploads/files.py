"""Checkpoints and files that a trainer names, as a source of uploads: each is tried a few times, and answered.

What was asked for is done although the trainer dies: the names, the order of pointers and the retries are here.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from holdfast._log import get_logger
from holdfast.copying.sending import TransferStopped
from holdfast.copying.transfer import copy_checkpoint, copy_file
from holdfast.errors import HoldfastError, StorageError, StorageNotFoundError, StoragePermissionError
from holdfast.format.names import MANIFEST_NAME, join
from holdfast.storage.base import Storage

from ..messages import MirrorLimits, WireValue
from .queue import Stop, UploadQueue

_LOG = get_logger("writer")
_LAST_S = 600.0  # no lease waits for them, and the next training sends the newest once more
_LOOK_S = 0.2
_CLOCKS_S = 60.0  # that the clock of a store may be behind ours
_Found = tuple["str | None", int, float]
"""Etag, size and time of an object: whatever of it a store tells."""
_OURS: _Found = (None, -1, 0.0)  # sent from here, and the store did not answer when it was looked at
_LIMITS = MirrorLimits(when_behind="wait", warn_after_s=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPointer(WireValue):
    """A small object that says which upload is the newest.

    Attributes:
        path: of the pointer, at the target.
        text: what it is to hold: the path of the upload in its bucket.
        order: (attempt, step, name) of the upload; an older pointer never replaces a newer one.
    """

    _DECODED: ClassVar[Any] = {"order": tuple}
    path: str
    text: str
    order: tuple[int, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadJob(WireValue):
    """One upload, of which nothing is left to the trainer.

    Attributes:
        path: where to, at the target.
        name: of the checkpoint or the file, at the source; None where only the pointer is sent.
        kind: "checkpoint" (a directory), "file", or "copy": a file in a directory of its own, both of which go when it
            was uploaded. One that will not be is left to its trainer; if that is dead it stays, and the log says where.
        pointer: sent after it; None for none.
        num_attempts: how often it is tried.
    """

    _DECODED: ClassVar[Any] = {"pointer": UploadPointer.from_json}
    path: str
    name: str | None = None
    kind: str = "file"
    pointer: UploadPointer | None = None
    num_attempts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    source: Storage
    job: UploadJob
    done: Callable[[BaseException | None], object]


class FileUploads:
    """The uploads to one target.

    Args:
        target: where they go.
        num_workers: how many at once.

    Attributes:
        uri: of the target.
        lost: always None, for there is no lease at the target.
    """

    lost: HoldfastError | None = None

    def __init__(self, target: Storage, *, num_workers: int) -> None:
        self.uri = target.uri
        self._target = target
        self._asked: dict[str, _Asked] = {}
        self._count = 0
        self._pointing = threading.Lock()
        self._pointed: dict[str, tuple[int, int, str]] = {}
        self._held: dict[str, bytes | None] = {}  # what a pointer held when we last looked
        self._alone = False
        # Objects are there whole or not at all; elsewhere they grow in place.
        self._is_store = target.traits.num_parallel > 1
        self._paths: dict[str, threading.Lock] = {}  # jobs of one path go one after another
        self._died_at = math.inf
        self._looking = threading.Lock()
        self._found: dict[str, _Found | None] = {}  # by path: what was there when the trainer died; None for nothing
        self._queue = UploadQueue(self, _LIMITS, num_workers=num_workers)

    def add(self, source: Storage, job: UploadJob, done: Callable[[BaseException | None], object]) -> None:
        """Queue an upload; ``done`` is called, by another thread, with None or with why it was given up."""
        self._count += 1
        key = job.path if job.path not in self._asked else f"{job.path} (number {self._count})"
        self._asked[key] = _Asked(source=source, job=job, done=done)
        self._queue.add(key)

    def trainer_gone(self) -> None:
        """Only this writer is left: another trainer may upload to the same place from now on.

        It starts after this call, so what is at the target now is not its own. What it uploads is newer than anything
        that waits here, and stays. If the target does not answer now, the first try of each job looks, and takes what
        is younger than the death of the trainer for another trainer's.
        """
        self._died_at = time.time()
        if self._is_store:
            with contextlib.suppress(StorageError):
                for asked in list(self._asked.values()):
                    if asked.job.name is not None:
                        self._look(asked.job)
        self._alone = True

    def close(self) -> None:
        """Upload what was asked for, within ten minutes."""
        self._queue.close(_LAST_S, "they are where they were saved")
        for asked in list(self._asked.values()) if self._alone else ():
            _say_kept(asked)

    # ---- for the queue: see `Source`

    def newest(self) -> None:
        """Nobody follows these uploads."""

    def take(self, key: str, *, stop: Stop) -> None:
        """Try one upload as often as its job says, and answer it; raises nothing but `TransferStopped`."""
        asked = self._asked[key]
        problem: Exception | None = None
        try:
            if self._alone and asked.job.kind != "copy" and not self._is_store:
                raise HoldfastError("the trainer died, and files there are written in place: the next one sends it")
            self._try(asked, stop)
        except TransferStopped:
            raise
        except Exception as error:  # noqa: BLE001 - a thread edge: the trainer gets the error
            problem = error
        if problem is not None and self._alone:
            _LOG.error("%s is not uploaded to %s: %s", asked.job.path, self.uri, problem)
            _say_kept(asked)
        del self._asked[key]
        asked.done(problem)  # first: if this writer dies now, the next one is not asked for what is removed here
        if problem is None:
            remove_copy(asked.source, asked.job)

    def _try(self, asked: _Asked, stop: Stop) -> None:
        job = asked.job
        for attempt in range(1, job.num_attempts + 1):
            try:
                self._send(asked, stop)
                return
            except StorageError as error:
                if attempt == job.num_attempts or isinstance(error, StoragePermissionError):
                    raise
                pause = 2.0 ** (attempt - 1)
                _LOG.warning("upload of %s failed (%s): trying again in %.0f s", job.path, error, pause)
                _pause(pause, stop)

    def _send(self, asked: _Asked, stop: Stop) -> None:
        job, source, target = asked.job, asked.source, self._target
        if job.pointer is not None:
            self._look_at(job.pointer)
        if job.name is not None:
            with self._paths.setdefault(job.path, threading.Lock()):
                self._check_ours(job)
                # No store completes a big upload on a condition, so this looks once more before the last step.
                last = partial(self._check_ours, job)
                if job.kind == "checkpoint":
                    copy_checkpoint(source, job.name, target, job.path, overwrite=True, stop=stop, last=last)
                else:
                    copy_file(source, job.name, target, job.path, stop=stop, last=last)
                self._note_ours(job)
        if job.pointer is not None:
            self._point(job.pointer)

    def _look(self, job: UploadJob) -> None:
        """Note what was at the target of a job when the trainer died, unless that is known.

        Raises:
            StorageError: the target does not answer.
        """
        with self._looking:
            if job.path in self._found:
                return
            found = self._at_target(job)
            if self._alone and found is not None and not 0 < found[2] < self._died_at - _CLOCKS_S:
                found = None  # looked at too late to know: it counts as another trainer's
            self._found[job.path] = found

    def _note_ours(self, job: UploadJob) -> None:
        """Note what was just sent, so that the next job of its path may replace it."""
        if not (self._is_store and self._died_at < math.inf):
            return
        try:
            found = self._at_target(job)
        except StorageError:
            found = _OURS
        with self._looking:
            self._found[job.path] = found

    def _check_ours(self, job: UploadJob) -> None:
        """Refuse to replace what came to the target after the trainer had died and was not sent from here.

        Raises:
            HoldfastError: there is such a thing.
            StorageError: the target does not answer.
        """
        if not (self._alone and self._is_store):
            return
        self._look(job)
        found = self._at_target(job)
        if found is not None and self._found[job.path] not in (found, _OURS):
            raise HoldfastError("another trainer has uploaded something of this name since this one died, which stays")

    def _at_target(self, job: UploadJob) -> _Found | None:
        path = join(job.path, MANIFEST_NAME) if job.kind == "checkpoint" else job.path
        try:
            about = self._target.stat(path)
        except StorageNotFoundError:
            return None
        return about.etag, about.size, about.modified

    def _look_at(self, pointer: UploadPointer) -> None:
        with self._pointing:
            if pointer.path not in self._held:
                self._held[pointer.path] = self._read(pointer.path)

    def _point(self, pointer: UploadPointer) -> None:
        path = pointer.path
        with self._pointing:  # with several uploads at once an older one may end last
            if pointer.order < self._pointed.get(path, pointer.order):
                return
            if self._alone and self._read(path) != self._held[path]:
                _LOG.warning("%s is left as it is: another trainer has set it meanwhile", path)
                return
            data = pointer.text.encode()
            self._target.put(path, data)
            self._pointed[path], self._held[path] = pointer.order, data

    def _read(self, path: str) -> bytes | None:
        try:
            return self._target.read(path)
        except StorageNotFoundError:
            return None


def remove_copy(source: Storage, job: UploadJob) -> None:
    """Remove a copy that was made for its upload alone; of other jobs nothing."""
    root = source.local_root
    if job.kind == "copy" and job.name is not None and root is not None:
        shutil.rmtree(os.path.dirname(root / job.name), ignore_errors=True)


def _say_kept(asked: _Asked) -> None:
    """Say where a copy is whose trainer is dead: it may be the only one."""
    root = asked.source.local_root
    if asked.job.kind == "copy" and asked.job.name is not None and root is not None:
        _LOG.error("what was to be uploaded as %s stays in %s", asked.job.path, root / asked.job.name)


def _pause(seconds: float, stop: Stop) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if stop():
            raise TransferStopped
        time.sleep(min(left, _LOOK_S))
