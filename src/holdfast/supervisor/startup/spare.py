"""A spare interpreter: imports what the life before had imported, waits, and becomes the next life.

It runs as a program, with the descriptor of a pipe as its argument. The first line on it says what to import, the
second one begins the life. It is never forked from: what it becomes is a process as the command itself would start.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import ModuleType
from typing import Any


def changes(before: dict[str, str]) -> dict[str, str | None]:
    """Return how the environment differs from what it was."""
    now = dict(os.environ)
    return {name: now.get(name) for name in {*before, *now} if before.get(name) != now.get(name)}


def prepare(plan: dict[str, Any]) -> str:
    """Import modules without a word; return why this interpreter does not fit, "" if it does."""
    before, said = dict(os.environ), (os.dup(1), os.dup(2))
    nothing = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nothing, fd)
    try:
        for name in plan["modules"]:
            if name not in sys.modules:
                try:
                    importlib.import_module(name)
                except Exception:  # noqa: BLE001 - it was imported under other conditions; the script will do it
                    continue
    finally:
        for fd, own in zip((1, 2), said, strict=True):
            os.dup2(own, fd)
            os.close(own)
        os.close(nothing)
    made, expected = changes(before), plan["environment"]
    differ = sorted(name for name in {*made, *expected} if made.get(name) != expected.get(name))
    return f"the script changes its environment ({', '.join(differ)}), which imports may read" if differ else ""


def run_file(path: str) -> None:
    """Run a script as `python PATH` does."""
    from importlib.machinery import SourceFileLoader

    path = os.path.abspath(path)
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __loader__=loader, __cached__=None)
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def run_module(name: str) -> None:
    """Run a module as `python -m NAME` does."""
    import runpy

    sys.path[0] = os.getcwd()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def main() -> None:
    """Get ready, wait, become the life."""
    with os.fdopen(int(sys.argv[1]), "r", encoding="utf-8") as pipe:
        plan = json.loads(pipe.readline())
        why = prepare(plan)
        if why:
            with open(plan["refusal"], "w", encoding="utf-8") as file:
                file.write(why)
            return
        line = pipe.readline()
    if not line:
        return  # the supervisor needs no further life
    os.environ.update(json.loads(line))
    from _holdfast_life import report_to  # type: ignore[import-not-found]

    report_to(os.environ["HOLDFAST_LIFE"])
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[1:] = [entry for entry in sys.path[1:] if entry != here]
    target, sys.argv = plan["argv"][0], plan["argv"]
    try:
        run_module(target) if plan["is_module"] else run_file(target)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - the traceback without our frames
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
