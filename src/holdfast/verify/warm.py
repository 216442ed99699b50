"""Start the lives of a Python script as forks of one interpreter that has imported torch.

A fresh interpreter takes seconds until its first step; a fork of a warm one takes a part of one, and many lives are
needed to meet a save at its many moments.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.config import VERIFY_VARIABLE
from holdfast.errors import ConfigError
from holdfast.run.python_command import PythonCommand

from .lives import end_with_parent, observed_environment

__all__ = ["WarmInterpreter", "WarmLife", "check_script", "script_command"]

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


def check_script(command: Sequence[str], cwd: Path) -> None:
    """Look whether the script of a command is there, if it is a Python script.

    Raises:
        ConfigError: it is not.
    """
    if (python := script_command(command)) is not None:
        script = python.argv[0]
        if "{run}" not in script and not (cwd / script).is_file():
            raise ConfigError(f"there is no script {script!r} in {cwd.absolute()}")
