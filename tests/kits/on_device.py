"""`on_device`: a test whose body runs in a process that has the late device.

torch prepares its threads for the devices that exist at the first backward of a process, and a backend cannot be taken
out again: so such tests run in one process of their own, which is started once and serves all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import late_device
import pytest

_KITS = Path(__file__).parent
_child: _Child | None = None


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test where ``torch.device("late")`` exists; skip it, with the reason, where that cannot be built."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        global _child
        if (why := late_device.missing()) is not None:
            pytest.skip(why)
        if _child is None or _child.process.poll() is not None:
            _child = _Child()
        failure = _child.call(Path(test.__code__.co_filename), test.__name__, arguments)
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    return run


class _Child:
    def __init__(self) -> None:
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        command = [sys.executable, "-u", str(_KITS / "on_device.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.output, text=True
        )
        atexit.register(self.close)

    def call(self, file: Path, name: str, arguments: dict[str, Any]) -> str | None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        begin = self.output.seek(0, os.SEEK_END)
        self.process.stdin.write(json.dumps([str(file), name, arguments], default=str) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        failure = json.loads(answer) if answer else f"its process ended with {self.process.wait()}"
        if failure is None:
            return None
        self.output.seek(begin)
        return f"{failure}\n{self.output.read()[-8000:]}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        self.process.wait()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a test prints is no answer
    late_device.load()
    for line in sys.stdin:
        file, name, arguments = json.loads(line)
        if file.endswith(".py") and str(Path(file).parent) not in sys.path:
            sys.path.insert(0, str(Path(file).parent))
        if "tmp_path" in arguments:
            arguments["tmp_path"] = Path(arguments["tmp_path"])
        failure = None
        try:
            getattr(importlib.import_module(Path(file).stem), name).__wrapped__(**arguments)
        except BaseException:  # the edge of the process: the test that called fails with it
            failure = traceback.format_exc()
        print(json.dumps(failure), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
