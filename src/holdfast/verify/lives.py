"""Run one life of a training in processes of its own, and kill all of them by SIGKILL where the plan says so.

Or in a fork of an interpreter that has imported torch (`WarmInterpreter`): a fresh one takes seconds until its first
step, a fork a part of one, and many lives are needed to meet a save at its many moments.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from holdfast.config import VERIFY_VARIABLE
from holdfast.errors import ConfigError
from holdfast.run.process import is_zombie
from holdfast.run.python_command import PythonCommand, meant

from .trace import LifePlan, Row

if TYPE_CHECKING:
    from .workplace import OutputWatch

_OTHERS_S = 20.0  # for the other ranks to reach the moment of the kill: they may wait for the first rank
_SHOWN = 4000
_TRACEBACK = "Traceback (most recent call last):"
_GRACE_S = 30.0  # after SIGTERM, until SIGKILL
_START = Path(__file__).parent / "start"
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies: nothing runs on for a verifier that is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def observed_environment(env: Mapping[str, str] | None, *, observed: bool = True) -> dict[str, str]:
    """Return the environment of a life, in which each interpreter loads the observer."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
    if observed:
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(_START), *([path] if path else [])])
    return environment


class LifeFailedError(AssertionError):
    """A life ended by itself, with an error or too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The result of a life.

    Attributes:
        plan: its plan.
        rows: the rows that its processes recorded.
        killed: it was killed as planned; else it ended by itself, without an error.
        output: path of the file with its output.
        seconds: its duration.
        status: its exit status, if it ended by itself.
    """

    plan: LifePlan
    rows: list[Row]
    killed: bool
    output: Path
    seconds: float
    status: int = 0

    def said(self, limit: int = _SHOWN) -> str:
        """Return the end of what it printed."""
        return self.output.read_text(errors="replace").strip()[-limit:]

    def last_line(self) -> str:
        """Return the last line that it printed, after the first one of an error that has several lines."""
        lines = [line for line in self.said().splitlines() if line.strip()] or ["it printed nothing"]
        last = lines[-1].strip()
        if _TRACEBACK in lines:
            after = lines[len(lines) - lines[::-1].index(_TRACEBACK) :]
            error = next((line for line in after if not line[0].isspace()), last)
            return last if error == last else f"{error} ... {last}"
        return last


class Process(Protocol):
    """What a life runs in."""

    def start(self, plan: Path, output: Path) -> int:
        """Start it with its output in the file ``output``; return its process id, which is that of its session."""
        ...

    def wait(self) -> int:
        """Return its exit status; it has ended."""
        ...


class Command:
    """A command, such as ``["python", "train.py"]``.

    Args:
        command: program and arguments.
        env: added to the environment.
        cwd: working directory, default: this one.
        observed: its interpreters load the observer.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        observed: bool = False,
    ) -> None:
        self._observed = observed
        self._command, self._env, self._cwd = [os.fspath(part) for part in command], dict(env or {}), cwd
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, plan: Path, output: Path) -> int:
        """Start the command with its output in the file ``output``; return its process id."""
        environment = observed_environment(self._env, observed=self._observed)
        environment[VERIFY_VARIABLE] = str(plan)
        with open(output, "ab") as file:
            try:
                self._process = subprocess.Popen(
                    self._command, env=environment, cwd=self._cwd, start_new_session=True, stdin=subprocess.DEVNULL,
                    stdout=file, stderr=subprocess.STDOUT, preexec_fn=end_with_parent,  # noqa: PLW1509 - a single call of libc, which takes no lock
                )  # fmt: skip
            except OSError as error:
                why = f"{error.strerror or error}{meant(self._command, '-- ')}"
                raise ConfigError(f"{self._command[0]!r} cannot be started: {why}") from error
        return self._process.pid

    def wait(self) -> int:
        """Return the exit status of the command, which has ended."""
        assert self._process is not None
        return self._process.wait()


class Forked:
    """A function, called in a fork of this process."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._body, self._pid = body, 0

    def start(self, plan: Path, output: Path) -> int:
        """Fork, with the child's output in the file ``output``; return the child's process id."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: see verify_resume
            self._pid = os.fork()
        if self._pid == 0:
            self._child(plan, output)
        return self._pid

    def wait(self) -> int:
        """Return the exit status of the child, which has ended."""
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _child(self, plan: Path, output: Path) -> NoReturn:
        status = 1
        try:
            end_with_parent()
            os.setsid()
            os.environ[VERIFY_VARIABLE] = str(plan)
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(file, 1)
            os.dup2(file, 2)
            # A test runner replaces these by files of its own.
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
            self._body()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except BaseException:  # noqa: BLE001 - a process edge: the parent shows the output
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def run_life(
    target: Process,
    plan: LifePlan,
    *,
    timeout_s: float,
    failure_counts: bool = True,
    watch: OutputWatch | None = None,
) -> Life:
    """Run one life: to its end, or until every rank has come to the planned moment; then all are killed.

    Args:
        target: what to run.
        plan: of this life.
        timeout_s: how long it may take.
        failure_counts: an exit status other than 0 is an error here.
        watch: is told whenever it has something to read.

    Raises:
        LifeFailedError: it ended with an error, or took too long; the message shows its output.
        ConfigError: the command cannot be started.
    """
    folder = Path(plan.trace)
    plan_file, output = folder / f"life-{plan.life}.plan.json", folder / f"life-{plan.life}.output.txt"
    plan.write(plan_file)
    output.touch()  # it may be killed before it has made it
    fifos = (plan.signal, f"{plan.signal}.alive")
    for fifo in fifos:
        os.mkfifo(fifo)
    begun = time.monotonic()
    # The other processes end when nobody holds the second one open any more.
    pipe, alive = (os.open(fifo, os.O_RDWR | os.O_NONBLOCK) for fifo in fifos)
    try:
        pid = target.start(plan_file, output)
        sessions = {pid}
        try:
            came = _until_it_ends(pid, pipe, sessions, begun + timeout_s, watch)
            if came == "due" and watch is not None:
                _kill_at_once(pid, watch)
            elif came == "moment" and plan.gentle:
                _terminate(pid, Path(f"{plan.signal}.go"))
        finally:
            _kill(pid, sessions)
            status = target.wait()
    finally:
        os.close(pipe)
        os.close(alive)
        for fifo in fifos:
            os.unlink(fifo)
    killed = came in ("moment", "due")
    if came == "late":
        raise LifeFailedError(f"the script did not end within {timeout_s:g} s{_said(output)}")
    if failure_counts and not killed and status != 0:
        raise LifeFailedError(f"the script ended with exit status {status}{_said(output)}")
    return Life(
        plan=plan, rows=plan.rows(), killed=killed, output=output, seconds=time.monotonic() - begun, status=status
    )


def _until_it_ends(pid: int, pipe: int, sessions: set[int], deadline: float, notes: OutputWatch | None) -> str:
    """Wait until the process has "ended", all ranks are at the "moment", the kill is "due", or it is too "late"."""
    watch = os.pidfd_open(pid)
    sources = [watch, pipe] if notes is None else [watch, pipe, notes.fileno()]
    waiting: dict[int, int] = {}  # rank -> process
    world, text = 1, b""
    try:
        while len(waiting) < world:
            due = None if notes is None else notes.due
            until = deadline if due is None else min(deadline, due)
            ready, _, _ = select.select(sources, [], [], max(0.0, until - time.monotonic()))
            if notes is not None and notes.fileno() in ready:
                notes.read()
            if pipe in ready:
                text += os.read(pipe, 1 << 16)
                *lines, text = text.split(b"\n")
                for moment in map(json.loads, lines):
                    waiting[moment["rank"]], world = moment["pid"], moment["world_size"]
                    sessions.add(moment["session"])
                    # Other ranks may wait in a collective with this rank: then they are killed where they are.
                    deadline = min(deadline, time.monotonic() + _OTHERS_S)
            elif watch in ready:
                return "ended"
            elif notes is not None and notes.due is not None and time.monotonic() >= notes.due:
                return "due"
            elif not ready and time.monotonic() >= deadline:
                return "moment" if waiting else "late"
        return "moment"
    finally:
        os.close(watch)


def _terminate(pid: int, go: Path) -> None:
    """Send SIGTERM, let the ranks go on from where they wait, and give them time to end by themselves."""
    watch = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGTERM)
        go.touch()
        select.select([watch], [], [], _GRACE_S)
    finally:
        os.close(watch)
        go.unlink()


def _kill_at_once(pid: int, watch: OutputWatch) -> None:
    """Kill a process and all that descends from it, in whichever session: none gets on with its work in between."""
    tree = [pid]
    for one in tree:  # a stopped process starts no other
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGSTOP)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                tree += [int(child) for child in Path(f"/proc/{one}/task/{thread}/children").read_text().split()]
    watch.stopped()
    for one in tree:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def _kill(pid: int, sessions: set[int]) -> None:
    """Kill a process and everything in these sessions. Writer processes have sessions of their own, and go on."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # first the process that could start the others again
    own = os.getsid(0)
    for _ in range(3):  # a process that is being started right now is killed in the next round
        members = [member for member in _members(sessions - {own}) if member != pid]
        for member in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        if not members:
            return
        time.sleep(0.02)


def _members(sessions: set[int]) -> list[int]:
    """Return the ids of the living processes of some sessions."""
    members = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.getsid(pid) in sessions and not is_zombie(pid):
                members.append(pid)
    return members


def _said(output: Path) -> str:
    text = output.read_text(errors="replace").strip()
    if len(text) > _SHOWN:
        text = text[-_SHOWN:].partition("\n")[2] or text[-_SHOWN:]
    return f"; the end of what it printed:\n{textwrap.indent(text, '  ')}" if text else ", and printed nothing"


# ---- forks of a warm interpreter


_PROGRAM = Path(__file__).parent / "warm_server.py"


class WarmInterpreter:
    """An interpreter that forks lives.

    Args:
        command: of the script.
        env: added to the environment.
        cwd: working directory of the command.
    """

    def __init__(self, command: PythonCommand, *, env: Mapping[str, str] | None, cwd: Path) -> None:
        self.environment = observed_environment(env)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command.interpreter, str(_PROGRAM), str(theirs.fileno())], env=self.environment, cwd=cwd,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], preexec_fn=end_with_parent,  # noqa: PLW1509 - a single call of libc
            )  # fmt: skip
        self._channel, self._lines = ours, ours.makefile("r", encoding="utf-8")
        self.ask(prepare=os.fspath(cwd / command.argv[0]))

    def ask(self, **asked: Any) -> int:
        """Have something done, and return the answer.

        Raises:
            ConfigError: the interpreter has ended.
        """
        try:
            self._channel.sendall(json.dumps(asked).encode() + b"\n")
            answer = self._lines.readline()
        except OSError:
            answer = ""
        if not answer:
            raise ConfigError("the interpreter that forks the lives has ended: start each in one of its own (--cold)")
        return int(answer)

    def close(self) -> None:
        """End it; idempotent."""
        self._lines.close()
        self._channel.close()
        self._process.kill()
        self._process.wait()


class WarmLife:
    """A life in a fork of a warm interpreter, in the place of a `Command`."""

    def __init__(self, interpreter: WarmInterpreter, command: PythonCommand, cwd: Path) -> None:
        self._interpreter, self._command, self._cwd = interpreter, command, cwd
        self._pid = 0

    def start(self, plan: Path, output: Path) -> int:
        """Fork it, with its output in the file ``output``; return its process id."""
        environment = {**self._interpreter.environment, VERIFY_VARIABLE: os.fspath(plan)}
        self._pid = self._interpreter.ask(
            cwd=os.fspath(self._cwd), env=environment, output=os.fspath(output), plan=os.fspath(plan),
            argv=self._command.argv,
        )  # fmt: skip
        return self._pid

    def wait(self) -> int:
        """Return its exit status; it has ended."""
        return self._interpreter.ask(wait=self._pid)


def script_command(command: Sequence[str]) -> PythonCommand | None:
    """Return what a command runs, if that is a Python script in an interpreter of its own; else None."""
    python = PythonCommand.parse(command)
    return python if python is not None and not python.is_module and python.argv[0].endswith(".py") else None


def split_command(line: str) -> list[str]:
    """Return the words of a line for a shell.

    Raises:
        ConfigError: a quote has no end.
    """
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"{line!r} is no command for a shell: {error}") from error


def check_script(command: Sequence[str], cwd: Path) -> None:
    """Look whether the script of a command is there, if it is a Python script.

    Raises:
        ConfigError: it is not.
    """
    if (python := script_command(command)) is not None:
        script = python.argv[0]
        if "{run}" not in script and not (cwd / script).is_file():
            raise ConfigError(f"there is no script {script!r} in {cwd.absolute()}")
