"""One writer's part of a checkpoint: arena in, durable files and their digests out.

`Arriving` keeps the saves that are not whole yet: behind a mark in the arena (`Watermark`), or window by window
(`WindowSource`). `PartWriter` follows them.

Digests run on the side thread ahead of the writing, which starts at once; small files are written and finished files
are fsynced on the side thread too. One writing thread with large aligned views is as fast as several.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from holdfast.errors import (
    HoldfastError,
    StorageError,
    StorageExistsError,
    StorageNotFoundError,
    StorageUnavailableError,
)
from holdfast.format.commit import PartSummary
from holdfast.format.digest import CHUNK, chunk_digests, digests_name, file_digest, table_at
from holdfast.format.division import Division
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.format.names import join, save_id_of
from holdfast.format.parts import clear_planned, has_plan, part_name, plan_name
from holdfast.storage.base import BLOCK, FileWriter, Storage
from holdfast.storage.together import SerialExecutor, together

from .frames import Message
from .messages import BlobPlan, FilePlan, SaveJob, error_from_json

__all__ = [
    "MAX_REUSES", "VIEW_BYTES", "Arriving", "Known", "PartWriter", "Previous", "Watermark", "Window", "WindowSource",
    "read_previous", "unchanged_runs", "write_views",
]  # fmt: skip

# Every tenth save writes again, so that a checkpoint and its fallback do not share all their rot.
MAX_REUSES = 9
T = TypeVar("T")
VIEW_BYTES = 64 << 20
# Small files for a store wait for each other, so that their requests go out side by side; this much of them at most.
_SMALL, _WAITING = 4 << 20, 16 << 20
# A copy at a store is three requests, one after another; smaller files are sent again meanwhile.
_COPIED = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One file of the previous save.

    Attributes:
        path: name inside its directory.
        size: length in bytes.
        table: its chunk digests.
        reuses: how many saves in a row have linked these bytes.
        repeated: the save before had the same bytes at this place.
        etag: of the file on a disk, where it may be changed in place; None at a store, and where nobody asked.
    """

    path: str
    size: int
    table: bytes
    reuses: int = 0
    repeated: bool = False
    etag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Previous:
    """The files of the previous save in the order of its plan."""

    directory: str = ""
    files: tuple[Known, ...] = field(default=())

    def at(self, number: int, size: int) -> Known | None:
        """Give the file at the same place of the plan if the layout (its size) is the same."""
        if number < len(self.files) and self.files[number].size == size:
            return self.files[number]
        return None

    def same(self, size: int, table: bytes) -> Known | None:
        """Find a file of the same bytes that may be reused once more."""
        for known in self.files:
            if known.size == size and known.reuses < MAX_REUSES and known.table == table:
                return known
        return None


def read_previous(storage: Storage, directory: str, manifest: Manifest, writer: int) -> Previous:
    """Rebuild what an earlier life wrote from its manifest and digest table; empty when that cannot be read.

    How often its linked files had been linked is not known, so those are written again.
    """
    known = []
    tables: dict[str, bytes] = {}
    try:
        for entry in manifest.files:
            if entry.writer != writer or entry.chunks is None:
                continue
            path, offset = entry.chunks
            if path not in tables:
                tables[path] = storage.read(f"{directory}/{path}")
            table = table_at(tables[path], offset, entry.size)
            if file_digest(table) != entry.digest:
                return Previous()
            reuses = MAX_REUSES if entry.reused_from else 0
            etag = _etag_on_disk(storage, f"{directory}/{entry.path}")
            known.append(Known(path=entry.path, size=entry.size, table=table, reuses=reuses, etag=etag))
    except HoldfastError:
        return Previous()
    return Previous(directory=directory, files=tuple(known))


def _etag_on_disk(storage: Storage, path: str) -> str | None:
    """Give the etag of a file where asking for it is no request."""
    if storage.local_root is None:
        return None
    with contextlib.suppress(StorageError):
        return storage.stat(path).etag
    return None


def unchanged_runs(number: int, table: bytes, known: Known) -> Iterator[tuple[int, int, int]]:
    """Yield (file number, offset, nbytes) of runs of equal chunks in a file that changed, but not wholly."""
    old, new = memoryview(known.table).cast("Q"), memoryview(table).cast("Q")
    start = -1
    for chunk in range(len(new) + 1):
        equal = chunk < len(new) and old[chunk] == new[chunk]
        if equal and start < 0:
            start = chunk
        elif not equal and start >= 0:
            yield number, start * CHUNK, min(chunk * CHUNK, known.size) - start * CHUNK
            start = -1


class Watermark:
    """A mark in the arena that only rises; whoever needs bytes waits until it has passed them.

    Args:
        filled: bytes of the arena that are complete already.
        size: bytes at which the job is complete: sealed.
    """

    def __init__(self, filled: int, size: int) -> None:
        self._filled, self._size = filled, size
        self._changed = threading.Condition()
        self._why: HoldfastError | None = None

    @property
    def sealed(self) -> bool:
        """True once everything is there: from then on the job is finished whatever happens to the trainer."""
        return self._filled >= self._size

    def rise(self, filled: int) -> None:
        """Move the mark."""
        with self._changed:
            self._filled = max(self._filled, filled)
            self._changed.notify_all()

    def abandon(self, why: HoldfastError) -> None:
        """Drop the job, unless it is sealed."""
        with self._changed:
            if not self.sealed:
                self._why = why
                self._changed.notify_all()

    def wait(self, end: int) -> None:
        """Wait until the bytes before ``end`` are there.

        Raises:
            HoldfastError: the job was abandoned.
        """
        with self._changed:
            # Unbounded on purpose: the end of the trainer, or of its connection, abandons the job.
            self._changed.wait_for(lambda: self._why is not None or self._filled >= min(end, self._size))
            if self._why is not None:
                raise self._why


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One range of the arena that holds the next bytes of a file; ``call`` is answered when it may be reused."""

    call: int
    file_no: int
    file_offset: int
    arena_offset: int
    nbytes: int


class WindowSource:
    """Queue between the thread that reads messages and the thread that writes.

    Args:
        answer: gets the calls of windows whose memory may be reused, or of those that failed with an error.
    """

    def __init__(self, answer: Callable[[list[int], BaseException | None], None]) -> None:
        self._answer = answer
        self._queue: queue.SimpleQueue[Window | HoldfastError | None] = queue.SimpleQueue()  # None: sealed
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._ended = False
        self.sealed = False

    def put(self, window: Window) -> None:
        """Add the next window.

        Raises:
            HoldfastError: the save has ended, nobody would answer.
        """
        with self._lock:
            if self._ended:
                raise HoldfastError("this save has ended already; its future says why")
            self._open.add(window.call)
        self._queue.put(window)

    def end(self, why: BaseException) -> None:
        """Take no more windows; those that nobody has answered fail."""
        with self._lock:
            self._ended = True
            left = list(self._open)
        if left:
            self._answer(left, why)

    def seal(self) -> None:
        """Declare the job complete."""
        self.sealed = True
        self._queue.put(None)

    def abandon(self, why: HoldfastError) -> None:
        """Drop the job, unless it is sealed."""
        if not self.sealed:
            self._queue.put(why)

    def windows(self) -> Iterator[Window]:
        """Yield windows until the seal.

        Whoever asks for the next window has done with the one before.

        Raises:
            HoldfastError: the job was abandoned.
        """
        while True:
            item = self._queue.get()
            if isinstance(item, Window):
                yield item
                with self._lock:
                    self._open.discard(item.call)
                self._answer([item.call], None)
            elif item is None:
                return
            else:
                raise item


class Arriving:
    """The saves that are not whole yet, by the number of the call that brought them."""

    def __init__(self) -> None:
        self._saves: dict[int, WindowSource | Watermark] = {}

    def expect(self, call: int, save: WindowSource | Watermark) -> None:
        """Wait for the bytes of a save from now on."""
        self._saves[call] = save

    def window(self, message: Message) -> None:
        """Take in that a window is filled.

        Raises:
            HoldfastError: its save has ended.
        """
        header = message.header
        source = self._saves.get(header["job_no"])
        if not isinstance(source, WindowSource):
            raise HoldfastError("this save has ended already; its future says why")
        fields = ("call", "file_no", "file_offset", "arena_offset", "nbytes")
        source.put(Window(**{name: header[name] for name in fields}))

    def fill(self, message: Message) -> None:
        """Take in how much of the arena is filled."""
        mark = self._saves.get(message.header["job_no"])
        if isinstance(mark, Watermark):
            mark.rise(message.header["filled"])

    def seal(self, message: Message) -> None:
        """Take in that all windows of a save have been sent."""
        source = self._saves.get(message.header["job_no"])
        if isinstance(source, WindowSource):
            source.seal()

    def abandon(self, message: Message) -> None:
        """Take in that the trainer gives a save up."""
        save = self._saves.get(message.header["job_no"])
        if save is not None:
            error = message.header["error"]
            why = HoldfastError("the trainer abandoned this save") if error is None else error_from_json(error)
            save.abandon(why)

    def abandon_all(self, why: str) -> None:
        """Give up every save that is not complete: nobody will send the rest."""
        for save in list(self._saves.values()):
            save.abandon(HoldfastError(why))

    def end(self, call: int, error: BaseException | None = None) -> None:
        """Forget a save that has ended, by an error or not: windows that are left, or come from now on, fail."""
        ended = self._saves.pop(call, None)
        if isinstance(ended, WindowSource):
            ended.end(error or HoldfastError("this save has ended already"))


def write_views(writer: FileWriter, view: memoryview, start: int, nbytes: int, gate: Watermark | None = None) -> float:
    """Write a range of the arena, as far as ``gate`` has passed it; returns the seconds apart from waiting for that."""
    # The tail goes out as a whole page, which the storage cuts to size: O_DIRECT writes nothing smaller.
    end = min(start + -(-nbytes // BLOCK) * BLOCK, len(view))
    seconds = 0.0
    for offset in range(start, end, VIEW_BYTES):
        if gate is not None:
            gate.wait(min(offset + VIEW_BYTES, start + nbytes))
        begin = time.perf_counter()
        writer.write(view[offset : min(offset + VIEW_BYTES, end)])
        seconds += time.perf_counter() - begin
    return seconds


class PartWriter:
    """Writes the files of one job. One object per attempt; `discard` undoes it.

    Attributes:
        seconds: time in digests and in writing.
        contents: the base of reuse for the next save, when all is written.
        unchanged: runs equal to the save before, when all is written and the job asked.
    """

    def __init__(self, storage: Storage, job: SaveJob, *, previous: Previous, side: SerialExecutor) -> None:
        self._storage, self._job, self._previous, self._side = storage, job, previous, side
        self._digests_path = digests_name(job.writer, job.save_id)
        self.seconds = {"digest": 0.0, "write": 0.0}
        self.contents = previous
        self.unchanged: tuple[tuple[int, int, int], ...] = ()
        self._gate: Watermark | None = None
        self._closing: list[Future[None]] = []
        self._side_by_side = storage.traits.num_parallel > 1
        self._small: list[tuple[FileWriter, int]] = []  # whole, and not closed yet
        self._waiting = threading.Lock()  # of that: the side thread writes blobs meanwhile
        self._created: list[str] = []

    # ---- the two ways in

    def write_arena(self, view: memoryview, blobs: tuple[bytes, ...], gate: Watermark | None = None) -> PartSummary:
        """Write a job whose files all lie in the arena, or will: then ``gate`` tells how far it is filled."""
        job, files = self._job, self._job.files
        self._gate = gate
        candidates = [number for number, plan in enumerate(files) if self._is_candidate(number, plan)]
        # Candidates for reuse are digested first and written last: the writing starts with what changes anyway.
        order = sorted(range(len(files)), key=candidates.__contains__, reverse=True)
        digests = {
            number: self._side.run(partial(self._digest, view, files[number].arena_offset, files[number].size))
            for number in order
        }
        small = self._side.run(partial(self._write_small, job.blobs, blobs))
        try:
            for number, plan in enumerate(files):
                if number not in candidates:
                    self._write_file(view, plan)
            tables = [digests[number].result() for number in range(len(files))]
            entries = [*small.result(), *self._write_digests(tables)]
            reused: dict[int, Known] = {}
            if candidates:
                reuses = [partial(self._reuse, files[number], tables[number]) for number in candidates]
                for number, known in zip(candidates, self._close_small(*reuses), strict=True):
                    if known is None:
                        self._write_file(view, files[number])
                    else:
                        reused[number] = known
            return self._finish(tables, reused, entries)
        finally:
            self._settle([*digests.values(), small])

    def write_windows(self, view: memoryview, source: WindowSource, blobs: tuple[bytes, ...]) -> PartSummary:
        """Write a job whose bytes come window by window."""
        files = self._job.files
        writers: dict[int, FileWriter] = {}
        tables = [bytearray() for _ in files]
        positions = [0] * len(files)
        try:
            for window in source.windows():
                plan = _check_window(window, files, positions)
                if window.file_no not in writers:
                    writers[window.file_no] = self._create(plan.path, plan.size)
                # The last window may reach into the padding of the file, which is not part of its content.
                nbytes = min(window.nbytes, plan.size - window.file_offset)
                digest = self._side.run(partial(self._digest, view, window.arena_offset, nbytes))
                positions[window.file_no] += nbytes
                last = positions[window.file_no] == plan.size
                try:
                    self.seconds["write"] += write_views(writers[window.file_no], view, window.arena_offset, nbytes)
                finally:
                    tables[window.file_no] += digest.result()
                if last:
                    self._close_later(writers.pop(window.file_no), plan.size)
            for number, plan in enumerate(files):
                if not plan.size and number not in writers:
                    self._close_later(self._create(plan.path, 0), 0)
            missing = [plan.path for plan, position in zip(files, positions, strict=True) if position != plan.size]
            if missing:
                raise HoldfastError(f"the save was sealed before all data had come: {', '.join(missing)}")
            entries = self._write_small(self._job.blobs, blobs)
            whole = list(map(bytes, tables))
            return self._finish(whole, {}, [*entries, *self._write_digests(whole)])
        finally:
            for writer in writers.values():
                writer.abort()
            self._settle([])

    def discard(self, *, plan: bool = False, again: bool = False) -> None:
        """Remove the files of this attempt (never a manifest); what cannot be removed is swept at the next start.

        Args:
            plan: there is a plan file of this save, which goes last.
            again: a writer that died had begun this save: any of its files may be there.
        """
        created = self._created
        if again:
            job = self._job
            paths = [*(file.path for file in job.files), *(blob.path for blob in job.blobs)]
            paths.append(self._digests_path)
            created = list(dict.fromkeys([*created, *(path for path in paths if job.save_id in path)]))
        try:
            if plan and not has_plan(self._storage, self._job.directory, self._job.save_id):
                # Another save has begun here, and perhaps committed: what has these names now is its.
                created, plan = [path for path in created if save_id_of(path) == self._job.save_id], False
        except HoldfastError:
            return
        # The part file, which may be there in spite of an error, goes first: nobody must commit what goes now.
        part = [part_name(self._job.writer, self._job.save_id)] if self._job.part else []
        ways = [part, created] if self._side_by_side else [[path] for path in [*part, *created]]
        for paths in ways:
            try:
                self._storage.delete_many([join(self._job.directory, path) for path in paths])
            except StorageUnavailableError:
                return  # each try would take minutes, and the next save waits
            except HoldfastError:
                plan = False
                continue
        with contextlib.suppress(HoldfastError):
            if plan:
                clear_planned(self._storage, self._job.directory, plan_name(self._job.save_id), created)
            self._storage.tidy(self._job.directory)

    # ---- steps

    def _is_candidate(self, number: int, plan: FilePlan) -> bool:
        if not self._job.reuse or not self._previous.files or not self._storage.traits.copies_itself:
            return False
        if self._side_by_side and plan.size < _COPIED:
            return False
        known = self._previous.at(number, plan.size)
        return plan.stable or (known is not None and known.repeated)

    def _digest(self, view: memoryview, start: int, nbytes: int) -> bytes:
        if self._gate is not None:  # until all is copied the trainer needs the cores, and digests are quick
            self._gate.wait(len(view))
        begin = time.perf_counter()
        table = chunk_digests(view[start : start + nbytes])
        self.seconds["digest"] += time.perf_counter() - begin
        return table

    def _reuse(self, plan: FilePlan, table: bytes) -> Known | None:
        known = self._previous.same(plan.size, table)
        if known is None:
            return None
        source = join(self._previous.directory, known.path)
        try:
            about = self._storage.stat(source)
            if about.size != plan.size or known.etag not in (None, about.etag):
                return None  # changed by hand since: memory has the right bytes
            self._created.append(plan.path)
            self._link(source, join(self._job.directory, plan.path))
        except StorageNotFoundError:  # the previous checkpoint was deleted meanwhile
            return None
        return known

    def _link(self, source: str, target: str) -> None:
        try:
            self._storage.copy(source, target)
        except StorageExistsError:
            # The name carries this save's id: an earlier writer of this very save was killed after it had linked.
            self._storage.delete(target)
            self._storage.copy(source, target)

    def _create(self, path: str, size: int) -> FileWriter:
        self._created.append(path)
        return self._storage.create(join(self._job.directory, path), size)

    def _write_file(self, view: memoryview, plan: FilePlan) -> None:
        writer = self._create(plan.path, plan.size)
        try:
            self.seconds["write"] += write_views(writer, view, plan.arena_offset, plan.size, self._gate)
        except BaseException:
            writer.abort()
            raise
        self._close_later(writer, plan.size)

    def _close_later(self, writer: FileWriter, size: int) -> None:
        """Make a file durable while the next one is written; a small one at a store together with others."""
        if not self._side_by_side or size > _SMALL:
            self._closing.append(self._side.run(writer.close))
            return
        with self._waiting:
            self._small.append((writer, size))
            full = sum(nbytes for _, nbytes in self._small) > _WAITING
        if full:
            self._close_small()

    def _close_small(self, *more: Callable[[], T]) -> list[T]:
        """Make the small files durable that are written by now, and do ``more`` meanwhile, whose results are given."""
        with self._waiting:
            closing, self._small = self._small, []
        calls: list[Callable[[], Any]] = [*more, *(writer.close for writer, _ in closing)]
        try:
            return together(self._storage, calls)[: len(more)]
        finally:
            for writer, _ in closing:  # does nothing to a closed writer
                writer.abort()

    def _write_small(self, plans: Sequence[BlobPlan], blobs: Sequence[bytes]) -> list[FileEntry]:
        if len(blobs) != len(plans):
            raise HoldfastError(f"{len(blobs)} small files came for {len(plans)} in the plan of the save")
        entries = []
        for plan, data in zip(plans, blobs, strict=True):
            writer = self._create(plan.path, len(data))
            try:
                if data:
                    writer.write(memoryview(data))
                if not self._side_by_side:
                    writer.close()  # on the side thread, or with everything else written
            except BaseException:
                writer.abort()
                raise
            if self._side_by_side:
                self._close_later(writer, len(data))
            entries.append(FileEntry.of_small(plan.path, data, role=plan.role, writer=self._job.writer))
        return entries

    def _write_digests(self, tables: Sequence[bytes]) -> list[FileEntry]:
        content = b"".join(tables)
        return self._write_small([BlobPlan(path=self._digests_path, role="digests")], [content]) if content else []

    def _finish(self, tables: list[bytes], reused: Mapping[int, Known], entries: list[FileEntry]) -> PartSummary:
        """Wait until everything is durable, and describe it.

        Args:
            tables: chunk digests of each big file, which follow each other in the digest file.
            reused: by their numbers, the files of the save before that were linked.
            entries: of the small files.
        """
        job, before = self._job, self._previous
        if self._small:
            self._close_small()
        for future in self._closing:
            future.result()
        files, contents = [], []
        table_start = 0  # in the digest file
        unchanged: list[tuple[int, int, int]] = []
        for number, (plan, table) in enumerate(zip(job.files, tables, strict=True)):
            link, known = reused.get(number), before.at(number, plan.size)
            files.append(
                FileEntry(
                    path=plan.path,
                    size=plan.size,
                    digest=file_digest(table),
                    role=plan.role,
                    writer=job.writer,
                    reused_from=None if link is None else before.directory.rpartition("/")[2],
                    chunks=(self._digests_path, table_start),
                )
            )
            table_start += len(table)
            repeated = known is not None and known.table == table
            if job.want_unchanged and known is not None and not repeated:
                unchanged += unchanged_runs(number, table, known)
            may_be_linked = job.reuse and (plan.stable or repeated)
            contents.append(
                Known(
                    path=plan.path,
                    size=plan.size,
                    table=table,
                    reuses=0 if link is None else link.reuses + 1,
                    repeated=repeated,
                    etag=_etag_on_disk(self._storage, join(job.directory, plan.path)) if may_be_linked else None,
                )
            )
        self.contents, self.unchanged = Previous(directory=job.directory, files=tuple(contents)), tuple(unchanged)
        division = None if job.division is None else Division.from_json(job.division)
        return PartSummary(writer=job.writer, files=(*files, *entries), division=division)

    def _settle(self, futures: list[Future[Any]]) -> None:
        """Wait for everything on the side thread, so that nothing touches arena or files afterwards."""
        for future in [*futures, *self._closing]:
            future.exception()
        for writer, _ in self._small:
            writer.abort()


def _check_window(window: Window, files: tuple[FilePlan, ...], positions: list[int]) -> FilePlan:
    if not 0 <= window.file_no < len(files):
        raise HoldfastError(f"window for file {window.file_no} of a save with {len(files)} files")
    plan = files[window.file_no]
    end = window.file_offset + window.nbytes
    if window.file_offset != positions[window.file_no] or window.file_offset > plan.size or end > plan.size + BLOCK:
        raise HoldfastError(f"window {window.file_offset}:{end} of {plan.path} does not follow what came before it")
    if end < plan.size and window.nbytes % CHUNK:
        raise HoldfastError(f"window of {window.nbytes} bytes in {plan.path}: only the last one may be odd")
    return plan
