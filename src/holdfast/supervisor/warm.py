"""The spare interpreter of a supervisor: when there is one, what it gets, and how it becomes a life."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holdfast.run.life import MODULES

__all__ = ["PythonCommand", "Spare"]

_PROGRAM = Path(__file__).parent / "startup" / "spare.py"
_FLAGS = re.compile(r"-[uBOdqsv]+|-[XW].+")  # that a spare can be started with as well


class PythonCommand:
    """A command that runs a Python script or module in an interpreter of its own.

    Attributes:
        interpreter: the program and its options.
        argv: the script or module, and its arguments.
        is_module: it is run by ``-m``.
    """

    def __init__(self, interpreter: Sequence[str], argv: Sequence[str], *, is_module: bool) -> None:
        self.interpreter, self.argv, self.is_module = list(interpreter), list(argv), is_module

    @classmethod
    def parse(cls, command: Sequence[str]) -> PythonCommand | None:
        """Recognize ``python [-u ...] SCRIPT ...`` and ``python -m MODULE ...``; None for anything else.

        Example:
            >>> PythonCommand.parse(["python3", "-u", "train.py", "--lr", "1"]).argv
            ['train.py', '--lr', '1']
            >>> PythonCommand.parse(["torchrun", "train.py"]) is None
            True
        """
        if not re.fullmatch(r"python(\d+(\.\d+)?)?", os.path.basename(command[0])):
            return None
        place = 1
        while place < len(command) and _FLAGS.fullmatch(command[place]):
            place += 1
        rest = list(command[place:])
        if rest[:1] == ["-m"] and len(rest) > 1:
            return cls(command[:place], rest[1:], is_module=True)
        if not rest or rest[0].startswith("-"):
            return None
        return cls(command[:place], rest, is_module=False)


class Spare:
    """An interpreter that gets ready to be the next life.

    Args:
        command: what it will run.
        told: `MODULES` of the life that runs now.
        home: folder of the supervisor.
        environment: of a life, without what differs between lives.
        prepare: called in the child before the interpreter begins.
        stdin: as of a life.
    """

    def __init__(
        self,
        command: PythonCommand,
        told: Path,
        home: Path,
        *,
        environment: Mapping[str, str],
        prepare: Callable[[], None],
        stdin: int | None,
    ) -> None:
        self._refusal = home / "refusal"
        ours, self._pipe = os.pipe()
        self.process = subprocess.Popen(
            [*command.interpreter, str(_PROGRAM), str(ours)], env=environment, stdin=stdin, pass_fds=[ours],
            preexec_fn=prepare,  # noqa: PLW1509 - the supervisor has no threads
        )  # fmt: skip
        os.close(ours)
        about = json.loads(told.read_bytes())
        self._send({**about, "refusal": str(self._refusal), "argv": command.argv, "is_module": command.is_module})

    def begin(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Have it become a life, with these variables added; None if it has ended."""
        if self.process.poll() is not None:
            self.close()
            return None
        self._send(environment)
        os.close(self._pipe)
        self._pipe = -1
        return self.process

    def refusal(self) -> str:
        """Return why it has ended by itself; "" while it lives."""
        if self.process.poll() is None:
            return ""
        with contextlib.suppress(OSError):
            return self._refusal.read_text(encoding="utf-8")
        return f"it ended with status {self.process.returncode}"

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


def is_told(folder: Path) -> Path | None:
    """Return the file in which a life names what it has imported, None before it has entered a run."""
    path = folder / MODULES
    return path if path.exists() else None
