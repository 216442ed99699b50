"""Checkpoints of every released format version load for ever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.state.load.restore import load_state
from holdfast.storage import LocalStorage
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
        kept_beside = {"k": 3, "layer": {"factors": [torch.arange(2.0)]}} if version == "1.0-other_state" else {}
        assert_state_equal(others, kept_beside)


def test_golden_checkpoint_with_a_tensor_in_parts() -> None:
    """A tensor that wraps others is one of its class again, and is read into a live one."""
    expected, loaded = golden.state("1.0-parts")["packed"], hf.load(DATA / "1.0-parts", only="packed")["packed"]
    live = type(expected).of(torch.ones(2, 4))
    hf.load(DATA / "1.0-parts", {"packed": live}, only="packed")
    for one in (loaded, live):
        assert type(one) is type(expected)
        assert_state_equal([one.codes, one.scale], [expected.codes, expected.scale])


@pytest.mark.parametrize("rank", [0, 1])
def test_golden_checkpoint_of_two_ranks_gives_each_its_own(rank: int) -> None:
    """Plain data and small objects that differ between the ranks, deep in a container too."""
    expected, live = golden.state("1.0-ranks", rank), golden.state("1.0-ranks", 7)
    loaded = load_state(LocalStorage(DATA / "1.0-ranks"), live, rank=rank, world_size=2)
    assert_state_equal(live["average"].total, expected["average"].total)
    assert_state_equal(live["mine"].value["rank"], 7)  # plain data is in what is returned
    for name in ("position", "nested", "plain"):
        assert_state_equal(loaded.state[name], expected[name])
    assert loaded.state["mine"].value["rank"] == rank
    assert loaded.notes == []
