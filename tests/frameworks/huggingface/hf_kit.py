"""Processes and servers for the tests of Transformers and Accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast.run.catalog import Catalog
from holdfast.storage import resolve

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests" / "storage"))
from object_kit import s3_environment  # noqa: E402

KILLED = 9


def run_script(name: str, told: dict[str, Any], *, ranks: int = 1, endpoint: str | None = None) -> int:
    """Run a script of this folder to its end, with torchrun if there are several ranks; returns its exit status.

    Raises:
        AssertionError: it neither ended well nor was killed.
    """
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launch, str(Path(__file__).with_name(name)), json.dumps(told)],
        env={
            **os.environ, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "kits")]),
            **(s3_environment(endpoint) if endpoint else {}),
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )  # fmt: skip
    killed = done.returncode == -KILLED or (ranks > 1 and "Signal 9 (SIGKILL)" in done.stderr)
    assert done.returncode == 0 or killed, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.returncode


def leave_at_once() -> None:
    """End a rank whose work is done: a thread of gloo that frees a tensor while Python ends aborts it, or hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def checkpoints(uri: str) -> list[hf.Checkpoint]:
    """The committed checkpoints of a run."""
    return [hf.Checkpoint.at(resolve(uri), record.name) for record in Catalog(resolve(uri)).records()]


def result(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found
