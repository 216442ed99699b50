"""Two ranks of torchrun, one of which kills itself in the first life; started again by hand, as a scheduler would."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

__all__ = ["run_killed_then_again"]


def run_killed_then_again(script: str, told: dict[str, Any]) -> None:
    """Run a script with ``told`` as JSON twice: the first life ends by SIGKILL of a rank, the second well."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    killed, done = (
        subprocess.run([*launch, json.dumps(told)], capture_output=True, text=True, timeout=200, check=False)
        for _ in range(2)
    )
    assert "exitcode: -9" in killed.stderr
    assert done.returncode == 0, done.stderr
