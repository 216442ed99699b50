"""One save that becomes a single file: digest and checksums, writing, and the step in which it takes its name.

The side thread fills in what follows from the bytes of the tensors, front to back; the writing follows it. Until the
whole file is durable its name means the file before it, or nothing.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import xxhash

from holdfast._log import get_logger
from holdfast.errors import HoldfastError, StorageConflictError, StorageError, StorageExistsError, StorageNotFoundError
from holdfast.format.digest import chunk_digests, file_digest
from holdfast.run.lease import Heartbeat, Lease
from holdfast.storage.base import FileWriter, Storage
from holdfast.storage.together import SerialExecutor

from .messages import DIGEST_DIGITS, SafetensorsFile, SaveResult, TorchFile
from .pipeline import VIEW_BYTES, Watermark, write_views
from .save import Task

_LOG = get_logger("writer")
_PIECE = 1 << 20  # both checksums of a piece are taken while it is in the processor's cache
_RISE = 8 << 20
_ROW = struct.Struct("<QQQ")

_Name = tuple[str, str]  # URI of a folder, and what stands for a name in it
Publish = Callable[..., object]
"""Takes ``if_absent`` and ``if_match``, as `Storage.put` does."""


class FileSaves:
    """The single files of one trainer, on a thread of their own: files and directories do not wait for each other.

    Attributes:
        leases: of the names of the files; belongs to that thread.
    """

    def __init__(self) -> None:
        self.leases = NameLeases()
        self._turn, self._side = SerialExecutor("holdfast-files"), SerialExecutor()

    def run(self, call: Callable[[], object]) -> Future[object]:
        """Call something on the thread of the files, after the saves before it."""
        return self._turn.run(call)

    def save(self, task: Task, file: SafetensorsFile | TorchFile) -> SaveResult:
        """Store one file; on that thread. See `write_file`."""
        lease = self.leases.begin(file.lease, task.storage, task.job.directory)
        return write_file(task, file, self._side, lease)

    def end(self) -> None:
        """Take no more calls, and give the leases back after the last one; returns at once."""
        self.run(self.leases.close)
        self._turn.close(wait=False)

    def close(self) -> None:
        """Wait until the last call is done; after `end`."""
        self._turn.close()
        self._side.close()


class NameLeases:
    """The names of files that only this writer gives, by folder. For one thread, apart from `trainer_gone`."""

    def __init__(self) -> None:
        self._held: dict[_Name, Heartbeat] = {}
        # What could not be taken again after an earlier writer had died: why, and another trial.
        self._lost: dict[_Name, tuple[HoldfastError, Callable[[], None]]] = {}
        self._is_trainer_gone = False
        self._swept: set[tuple[_Name, str]] = set()  # sub-folders by lease

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
        name = storage.uri, of
        if name in self._held:
            return
        try:
            lease = Lease.acquire(storage, {**owner, "pid": os.getpid()}, wait_s=wait_s, sleep=pause, of=of)
        except HoldfastError as error:
            self._lost[name] = error, partial(self.take, storage, of, owner, wait_s=wait_s, pause=pause)
            raise
        self._lost.pop(name, None)
        held = Heartbeat(lease)
        self._held = {**self._held, name: held}  # a new dictionary: the reading thread may be walking through the other
        if self._is_trainer_gone:
            held.trainer_gone()

    def held(self, storage: Storage, of: str | None) -> Heartbeat | None:
        """Return the lease of a name in a folder; None for a file that needs none.

        Raises:
            HoldfastError: it was not taken, or not taken again.
        """
        if of is None:
            return None
        name = storage.uri, of
        if name in self._lost:
            error, again = self._lost[name]
            if not isinstance(error, StorageError):
                raise error
            again()  # the storage did not answer then
        if name not in self._held:
            raise HoldfastError(f"this writer does not hold the lease {of} of that file name: call take_name first")
        return self._held[name]

    def begin(self, of: str | None, storage: Storage, path: str) -> Heartbeat | None:
        """Return the lease under which the file ``path`` is about to be written; see `held`.

        Before the first file of each folder this removes what killed writers have left there: a big file under a
        temporary name. A local disk does that by itself and knows the living by their locks; elsewhere the storage
        goes by age (`Storage.tidy`), so that the files of other trainers in the same folder stay.
        """
        held, folder = self.held(storage, of), path.rpartition("/")[0]
        if of is not None and storage.local_root is None and ((storage.uri, of), folder) not in self._swept:
            self._swept.add(((storage.uri, of), folder))
            try:
                storage.tidy(folder)
            except HoldfastError as error:
                _LOG.warning("what killed writers left in %s/%s stays for now: %s", storage.uri, folder, error)
        return held

    def give_back(self, folder: str, of: str) -> None:
        """Let others have a name; nothing to do for a name that is not held. A lease that cannot go goes stale.

        Args:
            folder: URI of the folder.
            of: see `take`.
        """
        name = folder, of
        held = self._held.get(name)
        self._held = {other: lease for other, lease in self._held.items() if other != name}
        self._lost.pop(name, None)
        try:
            if held is not None:
                held.close()
        except Exception as error:  # noqa: BLE001 - an error of one must not keep the others, nor the writer
            _LOG.warning("a lease could not be given back, it goes stale by itself: %s", error)

    def trainer_gone(self) -> None:
        """Let others know that only this writer is left, which will end soon: they wait instead of giving up."""
        self._is_trainer_gone = True
        for held in self._held.values():
            held.trainer_gone()

    def close(self) -> None:
        """Give all of them back."""
        for name in list(self._held):
            self.give_back(*name)


def write_file(
    task: Task, file: SafetensorsFile | TorchFile, side: SerialExecutor, lease: Heartbeat | None
) -> SaveResult:
    """Complete the image in the arena and store it, atomically and durably. May be done again for the same job.

    Args:
        task: the job, with the arena.
        file: its container.
        side: computes digest and checksums.
        lease: of the name. It is asked for before the file takes its name, which then takes the place of what was
            there at that moment and of nothing that came later; and again when it is there.

    Raises:
        RunBusyError: the name is not ours any more; what has it now stays.
        StorageError: the file could not be stored; what was there before is untouched.
    """
    begun = time.perf_counter()
    sealed = Watermark(0, file.size)
    sealing = side.run(partial(_seal, file, task.view, sealed))
    target = _Target(task, file.size, sealed, lease)
    try:
        target.store()
    finally:
        # Nothing may touch the arena once the trainer has it back.
        sealing.exception()
    now = time.perf_counter()
    return SaveResult(
        directory=task.job.directory,
        manifest=b"",
        bytes_total=file.size,
        bytes_written=file.size,
        bytes_reused=0,
        seconds={"digest": sealing.result(), "write": target.written - begun, "commit": now - target.written,
                 "total": now - begun},
    )  # fmt: skip


# ---- what the trainer left open


def _seal(file: SafetensorsFile | TorchFile, view: memoryview, sealed: Watermark) -> float:
    """Fill in digest and checksums; ``sealed`` rises over what is complete. Returns the seconds it took."""
    begun = time.perf_counter()
    try:
        if isinstance(file, SafetensorsFile):
            _put_digest(view, file.digest_at, file_digest(chunk_digests(view[file.data_at : file.size])))
        else:
            _seal_records(file, view, sealed)
    except BaseException as error:
        sealed.abandon(HoldfastError(f"digest and checksums could not be computed: {error}"))
        raise
    sealed.rise(file.size)
    return time.perf_counter() - begun


def _seal_records(file: TorchFile, view: memoryview, sealed: Watermark) -> None:
    hasher, hashed, risen = xxhash.xxh3_128(), 0, 0
    table = view[file.records_at : file.records_at + _ROW.size * file.num_records]
    for start, size, entry in _ROW.iter_unpack(table):
        checksum, end = 0, start + size
        is_digested = end <= file.digested
        if not is_digested and hashed < file.digested:
            hasher.update(view[hashed : file.digested])
            hashed = file.digested
            _put_digest(view, file.digest_at, hasher.hexdigest())
        for at in range(start, end, _PIECE):
            piece = min(at + _PIECE, end)
            checksum = zlib.crc32(view[at:piece], checksum)
            if is_digested:
                hasher.update(view[hashed:piece])
                hashed = piece
            if piece - risen >= _RISE:
                sealed.rise(piece)
                risen = piece
        view[entry : entry + 4] = view[end + 4 : end + 8] = struct.pack("<I", checksum)


def _put_digest(view: memoryview, at: int, digest: str) -> None:
    view[at : at + DIGEST_DIGITS] = digest[-DIGEST_DIGITS:].encode()


# ---- where it goes


class _Target:
    """One file of a storage, to be stored in place of the file that is there."""

    def __init__(self, task: Task, size: int, sealed: Watermark, lease: Heartbeat | None) -> None:
        self._storage, self._path = task.storage, task.job.directory
        self._view, self._size, self._sealed = task.view, size, sealed
        self._lease = lease
        self.written = 0.0

    def store(self) -> None:
        """Write it behind the digests, and let it take its name."""
        writer = self._storage.replace(self._path, self._size)
        if writer is not None:
            try:
                self._write_to(writer)
                self._publish(writer.publish)
            except BaseException:
                writer.abort()
                raise
        elif self._size <= VIEW_BYTES:
            self._sealed.wait(self._size)
            self._publish(partial(self._storage.put, self._path, self._view[: self._size]))
        else:
            self._confirm()
            with self._storage.create(self._path, self._size) as upload:  # which no store does on a condition
                self._write_to(upload)
                self._confirm()
        self._confirm()

    def _write_to(self, writer: FileWriter) -> None:
        write_views(writer, self._view, 0, self._size, self._sealed)
        self.written = time.perf_counter()

    def _publish(self, publish: Publish) -> None:
        self.written = time.perf_counter()
        if self._lease is None:
            publish()
            return
        for is_last in (False, False, True):
            etag, is_there = _found(self._storage, self._path)
            self._confirm()
            try:
                publish(if_absent=not is_there, if_match=etag)
                return
            except (StorageExistsError, StorageConflictError, StorageNotFoundError):
                if is_last:
                    raise

    def _confirm(self) -> None:
        if self._lease is not None:
            self._lease.verify()


def _found(storage: Storage, path: str) -> tuple[str | None, bool]:
    """Return the etag of what is there, and whether anything is."""
    try:
        return storage.stat(path).etag, True
    except StorageNotFoundError:
        return None, False
