"""The files that exporters write, to any storage; a file gets its final name only when it is whole."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator

from holdfast.errors import CheckpointExistsError
from holdfast.storage.base import FileWriter, Storage

__all__ = ["Blocks", "ExportFolder"]

_BUFFER = 1 << 20  # bytes; a multiple of the block size of storages
Sink = Callable[[memoryview], None]


class ExportFolder:
    """The destination of an export: writes files of known size, durably.

    Args:
        storage: holds the files.
        prefix: directory inside of it, "" for its root.
        overwrite: replace existing files.

    Attributes:
        written: (name, bytes) of every file written so far.
    """

    def __init__(self, storage: Storage, prefix: str = "", *, overwrite: bool = False) -> None:
        self.storage, self.prefix, self.overwrite = storage, prefix, overwrite
        self.written: list[tuple[str, int]] = []

    @property
    def uri(self) -> str:
        """Location of the folder, for messages."""
        return f"{self.storage.uri.rstrip('/')}/{self.prefix}".rstrip("/")

    def path(self, name: str) -> str:
        """Return where a file lies inside the storage."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def check_free(self, *names: str) -> None:
        """Refuse to replace a file.

        Raises:
            CheckpointExistsError: a file exists, and ``overwrite`` is false.
        """
        existing = [name for name in names if not self.overwrite and self.storage.exists(self.path(name))]
        if existing:
            raise CheckpointExistsError(
                f"{self.uri} has {', '.join(existing[:3])} already: pass overwrite=True (--overwrite) to replace it, "
                "or another destination"
            )

    @contextlib.contextmanager
    def create(self, name: str, size: int) -> Iterator[Sink]:
        """Write one file: the body passes its bytes in parts of any length.

        The file has its name only when it is whole; the one that it replaces stays until then.

        Raises:
            CheckpointExistsError: the file exists, and ``overwrite`` is false.
        """
        self.check_free(name)
        path = self.path(name)
        with Blocks(self.storage.replace(path, size) or self.storage.create(path, size)) as sink:
            yield sink
        self.written.append((name, size))

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically."""
        self.check_free(name)
        self.storage.put(self.path(name), data)
        self.written.append((name, len(data)))


class Blocks(contextlib.AbstractContextManager["Blocks"]):
    """Turns parts of any length into the whole blocks that `FileWriter.write` takes; an error aborts the file."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER))  # aligned, so that a disk may take it directly
        self._used = 0

    def __call__(self, view: memoryview) -> None:
        """Take the next bytes."""
        done = 0
        while done < len(view):
            if not self._used and len(view) - done >= _BUFFER:
                whole = (len(view) - done) // _BUFFER * _BUFFER
                self._writer.write(view[done : done + whole])
                done += whole
                continue
            take = min(_BUFFER - self._used, len(view) - done)
            self._buffer[self._used : self._used + take] = view[done : done + take]
            self._used, done = self._used + take, done + take
            if self._used == _BUFFER:
                self._flush()

    def _flush(self) -> None:
        if self._used:
            self._writer.write(self._buffer[: self._used])
            self._used = 0

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._writer.abort()
            return
        try:
            self._flush()
        except BaseException:
            self._writer.abort()
            raise
        self._writer.close()
