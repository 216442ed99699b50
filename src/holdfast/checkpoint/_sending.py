"""Files from one storage to another: several at once, each through its own few windows of memory.

While a window is written, the next ones are read; the digest is made of what was read, in passing. All windows
together are `NUM_WINDOWS` * `WINDOW` bytes, however many files there are and however large they be.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from holdfast.errors import CorruptCheckpointError, StorageNotFoundError
from holdfast.format.digest import ChunkHasher, file_digest
from holdfast.storage.base import BLOCK, FileReader, Storage

__all__ = ["NUM_WINDOWS", "WINDOW", "File", "Sender", "TransferStopped", "Windows"]

WINDOW = 8 << 20
NUM_WINDOWS = 8
# A client that uploads holds up to 13 parts of 8 MiB for each big object, so of those only two go at once, and with
# half of the windows: 240 MiB in all.
_NUM_UPLOADS = 2
_BIG = 8 << 20

Progress = Callable[[int], None]
Stop = Callable[[], bool]


class TransferStopped(Exception):  # noqa: N818 - nothing went wrong
    """Somebody asked for the end of a copy; what is complete at the target stays for the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file to be brought to the target.

    Attributes:
        path: path inside the checkpoint.
        source: path in the source.
        target: path at the target.
        size: bytes.
        digest: what its bytes must have; None where nobody knows.
        shared: another checkpoint at the source has the same bytes.
    """

    path: str
    source: str
    target: str
    size: int
    digest: str | None = None
    shared: bool = False


class Sender:
    """Copies files between two storages with bounded memory.

    Args:
        source: where they are.
        target: where they go.
        num_threads: files under way at once, `NUM_WINDOWS` at most.
        progress: called with the bytes just written, by one thread at a time.
        stop: asked between windows; true ends everything with `TransferStopped`.
    """

    def __init__(
        self,
        source: Storage,
        target: Storage,
        *,
        num_threads: int = 4,
        progress: Progress | None = None,
        stop: Stop | None = None,
    ) -> None:
        self._source, self._target = source, target
        self._progress, self._stop = progress, stop
        self._lock = threading.Lock()
        self._halt = threading.Event()
        is_local = target.local_root is not None
        self._num_windows = NUM_WINDOWS if is_local else NUM_WINDOWS // 2
        self._num_threads = max(1, min(num_threads, self._num_windows))
        self._uploads = None if is_local else threading.Semaphore(_NUM_UPLOADS)

    def each(self, files: Sequence[File], action: Callable[[File, Windows], None]) -> None:
        """Call ``action`` for all files, several at once; the first error ends the others and is raised.

        Raises:
            TransferStopped: ``stop()`` said so.
        """
        if not files:
            return
        num_threads = min(self._num_threads, len(files))
        # The big ones first: a big one that starts last would be waited for alone.
        left = deque(sorted(files, key=lambda file: -file.size))
        with (
            ThreadPoolExecutor(self._num_windows, "holdfast-read") as readers,
            ThreadPoolExecutor(num_threads, "holdfast-send") as threads,
        ):

            def work() -> None:
                windows = Windows(readers, self._num_windows // num_threads)
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

    def settled(self, nbytes: int) -> None:
        """Count bytes that are at the target, sent or found there."""
        if self._progress is not None:
            with self._lock:
                self._progress(nbytes)

    def send(self, file: File, windows: Windows) -> None:
        """Copy one file and compare what was read with its digest; durable on return.

        Raises:
            CorruptCheckpointError: the source is not what its digest says; nothing is left at the target.
            StorageNotFoundError: the source is gone.
        """
        with self._turn(file), self._source.open(file.source) as reader:
            if reader.size != file.size:
                raise _damaged(self._source, file, f"has {reader.size} bytes where {file.size} were written or listed")
            with self._target.create(file.target, file.size) as writer:
                hasher = ChunkHasher()
                for view, nbytes in windows.read(reader):
                    self.check()
                    hasher.update(view[:nbytes])
                    writer.write(view)
                    self.settled(nbytes)
                if file.digest is not None and file_digest(hasher.table) != file.digest:
                    raise _damaged(self._source, file, "does not hold the bytes that were written (digest differs)")

    def _turn(self, file: File) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._uploads is None or file.size <= _BIG else self._uploads

    def is_at_target(self, file: File, windows: Windows) -> bool:
        """Read the file at the target, and tell whether its bytes have the digest; if so it is durable on return."""
        try:
            found = _digest_of(self._target, file.target, windows, self.check)
        except StorageNotFoundError:
            return False
        if found != file.digest:
            return False
        self._target.sync(file.target)  # whoever wrote it may have died before it was
        return True


class Windows:
    """The memory of one thread: a few page-aligned buffers, filled ahead by the readers."""

    def __init__(self, readers: ThreadPoolExecutor, number: int) -> None:
        self._readers = readers
        self._number = max(1, number)
        self._buffers: list[mmap.mmap] = []

    def read(self, reader: FileReader) -> Iterator[tuple[memoryview, int]]:
        """Yield a file window by window: a view padded to whole blocks, and how many of its bytes are the file's.

        Each view is valid until the next is asked for.
        """
        ahead: deque[tuple[Future[None], memoryview, int]] = deque()
        starts = iter(range(0, reader.size, WINDOW))
        free = deque(self._take(-(-reader.size // WINDOW)))
        try:
            while True:
                for start in starts if free else ():
                    buffer = free.popleft()
                    nbytes = min(WINDOW, reader.size - start)
                    view = memoryview(buffer)
                    future = self._readers.submit(reader.read_into, start, view[:nbytes])
                    ahead.append((future, view, nbytes))
                    if not free:
                        break
                if not ahead:
                    return
                future, view, nbytes = ahead.popleft()
                future.result()
                yield view[: -(-nbytes // BLOCK) * BLOCK], nbytes
                free.append(view.obj)  # type: ignore[arg-type]
        finally:
            wait([future for future, _, _ in ahead])  # nothing may touch buffers or reader after this

    def _take(self, wanted: int) -> list[mmap.mmap]:
        number = min(self._number, wanted)
        while len(self._buffers) < number:
            self._buffers.append(mmap.mmap(-1, WINDOW))
        return self._buffers[:number]


def _digest_of(storage: Storage, path: str, windows: Windows, check: Callable[[], None]) -> str:
    """Return the digest of a stored file."""
    hasher = ChunkHasher()
    with storage.open(path) as reader:
        for view, nbytes in windows.read(reader):
            check()
            hasher.update(view[:nbytes])
    return file_digest(hasher.table)


def _raise_first(working: Sequence[Future[None]]) -> None:
    errors = [error for future in working if (error := future.exception()) is not None]
    # What made the others stop says more than that they did.
    errors.sort(key=lambda error: isinstance(error, TransferStopped))
    if errors:
        raise errors[0]


def _damaged(source: Storage, file: File, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{source.uri}/{file.source} {what}: it was not copied; `holdfast verify --deep` of its checkpoint says what "
        "is damaged",
        file=file.path,
    )
