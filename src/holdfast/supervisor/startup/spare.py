"""A spare interpreter: imports what the life before had imported, waits, and becomes the next life.

It runs as a program, with the descriptor of a pipe as its argument. The first line on it says what to import, the
second one begins the life. It is never forked from: what it becomes is a process as the command itself would start.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import sys
from importlib.machinery import PathFinder
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))


def changes(before: dict[str, str]) -> dict[str, str | None]:
    """Return how the environment differs from what it was."""
    now = dict(os.environ)
    return {name: now.get(name) for name in {*before, *now} if before.get(name) != now.get(name)}


def flush() -> None:
    """Write what Python and C have in the buffers of their output."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, or one that an import has closed
            stream.flush()  # type: ignore[union-attr]
    ctypes.CDLL(None).fflush(None)


def shadowed(folders: list[str], planned: set[str]) -> list[str]:
    """Return the modules here that a new interpreter takes from the script's folders, which are not on the path yet."""
    found = []
    for name, module in list(sys.modules.items()):
        if name in planned or name == "__main__" or "." in name:
            continue
        if getattr(getattr(module, "__spec__", None), "origin", None) in ("built-in", "frozen"):  # before any folder
            continue
        spec = PathFinder.find_spec(name, folders)
        if spec is not None and spec.loader is not None:  # None: a folder that is no package comes last
            found.append(name)
    return sorted(found)


def prepare(plan: dict[str, Any], folder: str | None) -> str:
    """Import modules without a word; return why this interpreter does not fit, "" if it does.

    Args:
        plan: "modules" to import, how the script has changed its "environment", and what became of its "path".
        folder: where the script finds its own modules, before all others.
    """
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
        flush()
        for fd, own in zip((1, 2), said, strict=True):
            os.dup2(own, fd)
            os.close(own)
        os.close(nothing)
    made, expected = changes(before), plan["environment"]
    differ = sorted(name for name in {*made, *expected} if made.get(name) != expected.get(name))
    if differ:
        return f"the script changes its environment ({', '.join(differ)}), which imports may read"
    # Not taken out of `sys.modules`: the packages that have imported them would hold the wrong ones all the same.
    folders = [*filter(None, [folder]), *(entry for entry in plan["path"] if entry not in sys.path)]
    names = shadowed(folders, set(plan["modules"]))
    return f"modules beside the script have the names of installed ones ({', '.join(names)})" if names else ""


def main() -> None:
    """Get ready, wait, become the life."""
    # Our folder is not there with PYTHONSAFEPATH. What we need of the package is loaded by its path.
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    python = runpy.run_path(os.path.join(_PACKAGE, "run", "python_command.py"))
    with os.fdopen(int(sys.argv[1]), "r", encoding="utf-8") as pipe:
        plan = json.loads(pipe.readline())
        why = prepare(plan, python["script_folder"](plan["argv"], is_module=plan["is_module"]))
        if why:
            with open(f"{plan['refusal']}.new", "w", encoding="utf-8") as file:
                file.write(why)
            os.replace(f"{plan['refusal']}.new", plan["refusal"])
            raise SystemExit(1)  # 0 would be a life that is done
        line = pipe.readline()
    if not line:
        return  # the supervisor needs no further life
    os.environ.update(json.loads(line))
    report_to = runpy.run_path(os.path.join(_HERE, "sitecustomize.py"), run_name="spare")["report_to"]
    report_to(os.environ["HOLDFAST_LIFE"])
    python["run_as_main"](plan["argv"], is_module=plan["is_module"])


if __name__ == "__main__":
    main()
