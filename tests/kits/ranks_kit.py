"""Ranks of a real gloo group, cheaply: forked from a process that has imported torch.

    with RankServer(preload=["/path/to/cases.py"]) as server:
        outcomes = server.ranks("/path/to/cases.py:train", root, 7, world_size=2)

Each rank is a process with RANK, WORLD_SIZE and the like in its environment, and (unless ``group`` is False) a default
process group that meets in a file of its own. The function takes and returns JSON, as with `ForkServer`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.testing.faults import ForkServer, Outcome, _find

_HERE = str(Path(__file__).resolve())
_LIMIT_S = 150.0  # of what takes seconds where nobody else has the cores


class LastingServer(ForkServer):
    """A `ForkServer` that is replaced when it has died; where writers are forked, those of its cases are, too."""

    def __init__(self, preload: Sequence[str] = (), path: Sequence[str | os.PathLike[str]] = ()) -> None:
        self._given: dict[str, Any] = {"preload": (*preload, "forked_kit"), "path": (os.path.dirname(_HERE), *path)}
        super().__init__(**self._given)

    def run(self, function: str, *args: Any, **options: Any) -> Outcome:
        """See `ForkServer.run`; a server that has died, or was given up, is replaced first."""
        if not self.is_alive:
            self.close()
            super().__init__(**self._given)
        address = getattr(subprocess.Popen, "address", None)  # of `forked_interpreters`
        if address is None:
            return super().run(function, *args, **options)
        timed = {"timeout_s": options.pop("timeout_s")} if "timeout_s" in options else {}
        return super().run("forked_kit:case", address, function, args, options, **timed)

    @property
    def is_alive(self) -> bool:
        """Whether it takes orders."""
        stdin = self._process.stdin
        return self._process.poll() is None and stdin is not None and not stdin.closed


class RankServer(LastingServer):
    """One that has torch, and starts several ranks at once."""

    def __init__(self, preload: Sequence[str] = (), path: Sequence[str | os.PathLike[str]] = ()) -> None:
        first = (
            "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "numpy", "holdfast.core",
            "holdfast.trainers.function.worker.main", "holdfast.trainers.function.worker.session",
        )  # fmt: skip
        super().__init__(preload=(*first, _HERE, *preload), path=path)

    def ranks(
        self,
        function: str,
        *args: Any,
        world_size: int = 2,
        timeout_s: float = _LIMIT_S,
        group: bool = True,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Run ``function(*args, **kwargs)`` on every rank; how each ended, in order of ranks.

        Ranks that are not done after ``timeout_s`` are killed (status -9), and those that are stopped (SIGSTOP) when
        all others are done.
        """
        order = {"function": function, "args": args, "kwargs": kwargs, "world_size": world_size}
        order |= {"timeout_s": timeout_s, "group": group}
        found = self.run(f"{_HERE}:launch", order, timeout_s=timeout_s + 30.0).checked()
        return [Outcome(**one) for one in found]

    def checked(self, function: str, *args: Any, **options: Any) -> list[Any]:
        """As `ranks`, but all must end well; what they returned."""
        return [one.checked() for one in self.ranks(function, *args, **options)]


def launch(order: dict[str, Any]) -> list[dict[str, Any]]:
    """In a child of the server: fork the ranks and wait for them."""
    with tempfile.TemporaryDirectory() as scratch:
        children = {}
        for rank in range(order["world_size"]):
            pid = os.fork()
            if pid == 0:
                _be_rank(order, rank, scratch)
            children[pid] = rank
        deadline = time.monotonic() + order["timeout_s"]
        statuses: dict[int, int] = {}
        stopped: set[int] = set()
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid in children and os.WIFSTOPPED(status):
                stopped.add(pid)
            elif pid in children:
                statuses[children.pop(pid)] = os.waitstatus_to_exitcode(status)
            elif pid == 0:
                if time.monotonic() > deadline or stopped.issuperset(children):
                    for late in children:
                        os.kill(late, signal.SIGKILL)
                    deadline, stopped = float("inf"), set()
                time.sleep(0.005)
        return [_outcome(Path(scratch), rank, statuses[rank]) for rank in range(order["world_size"])]


def _outcome(scratch: Path, rank: int, status: int) -> dict[str, Any]:
    told = (scratch / f"answer-{rank}").read_text() if (scratch / f"answer-{rank}").exists() else ""
    output = (scratch / f"output-{rank}").read_text(errors="replace")[-20_000:]
    return {"status": status, "output": output, **json.loads(told or "{}")}


def _be_rank(order: dict[str, Any], rank: int, scratch: str) -> None:
    status, told = 1, {}
    world_size = str(order["world_size"])
    try:
        output = os.open(f"{scratch}/output-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world_size}
        os.environ |= {"LOCAL_WORLD_SIZE": world_size}
        signal.set_wakeup_fd(-1)
        try:
            if order["group"]:
                import torch

                torch.distributed.init_process_group(
                    "gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=order["world_size"]
                )
            told = {"value": _find(order["function"])(*order["args"], **order["kwargs"])}
            status = 0
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 1
            told = {"value": None}
        except BaseException:
            told = {"error": traceback.format_exc()}
        Path(f"{scratch}/answer-{rank}").write_text(json.dumps(told))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
