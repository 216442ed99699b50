"""Files from one storage to another: several at once, each through a few windows of memory.

While a window is written, the next windows are read and digested. All files share the windows: together they take
`num_windows` * `WINDOW` bytes, for any number of files of any size.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.errors import CorruptCheckpointError, StorageError, StorageFullError, StorageNotFoundError
from holdfast.format.digest import bytes_digest, chunk_digests, file_digest
from holdfast.format.names import start_id_of
from holdfast.storage.base import BLOCK, FileBatch, FileReader, Storage

# A client that uploads holds up to 7 parts of 16 MiB for each big object, so of those only two go at once, and with few
# windows: 256 MiB in all.
_NUM_UPLOADS = 2
_BIG = 4 << 20

Progress = Callable[[int], None]
Stop = Callable[[], object]  # a true value ends the transfer, as an error does that it raises
Trust = Literal["size", "name", "digest"]
"""What tells that a file of the right size at the target is the one to be brought; see `Sender.bring`."""
WINDOW = 8 << 20
"""A multiple of the chunks of `holdfast.format.digest`, so that the digests of windows join to those of the file."""


class TransferStopped(Exception):  # noqa: N818 - nothing went wrong
    """The copy was asked to end; what is complete at the target stays for the next copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file to be brought to the target.

    Attributes:
        path: path inside the checkpoint.
        source: path in the source.
        target: path at the target.
        size: bytes.
        digest: that its bytes must have; None if it is not known.
        shared: another checkpoint at the source has the same bytes.
    """

    path: str
    source: str
    target: str
    size: int
    digest: str | None = None
    shared: bool = False


def num_windows(source: Storage, target: Storage) -> int:
    """Return how many windows a copy has: enough to keep a remote busy, few where the client takes memory itself."""
    if target.local_root is None:
        return 4
    return 8 if source.local_root is not None else 16


class Sender:
    """Copies files between two storages with bounded memory.

    Args:
        source: where they are.
        target: where they go.
        num_threads: files under way at once, as many as there are windows at most.
        progress: called with the bytes just written, by one thread at a time.
        stop: asked between windows; true ends everything with `TransferStopped`.
        last: called by `send` when all bytes of a file are written, before it is complete at the target.
    """

    def __init__(
        self,
        source: Storage,
        target: Storage,
        *,
        num_threads: int = 4,
        progress: Progress | None = None,
        stop: Stop | None = None,
        last: Callable[[], object] | None = None,
    ) -> None:
        self._source, self._target = source, target
        self._progress, self._stop, self._last = progress, stop, last
        self._lock = threading.Lock()
        self._halt = threading.Event()
        self._num_windows = num_windows(source, target)
        self._num_threads = max(1, min(num_threads, self._num_windows))
        self._uploads = None if target.local_root is not None else threading.Semaphore(_NUM_UPLOADS)

    def each(self, files: Sequence[File], action: Callable[[File, Windows], None]) -> None:
        """Call ``action`` for all files, several at once; the first error ends the others and is raised.

        Raises:
            TransferStopped: ``stop()`` said so.
        """
        if not files:
            return
        num_threads = min(self._num_threads, len(files))
        # Big files first: at the end the others would wait for a big file that starts last.
        left = deque(sorted(files, key=lambda file: -file.size))
        with (
            ThreadPoolExecutor(self._num_windows, "holdfast-read") as readers,
            ThreadPoolExecutor(num_threads, "holdfast-send") as threads,
        ):
            windows = Windows(readers.submit, self._num_windows)

            def work() -> None:
                while True:
                    self.check()
                    try:
                        file = left.popleft()
                    except IndexError:
                        return
                    action(file, windows)

            working = [threads.submit(work) for _ in range(num_threads)]
            try:
                wait(working, return_when=FIRST_EXCEPTION)
            finally:  # Ctrl-C too: the threads end within one window
                self._halt.set()
                wait(working)
                self._halt.clear()
        _raise_first(working)

    def check(self) -> None:
        """Raise `TransferStopped` if this copy is to end."""
        if self._halt.is_set() or (self._stop is not None and self._stop()):
            raise TransferStopped

    def bring(
        self, file: File, windows: Windows, *, there: int | None, twin: str | None, trust: Trust = "name"
    ) -> Literal["there", "copied", "sent"]:
        """Bring one file; return which way: it was there, the target has copied its twin, or it was sent. Then durable.

        Args:
            file: what to bring.
            windows: as for `send`.
            there: bytes that the target has under its name; None for no such file.
            twin: path at the target of a file with the same bytes, if there is one.
            trust: "size" where the target has committed this very file before; "name" where a save's id in the name is
                enough at a store (files of model_files have one name in all saves), and nothing but the digest on a
                disk, where the writer of a file of the right size may have died; "digest" anywhere.

        Raises:
            CorruptCheckpointError: as `send`.
            StorageNotFoundError: as `send`.
        """
        is_named = start_id_of(file.path) is not None
        if file.digest is not None and there == file.size:
            asks = trust == "digest" or (trust == "name" and self._target.local_root is not None)
            if self.is_at_target(file, windows) if asks else trust == "size" or is_named:
                self.settled(file.size)
                return "there"
        if twin is not None and self._repeat(twin, file.target, replace=there is not None):
            self.settled(file.size)
            return "copied"
        self.send(file, windows, replace=there is not None and (trust == "digest" or not is_named))
        return "sent"

    def _repeat(self, twin: str, path: str, *, replace: bool) -> bool:
        """Have the target copy a file that it has; False if that file is gone or the store cannot copy."""
        if not self._target.traits.copies_itself:
            return False
        try:
            if replace:
                self._target.delete(path)
            self._target.copy(twin, path)
        except StorageFullError:
            raise
        except StorageError:  # it would only have saved time; if the store does not answer, the sending fails too
            return False
        return True

    def settled(self, nbytes: int) -> None:
        """Count bytes that are at the target, sent or found there."""
        if self._progress is not None:
            with self._lock:
                self._progress(nbytes)

    def send(self, file: File, windows: Windows, *, replace: bool = False) -> None:
        """Copy one file and compare what was read with its digest; durable on return.

        Args:
            file: what to copy.
            windows: from `each`.
            replace: keep what is at the target under its name until the copy is whole. Files that a save has named need
                not: their names are new.

        Raises:
            CorruptCheckpointError: the source is not what its digest says; nothing is left at the target.
            StorageNotFoundError: the source is gone.
        """
        turn = contextlib.nullcontext() if self._uploads is None or file.size <= _BIG else self._uploads
        with turn, self._source.open(file.source) as reader:
            if reader.size != file.size:
                raise _damaged(self._source, file, f"has {reader.size} bytes where {file.size} were written or listed")
            target = self._target.replace(file.target, file.size) if replace else None
            with target or self._target.create(file.target, file.size) as writer:
                table = bytearray()
                with contextlib.closing(windows.read(reader)) as views:
                    for window in views:
                        self.check()
                        table += window.digests
                        writer.write(window.view)
                        self.settled(window.nbytes)
                if file.digest is not None and file_digest(bytes(table)) != file.digest:
                    raise _damaged(self._source, file, "does not hold the bytes that were written (digest differs)")
                if self._last is not None:
                    self._last()

    def send_small(self, file: File, batch: FileBatch, buffer: memoryview) -> None:
        """Copy one file that ``buffer`` can hold into a batch, as `send` does; durable when the batch is closed.

        Raises:
            CorruptCheckpointError: as `send`.
            StorageNotFoundError: as `send`.
        """
        view = buffer[: file.size]
        with self._source.open(file.source) as reader:
            if reader.size != file.size:
                raise _damaged(self._source, file, f"has {reader.size} bytes where {file.size} were written or listed")
            if file.size:
                reader.read_into(0, view)
        if file.digest is not None and bytes_digest(view) != file.digest:
            raise _damaged(self._source, file, "does not hold the bytes that were written (digest differs)")
        batch.add(file.target, view)
        self.settled(file.size)

    def is_at_target(self, file: File, windows: Windows) -> bool:
        """Read the file at the target; return whether its bytes have the digest. If so it is durable on return."""
        try:
            found = _digest_of(self._target, file.target, windows, self.check)
        except StorageNotFoundError:
            return False
        if found != file.digest:
            return False
        self._target.sync(file.target)  # its writer may have died before it was durable
        return True


def _digest_of(storage: Storage, path: str, windows: Windows, check: Callable[[], None]) -> str:
    """Return the digest of a stored file."""
    table = bytearray()
    with storage.open(path) as reader, contextlib.closing(windows.read(reader)) as views:
        for window in views:
            check()
            table += window.digests
    return file_digest(bytes(table))


def _raise_first(working: Sequence[Future[None]]) -> None:
    errors = [error for future in working if (error := future.exception()) is not None]
    # The error that stopped the others says more than `TransferStopped`.
    errors.sort(key=lambda error: isinstance(error, TransferStopped))
    if errors:
        raise errors[0]


def _damaged(source: Storage, file: File, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{source.uri}/{file.source} {what}: it was not copied; `holdfast verify --deep` of its checkpoint says what "
        "is damaged",
        file=file.path,
    )


class ReadWindow(NamedTuple):
    """A part of a file.

    Attributes:
        view: page-aligned, padded to whole blocks; valid until the next window is asked for.
        nbytes: how many of its bytes are the file's.
        digests: the chunk digests of those bytes.
    """

    view: memoryview
    nbytes: int
    digests: bytes


class Windows:
    """Page-aligned buffers, filled ahead by other threads; the files under way have equal shares of them.

    A file that is alone has all of them, so that the end of the last big file is as fast as the middle.

    Args:
        submit: runs a call on another thread and returns its future; several at once, or one after another.
        number: how many buffers there are at most. A buffer is made when it is first needed, and stays.
    """

    def __init__(self, submit: Callable[[Callable[[], bytes]], Future[bytes]], number: int) -> None:
        self._submit, self._number = submit, number
        self._free: list[mmap.mmap] = []
        self._num_made = self._num_files = 0
        self._changed = threading.Condition()

    def read(self, reader: FileReader) -> Generator[ReadWindow]:
        """Yield a file window by window. To be closed: others may wait for the buffers.

        Raises:
            StorageError: the file could not be read.
        """
        ahead: deque[tuple[Future[bytes], mmap.mmap, int]] = deque()
        starts = deque(range(0, reader.size, WINDOW))
        self._count(1)
        try:
            while starts or ahead:
                while starts and (buffer := self._take(len(ahead))) is not None:
                    start = starts.popleft()
                    nbytes = min(WINDOW, reader.size - start)
                    ahead.append((self._load(reader, start, memoryview(buffer)[:nbytes]), buffer, nbytes))
                future, buffer, nbytes = ahead[0]
                digests = future.result()
                yield ReadWindow(memoryview(buffer)[: -(-nbytes // BLOCK) * BLOCK], nbytes, digests)
                self._give(ahead.popleft()[1])
        finally:
            wait([future for future, _, _ in ahead])  # nothing may touch buffers or reader after this
            for _, buffer, _ in ahead:
                self._give(buffer)
            self._count(-1)

    @contextlib.contextmanager
    def buffer(self) -> Iterator[memoryview]:
        """Lend a buffer of `WINDOW` bytes to a caller that reads by itself."""
        self._count(1)
        buffer = self._take(0)
        assert buffer is not None  # who holds none waits for one
        try:
            yield memoryview(buffer)
        finally:
            self._give(buffer)
            self._count(-1)

    def _load(self, reader: FileReader, start: int, view: memoryview) -> Future[bytes]:
        def load() -> bytes:
            reader.read_into(start, view)
            return chunk_digests(view)

        return self._submit(load)

    def _take(self, held: int) -> mmap.mmap | None:
        """Return another buffer for a file, None if the file has its share; a file without buffers waits for one."""
        with self._changed:
            while True:
                may_have = held < max(1, self._number // self._num_files)
                if may_have and self._free:
                    return self._free.pop()
                if may_have and self._num_made < self._number:
                    self._num_made += 1
                    return mmap.mmap(-1, WINDOW)
                if held:
                    return None
                self._changed.wait()  # files with more than their share give a buffer back with each window

    def _give(self, buffer: mmap.mmap) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def _count(self, change: int) -> None:
        with self._changed:
            self._num_files += change
