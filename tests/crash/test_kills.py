"""SIGKILL of trainer or writer at random moments: the end of the run is that of one nobody touched."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from catalog_kit import index_of

import holdfast as hf
from holdfast.testing import ForkServer, assert_state_equal

SCRIPT = str(Path(__file__).parents[1] / "kits" / "kill_training.py")


@pytest.fixture(scope="module")
def server():
    preload = ("torch", "torch._dynamo", "torch.utils.data", "holdfast.checkpointer", SCRIPT)
    with ForkServer(preload=preload, path=[Path(SCRIPT).parent]) as one:
        yield one


def life(server, home, name, kill):
    """One life; ``kill`` is (who, seconds after the start of training) or None. Returns its exit status."""
    writer_file = home / f"{name}.writer"
    writer_file.unlink(missing_ok=True)
    return server.run(
        f"{__file__}:trainer_with_killer",
        str(home / name), str(home / f"{name}-result"), str(writer_file), *(kill or (None, 0.0)), timeout_s=120,
    )  # fmt: skip


def trainer_with_killer(run, result, writer_file, who, after):
    """In a fork of the server: a trainer in a child of its own, killed from here. Returns its exit status."""
    module = sys.modules["_holdfast_case_kill_training"]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            module.main(run, result, writer_file, 0.004)
            status = 0
        finally:
            os._exit(status)
    killed = False
    if who is not None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0):
            # Complete as soon as it is there: one write of a few bytes.
            with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
                writer = int(Path(writer_file).read_text().split()[0])
                break
            time.sleep(0.002)
        else:
            return {"status": "early", "killed": False}
        time.sleep(after)
        victim = pid if who == "trainer" else writer
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            killed = True
    return {"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "killed": killed}


def run_until_done(server, home, num_kills, seed):
    """Start the run, kill it, start it again ... the last lives are left alone."""
    chance = random.Random(seed)
    kills = {"trainer": 0, "writer": 0}
    while sum(kills.values()) < num_kills:
        who = "writer" if sum(kills.values()) % 3 == 2 else "trainer"
        outcome = life(server, home, "run", (who, chance.uniform(0.0, 0.25)))
        check_link(home / "run")
        told = outcome.checked()
        assert told["status"] in (0, -signal.SIGKILL), (told, outcome.output)
        assert not (who == "writer" and told["status"] != 0), f"a dead writer must not stop training: {outcome.output}"
        if told["status"] == 0:
            compare(home)
            for path in ("run", "run-result"):
                (home / path).rename(home / f"{path}-{time.monotonic_ns()}")
        kills[who] += told["killed"]
    outcome = life(server, home, "run", None)
    assert outcome.checked()["status"] == 0, outcome.output
    compare(home)
    return kills


def check_link(run):
    """Where there is a link to the newest, it leads to a committed checkpoint, also while a writer still works."""
    with contextlib.suppress(FileNotFoundError):
        while not (run / (name := os.readlink(run / "latest")) / "manifest.json").exists():
            assert os.readlink(run / "latest") != name, f"latest -> {name}, which is no checkpoint"


def compare(home):
    """The final state, the sample ids and the metrics of the killed run against the twin's."""
    left, right = hf.load(home / "twin-result"), hf.load(home / "run-result")
    assert_state_equal(left, right)
    assert sorted(right["ids"][:160]) == list(range(160)), "each sample once in the first epoch"
    rows = [[(row["step"], row["metrics"]) for row in index_of(home / name).history()] for name in ("twin", "run")]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 80


@pytest.fixture
def home(server, tmp_path):
    assert life(server, tmp_path, "twin", None).checked()["status"] == 0
    return tmp_path


@pytest.mark.slow
def test_kills(server, home):
    """Twelve kills of trainer and writer change nothing in the end."""
    kills = run_until_done(server, home, 12, seed=1)
    assert kills == {"trainer": 8, "writer": 4}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 12))
def test_two_hundred_kills(server, home, seed):
    """Ten times twenty."""
    run_until_done(server, home, 20, seed=seed)
