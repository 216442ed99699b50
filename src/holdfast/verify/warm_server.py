"""A warm interpreter: imports what a script imports at its top, and forks each life of the script.

It runs as a program of the script's own interpreter, with the descriptor of a socket as its argument, and needs no
Holdfast there: standard library only. It computes nothing before a fork, so no pool of threads is lost in one.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_HERE = os.path.dirname(os.path.abspath(__file__))
_ALWAYS = ("torch", "torch._dynamo")  # the first step of an optimizer imports the second one, for seconds


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare(script: str) -> None:
    """Import what a script imports at its top, but for modules that lie beside it; errors come again in the lives."""
    try:
        with open(script, "rb") as file:
            body = ast.parse(file.read(), script).body
    except (OSError, SyntaxError):
        return
    wanted: list[tuple[str, tuple[str, ...]]] = []
    for node in body:
        if isinstance(node, ast.Import):
            wanted += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted.append((node.module, tuple(alias.name for alias in node.names)))
    beside = {name.partition(".")[0] for name in os.listdir(os.path.dirname(os.path.abspath(script)))}
    # Nothing is imported ahead for a script that does not use torch.
    ahead = [(name, ()) for name in _ALWAYS if any(one.partition(".")[0] == "torch" for one, _ in wanted)]
    for name, attributes in [*ahead, *wanted]:
        if name.partition(".")[0] in beside:
            continue
        try:
            module = importlib.import_module(name)
            for attribute in attributes:
                getattr(module, attribute)  # packages that import on use
        except Exception:  # noqa: BLE001 - an edge: the script will see it
            continue
    # What is there now is nobody's model: the observer need not look through it, and no collection touches its pages.
    gc.collect()
    gc.freeze()


def load(name: str, path: str) -> Any:
    """Load a file of our package as a module of this name; no package of ours need be there to be imported."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(_HERE), path))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def become(life: dict[str, Any]) -> None:
    """Become a life: run the script in this process, a fork."""
    end_with_parent()
    os.setsid()
    os.chdir(life["cwd"])
    os.environ.clear()
    os.environ.update(life["env"])
    output = os.open(life["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, fd)
    os.close(nothing)
    os.close(output)
    load("_holdfast_observer", "verify/observer.py").start(life["plan"])
    load("_holdfast_python_command", "run/python_command.py").run_as_main(life["argv"])


def main() -> None:
    """Get ready, and fork a life whenever one is asked for."""
    if not getattr(sys.flags, "safe_path", False):  # of Python 3.11 and later
        del sys.path[0]  # this folder
    end_with_parent()
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel, channel.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            asked = json.loads(line)
            if "prepare" in asked:
                prepare(asked["prepare"])
                answer = 0
            elif "wait" in asked:
                answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
            else:
                answer = os.fork()
                if answer == 0:
                    break
            channel.sendall(json.dumps(answer).encode() + b"\n")
        else:
            return
    become(asked)


if __name__ == "__main__":
    main()
