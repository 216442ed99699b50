"""A command that runs Python, and how its script becomes the main program of an interpreter that has started already.

Interpreters that need not have Holdfast load this file by its path: standard library only.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

_FLAGS = re.compile(r"-[uBOdqsv]+|-[XW].+")  # that an interpreter which is prepared for it can be started with as well


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

        A script is a file of source: not a folder, an archive or compiled code, which Python runs too.

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
        if not rest or rest[0].startswith("-") or not _is_source(rest[0]):
            return None
        return cls(command[:place], rest, is_module=False)


def meant(command: Sequence[str], before: str) -> str:
    """Say what was probably meant by a command that cannot be started.

    Args:
        command: the command.
        before: what comes before it on the line.

    Example:
        >>> meant(["python train.py"], "holdfast run -- ")
        '; it is one word with its quotes: `holdfast run -- python train.py`'
    """
    import shlex

    program = command[0]
    if len(program.split()) > 1 and not os.path.isfile(program):
        if re.search(r"""[|&;<>()$`*?~#'"\n\\]|^\w+=""", program):
            return f"; a line for a shell is run as `{before}bash -c {shlex.quote(program)}`"
        return f"; it is one word with its quotes: `{before}{' '.join([program, *map(shlex.quote, command[1:])])}`"
    is_shell = program.endswith(".sh") or (os.path.isfile(program) and not os.access(program, os.X_OK))
    if interpreter := "python" if program.endswith(".py") else "bash" if is_shell else "":
        return f"; a script is run as `{before}{interpreter} {shlex.join(command)}`"
    return ""


def run_as_main(argv: Sequence[str], *, is_module: bool = False) -> None:
    """Run a script as `python PATH ...` does, or a module as `python -m NAME ...`, in this interpreter.

    The entry of ``sys.path`` that Python sets for the program it was started with is to be gone. An error that ends the
    script goes to its ``sys.excepthook`` without our frames, and then out as `SystemExit`.

    Args:
        argv: the script or the name of the module, and its arguments.
        is_module: it is a module.
    """
    sys.argv = list(argv)
    if (folder := script_folder(argv, is_module=is_module)) is not None:
        sys.path.insert(0, folder)
    try:
        if is_module:
            import runpy

            runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
        else:
            _run_file(sys.argv[0])
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - a process edge
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


def script_folder(argv: Sequence[str], *, is_module: bool) -> str | None:
    """Return the folder that Python puts first on ``sys.path`` for a script or module; None with PYTHONSAFEPATH."""
    if getattr(sys.flags, "safe_path", False):  # of Python 3.11 and later
        return None
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(argv[0]))


def _is_source(path: str) -> bool:
    """Tell whether Python takes this for source: by its name, and by what is in it where it is there."""
    if not os.path.isfile(path):
        return path.endswith(".py") and not os.path.isdir(path)
    from pkgutil import get_importer

    try:
        with open(path, "rb") as file:
            begin = file.read(16)
    except OSError:  # Python itself says why it cannot be read
        return False
    # The head of compiled code has zeros, which source must not have. An archive may begin with a line for the shell.
    return not path.endswith(".pyc") and b"\0" not in begin and get_importer(path) is None


def _run_file(path: str) -> None:
    import builtins
    from importlib.machinery import SourceFileLoader
    from types import ModuleType

    path = os.path.abspath(path)
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __builtins__=builtins, __loader__=loader, __cached__=None)
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)
