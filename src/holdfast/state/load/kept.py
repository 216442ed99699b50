"""Tensors from the memory that the life before has left, instead of from the storage.

`holdfast run` holds the arenas of a life that has died (`holdfast.run.life`). An arena is laid out as the files of a
checkpoint, so a block of a file is looked for at its place there, and counts if its digests are those of the checkpoint
that is loaded: an arena may hold an older save, or the beginning of a newer one. What is not there is read as ever.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast.format.digest import CHUNK, Digests
from holdfast.format.manifest import Manifest
from holdfast.format.names import save_id_of
from holdfast.run.life import kept_arenas
from holdfast.storage.base import FileReader, Storage, WrappedStorage

__all__ = ["KeptMemory"]

_MISSES = 4  # blocks that are not in an arena, before it is asked no more


class KeptMemory(WrappedStorage):
    """A storage, rooted at a checkpoint, whose files come from kept memory where they can; a context manager.

    Args:
        storage: rooted at the checkpoint.
        manifest: of that checkpoint.
        digests: tables of its files; None: nothing can be checked, so nothing is taken from memory.

    Attributes:
        nbytes: bytes that came from memory so far.
    """

    def __init__(self, storage: Storage, manifest: Manifest, digests: Digests | None) -> None:
        super().__init__(storage)
        self._digests = digests
        self._sizes = {entry.path: entry.size for entry in manifest.files}
        self.nbytes = 0
        self._fds: list[int] = []
        self._places: dict[tuple[str, str], list[tuple[int, int]]] = {}  # by the name of a file around the save's id
        for arena in [] if digests is None else kept_arenas():
            try:
                fd = os.open(arena["path"], os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # the supervisor has ended meanwhile, or a sandbox hides /proc
                continue
            self._fds.append(fd)
            for stem, suffix, at in arena["files"]:
                self._places.setdefault((stem, suffix), []).append((fd, at))

    def open(self, path: str) -> FileReader:
        """Open a file for reading."""
        save_id = save_id_of(path)
        stem, _, suffix = path.partition(f"-{save_id}") if save_id else (path, "", "")
        places = self._places.get((stem, suffix))
        return self.below.open(path) if not places else _KeptFile(self, path, places)

    def as_storage(self) -> Storage:
        """Return the storage to read from: the plain one if no memory is kept."""
        return self if self._fds else self.below

    def __enter__(self) -> KeptMemory:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class _KeptFile(FileReader):
    """One file: each block from the first arena that has it, else from the storage, which is opened then."""

    ahead_bytes = 0  # the storage is to fetch nothing before it is asked for

    def __init__(self, kept: KeptMemory, path: str, places: Sequence[tuple[int, int]]) -> None:
        assert kept._digests is not None
        self._kept, self._path, self._digests = kept, path, kept._digests
        self._places = dict.fromkeys(places, 0)  # with their misses in a row
        self.size = kept._sizes.get(path, 0)
        self._reader: FileReader | None = None

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `FileReader.read_into`."""
        for place, misses in self._places.items():
            if misses >= _MISSES:
                continue
            fd, at = place
            read = os.preadv(fd, [view], at + offset)  # not mapped: it may be cut to nothing while it is read
            if read == len(view) and self._digests.fit(self._path, offset // CHUNK, view):
                self._places[place] = 0
                self._kept.nbytes += read
                return
            self._places[place] = misses + 1
        self._opened().read_into(offset, view)

    def _opened(self) -> FileReader:
        if self._reader is None:
            self._reader = self._kept.below.open(self._path)
        return self._reader

    def close(self) -> None:
        """See `FileReader.close`."""
        if self._reader is not None:
            self._reader.close()
