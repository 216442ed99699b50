"""Faults of the cluster itself: a raylet that hangs, a cluster that goes away, places that are too many."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from cluster_functions import agreed, notes
from cluster_kit import LIMIT_S, Nodes, trainer, wait_until
from engine_kit import fitting
from process_kit import wait_gone
from test_ray_engine import live_groups, steps, waiting

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
SCRIPT = Path(__file__).resolve().parent / "gone_script.py"
NOTICED_S = 30.0  # the collective of the survivor would end it after minutes


def test_a_raylet_that_hangs(nodes: Nodes, tmp_path: Path) -> None:
    """Training goes on until the cluster declares its node dead; its ranks end then, and the run goes on elsewhere."""
    nodes.add(1, 1, 1)

    def steps_done() -> int:
        path = tmp_path / "steps-1-0"
        return int(path.read_text() or 0) if path.exists() else 0

    with fitting(trainer(tmp_path, agreed, failures=1, config={"go_on": 2, "count": True}), LIMIT_S) as future:
        first = waiting(tmp_path, 2, future, "begun")
        node = nodes.of(first[0]["agent"])
        nodes.spoil(node)
        raylet = node.all_processes["raylet"][0].process
        raylet.send_signal(signal.SIGSTOP)
        try:
            before = steps_done()
            wait_until(lambda: steps_done() > before + 20, "it trains on")
            assert alive(node)
            wait_until(lambda: not alive(node), "the node is declared dead")
            assert wait_gone(first[0]["pid"])
            result = future.result(LIMIT_S)
        finally:
            raylet.send_signal(signal.SIGCONT)
    second = notes(tmp_path, 2)
    assert first[0]["agent"] not in {one["agent"] for one in second}
    assert first[1]["agent"] in {one["agent"] for one in second}
    if result.checkpoint is not None:  # they save when they are asked to, and a node that is lost asks for nothing
        assert result.checkpoint.verify().ok


def alive(node: Any) -> bool:
    return any(one["Alive"] for one in ray.nodes() if one["NodeID"] == node.node_id)


def test_the_cluster_goes_away(tmp_path: Path) -> None:
    """`fit` ends by itself, and says what has gone."""
    driver = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
        env={**os.environ, "RAY_ADDRESS": ""},
    )
    assert "the Ray cluster has not answered for 8 s" in driver.stdout, driver.stderr
    assert "seconds" in driver.stdout


def test_node_killed_with_a_spare(nodes: Nodes, tmp_path: Path) -> None:
    """The run goes on, on the spare; the node that is left keeps its agent; what Ray finds again later goes back."""
    nodes.add(1, 1, 1, 1)
    with fitting(trainer(tmp_path, steps, failures=2, config={"wait_at": 2, "again_at": 4}), LIMIT_S) as future:
        first = waiting(tmp_path, 2, future)
        nodes.kill(node := nodes.of(first[0]["agent"]))
        killed = time.monotonic()
        assert wait_gone(first[0]["pid"])
        assert wait_gone(first[1]["pid"])  # the survivor is ended once the death is noticed
        assert time.monotonic() - killed < NOTICED_S
        wait_until(lambda: len(list(tmp_path.glob("again-*"))) == 2, "the workers wait again")
        second = notes(tmp_path, 2)
        wait_until(lambda: not alive(node), "Ray has declared the node dead")
        wait_until(lambda: reserved() == 3, "Ray has found the place again")
        os.kill(second[0]["pid"], signal.SIGKILL)
        wait_until(lambda: len(notes(tmp_path, 3)) == 2, "the workers begin once more")
        wait_until(lambda: reserved() == 2, "what is too many is given back")
        (tmp_path / "go-on").touch()
    result = future.result()
    assert {one["start"] for one in second} == {3}
    assert first[1]["agent"] in {one["agent"] for one in second}
    assert (result.metrics["step"], result.metrics["total"]) == (6, 21)


def reserved() -> int:
    """How many places are reserved on live nodes."""
    known = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
    return sum(node in known for one in live_groups() for node in one["bundles_to_node_id"].values())
