"""Where a script runs while it is verified: a copy of its working directory, watched from outside, robbed of power.

A script without Holdfast saves where it likes, so each chain of lives gets the directory as it was, and the real one,
with its real checkpoints, stays untouched.

A power cut, as it can be made from outside: what a file has in memory only is lost. The kernel says which pages of a
file are not on the disk yet (``cachestat``, Linux 6.5). The model is that of `holdfast.testing.power_cut_states`: bytes
and length survive from an fsync of the file on, later ones may have arrived or not. Names are left as they were, for
the kernel does not tell which of them are durable; what a file held before bytes were written over is not known, so
those come back as zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import re
import shutil
import signal
import stat
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast._units import format_bytes
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

_LINKED = (".git", ".venv", "venv", "node_modules", ".tox", ".mypy_cache", ".ruff_cache")
"""Never written by a training: a link to the real one will do."""
_LEFT_OUT = ("__pycache__",)
_NO_STATE = (".pyc", ".log", ".txt", ".csv", ".json", ".jsonl", ".out", ".err", ".yaml", ".yml", ".md", ".png", ".html")
"""Ends of names of files that hold no training state: a script may write them at every step."""

_LIBC = ctypes.CDLL(None, use_errno=True)
# Of Linux' inotify.h.
_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
_IS_DIRECTORY, _OVERFLOW = 0x40000000, 0x4000
_F_SETSIG = 10  # of Linux' fcntl.h; `fcntl` does not name it
_KINDS = {
    _CREATE: "made", _MODIFY: "written", _CLOSE_WRITE: "closed", _MOVED_TO: "renamed", _MOVED_FROM: "moved away",
    _DELETE: "deleted",
}  # fmt: skip
_VARIABLE = re.compile(r"[0-9a-f]{6,}|\d+")  # of a name: steps, ids, ranks
_EVENT = struct.Struct("iIII")


class Workplace:
    """Copies of a working directory, without its pipes, sockets and devices.

    Links that lead out of it lead to the same places from a copy; those that lead into it stay within the copy.

    Args:
        source: the real one.
        home: directory that takes the copies; it may lie in the real one.
        limit_bytes: more than this is not copied.
        advice: what can be done besides where it is too large, for people.

    Raises:
        ConfigError: the directory is too large; names its largest entries.
    """

    def __init__(self, source: Path, home: Path, *, limit_bytes: int, advice: str = "") -> None:
        self._source, self._home = source.absolute(), home.absolute()
        self._real = Path(os.path.realpath(source))
        sizes = {entry.name: _size(Path(entry.path), self._home) for entry in os.scandir(source)}
        sizes = {name: size for name, size in sizes.items() if name not in _LINKED}
        total = sum(sizes.values())
        if total > limit_bytes:
            large = sorted(sizes, key=lambda name: -sizes[name])[:3]
            raise ConfigError(
                f"the working directory {self._source} holds {format_bytes(total)} ("
                + ", ".join(f"{name}: {format_bytes(sizes[name])}" for name in large)
                + f"), and a script runs in a copy of it, of up to {format_bytes(limit_bytes)}, so that its own files "
                f"stay as they are. Start it in a smaller directory, or allow more with --copy-limit{advice}"
            )

    def copy(self, name: str) -> Path:
        """Make a copy called ``name``, and return its path.

        Raises:
            ConfigError: a file cannot be read, or is gone meanwhile.
        """
        place = self._home / name / "work"

        def leave_out(folder: str, names: Sequence[str]) -> set[str]:
            out = {one for one in names if one in _LEFT_OUT or Path(folder, one) == self._home}
            out |= {one for one in names if _is_special(Path(folder, one))}
            return out | ({one for one in names if one in _LINKED} if Path(folder) == self._source else set())

        try:
            shutil.copytree(self._source, place, symlinks=True, ignore=leave_out)
        except shutil.Error as error:
            path, _, why = error.args[0][0]
            raise ConfigError(
                f"a script runs in a copy of its working directory, and {path} cannot be copied: {why}. Let nothing "
                "else write there meanwhile, and start it in a directory of which all files can be read"
            ) from error
        self._mend_links(place)
        for linked in _LINKED:
            if (self._source / linked).exists():
                (place / linked).symlink_to(self._source / linked)
        return place

    def _mend_links(self, place: Path) -> None:
        for folder, folders, files in os.walk(place):
            beside = self._real / os.path.relpath(folder, place)
            for path in (Path(folder, name) for name in (*folders, *files) if os.path.islink(Path(folder, name))):
                text = os.readlink(path)
                there = _place_of(beside / text)
                if there.is_relative_to(self._real):
                    if not os.path.isabs(text) and os.pardir not in Path(text).parts:
                        continue
                    there = place / there.relative_to(self._real)
                    target = os.fspath(there) if os.path.isabs(text) else os.path.relpath(there, folder)
                else:
                    target = os.path.join(beside, text)
                if target != text:
                    path.unlink()
                    path.symlink_to(target)

    def moved(self, command: Sequence[str], place: Path) -> list[str]:
        """Return a command for a copy: paths of the real directory that it names become those of the copy.

        A program or a script that lies outside, by a relative path, is named by the absolute one.
        """
        real = f"{self._source}{os.sep}"
        linked = tuple(f"{real}{name}{os.sep}" for name in _LINKED)
        words = [
            os.fspath(_place_of(self._real / word))
            if (number == 0 or word.endswith(".py")) and self._leads_out(word)
            else word
            for number, word in enumerate(command)
        ]
        return [word if word.startswith(linked) else word.replace(real, f"{place}{os.sep}") for word in words]

    def hint(self, command: Sequence[str]) -> str:
        """Say which relative paths of a command a script does not find in a copy, after its output; "" if none."""
        paths = [
            word for word in command[1:] if not word.endswith(".py") and self._leads_out(word.rpartition("=")[2])
        ]  # fmt: skip
        return (
            f"\nit ran in a copy of its working directory, where {', '.join(paths)} leads to another place: give an "
            "absolute path" if paths else ""
        )  # fmt: skip

    def _leads_out(self, word: str) -> bool:
        """Tell whether a word is a relative path of something that is there, and lies outside of the directory."""
        if os.pardir not in Path(word).parts or os.path.isabs(word):
            return False
        path = self._real / word
        return path.exists() and not _place_of(path).is_relative_to(self._real)


def _place_of(path: Path) -> Path:
    """Return where a file or link lies, without following it, should it be a link."""
    return Path(os.path.realpath(path.parent), path.name)


def _is_special(path: Path) -> bool:
    with contextlib.suppress(OSError):
        mode = path.lstat().st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
    return False


def _size(path: Path, home: Path) -> int:
    if path.is_symlink() or path == home:
        return 0
    with contextlib.suppress(OSError):  # whatever it is, its copy says it
        if path.is_dir():
            return sum(_size(Path(entry.path), home) for entry in os.scandir(path) if entry.name not in _LEFT_OUT)
        return path.stat().st_size
    return 0


class OutputWatch:
    """Notes when files below a directory change, by inotify: nothing is asked of who changes them.

    No clock says between which steps: the files to which the observer writes a row before each step are watched too,
    and the kernel puts all that happens into one queue, in its order.

    Attributes:
        due: when, by the monotonic clock, everything that the life has started is killed; None: not yet.
        changes: for each change, how many steps rank 0 had begun.
        written: each file that was finished: its path, with # for the numbers in it, how many steps had been begun, and
            its bytes.
        missed: there were more changes than the kernel keeps (fs.inotify.max_queued_events): some were not seen.
        num_found: how many files were finished, since the first step, in a new directory before it was watched. They
            count as finished when it was made: what a save in the background wrote later is placed some steps early.

    Args:
        root: the directory.
        trace: the directory of the rows, which is made if it is not there.
    """

    _mask = _CLOSE_WRITE | _MOVED_TO | _CREATE

    def __init__(self, root: Path, *, trace: Path | None = None) -> None:
        self._root = root
        self.due: float | None = None
        self._leases = _gives_leases(root.parent)
        self._fd = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._folders: dict[int, Path] = {}
        self.num_found, self.missed = 0, False
        self.changes: list[int] = []
        self.written: list[tuple[str, int, int]] = []
        self._rows: Counter[str] = Counter()
        self._trace = -1
        if trace is not None:
            trace.mkdir(exist_ok=True)
            self._trace = _LIBC.inotify_add_watch(self._fd, os.fsencode(trace), _MODIFY | _ATTRIB)
            if self._trace < 0:
                code = ctypes.get_errno()
                os.close(self._fd)
                raise OSError(code, os.strerror(code), os.fspath(trace))
        self._add(root, found=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        """Return what to wait for."""
        return int(self._fd)

    def stopped(self) -> None:
        """Do nothing: no kill is due here."""

    def read(self) -> None:
        """Note the changes that are there to be read."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data = os.read(self._fd, 1 << 16)
                for path, mask in self._events(data):
                    self._changed(path, mask)
                    if mask & _IS_DIRECTORY and mask & (_CREATE | _MOVED_TO):
                        self._add(path, found=True)

    def _events(self, data: bytes) -> Iterator[tuple[Path, int]]:
        at = 0
        while at < len(data):
            folder, mask, _, size = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + size].rstrip(b"\0")
            at += _EVENT.size + size
            self.missed = self.missed or bool(mask & _OVERFLOW)
            if folder == self._trace and mask & _ATTRIB and b".rank-0." in name:
                self._rows[os.fsdecode(name)] += 1
            if folder in self._folders:
                yield self._folders[folder] / os.fsdecode(name), mask

    def _add(self, folder: Path, *, found: bool) -> None:
        """Watch a directory and those in it; files that are in a new one already are changes, too."""
        number = _LIBC.inotify_add_watch(self._fd, os.fsencode(folder), self._mask)
        if number < 0:
            return  # it is gone again
        is_known = number in self._folders  # it has another name now
        self._folders[number] = folder
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    self._add(Path(entry.path), found=found)
                elif found:
                    is_open = self._leases and _has_writer(entry.path)
                    self.num_found += not (is_open or is_known) and self._begun() > 0
                    self._changed(Path(entry.path), _CREATE if is_open else _CLOSE_WRITE)

    def _changed(self, path: Path, mask: int) -> None:
        if mask & _IS_DIRECTORY or not mask & (_CLOSE_WRITE | _MOVED_TO):
            return
        if path.name.endswith(_NO_STATE) or "tfevents" in path.name:
            return
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            self.changes.append(self._begun())
            self.written.append((_VARIABLE.sub("#", os.path.relpath(path, self._root)), self._begun(), size))

    def _begun(self) -> int:
        """Return how many steps rank 0 had begun at the change that is being read."""
        return max(self._rows.values(), default=0)  # of several processes of a rank the one that made most


def _has_writer(path: str) -> bool:
    """Tell whether a process has a file open to write it: the kernel gives no lease to read it then (fcntl(2))."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False  # it is gone again
    try:
        return _lease_error(file) == errno.EAGAIN
    finally:
        os.close(file)


def _lease_error(file: int) -> int:
    """Ask for a lease to read a file, which ends with the descriptor; return the number of the error, 0 for none."""
    try:
        fcntl.fcntl(file, _F_SETSIG, signal.SIGURG)  # who opens it now breaks the lease: SIGIO would end this process
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno or 0
    return 0


def _gives_leases(folder: Path) -> bool:
    """Tell whether a file that nobody writes gets a lease; NFS and SMB refuse it as if somebody wrote the file."""
    writer, path = tempfile.mkstemp(dir=folder)
    os.close(writer)
    try:
        file = os.open(path, os.O_RDONLY)
    finally:
        os.unlink(path)
    try:
        return _lease_error(file) == 0
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a file or a directory.

    Attributes:
        what: its kind and its name, with # for what differs from save to save: "renamed out/step-#.pt".
        name: the name in it.
        numbers: what # stands for.
        begun: how many steps had been begun.
        size: of the file in bytes, 0 where it is gone or a directory.
        finished: the file took its name or was closed.
    """

    what: str
    name: str
    numbers: tuple[str, ...] = ()
    begun: int
    size: int
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """When to kill.

    Attributes:
        what: the change after which the moment comes; None for any.
        nth: how often that change comes first; 0 for never.
        delay_s: from that change on.
        at_most: number of changes after which the moment comes in any case.
        cut: look then for what is not on the disk yet.
    """

    what: str | None = None
    nth: int = 0
    delay_s: float = 0.0
    at_most: int = 0
    cut: bool = False


class ChangeWatch(OutputWatch):
    """Notes each change below a directory, and can say when the planned moment comes.

    Attributes:
        seen: the changes.
        unwritten: at the planned moment, the pages of files that were not on the disk yet.

    Args:
        root: the directory.
        aim: the planned moment.
        trace: the directory of the rows.
    """

    _mask = _MODIFY | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE

    def __init__(self, root: Path, aim: Aim | None = None, *, trace: Path | None = None) -> None:
        self._aim, self._times = aim or Aim(), 0
        self.unwritten: dict[Path, list[int]] = {}
        self.seen: list[Change] = []
        super().__init__(root, trace=trace)

    def stopped(self) -> None:
        """Look for what is not on the disk yet."""
        if self._aim.cut:
            self.unwritten = unwritten(self._root)

    def _changed(self, path: Path, mask: int) -> None:
        kind = next((text for bit, text in _KINDS.items() if mask & bit), "")
        if not kind:
            return
        place = os.path.relpath(path, self._root)
        name, size = _VARIABLE.sub("#", place), 0
        if not mask & _IS_DIRECTORY:
            with contextlib.suppress(OSError):
                size = os.lstat(path).st_size
        self.seen.append(
            Change(
                what=f"{kind} {name}", name=name, numbers=tuple(_VARIABLE.findall(place)), begun=self._begun(),
                size=size, finished=bool(mask & (_CLOSE_WRITE | _MOVED_TO)) and not mask & _IS_DIRECTORY,
            )
        )  # fmt: skip
        aim = self._aim
        self._times += aim.what in (None, self.seen[-1].what)
        if self.due is not None:
            return
        if 0 < aim.nth == self._times:
            self.due = time.monotonic() + aim.delay_s
        elif 0 < aim.at_most <= len(self.seen):
            self.due = time.monotonic()


# ---- power cuts


_CACHESTAT = 451
_PAGE = os.sysconf("SC_PAGE_SIZE")


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
