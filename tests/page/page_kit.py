"""Runs to draw, made by real training loops, and one browser for all tests."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.run.index import Attempt
from holdfast.run.reports import ReportLog

STORES = Path(__file__).parents[1] / "stores" / "node_modules"
browser_is_here = pytest.mark.skipif(
    shutil.which("node") is None or not (STORES / "@sparticuz").exists(), reason="make test-frameworks installs it"
)
HOSTILE = "</script><script>window.hurt=1</script><img src=x onerror=window.hurt=1>"


def log_rows(storage, rows):
    """Write reports of a first life that nobody had to train."""
    ReportLog(storage, Attempt(attempt=1, start_id="aaaaaaaa"), "f" * 16).write(rows)


def train(root, until, *, die_at=None, keep=None, **metrics):
    """Train up to a step in this process; with ``die_at`` the life ends in an error there, before its save."""
    state = {"w": torch.zeros(8)}
    try:
        with hf.Checkpointer(root, state=state, every="5ba", keep=keep) as ck:
            while ck.global_step < until:
                step = ck.global_step
                state["w"] += 1
                ck.report(loss=1 / (step + 1), **{name: value(step) for name, value in metrics.items()})
                ck.step()
                if step + 1 == die_at:
                    raise InterruptedError("somebody pulled the plug")
    except InterruptedError:
        pass


def killed(root, at):
    """Train in a process of its own that is killed after ``at`` steps; what it saved is durable by then."""
    script = f"""
import os, signal, torch, holdfast as hf
with hf.Checkpointer({str(root)!r}, state={{"w": torch.zeros(8)}}, every="5ba") as ck:
    while True:
        ck.report(loss=1.0)
        ck.step()
        if ck.global_step == {at}:
            ck.wait()
            os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr.decode()


def browse(page, *steps, width=1280, scheme="light"):
    """Open a page in headless Chromium and go through ``steps``; give what the script tells (`browser.mjs`)."""
    # The browser unpacks itself into TMPDIR: two processes of pytest must not do that into one place.
    scratch = STORES / f".chromium-{os.environ.get('PYTEST_XDIST_WORKER', 'one')}"
    scratch.mkdir(exist_ok=True)
    told = {"page": str(page), "steps": list(steps), "width": width, "scheme": scheme}
    done = subprocess.run(
        [shutil.which("node"), str(Path(__file__).with_name("browser.mjs")), json.dumps(told)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "NODE_PATH": str(STORES), "STORES": str(STORES), "TMPDIR": str(scratch)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
