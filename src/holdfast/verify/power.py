"""A power cut as it can be made from outside: what a file has in memory only is lost.

The kernel says which pages of a file are not on the disk yet (``cachestat``, Linux 6.5). The model is that of
`holdfast.testing.power_cut_states`: bytes and length survive from an fsync of the file on, later ones may have arrived
or not. Names are left as they were, for the kernel does not tell which of them are durable; what a file held before
bytes were written over is not known, so those come back as zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["cut_power", "make_durable", "sees_power_cuts", "unwritten"]

_CACHESTAT = 451
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def sees_power_cuts(folder: Path) -> bool:
    """Tell whether the kernel and the file system of a directory say what is not on the disk yet."""
    probe = folder / ".power"
    try:
        with probe.open("wb") as file:
            file.write(bytes(2 * _PAGE))
            file.flush()
            before = _in_memory(file.fileno(), 0, 2 * _PAGE)
            os.fsync(file.fileno())
            return before > 0 and _in_memory(file.fileno(), 0, 2 * _PAGE) == 0
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)


def unwritten(root: Path) -> dict[Path, list[int]]:
    """Return the pages of the files below a directory that are not on the disk yet, by path."""
    found = {}
    for path in _files(root):
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            pages = list(_dirty(file.fileno(), 0, -(-size // _PAGE)))
            if pages:
                found[path] = pages
    return found


def cut_power(pages_of: Mapping[Path, Sequence[int]], chance: random.Random) -> None:
    """Take these pages from files.

    For each file one of three: all of them are zeros, the second half of them, or the file ends where they begin.
    """
    for path, pages in pages_of.items():
        with path.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            kind = chance.choice(("zeros", "half", "end"))
            if kind == "end":
                file.truncate(pages[0] * _PAGE)
                continue
            for page in pages[len(pages) // 2 if kind == "half" else 0 :]:
                os.pwrite(file.fileno(), bytes(min(_PAGE, size - page * _PAGE)), page * _PAGE)


def make_durable(root: Path) -> None:
    """Bring the files below a directory to the disk."""
    for path in _files(root):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _files(root: Path) -> Iterator[Path]:
    """Iterate over the regular files below a directory, but for compiled modules: Python would refuse them."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in sorted(names):
            if stat.S_ISREG(Path(folder, name).lstat().st_mode):
                yield Path(folder, name)


def _dirty(file: int, begin: int, end: int) -> Iterator[int]:
    """Iterate over the pages of a range that are not on the disk yet."""
    count = _in_memory(file, begin * _PAGE, (end - begin) * _PAGE) if begin < end else 0
    if count >= end - begin:
        yield from range(begin, end)
    elif count:
        middle = (begin + end) // 2
        yield from _dirty(file, begin, middle)
        yield from _dirty(file, middle, end)


def _in_memory(file: int, offset: int, length: int) -> int:
    """Return how many pages of a range are not on the disk yet.

    Raises:
        OSError: the kernel cannot tell.
    """
    asked, pages = _Range(offset, length), _Pages()
    if _LIBC.syscall(_CACHESTAT, file, ctypes.byref(asked), ctypes.byref(pages), 0):
        raise OSError(ctypes.get_errno(), "cachestat")
    return int(pages.dirty + pages.writeback)
