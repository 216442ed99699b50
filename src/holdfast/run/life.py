"""What the processes of a script tell `holdfast run`: which run they have entered, and how far they are.

Each run that a process enters is a file of 4096 bytes in the folder that the variable of the environment names, written
by one `os.pwrite` for each step (about a microsecond): the bytes survive a SIGKILL of the process, and a full disk
costs the report and not the training, which a mapped file would (SIGBUS).
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .process import is_dead, this_process

VARIABLE = "HOLDFAST_LIFE"
"""Set in the processes of a script that `holdfast run` has started: the folder of this life."""
REQUEUE_STATUS = 85
"""Exit status of a script that asks to be started again, unless it was given another."""
GUARD_STATUS = 86
"""Exit status after a guard has found a bad step: the next start goes on from before it."""
DEATHS = "deaths.json"
MODULES = "modules.json"
ARENAS = "arenas-"
"""Begins the names of files in which a process names its arenas: {"pid", "arenas": [{"fd", "size", "uri", "files"}]}"""
KEPT = "kept.json"
"""The arenas of the life before: [{"path", "size", "uri", "files": [[stem, suffix, offset], ...]}]."""
_FIELDS = struct.Struct("<7q")
_DURABLE = struct.Struct("<q")  # behind the others: another thread writes it
_TEXT_AT, _BYTES = 256, 4096
_ENTERED, _TRAINS, _WAITS, _FINISHED, _STOPPED, _CLOSED, _ROLLED_BACK, _GIVEN_UP = range(8)
_ENDS = {"finished": _FINISHED, "stopped": _STOPPED, "rolled back": _ROLLED_BACK, "given up": _GIVEN_UP}


class RolledBack(SystemExit):
    """A guard has found a bad step, and this process ends for it: the next start goes on from before that."""

    def __init__(self, status: int = GUARD_STATUS) -> None:
        super().__init__(status)


class LifeReport:
    """The report of one run of this process. What goes wrong with it is nobody's error.

    Args:
        folder: of this life; "" if nobody supervises this process: nothing is reported.
        about: "uri", "attempt" and "rank", and what else does not change.
    """

    def __init__(self, folder: str = "", about: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._owner = os.getpid()
        self._state, self._step, self._longest, self._resumed, self._durable = _ENTERED, -1, 0, -1, -1
        self._moment, self._limits = time.monotonic_ns(), (-1, 0)  # requeue status, milliseconds that a save may hold
        self._fd, self._name = -1, f"{self._owner}-{time.monotonic_ns()}"
        self._arenas: tuple[tuple[int, int], ...] = ()
        self._num_told = 0  # how often arenas were named
        self._freeing: threading.Thread | None = None
        self._folder, self._uri = folder, str(about.get("uri", ""))
        text = json.dumps({**about, **this_process()}).encode() if folder else b""
        if not folder or len(text) > _BYTES - _TEXT_AT:
            return
        with contextlib.suppress(OSError):
            name = f"run-{self._name}"
            fd = os.open(f"{folder}/.{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.pwrite(fd, text.ljust(_BYTES - _TEXT_AT), _TEXT_AT)
            self._fd = fd
            self._write()
            self.durable(-1)
            os.rename(f"{folder}/.{name}", f"{folder}/{name}")

    @classmethod
    def begin(cls, **about: Any) -> LifeReport:
        """Report a run that was entered just now."""
        folder = os.environ.get(VARIABLE, "")
        if folder and not (Path(folder) / MODULES).exists():
            with contextlib.suppress(OSError):
                _tell_imports(Path(folder), _environment_changes())
        return cls(folder, about)

    def trains(self, step: int, *, requeue: int, wait_s: float) -> None:
        """Report that steps are counted from here on, and the end of each comes through `stepped`.

        Args:
            step: done so far, which is durable.
            requeue: exit status after a signal.
            wait_s: bound of the waits for a save.
        """
        self._resumed, self._limits, self._state = step, (requeue, int(wait_s * 1000)), _TRAINS
        self._step, self._moment = step, time.monotonic_ns()
        self._write()
        self.durable(step)

    def stepped(self, step: int) -> None:
        """Report the boundary of a step; the same step again is a sign of life within the next one."""
        if not self._folder:
            return
        now = time.monotonic_ns()
        if self._state == _TRAINS and self._step > self._resumed:  # the first step compiles and warms up
            self._longest = max(self._longest, now - self._moment)
        elif step > self._step == self._resumed:
            self._give_back()
            with contextlib.suppress(OSError, ValueError, KeyError):
                told, environment = Path(self._folder, MODULES), _environment_changes()
                if json.loads(told.read_bytes())["environment"] == environment:  # else imports since may have read it
                    _tell_imports(told.parent, environment)  # again: a step imports, too
        self._step, self._moment = step, now
        self._write()

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Report that a save holds the loop, which may take ``wait_s``; it begins when the memory for it is free."""
        was = self._state
        try:
            if was == _TRAINS:
                self._state, self._moment = _WAITS, time.monotonic_ns()
                self._write()
            if self._freeing is not None:
                self._freeing.join()
            yield
        finally:
            if was == _TRAINS and self._state == _WAITS:
                self._state, self._moment = _TRAINS, time.monotonic_ns()
                self._write()

    def leaves(self) -> None:
        """Report that no more steps come: what is left to write and to upload takes as long as it takes."""
        if self._state in (_TRAINS, _WAITS):
            self._state = _ENTERED
            self._write()

    def gives_back(self) -> bool:
        """Tell whether memory that the life before has left is still being given back: no more is taken before."""
        return self._freeing is not None and self._freeing.is_alive()

    def _give_back(self) -> None:
        # All ranks have loaded. The kernel takes 0.15 s for a GiB, which the first step does not wait for.
        if paths := [arena["path"] for arena in kept_arenas(self._uri)]:
            thread = threading.Thread(target=_free, args=(paths,), name="holdfast-free", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread to be had now
                _free(paths)
            else:
                self._freeing = thread

    def durable(self, step: int) -> None:
        """Report that the checkpoint of a step is committed; may be called on another thread."""
        if self._fd < 0 or self._owner != os.getpid():
            return
        self._durable = max(self._durable, step)
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, _DURABLE.pack(self._durable), _FIELDS.size)

    def keeps(self, arenas: Sequence[tuple[int, int]], files: Callable[[], Sequence[tuple[str, str, int]]]) -> None:
        """Name the memory that saves of this run are copied to, so that it may outlive this process.

        Args:
            arenas: (descriptor, bytes) of each arena.
            files: returns (name before the id of a save, name after it, first byte in an arena) of each file.
        """
        if not self._folder or tuple(arenas) == self._arenas or self._owner != os.getpid():
            return
        self._arenas = tuple(arenas)
        about = [{"fd": fd, "size": size, "uri": self._uri, "files": files()} for fd, size in arenas]
        with contextlib.suppress(OSError):
            path = Path(self._folder, f".{self._name}")
            path.write_text(json.dumps({"pid": self._owner, "arenas": about}), encoding="utf-8")
            path.rename(Path(self._folder, f"{ARENAS}{self._name}-{self._num_told}"))
            self._num_told += 1

    def end(self, reason: str = "closed") -> None:
        """Report that the run was left; the first reason counts."""
        if reason == "finished":
            self.keeps([], list)  # no life goes on from there
        if self._state <= _WAITS and self._owner == os.getpid():
            self._state = _ENDS.get(reason, _CLOSED)
            self._write()

    def _write(self) -> None:
        if self._fd < 0 or self._owner != os.getpid():
            return
        fields = (self._state, self._step, self._moment, self._longest, self._resumed)
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, _FIELDS.pack(*fields, *self._limits), 0)


def _free(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)


def _tell_imports(folder: Path, environment: Mapping[str, str | None]) -> None:
    """Name, for a spare interpreter, what is imported of installed packages, and how the environment has changed."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places.add(str(Path(__file__).parents[1]))
    installed = tuple(f"{place}{os.sep}" for place in places)

    def is_installed(module: Any) -> bool:
        try:
            path = getattr(module, "__file__", None)
        except Exception:  # noqa: BLE001 - a module that is made when it is looked at
            return False
        return isinstance(path, str) and path.startswith(installed)

    names = [name for name, module in list(sys.modules.items()) if name != "__main__" and is_installed(module)]
    own = folder / f".{MODULES}-{os.getpid()}"
    told = {"modules": names, "environment": environment, "path": [str(entry) for entry in sys.path]}
    own.write_text(json.dumps(told), encoding="utf-8")
    own.rename(folder / MODULES)


def _environment_changes() -> dict[str, str | None]:
    """Return what this process has changed in its environment, None for what it has removed."""
    entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    began = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    now = dict(os.environ)
    changed = {name: now.get(name) for name in {*began, *now} if began.get(name) != now.get(name)}
    known = {VARIABLE, "TORCHELASTIC_RESTART_COUNT"}
    return {name: value for name, value in changed.items() if name not in known}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a process has last reported of a run.

    Attributes:
        uri: of the run.
        attempt: number of this life in the run.
        rank: of the process.
        pid: of the process.
        trains: steps are counted, and more are to come.
        stopped: the run was left for a signal or a deadline, with all steps saved.
        rolled_back: the run was left by its guard, which had found a bad step: to be started again.
        given_up: the run was left by its guard, and must not be started again.
        waits: a save holds the loop.
        step: steps done; -1 if they are not counted.
        moment_s: `time.monotonic` of the last boundary.
        longest_s: longest time between two boundaries, 0.0 before there were two.
        resumed: step that this life began with, -1 if not known.
        durable: newest step that is durable, as far as the process knows; -1 if none.
        requeue: exit status after a signal, -1 if not known.
        wait_s: bound of a save that holds the loop.
        process: names it and its machine.
    """

    uri: str
    attempt: int
    rank: int
    pid: int
    trains: bool
    stopped: bool
    rolled_back: bool
    given_up: bool
    waits: bool
    step: int
    moment_s: float
    longest_s: float
    resumed: int
    durable: int
    requeue: int
    wait_s: float
    process: Mapping[str, Any]

    @property
    def is_there(self) -> bool:
        """False once its process is gone, which says nothing more: a launcher may have started another in its place."""
        return not is_dead(self.process)


def read_reports(folder: Path) -> list[RunReport]:
    """Return the reports of a life, in the order in which the runs were entered."""
    found = []
    for path in folder.glob("run-*"):
        try:
            data = path.read_bytes()
            about = json.loads(data[_TEXT_AT:])
            state, step, moment, longest, resumed, requeue, wait_ms = _FIELDS.unpack_from(data)
            (durable,) = _DURABLE.unpack_from(data, _FIELDS.size)
            report = RunReport(
                uri=str(about["uri"]), attempt=int(about["attempt"]), rank=int(about["rank"]), pid=int(about["pid"]),
                trains=state in (_TRAINS, _WAITS), stopped=state == _STOPPED, rolled_back=state == _ROLLED_BACK,
                given_up=state == _GIVEN_UP, waits=state == _WAITS, step=step,
                moment_s=moment / 1e9, longest_s=longest / 1e9, resumed=resumed, durable=durable, requeue=requeue,
                wait_s=wait_ms / 1e3, process=about,
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            continue
        found.append((int(path.name.rpartition("-")[2]), report))
    return [report for _, report in sorted(found, key=lambda pair: pair[0])]


def kept_arenas(uri: str | None = None) -> list[dict[str, Any]]:
    """Return the arenas that the life before has left, of one run or of all; [] without a supervisor."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return []
    try:
        return [arena for arena in json.loads(Path(folder, KEPT).read_bytes()) if uri in (None, arena["uri"])]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def kept_bytes(uri: str) -> int:
    """Return how much memory the life before has left for one run, which is given back after the first step."""
    return sum(int(arena["size"]) for arena in kept_arenas(uri))


def deaths_before(uri: str) -> list[dict[str, Any]]:
    """Return what the supervisor says of the ends of earlier lives in this run, as journal events; [] without one."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return []
    try:
        deaths = json.loads(Path(folder, DEATHS).read_bytes())
        return [dict(death["event"]) for death in deaths if death["uri"] == uri]
    except (OSError, ValueError, KeyError, TypeError):
        return []
