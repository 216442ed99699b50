"""What it costs to begin: `import holdfast`, the writer process, the command line."""

from __future__ import annotations

import subprocess
import sys
import time

from holdfast.storage.local.local_storage import LocalStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.conversation import launch_process

from .bench import Context, Goal, Outcome, remove, timed

__all__ = ["run"]

_CODE = {
    "interpreter": "pass",
    "import holdfast": "import holdfast, sys; assert 'torch' not in sys.modules",
    "import holdfast.Checkpointer": "from holdfast import Checkpointer",
    "import torch": "import torch",
}


def run(context: Context) -> Outcome:
    """Start each several times in new processes."""
    outcome = Outcome()
    for turn in range(context.repeat + 1):
        for name, code in _CODE.items():
            if not context.quick or name in ("interpreter", "import holdfast"):
                _note(outcome, name, timed(_python, "-c", code), first=not turn)
        _note(outcome, "holdfast --version", timed(_python, "-m", "holdfast.cli.main", "--version"), first=not turn)
        _note(outcome, "writer process alone", _writer(), first=not turn)
        _note(outcome, "writer ready, first probe done", _first_probe(context), first=not turn)
    base = outcome.median("interpreter", "ms")
    for name, bound in (("import holdfast", None), ("holdfast --version", 1000.0)):
        value = outcome.median(name, "ms") - (base if name.startswith("import") else 0)
        outcome.goals.append(Goal(what=name, value=value, unit="ms", at_most=bound))
    for name in ("writer process alone", "writer ready, first probe done"):
        outcome.goals.append(Goal(what=name, value=outcome.median(name, "ms"), unit="ms"))
    if not context.quick:
        value = outcome.median("import holdfast.Checkpointer", "ms") - outcome.median("import torch", "ms")
        outcome.goals.append(Goal(what="import of Checkpointer beyond import of torch", value=value, unit="ms"))
    return outcome


def _note(outcome: Outcome, name: str, seconds: float, *, first: bool) -> None:
    outcome.add(name, first=first, ms=seconds * 1000)


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def _writer() -> float:
    """Start the writer and let it end at once: it has to be up to see that nobody talks to it."""
    start = time.perf_counter()
    channel, process = launch_process()
    channel.close()
    process.wait()
    return time.perf_counter() - start


def _first_probe(context: Context) -> float:
    """Start a writer through its client and let it send a small checkpoint through the whole commit."""
    root = context.folder("startup")
    root.mkdir(parents=True)
    storage = LocalStorage(root)
    start = time.perf_counter()
    with WriterClient.start(storage) as client:
        client.probe(storage, directory=".hf-probe-0badcafe-0").result()
        seconds = time.perf_counter() - start
    remove(root)
    return seconds
