"""The ring of a rank: what was handed to training last, in a file of the run that survives a kill.

A file of 4096 entries of 64 bytes below ``.ledger/``, written by one `os.pwrite` for each batch. The bytes are in the
page cache of the kernel when the call returns, so they survive the process (SIGKILL too), though not a power cut: there
is no fsync. A mapped file would do the same, but a full disk or a file that somebody cuts off would then kill the
training by SIGBUS. Each entry carries a checksum of its own, and the life that wrote it: a torn or an old entry is
never taken for another one.

Nothing here imports torch: ``holdfast log --data`` reads it.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from holdfast._log import get_logger
from holdfast.storage.local.beneath import Beneath

FOLDER = ".ledger"
NUM_ENTRIES = 4096
_HEADER_BYTES = 4096
_FIELDS = struct.Struct("<QQQIIIIIIII")  # of an entry, behind its checksum
_CHECK = struct.Struct("<Q")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_ENTRY_BYTES = _CHECK.size + _FIELDS.size
_log = get_logger("data")


class BatchSpan(NamedTuple):
    """Batches of one loader, by their place in the order of an epoch: from ``first`` up to ``end``, without that."""

    name: str
    epoch: int
    first: int
    end: int

    @classmethod
    def from_json(cls, data: Any) -> BatchSpan:
        """Rebuild from a list; raises ValueError or TypeError for anything else."""
        name, *numbers = data
        if type(name) is not str or len(numbers) != 3 or any(type(number) is not int for number in numbers):
            raise ValueError(f"no batches: {data!r}")
        return cls(name, *numbers)


@dataclass(frozen=True, slots=True)
class RingEntry:
    """A batch that was handed to training.

    Attributes:
        seq: number of the entry in its ring.
        content: digest of the batch; 0 if it was not read (a device has it).
        indices: digest of the indices of its samples; 0 if the loader has none.
        attempt: of the life that drew it.
        parent: attempt of the checkpoint that this life went on from; 0 after a fresh start.
        parent_step: step of that checkpoint.
        step: steps that were done when the batch was drawn.
        epoch: it belongs to.
        index: of the batch in the epoch.
        num_samples: of this rank in the batch.
        name: `name_id` of the loader.
    """

    seq: int
    content: int
    indices: int
    attempt: int
    parent: int
    parent_step: int
    step: int
    epoch: int
    index: int
    num_samples: int
    name: int

    @classmethod
    def unpack(cls, data: bytes) -> RingEntry | None:
        """Return the entry, None if it is torn or was never written."""
        fields = data[_CHECK.size :]
        if len(data) != _ENTRY_BYTES or _CHECK.unpack_from(data)[0] != xxhash.xxh3_64_intdigest(fields):
            return None
        return cls(*_FIELDS.unpack(fields))


def _pack(seq: int, content: int, indices: int, *others: int) -> bytes:
    """Return the 64 bytes that `RingEntry.unpack` reads, of its fields in their order."""
    packed = _FIELDS.pack(seq, content, indices, *[value & 0xFFFFFFFF for value in others])
    return _CHECK.pack(xxhash.xxh3_64_intdigest(packed)) + packed


def name_id(name: str) -> int:
    """Return the number that stands for the name of a loader."""
    return zlib.crc32(name.encode())


class DataRing:
    """The ring of one rank; what goes wrong with it is logged once, and never stops a training.

    Args:
        root: local root of the run.
        rank: of this process.
        run_id: of the run; what another run has left here (its files were deleted, all but the hidden ones) goes.

    Attributes:
        entries: what earlier lives have left, in the order in which they wrote it.
    """

    def __init__(self, root: Path, rank: int, *, run_id: str) -> None:
        self._run_id = run_id
        self.entries: list[RingEntry] = []
        self._names: dict[str, int] = {}
        self._fd, self._has_room = -1, True
        self._path = f"{root}/{FOLDER}/rank-{rank:05d}"
        try:
            (root / FOLDER).mkdir(parents=True, exist_ok=True)
            folder = Beneath(os.fspath(root)).folder(FOLDER)
            with folder:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fd = os.open(f"rank-{rank:05d}", flags, 0o666, dir_fd=folder.fd)
            self._read()
        except OSError as error:
            self._give_up(error)
        self._seq = self.entries[-1].seq + 1 if self.entries else 0

    def _read(self) -> None:
        data = os.pread(self._fd, _HEADER_BYTES + NUM_ENTRIES * _ENTRY_BYTES, 0)
        run_id, self._names, self.entries = _parse(data)
        if run_id != self._run_id:
            # Its attempts have the numbers of ours, and none of its batches is one of ours.
            self._names, self.entries = {}, []
            os.ftruncate(self._fd, 0)
            self._write_header()

    def _write_header(self) -> None:
        os.pwrite(self._fd, _header(self._run_id, self._names), 0)

    def add(self, entry: tuple[int, int, int, int, int, int, int, int, int], name: str) -> None:
        """Write an entry: the fields of `RingEntry` between ``seq`` and ``name``."""
        if self._fd < 0:
            return
        try:
            if name not in self._names:
                os.pwrite(self._fd, _header(self._run_id, [*self._names, name]), 0)
                self._names[name] = name_id(name)
            data = _pack(self._seq, *entry, self._names[name])
            os.pwrite(self._fd, data, _HEADER_BYTES + self._seq % NUM_ENTRIES * _ENTRY_BYTES)
            self._has_room = True
        except OSError as error:
            if error.errno not in _NO_ROOM:
                self._give_up(error)
            elif self._has_room:  # what is missing then is not compared
                self._has_room = False
                _log.warning("%s: no room for the ledger of batches; it goes on when there is: %s", self._path, error)
        self._seq += 1

    def _give_up(self, error: OSError) -> None:
        _log.warning(
            "%s: the ledger of batches is not written any more (%s): a resume cannot compare what its loader gives "
            "with what was trained after the last save", self._path, error,
        )  # fmt: skip
        self.close()

    def close(self) -> None:
        """Let go of the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _header(run_id: str, names: Iterable[str]) -> bytes:
    shown = sorted(names)[:64]
    while len(header := json.dumps({"ledger": 1, "run": run_id, "names": shown}).encode()) > _HEADER_BYTES:
        shown.pop()
    return header.ljust(_HEADER_BYTES)


def _parse(data: bytes) -> tuple[str, dict[str, int], list[RingEntry]]:
    """Return the run, the names of loaders and the good entries of a file, whatever it holds."""
    run_id = ""
    names: dict[str, int] = {}
    try:
        header: Any = json.loads(data[:_HEADER_BYTES])
        run_id = str(header.get("run"))
        names = {name: name_id(name) for name in header["names"] if isinstance(name, str)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # whose it is cannot be told, and names are for display only
    places = range(_HEADER_BYTES, len(data), _ENTRY_BYTES)
    found = (RingEntry.unpack(data[place : place + _ENTRY_BYTES]) for place in places)
    return run_id, names, sorted((entry for entry in found if entry is not None), key=lambda entry: entry.seq)


def read_rings(root: Path) -> dict[int, tuple[dict[str, int], list[RingEntry]]]:
    """Return the names of loaders and the entries of every rank's ring, by rank; {} where there is no ledger."""
    rings: dict[int, tuple[dict[str, int], list[RingEntry]]] = {}
    if (root / FOLDER).is_symlink():
        return rings
    for path in sorted((root / FOLDER).glob("rank-*")):
        number = path.name.removeprefix("rank-")
        if number.isdigit() and path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                rings[int(number)] = _parse(file.read(_HEADER_BYTES + NUM_ENTRIES * _ENTRY_BYTES))[1:]
    return rings
