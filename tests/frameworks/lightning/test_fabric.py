"""Loops with Lightning Fabric: killed and resumed, they train what the uninterrupted run trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

import holdfast as hf

SCRIPT = Path(__file__).with_name("train_fabric.py")
STEPS = 18


def life(run: Path, *, devices: int, kill: int = 0, steps: int = STEPS, more: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(run), str(steps), str(devices), str(kill), *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode == 0) is (kill == 0), done.stdout + done.stderr
    return done.stdout + done.stderr


def lines(said: str, begin: str) -> list[str]:
    return sorted(line for line in said.splitlines() if line.startswith(begin))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return {devices: life(tmp_path_factory.mktemp("twin"), devices=devices) for devices in (1, 2)}


@pytest.mark.parametrize(("devices", "kill"), [(1, 11), (2, 5), (2, 8)], ids=["middle", "ranks-middle", "ranks-border"])
def test_a_killed_loop_is_its_twin(tmp_path: Path, twins: dict[int, str], devices: int, kill: int) -> None:
    """In the middle of an epoch, and at the border of two, where Fabric would give the sampler epoch 0 once more."""
    twin = twins[devices]
    life(tmp_path / "run", devices=devices, kill=kill)
    said = life(tmp_path / "run", devices=devices)
    assert "not exact" not in said
    assert "drawing" not in said  # it is placed, not drawn again
    assert lines(said, "weights") == lines(twin, "weights") != []
    assert set(lines(said, "step")) <= set(lines(twin, "step"))
    assert len(lines(said, "step")) == devices * (STEPS - kill)


def test_shards(tmp_path: Path) -> None:
    """FSDP2: the state of the optimizer comes back as shards, and is known by the names of the weights."""
    twin = life(tmp_path / "twin", devices=2, steps=6, more=("sharded",))
    life(tmp_path / "run", devices=2, steps=6, kill=3, more=("sharded",))
    said = life(tmp_path / "run", devices=2, steps=6, more=("sharded",))
    assert lines(said, "weights") == lines(twin, "weights") != []
    assert set(lines(said, "step")) <= set(lines(twin, "step"))


def test_the_optimizer_in_its_wrapper(tmp_path: Path) -> None:
    """What Fabric has wrapped is stored as what it is: names of weights, also of what earlier versions have stored."""

    class Opaque:  # as `_FabricOptimizer` was stored: what its `state_dict` gives
        def __init__(self, optimizer: Any) -> None:
            self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    def made() -> Any:
        net = torch.nn.Linear(2, 1)
        return net, torch.optim.AdamW(net.parameters(), lr=0.01)

    bare, own = made()
    net, optimizer = Fabric(accelerator="cpu", devices=1).setup(bare, own)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    Opaque.__name__ = "FabricAdamW"
    for number, given in enumerate((optimizer, Opaque(optimizer))):
        path = tmp_path / str(number)
        hf.save(path, {"model": net, "optimizer": given})
        for wraps in (False, True):
            other, fresh = made()
            into = Fabric(accelerator="cpu", devices=1).setup(other, fresh) if wraps else (other, fresh)
            hf.load(path, into={"model": into[0], "optimizer": into[1]})
            assert fresh.state[other.weight]["exp_avg"].equal(own.state[bare.weight]["exp_avg"])
    assert hf.load(tmp_path / "0")["optimizer"]["state"].keys() == {"model/weight", "model/bias"}


def test_a_shuffle_without_a_seed_goes_on(tmp_path: Path) -> None:
    """The order belongs to the run: the second life draws the samples of the epoch that the first has not seen."""
    first = life(tmp_path, devices=1, kill=3, more=("chance",))
    second = life(tmp_path, devices=1, steps=8, more=("chance",))
    rows = [line for line in (first + second).splitlines() if line.startswith("step")]
    seen = [int(sample) for row in rows for sample in row.partition("[")[2].rstrip("]").split(",")]
    assert sorted(seen) == list(range(32))
