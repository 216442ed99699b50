"""`holdfast import` of folders that Transformers and Accelerate wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator
from torch import nn
from transformers import GPT2LMHeadModel

import holdfast as hf
from holdfast.testing import assert_state_equal


def test_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    """Weights, optimizer by parameter name, schedule and log of a `Trainer` are taken over; what is not is listed."""
    trainer = tiny.make(tmp_path / "out", [], max_steps=2)
    trainer.train()
    command = [sys.executable, "-m", "holdfast.cli.main", "import", "out/checkpoint-2", "taken"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    for name in ("model", "optimizer", "scheduler", "trainer_state", "rng_state"):
        assert name in said
    for name in ("config.json", "generation_config.json", "training_args.bin"):
        assert name in said
    again = GPT2LMHeadModel(trainer.model.config)
    optimizer = torch.optim.AdamW(again.parameters())
    checkpoint = hf.Checkpoint(tmp_path / "taken")
    assert checkpoint.step == 2
    hf.load(checkpoint, {"model": again, "optimizer": optimizer}, only=["model", "optimizer"], strict=False)
    assert_state_equal(again.state_dict(), trainer.model.state_dict())
    log = hf.load(checkpoint, only="trainer_state")["trainer_state"]["log_history"]
    assert log[-1]["step"] == 2


@pytest.mark.parametrize("safe", [True, False])
def test_a_state_with_two_models(tmp_path: Path, safe: bool) -> None:
    """Both models of an Accelerator, their optimizers by parameter name, scaler and generators are taken over."""
    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    accelerator.scaler = torch.amp.GradScaler("cpu")

    def made() -> list[Any]:
        models = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        return [*models, *(torch.optim.AdamW(model.parameters()) for model in models)]

    prepared = accelerator.prepare(*made())
    prepared[1](prepared[0](torch.ones(1, 3))).sum().backward()
    for optimizer in prepared[2:]:
        optimizer.optimizer.step()
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    (tmp_path / "state" / "notes.txt").write_text("mine")
    done = hf.import_checkpoint(tmp_path / "state", tmp_path / "taken")
    taken = dict(done.taken)
    assert {"model", "model_1", "optimizer", "optimizer_1", "scaler", "random_states_0"} <= set(taken)
    assert taken["optimizer_1"] == "optimizer state, by parameter name"
    assert [name for name, _ in done.not_taken] == ["notes.txt"]
    names = ("model", "model_1", "optimizer", "optimizer_1")
    live = dict(zip(names, made(), strict=True))
    hf.load(done.checkpoint, live, only=list(names))
    for name, one in zip(names, prepared, strict=True):
        assert_state_equal(live[name].state_dict(), getattr(one, "optimizer", one).state_dict())
