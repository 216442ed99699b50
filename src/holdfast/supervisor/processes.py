"""The processes of one life, and the spare that may be the next: in process groups of their own, ended whole."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.run.life import VARIABLE, read_reports
from holdfast.run.process import is_running, is_zombie
from holdfast.run.python_command import PythonCommand, meant

_STARTUP = Path(__file__).with_name("startup")
_STACKS = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None  # registered by the start file
_STACKS_S = 2.0  # for the stacks of one process
_MOST_STACKS = 16
_GONE_S = 30.0  # for what is killed to be gone: a driver may hold it in the kernel
_PDEATHSIG = 1  # of prctl(2)


class LifeProcesses:
    """Starts the processes of a life, one for each rank, and ends whatever is left of them.

    Args:
        command: program and arguments.
        folder: where the processes report.
        num_ranks: processes to start with the environment of torchrun; None: one, with the environment as it is.
        more: variables for the environment.
        spare: an interpreter that becomes the life, if it is still there.

    Attributes:
        statuses: of the processes that have ended, by rank, as `subprocess` gives them.

    Raises:
        ConfigError: the command cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        num_ranks: int | None,
        more: Mapping[str, str],
        spare: Spare | None = None,
    ) -> None:
        self._folder, self._command = folder, command
        self.statuses: dict[int, int] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        if spare is not None and (process := spare.begin({**more, VARIABLE: str(folder)})) is not None:
            self._processes.append(process)
            return
        port = "" if num_ranks is None else str(_free_port())
        for rank in range(num_ranks or 1):
            ranked = {} if num_ranks is None else _of_torchrun(rank, num_ranks, port)
            environment = {**_environment(), **ranked, **more, VARIABLE: str(folder)}
            try:
                process = subprocess.Popen(
                    command, env=environment, stdin=_stdin(),
                    preexec_fn=_prepare_child(),  # noqa: PLW1509 - this process has no threads
                )  # fmt: skip
            except OSError as error:
                self.end()
                self.reap()
                raise ConfigError(
                    f"{command[0]!r} cannot be started: {error.strerror or error}{meant(command, 'holdfast run -- ')}"
                ) from error
            self._processes.append(process)

    def poll(self, *, waits: bool = False) -> bool:
        """Take in what has ended; True when all processes have.

        They are looked at and not reaped: the writer of a dead trainer reads from the kernel how it has ended.
        """
        for rank, process in enumerate(self._processes):
            if rank not in self.statuses and (status := _status_of(process, waits=waits)) is not None:
                self.statuses[rank] = status
        return len(self.statuses) == len(self._processes)

    def send(self, number: int, also: Sequence[int] = ()) -> None:
        """Send a signal to the processes that we started, and to ``also``, scripts below them.

        Where a shell is between us and the script, SIGINT goes to its process group, as from a terminal: a shell passes
        none on, and waits for the script.
        """
        scripts = self._reported() if number == signal.SIGINT else self.pids
        for pid in self.pids:
            _kill(pid if pid in scripts else -pid, number)
        self.send_below(number, also)

    def send_below(self, number: int, pids: Sequence[int]) -> None:
        """Send a signal to scripts below what we started, except where the signal to its group has reached them."""
        for pid in pids:
            if number != signal.SIGINT or _group_of(pid) not in self.pids:
                _kill(pid, number)

    def send_all(self, number: int) -> None:
        """Send a signal to all processes of this life: what we started, its children, and the ranks of a launcher."""
        for target in self._targets():
            _kill(target, number)

    @property
    def pids(self) -> list[int]:
        """The processes that we have started."""
        return [process.pid for process in self._processes]

    @property
    def kill_line(self) -> str:
        """The line for a shell that ends all processes of this life."""
        return f"kill -KILL -- {' '.join(map(str, self._targets()))}"

    def _reported(self) -> list[int]:
        """Return the processes that have entered a run and are still there."""
        return [report.pid for report in read_reports(self._folder) if is_running(report.process)]

    def _targets(self) -> list[int]:
        """Name all processes of this life for kill(2): the process groups, as negative numbers, and single processes.

        torchrun and srun give their ranks sessions, so groups, of their own, which outlive a launcher that is killed.
        """
        ours = self.pids
        theirs = {pid for pid in self._reported() if _group_of(pid) not in ours}
        return [*(-pid for pid in ours), *sorted(-pid if _group_of(pid) == pid else pid for pid in theirs)]

    def are_alive(self, pids: Sequence[int]) -> list[int]:
        """Return those that still run and belong to this life, with the children of what does."""
        reported = self._reported()
        groups = {*self.pids, *(pid for pid in reported if _group_of(pid) == pid)}
        # Without /proc nobody sees that a process which is not reaped has ended: of our own we know it.
        ended = {self._processes[rank].pid for rank in self.statuses}
        ours = [pid for pid in pids if _group_of(pid) in groups or pid in reported]
        return [pid for pid in ours if pid not in ended and not is_zombie(pid)]

    def stacks(self) -> str:
        """Have every Python process of this life write the stacks of its threads, and return them."""
        if _STACKS is None:
            return ""
        texts = []
        for path in sorted(self._folder.glob("stacks-*"), key=lambda path: path.stat().st_mtime)[:_MOST_STACKS]:
            pid = int(path.name.rpartition("-")[2])
            if not self.are_alive([pid]):
                continue
            before = path.stat().st_size
            with contextlib.suppress(OSError):
                os.kill(pid, _STACKS)
            if text := _grown(path, before):
                is_first = pid in self.pids  # a spare shows its own command line
                command = shlex.join(self._command) if is_first else _command_of(pid)
                texts.append(f"process {pid} ({command}):\n{text}")
        return "\n".join(texts)

    def end(self) -> list[int]:
        """Kill what is left: data loader workers, ranks that wait for a dead one; return what could not be ended.

        What a command that has ended with 0 has left in other process groups may be meant to stay.
        """
        is_done = len(self.statuses) == len(self._processes) and not any(self.statuses.values())
        ranks = [] if is_done else self._reported()
        for target in [-pid for pid in self.pids] if is_done else self._targets():
            _kill(target, signal.SIGKILL)
        self.poll(waits=True)
        until = time.monotonic() + _GONE_S
        while (left := self.are_alive(ranks)) and time.monotonic() < until:
            time.sleep(0.02)
        return left

    def reap(self) -> None:
        """Let the kernel forget the processes, which have ended."""
        for process in self._processes:
            process.wait()


class Spare:
    """An interpreter that gets ready to be the next life.

    Args:
        command: what it will run.
        told: `MODULES` of the life that runs now.
        home: folder of the supervisor.
    """

    def __init__(self, command: PythonCommand, told: Path, home: Path) -> None:
        self._refusal, self._has_begun = home / "refusal", False
        ours, self._pipe = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*command.interpreter, str(_STARTUP / "spare.py"), str(ours)], env=_environment(), stdin=_stdin(),
                pass_fds=[ours], preexec_fn=_prepare_child(),  # noqa: PLW1509 - this process has no threads
            )  # fmt: skip
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(ours)
        about = json.loads(told.read_bytes())
        self._send({**about, "refusal": str(self._refusal), "argv": command.argv, "is_module": command.is_module})

    def begin(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Have it become a life, with these variables added; None if it has ended."""
        if self.process.poll() is not None or self.refusal():  # one that refuses takes a moment to end
            self.close()
            return None
        self._send(environment)
        os.close(self._pipe)
        self._pipe, self._has_begun = -1, True
        return self.process

    def refusal(self) -> str:
        """Return why it does not become a life; "" while it may."""
        with contextlib.suppress(OSError):
            if why := self._refusal.read_text(encoding="utf-8"):
                return why
        return "" if self.process.poll() is None else f"it ended with status {self.process.returncode}"

    def has_refused(self) -> bool:
        """Tell whether it was to begin, and has said then why it does not become a life."""
        return self._has_begun and self._refusal.exists()

    def close(self) -> None:
        """End it, if it is no life yet; idempotent."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _send(self, document: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            data = json.dumps(document).encode() + b"\n"
            while data:
                data = data[os.write(self._pipe, data) :]


def first_error(folder: Path, pids: Collection[int] | None) -> dict[str, Any] | None:
    """Return the exception that has ended one of these processes of a life first, None if none was noted.

    Args:
        folder: where the processes report.
        pids: of the processes; None: all.
    """
    found = []
    for path in folder.glob("error-*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if pids is not None and int(path.name.rpartition("-")[2]) not in pids:
                continue
            about = json.loads(path.read_bytes())
            found.append((float(about["time"]), about))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def describe_status(status: int) -> str:
    """Say how a process has ended, for people."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def shell_status(status: int) -> int:
    """Return an exit status as a shell gives it: 128 and the number of the signal."""
    return status if status >= 0 else 128 - status


def _environment() -> dict[str, str]:
    """Return the environment of a life: ours, with the folder of the start file, without a life that we are part of."""
    paths = [str(_STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return {**ours, "PYTHONPATH": os.pathsep.join(paths)}


def _of_torchrun(rank: int, num_ranks: int, port: str) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    both = [dict.fromkeys(keys, str(value)) for keys, value in zip(names, (rank, num_ranks), strict=True)]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    if num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        given["OMP_NUM_THREADS"] = "1"  # as torchrun does
    return {**both[0], **both[1], **given}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stdin() -> int | None:
    """Return the standard input of a life: ours, unless it is a terminal."""
    # A process group in the background that reads from a terminal is stopped for ever.
    return subprocess.DEVNULL if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty() else None


def _prepare_child() -> Callable[[], None]:
    """Return what a child does before its program begins.

    It gets a process group of its own, and asks for SIGTERM, a request to stop, should we be killed.
    """
    import ctypes

    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def prepare() -> None:
        os.setpgid(0, 0)
        if prctl is not None:
            prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    return prepare


def _status_of(process: subprocess.Popen[bytes], *, waits: bool) -> int | None:
    """Return how a process has ended, as `subprocess` gives it, without reaping it; None while it runs."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13, which has no other way than to reap
        return process.wait() if waits else process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | (0 if waits else os.WNOHANG))
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _kill(target: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(target, number)


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return -1


def _grown(path: Path, before: int) -> str:
    """Return what is appended to a file, once it has stopped growing."""
    until, size = time.monotonic() + _STACKS_S, before
    while time.monotonic() < until:
        time.sleep(0.05)
        now = path.stat().st_size
        if now == size and now > before:
            break
        size = now
    with path.open("rb") as file:
        file.seek(before)
        return file.read(64 << 10).decode(errors="replace")


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "python"
    return b" ".join(words[:4]).decode(errors="replace").strip()
