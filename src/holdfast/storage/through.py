"""How the bytes of an object that replaces another one go through a wrapper that has changed `Storage.create`."""

from __future__ import annotations

import copy

from .base import FileWriter, ReplacingWriter, WrappedStorage

__all__ = ["replace_through"]


class _KeptOpen(FileWriter):
    """A `ReplacingWriter` for a writer above it, whose `close` leaves it to be published.

    Attributes:
        inner: that writer; None before its object is begun, and where the storage has none.
    """

    inner: ReplacingWriter | None = None

    def write(self, view: memoryview) -> None:
        self.inner.write(view)  # type: ignore[union-attr]

    def close(self) -> None:
        pass

    def abort(self) -> None:
        if self.inner is not None:
            self.inner.abort()


class _ReplacingThrough(ReplacingWriter):
    """What a wrapper writes to a new object, as the successor of an old one."""

    def __init__(self, writer: FileWriter, kept: _KeptOpen) -> None:
        self._writer, self._kept = writer, kept

    def write(self, view: memoryview) -> None:
        self._writer.write(view)

    def publish(self, *, if_absent: bool = False, if_match: str | None = None) -> None:
        self._writer.close()
        self._kept.inner.publish(if_absent=if_absent, if_match=if_match)  # type: ignore[union-attr]

    def abort(self) -> None:
        self._writer.abort()


def replace_through(wrapper: WrappedStorage, path: str, size: int) -> ReplacingWriter | None:
    """Start a big object that replaces another one (`Storage.replace`), through the `create` of a wrapper.

    Returns:
        None where the storage below has no such way, or the wrapper does not use it.
    """
    kept, below = _KeptOpen(), wrapper.below

    class Instead(WrappedStorage):
        def create(self, path: str, size: int) -> FileWriter:
            kept.inner = below.replace(path, size)
            return kept if kept.inner is not None else below.create(path, size)

    clone = copy.copy(wrapper)
    clone.below = Instead(below)
    writer = clone.create(path, size)
    if kept.inner is not None:
        return _ReplacingThrough(writer, kept)
    writer.abort()
    return None
