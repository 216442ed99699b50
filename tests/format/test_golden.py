"""Checkpoints of every released format version load for ever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.testing import assert_state_equal

DATA = Path(__file__).parent.parent / "data"
sys.path.insert(0, str(DATA))
import golden  # noqa: E402

VERSIONS = sorted(path.name for path in DATA.iterdir() if (path / "manifest.json").exists())


def test_there_are_golden_checkpoints() -> None:
    """The current format version has its golden checkpoint."""
    assert "1.0" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoint_verifies_and_loads(version: str) -> None:
    """It passes a deep verification, and every value comes back with its type and bits."""
    checkpoint = hf.Checkpoint(DATA / version)
    assert checkpoint.verify(deep=True).ok
    assert checkpoint.step == 42
    assert checkpoint.metrics["loss"] == 0.5
    expected = golden.state(version)
    loaded = hf.load(DATA / version)
    assert_state_equal(loaded["plain"], expected["plain"])
    assert_state_equal(loaded["tensors"], expected["tensors"])
    assert_state_equal(loaded["arrays"], expected["arrays"])
    assert_state_equal(loaded["mine"], expected["mine"].value)


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoint_restores_objects(version: str) -> None:
    """Module, ties and optimizer state are restored into live objects."""
    expected = golden.state(version)
    model = golden.Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    hf.load(DATA / version, {"model": model, "optimizer": optimizer}, only=["model", "optimizer"])
    assert_state_equal(model.state_dict(), expected["model"].state_dict())
    assert model.first.weight is model.second.weight
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    for mine, theirs in zip(model.parameters(), expected["model"].parameters(), strict=True):
        assert_state_equal(optimizer.state[mine], expected["optimizer"].state[theirs])
    for one in (optimizer, expected["optimizer"]):
        others = {
            key if type(key) is str else key[0]: kept for key, kept in one.state.items() if not torch.is_tensor(key)
        }
        assert_state_equal(others, {} if version == "1.0" else {"k": 3, "layer": {"factors": [torch.arange(2.0)]}})
