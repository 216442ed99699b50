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
from hf_kit import run_script
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


def test_pretrained(tmp_path: Path) -> None:
    """Shards of `save_pretrained` are taken over, and `from_pretrained` opens an export, though weights are tied."""
    model = tiny.make(tmp_path / "out", []).model
    model.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    done = hf.import_checkpoint(tmp_path / "theirs", tmp_path / "taken")
    assert done.format == "hf"
    assert [path for path, _ in done.not_taken] == ["config.json", "generation_config.json"]
    again = GPT2LMHeadModel(model.config)
    hf.load(done.checkpoint, {"model": again})
    assert_state_equal(again, model)
    hf.export(done.checkpoint, tmp_path / "ours", to="hf", max_shard_size="4KB")
    model.config.save_pretrained(tmp_path / "ours")
    assert_state_equal(GPT2LMHeadModel.from_pretrained(tmp_path / "ours", local_files_only=True), model)


def test_a_state_of_fsdp(tmp_path: Path) -> None:
    """What `save_state` of two FSDP2 ranks leaves, whole or sharded: the same weights and moments, by name."""
    run_script("sharded_state.py", {"folder": str(tmp_path)}, ranks=2)
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    found = {}
    for kind in ("FULL", "SHARDED"):
        done = hf.import_checkpoint(tmp_path / kind, tmp_path / f"taken-{kind}")
        assert {name for name, _ in done.taken} == {"model", "optimizer"}
        assert done.not_taken == ()
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(reversed(list(model.parameters())))
        hf.load(done.checkpoint, {"model": model, "optimizer": optimizer}, only=["model", "optimizer"])
        assert_state_equal(dict(model.named_parameters()), weights)
        found[kind] = [optimizer.state[one] for one in model.parameters()]
    assert_state_equal(found["FULL"], found["SHARDED"])
    assert all(one["exp_avg"].any() for one in found["FULL"])


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
