"""Pipelines and mixtures of experts that are trained, killed, and go on: bit for bit, and in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf

CASES = str(Path(__file__).with_name("pipeline_cases.py"))


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: item for key, inner in value.items() for name, item in flat(inner, f"{path}/{key}").items()}
    return {path: value}


def trained(run: Path, step: int) -> dict[str, Any]:
    """All weights and moments of a checkpoint, loaded whole."""
    loaded = hf.load(run / f"step_{step:08d}", only=["model", "optimizer/state/*"])
    return flat(loaded)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def live(ranks, which: str, run: Path, *args: int, world_size: int, killed: bool = False) -> str:
    outcomes = ranks.ranks(f"{CASES}:{which}", str(run), *args, world_size=world_size)
    for one in outcomes:
        assert one.status in ((-9,) if killed else (0,)), f"{one.status}\n{one.error}\n{one.output}"
    return outcomes[0].output


@pytest.mark.slow
@pytest.mark.parametrize(("which", "groups", "world_size"), [
    ("pipeline", 2, 4),
    pytest.param("pipeline", 2, 2, marks=pytest.mark.long),
    pytest.param("pipeline", 4, 4, marks=pytest.mark.long),
    ("mixture", 2, 4),
])  # fmt: skip
def test_killed_and_resumed_is_its_twin(ranks, tmp_path, which, groups, world_size) -> None:
    """Two stages with FSDP2 inside, stages alone, two groups of experts: the twin was never killed."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    live(ranks, which, whole, groups, 10, world_size=world_size)
    live(ranks, which, broken, groups, 10, 5, world_size=world_size, killed=True)
    assert "resumed from" in live(ranks, which, broken, groups, 10, world_size=world_size)
    assert same(trained(whole, 10), trained(broken, 10))
    assert hf.Checkpoint(whole / "step_00000010").verify(deep=True).ok
    layers = {name.split("/")[-1] for name in trained(whole, 10) if name.startswith("/model/")}
    assert len(layers) == (18 if which == "pipeline" else 14)
    if which == "mixture":
        assert (
            ranks.checked(f"{CASES}:whole_mixture", str(whole), "step_00000010", world_size=2) == [{"same": True}] * 2
        )


@pytest.mark.slow
def test_a_pipeline_goes_on_with_other_stages(ranks, tmp_path) -> None:
    """Two stages of two ranks, then four stages, then all of it on one rank, then two stages again."""
    run = tmp_path / "run"
    step = 4
    for groups, world_size in ((2, 4), (4, 4), (1, 1), (2, 2)):
        printed = live(ranks, "pipeline", run, groups, step, world_size=world_size)
        if step > 4:
            assert f"resumed from {run}/step_{step - 4:08d} at step {step - 4}" in printed
            assert "NOT restored" not in printed
        step += 4
    assert len({len(trained(run, one)) for one in (8, 12, 16)}) == 1
