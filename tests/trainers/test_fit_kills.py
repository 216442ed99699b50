"""Three workers and kills at random, of workers, writers, the zygote and the driver, until the training is done."""

from __future__ import annotations

import os
import random
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
CONFIG = {"steps": 30, "sleep": 0.03}


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


def kill_until_done(root: Path, seed: int, monkeypatch: pytest.MonkeyPatch, *, budget_s: float = 30.0) -> int:
    """Start the script again and again, kill something every second or so; after the budget let it finish."""
    ident = uuid.uuid4().hex
    monkeypatch.setenv(MARK, ident)
    chance, kills, deadline = random.Random(seed), 0, time.monotonic() + budget_s
    while True:
        driver = start_script(root, learn=True, workers=3, failures=-1, **CONFIG)
        while True:
            over = time.monotonic() > deadline
            try:
                driver.communicate(timeout=LIMIT_S if over else chance.uniform(0.2, 1.5))
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
    return kills


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, optimizer state and every metric are bitwise those of a training that nobody disturbed."""
    calm = make(tmp_path, learn, name="calm", workers=3, train_loop_config=CONFIG).fit()
    assert kill_until_done(tmp_path, seed, monkeypatch) > 3
    killed = hf.Result.from_path(tmp_path / "run")
    assert killed.checkpoint is not None
    assert calm.checkpoint is not None
    assert killed.checkpoint.verify()
    ours, theirs = killed.checkpoint.load(), calm.checkpoint.load()
    assert_state_equal(ours, theirs)
    assert list(killed.metrics_dataframe["loss"]) == list(calm.metrics_dataframe["loss"])
