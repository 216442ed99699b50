"""Which functions a saved step, a save and a load pass, in the process that trains and in the one that writes."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

__all__ = ["PATHS", "loaded", "measure", "passed", "record"]

PATHS = ("step to commit", "save", "load")

_Function = tuple[str, str, int]  # file, name, first line
_TIMEOUT_S = 300
_README = "## Your own loop"


def measure(tree: Path) -> dict[str, int]:
    """Run the three in processes of their own with the sources of a checkout, and return the figures by name."""
    figures: dict[str, int] = {}
    for name in PATHS:
        found = passed(tree, name)
        files = {file for file, _, _ in found}
        figures[f"{name}: functions"] = len(found)
        figures[f"{name}: modules"] = len(files)
        figures[f"{name}: lines of these modules"] = sum(_lines(file) for file in files)
    figures["lines loaded by the README's own loop"] = sum(loaded(tree).values())
    return figures


def loaded(tree: Path) -> dict[str, int]:
    """Run the README's own loop; return the lines of each module that it has loaded at its end, by file."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "readme"
        _run(tree, home, "-c", _example(tree))
        files = json.loads((home / "loaded.json").read_text(encoding="utf-8"))
    return {file: _lines(file) for file in files}


def passed(tree: Path, name: str) -> dict[_Function, set[_Function]]:
    """Run one of `PATHS`; return the functions that were called in any of its processes, each with its callers.

    Callers outside Holdfast count too: the main program, a thread, a library that calls back.
    """
    found: dict[_Function, set[_Function]] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "run"
        _run(tree, home, "-m", __name__, name)
        for one in home.glob("passed-*.json"):
            for function, callers in json.loads(one.read_text(encoding="utf-8")):
                found.setdefault(tuple(function), set()).update(map(tuple, callers))
    return found


def _run(tree: Path, home: Path, *command: str) -> None:
    home.mkdir()
    path = os.pathsep.join([str(tree / "src"), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=home, env=environment, timeout=_TIMEOUT_S, capture_output=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} {command[-1][:40]!r} failed: {done.stderr.decode()[-3000:]}")


def _example(tree: Path) -> str:
    text = (tree / "README.md").read_text(encoding="utf-8").partition(_README)[2]
    block = text.partition("```python\n")[2].partition("```")[0]
    return f"""{block}
import json, sys
files = [getattr(module, "__file__", None) for name, module in sys.modules.items() if name.split(".")[0] == "holdfast"]
json.dump([file for file in files if file], open("loaded.json", "w"))
"""


def _lines(file: str) -> int:
    return len(Path(file).read_text(encoding="utf-8").splitlines())


def record(home: str) -> Callable[[], None]:
    """Note which functions of Holdfast are called in all threads of this process while the byte in a file is 1.

    Returns:
        A function that writes them down.
    """
    with open(Path(home) / "switch", "r+b") as file:
        switch = mmap.mmap(file.fileno(), 1)
    calls: set[tuple[Any, Any]] = set()  # (code, code of the caller): short, as this runs at every call

    def called(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and switch[0]:
            calls.add((frame.f_code, frame.f_back and frame.f_back.f_code))

    threading.setprofile(called)
    sys.setprofile(called)

    def write() -> None:
        inside = f"{os.sep}holdfast{os.sep}"
        # Comprehensions count too, as they did when the goals were set (Python 3.11; from 3.12 on fewer have a frame).
        found: dict[_Function, list[_Function]] = {}
        for code, caller in calls:
            if inside in code.co_filename:
                found.setdefault(_function(code), []).append(_function(caller) if caller else ("", "a thread", 0))
        text = json.dumps(sorted(found.items()))
        (Path(home) / f"passed-{os.getpid()}.json").write_text(text, encoding="utf-8")

    return write


def _function(code: CodeType) -> _Function:
    return code.co_filename, code.co_name, code.co_firstlineno


def _record_writer(home: str) -> None:
    """Begin in a writer process, which ends by `os._exit`."""
    write, end = record(home), os._exit

    def written(status: int) -> None:
        write()
        end(status)

    os._exit = written  # type: ignore[assignment]


def _main(name: str) -> None:
    home = os.getcwd()
    (Path(home) / "switch").write_bytes(b"\0")
    try:
        from holdfast.writer import launch
    except ImportError:  # a newer checkout
        from holdfast.writer import conversation as launch

    own = f"sys.path.append({str(Path(__file__).parents[2])!r});from benchmarks.house.passed import _record_writer;"
    launch._BOOT = launch._BOOT.replace("from holdfast", f"{own}_record_writer({home!r});from holdfast", 1)
    write = record(home)
    with open(Path(home) / "switch", "r+b") as file:
        switch = mmap.mmap(file.fileno(), 1)
    import torch

    import holdfast

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}

    def measured(call: Callable[[], object]) -> None:
        switch[0] = 1
        call()
        switch[0] = 0

    if name == "step to commit":
        with holdfast.Checkpointer("run", state, every=1) as ck:
            ck.step()
            ck.wait()
            measured(lambda: (ck.step(), ck.wait()))
    else:
        holdfast.save("before", state)
        holdfast.load("before", state)
        measured(lambda: holdfast.save("one", state) if name == "save" else holdfast.load("before", state))
    write()


if __name__ == "__main__":
    _main(sys.argv[1])
