"""Loading needs next to no memory beside the training it loads into, whatever the checkpoint is stored as."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.state.load.restore import load_state
from holdfast.trainers.loop.saving.files import lay

ROOT = Path(__file__).resolve().parents[3]
LIMIT_MIB = 64  # of 288, or 96


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks of memory")
@pytest.mark.parametrize("suffix", ["", ".pt", ".safetensors"])
def test_peak_of_a_load(tmp_path: Path, suffix: str) -> None:
    """A file is mapped and goes to the live tensors piece by piece."""
    command = [sys.executable, str(Path(__file__).with_name("load_memory.py")), str(tmp_path), suffix]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "kits")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < LIMIT_MIB


def test_every_tensor_is_read_as_it_lies() -> None:
    """Other strides, conjugates, ties, no elements, no dimensions, every size of element."""
    base = torch.arange(12.0).view(3, 4)
    complex_ = torch.tensor([1 + 2j, 3 - 1j])
    found = {
        "plain": base, "tied": base, "turned": base.t(), "part": base[:, 1:3], "conjugate": complex_.conj(),
        "empty": torch.empty(0, 3), "scalar": torch.tensor(7), "bool": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16), "data": {"list": [1, "two", None], "inner": torch.ones(2)},
    }  # fmt: skip
    loaded = load_state(lay(found, "memory"), verify=False).state
    for name in found.keys() - {"data"}:
        assert loaded[name].dtype is found[name].dtype
        assert torch.equal(loaded[name], found[name]), name
    assert loaded["tied"] is loaded["plain"]
    assert loaded["data"]["list"] == [1, "two", None]
    assert torch.equal(loaded["data"]["inner"], torch.ones(2))
