"""Files as Composer writes them, made with torch and NumPy alone: the same names, nesting and types of values."""

from __future__ import annotations

import random
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["composer_state", "full_file"]


def composer_state(net: torch.nn.Module, optimizer: torch.optim.Optimizer, *, epoch: int, batch: int, in_epoch: int,
                   batch_size: int, **more: Any) -> dict[str, Any]:  # fmt: skip
    """Return the content of a full checkpoint of a training in one process; ``more`` replaces parts of "state"."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    groups = [{**group, "params": [names[one] for one in group["params"]]} for group in optimizer.param_groups]
    kept = {names[one]: dict(state) for one, state in optimizer.state.items()}
    stamp = {
        "iteration": 0, "epoch": epoch, "batch": batch, "sample": batch * batch_size, "token": 0,
        "epoch_in_iteration": epoch, "token_in_iteration": 0, "batch_in_epoch": in_epoch,
        "sample_in_epoch": in_epoch * batch_size, "token_in_epoch": 0, "total_wct": timedelta(seconds=12.5),
        "iteration_wct": timedelta(seconds=12.5), "epoch_wct": timedelta(seconds=2), "batch_wct": timedelta(seconds=1),
    }  # fmt: skip
    environment = {
        "composer_version": "0.32.1", "composer_commit_hash": None, "cpu_model": "x", "cpu_count": 2, "num_nodes": 1,
        "gpu_model": "N/A", "num_gpus_per_node": 1, "num_gpus": 1, "cuda_device_count": 0,
    }  # fmt: skip
    state: dict[str, Any] = {
        "model": OrderedDict(net.state_dict()),
        "optimizers": {type(optimizer).__qualname__: {"state": kept, "param_groups": groups}},
        "schedulers": {},
        "algorithms": [],
        "callbacks": {
            "CheckpointSaver": {"all_saved_checkpoints_to_timestamp": [("runs/ep0-ba1.pt", stamp)]},
            "EarlyStopper": {},
        },
        "scaler": {"GradScaler": {}},
        "timestamp": {"Timestamp": stamp},
        "rank_zero_seed": 17,
        "train_metrics": {},
        "eval_metrics": {},
        "run_name": "1711111111-neon-newt",
        "dataset_state": {"train": None, "eval": {}},
        "integrations": {},
        "metadata": {
            "composer_env_info": environment, "torch_version": torch.__version__, "device": "cpu",
            "precision": "fp32", "world_size": 1, "device_train_microbatch_size": batch_size,
            "train_dataloader_batch_size": batch_size,
        },
    }  # fmt: skip
    generators = {
        "python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.random.get_rng_state()
    }  # fmt: skip
    return {"state": {**state, **more}, "rng": [generators]}


def full_file(path: Path, content: dict[str, Any]) -> Path:
    """Write a file as Composer does."""
    torch.save(content, path)
    return path
