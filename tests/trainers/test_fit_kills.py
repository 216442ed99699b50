"""Three workers and kills at random, of workers, writers, the zygote and the driver, until the training is done."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from fit_functions import learn
from fit_kit import LIMIT_S, make
from process_kit import wait_gone
from test_fit_runs import start_script

import holdfast as hf
from holdfast.testing import assert_state_equal

MARK = "HOLDFAST_TEST_RUN"
CONFIG = {"steps": 60, "sleep": 0.05}


def processes(ident: str) -> list[int]:
    """Every process that descends from a driver with this mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={ident}".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def newest(root: Path) -> str:
    return max((path.name for path in (root / "run").glob("checkpoint_*")), default="")


def await_progress(driver: subprocess.Popen[str], root: Path, *, limit_s: float = 10.0) -> None:
    """Wait until training is a checkpoint further on, so that what goes on later has something to go on from."""
    before, until = newest(root), time.monotonic() + limit_s
    while driver.poll() is None and newest(root) == before and time.monotonic() < until:
        time.sleep(0.05)


def kill_until_done(root: Path, seed: int, monkeypatch: pytest.MonkeyPatch, *, budget_s: float = 30.0) -> list[int]:
    """Start the script again and again, and kill something of it; after the budget let it finish.

    Returns how many processes were killed, and how often training went on from a checkpoint.
    """
    ident = uuid.uuid4().hex
    monkeypatch.setenv(MARK, ident)
    chance, kills, resumed, deadline = random.Random(seed), 0, 0, time.monotonic() + budget_s
    while True:
        driver = start_script(root, learn=True, workers=3, failures=-1, **CONFIG)
        while True:
            if chance.random() < 0.6:
                await_progress(driver, root)
            over = time.monotonic() > deadline
            try:
                _, printed = driver.communicate(timeout=LIMIT_S if over else chance.uniform(0.1, 1.5))
                resumed += len(re.findall(r"from checkpoint_\d", printed))
                break
            except subprocess.TimeoutExpired:
                assert not over, f"the driver did not end within {LIMIT_S} s"
            live = processes(ident)
            victim = driver.pid if chance.random() < 0.15 or not live else chance.choice(live)
            try:
                os.kill(victim, signal.SIGKILL)
                kills += 1
            except ProcessLookupError:
                continue
        if driver.returncode == 0:
            break
    for pid in processes(ident):  # writers of killed drivers end by themselves
        assert wait_gone(pid)
    return [kills, resumed]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, optimizer state and every metric are bitwise those of a training that nobody disturbed."""
    calm = make(tmp_path, learn, name="calm", workers=3, train_loop_config=CONFIG).fit()
    kills, resumed = kill_until_done(tmp_path, seed, monkeypatch)
    assert kills > 3
    assert resumed > 0
    killed = hf.Result.from_path(tmp_path / "run")
    assert killed.checkpoint is not None
    assert calm.checkpoint is not None
    assert killed.checkpoint.verify()
    ours, theirs = killed.checkpoint.load(), calm.checkpoint.load()
    assert_state_equal(ours, theirs)
    assert list(killed.metrics_dataframe["loss"]) == list(calm.metrics_dataframe["loss"])
