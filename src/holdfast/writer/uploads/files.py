"""Checkpoints and files that a trainer names, as a source of uploads: each is tried a few times, and answered.

What was asked for is done although the trainer dies: the names, the order of pointers and the retries are here.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast._log import get_logger
from holdfast.copying.transfer import TransferStopped, copy_checkpoint, copy_file
from holdfast.errors import HoldfastError, StorageError, StorageNotFoundError, StoragePermissionError
from holdfast.storage.base import Storage

from .plan import MirrorLimits
from .queue import Stop, UploadQueue

__all__ = ["FileUploads", "UploadJob", "UploadPointer"]

_LOG = get_logger("writer")
_LAST_S = 600.0  # no lease waits for them, and whoever starts the training again sends the newest once more
_LOOK_S = 0.2
_LIMITS = MirrorLimits(when_behind="wait", warn_after_s=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPointer:
    """A small object that says which upload is the newest.

    Attributes:
        path: of the pointer, at the target.
        text: what it is to hold: the path of the upload in its bucket.
        order: (attempt, step, name) of what it means; an older one never takes the place of a newer one.
    """

    path: str
    text: str
    order: tuple[int, int, str]

    def to_json(self) -> dict[str, Any]:
        """Describe this pointer for the wire."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> UploadPointer:
        """Rebuild what `to_json` described."""
        attempt, step, name = data["order"]
        return cls(path=data["path"], text=data["text"], order=(attempt, step, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadJob:
    """One upload, of which nothing is left to the trainer.

    Attributes:
        path: where to, at the target.
        name: of the checkpoint or the file, at the source; None where only the pointer is sent.
        kind: "checkpoint" (a directory), "file", or "copy": a file in a directory of its own, both of which go when it
            was uploaded, or when nobody will ask for it again.
        pointer: sent after it; None for none.
        num_attempts: how often it is tried.
    """

    path: str
    name: str | None = None
    kind: str = "file"
    pointer: UploadPointer | None = None
    num_attempts: int = 3

    def to_json(self) -> dict[str, Any]:
        """Describe this job for the wire."""
        told = {name: getattr(self, name) for name in self.__slots__}
        return {**told, "pointer": None if self.pointer is None else self.pointer.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> UploadJob:
        """Rebuild what `to_json` described."""
        pointer = data["pointer"]
        return cls(**{**data, "pointer": None if pointer is None else UploadPointer.from_json(pointer)})


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
        lost: never: nobody holds a lease there.
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
        self._queue = UploadQueue(self, _LIMITS, num_workers=num_workers)

    def add(self, source: Storage, job: UploadJob, done: Callable[[BaseException | None], object]) -> None:
        """Queue an upload; ``done`` is called, by another thread, with None or with why it was given up."""
        self._count += 1
        key = job.path if job.path not in self._asked else f"{job.path} (number {self._count})"
        self._asked[key] = _Asked(source=source, job=job, done=done)
        self._queue.add(key)

    def trainer_gone(self) -> None:
        """Only this writer is left: another trainer may upload to the same place from now on."""
        self._alone = True

    def close(self) -> None:
        """Upload what was asked for, within ten minutes."""
        self._queue.close(_LAST_S, "they are where they were saved")
        for asked in list(self._asked.values()) if self._alone else ():
            self._clear(asked)

    # ---- for the queue: see `Source`

    def newest(self) -> None:
        """Nobody follows these uploads."""

    def take(self, key: str, *, stop: Stop) -> None:
        """Try one upload as often as its job says, and answer it; raises nothing but `TransferStopped`."""
        asked = self._asked[key]
        problem: Exception | None = None
        try:
            if self._alone and asked.job.kind != "copy" and self._target.num_parallel == 1:
                raise HoldfastError("the trainer died, and files there are written in place: the next one sends it")
            self._try(asked, stop)
        except TransferStopped:
            raise
        except Exception as error:  # noqa: BLE001 - a thread edge: the trainer hears of it
            problem = error
        if problem is not None and self._alone:
            _LOG.error("%s is not uploaded to %s: %s", asked.job.path, self.uri, problem)
        del self._asked[key]
        asked.done(problem)  # first: if this writer dies now, the next one is not asked for what is removed here
        if problem is None or self._alone:
            self._clear(asked)

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
        if job.name is None:
            pass
        elif job.kind == "checkpoint":
            copy_checkpoint(source, job.name, target, job.path, overwrite=True, stop=stop)
        else:
            copy_file(source, job.name, target, job.path, stop=stop)
        if job.pointer is not None:
            self._point(job.pointer)

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

    def _clear(self, asked: _Asked) -> None:
        """Remove a copy that was made for its upload alone."""
        root = asked.source.local_root
        if asked.job.kind == "copy" and asked.job.name is not None and root is not None:
            shutil.rmtree(os.path.dirname(root / asked.job.name), ignore_errors=True)


def _pause(seconds: float, stop: Stop) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if stop():
            raise TransferStopped
        time.sleep(min(left, _LOOK_S))
