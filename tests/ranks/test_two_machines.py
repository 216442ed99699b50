"""Two machines with a bad network between them: bounded waits, errors that name the rank, nothing half-committed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import network_kit
import pytest
from catalog_kit import catalog_of
from network_kit import ADDRESSES, DEVICE, Network

import holdfast as hf

SCRIPT = str(Path(__file__).with_name("network_cases.py"))
LIMIT_S = 200.0
PATIENT_S = 30.0


@pytest.fixture(scope="session")
def allowed() -> None:
    if (problem := network_kit.why_not()) is not None:
        pytest.skip(problem)


class Ranks:
    """Both ranks, started."""

    def __init__(self, network, root, notes, port, *, until, stale_s, timeout_s, hold=None):
        self.network, self.root, self.notes = network, root, notes
        notes.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": "1",
        }
        told = [str(root), str(notes), str(until), str(stale_s), str(timeout_s), *([] if hold is None else [str(hold)])]
        self._stack = ExitStack()
        self._ranks = [
            self._stack.enter_context(
                subprocess.Popen(
                    network.command(rank, sys.executable, SCRIPT, str(rank), *told),
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in (0, 1)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self._ranks:
            rank.kill()
        self._stack.close()

    def until_held(self):
        until = time.monotonic() + LIMIT_S
        while not (self.notes / "held").exists():
            assert time.monotonic() < until, "the save never began"
            assert all(rank.poll() is None for rank in self._ranks), self.ended()
            time.sleep(0.02)

    def go(self):
        (self.notes / "go").touch()

    def ended(self):
        found = []
        for rank in self._ranks:
            out, err = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0, err[-3000:]
            found.append(json.loads(out.splitlines()[-1]))
        return found


def steps(root):
    """The committed steps, each of which is whole."""
    found = catalog_of(str(root)).records()
    assert all(hf.Checkpoint(root / record.name).verify(deep=True).ok for record in found)
    return sorted(record.step for record in found)


@pytest.mark.slow
def test_a_slow_line_that_loses_packets_and_is_cut_for_a_while(allowed, tmp_path):
    """30 ms each way and 3 % of the packets lost, and nothing at all for two seconds in mid-save: all saves succeed."""
    root = tmp_path / "run"
    with Network(delay_s=0.03, loss=0.03) as network:
        told = {"until": 4, "stale_s": PATIENT_S, "timeout_s": 120.0, "hold": 3}
        with Ranks(network, root, tmp_path / "notes", 29411, **told) as ranks:
            ranks.until_held()
            network.cut = True
            ranks.go()
            time.sleep(2.0)
            network.cut = False
            first = ranks.ended()
        assert network.num_carried > 100
        assert network.num_lost > 0
    assert [one["error"] for one in first] == [None, None]
    assert first[0]["weights"] == first[1]["weights"]
    assert steps(root) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("silence_s", "away_s"),
    [
        pytest.param(20.0, 13.5, marks=pytest.mark.slow, id="shortly"),
        pytest.param(90.0, 55.0, marks=pytest.mark.long, id="longer_than_the_default_allows"),
    ],
)
def test_a_line_that_is_back_before_anybody_is_given_up(allowed, tmp_path, silence_s, away_s):
    """A network that is away in mid-save for less than `silence_s` costs no save, and nobody is given up."""
    root = tmp_path / "run"
    with Network(delay_s=0.005) as network:
        told = {"until": 4, "stale_s": silence_s, "timeout_s": 150.0, "hold": 3}
        with Ranks(network, root, tmp_path / "notes", 29414, **told) as ranks:
            ranks.until_held()
            network.cut = True
            ranks.go()
            time.sleep(away_s)
            network.cut = False
            ended = ranks.ended()
    assert [one["error"] for one in ended] == [None, None]
    assert steps(root) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("stale_s", "away_s"),
    [
        pytest.param(3.0, 0.0, marks=pytest.mark.slow, id="for_ever"),
        pytest.param(PATIENT_S, 60.0, marks=pytest.mark.long, id="for_a_minute"),
    ],
)
def test_a_side_that_is_gone_in_mid_save(allowed, tmp_path, stale_s, away_s):
    """Each side gives the other up after ``stale_s`` and says whom; the next start finds the save before, whole."""
    root = tmp_path / "run"
    with Network(delay_s=0.005) as network:
        told = {"stale_s": stale_s, "timeout_s": 100.0}
        with Ranks(network, root, tmp_path / "notes", 29412, until=4, hold=3, **told) as ranks:
            ranks.until_held()
            network.cut = True
            ranks.go()
            if away_s:
                time.sleep(away_s)
                network.cut = False
            ended = ranks.ended()
        network.cut = False
        assert "rank 1: its writer process gives no sign of life" in ended[0]["error"]
        assert "rank 0's writer" in ended[1]["error"]
        assert all(one["waited_s"] < 3 * stale_s + 30.0 for one in ended), ended
        assert steps(root) == [1, 2]
        with Ranks(network, root, tmp_path / "notes", 29413, until=4, **told) as ranks:
            again = ranks.ended()
    assert [(one["start"], one["error"]) for one in again] == [(2, None), (2, None)]
    assert steps(root) == [1, 2, 3, 4]
    assert not list(root.rglob("part-*"))
