"""Checked by mypy (strict), never run: configurations, results and torch helpers have the types users rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import holdfast as hf
from holdfast.torch import PreparedLoader, get_device, get_devices, prepare_data_loader, prepare_model


def configurations() -> hf.RunConfig:
    """Every argument has its type, also through the check for removed ones."""
    scaling = hf.ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 2})
    assert_type(scaling.num_workers, int | tuple[int, int])
    keep = hf.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="acc", checkpoint_score_order="max").retention
    assert_type(keep, hf.Keep)
    assert_type(hf.CheckpointStrategy(num_to_keep=0).retention, hf.Keep)
    failures = hf.FailureConfig(max_failures=-1, hang_timeout_s=600)
    hf.FailureConfig(max_failures="1")  # type: ignore[arg-type]
    hf.RunConfig(verbose=1)  # type: ignore[call-arg]
    return hf.RunConfig(name="a", storage_path=Path("runs"), checkpoint_config=hf.CheckpointConfig(keep=keep),
                        failure_config=failures, callbacks=[object()])  # fmt: skip


def results(path: Path) -> None:
    """`Result` and what it hands out."""
    result = hf.Result.from_path(path)
    assert_type(result.checkpoint, hf.Checkpoint | None)
    assert_type(result.best_checkpoints, list[tuple[hf.Checkpoint, dict[str, Any]]])
    assert_type(result.get_best_checkpoint("acc", "max"), hf.Checkpoint)
    assert_type(result.metrics, dict[str, Any])
    assert_type(result.error, BaseException | None)
    assert_type(result.attempts[0].seconds_lost, float)
    assert_type(result.path, str)
    assert_type(result.latest_checkpoint_id, int | None)


def values(mode: hf.CheckpointUploadMode, reported: hf.ReportedCheckpoint) -> None:
    """Small public values."""
    print(mode is hf.CheckpointUploadMode.ASYNC)
    assert_type(reported.checkpoint, hf.Checkpoint)
    assert_type(reported.status, hf.ReportedCheckpointStatus)


def helpers(model: torch.nn.Module, loader: DataLoader[Any]) -> None:
    """What a training function calls."""
    assert_type(prepare_model(model), torch.nn.Module)
    prepared = prepare_data_loader(loader, seed=1)
    assert_type(prepared, PreparedLoader)
    assert_type(prepared.state_dict(), dict[str, Any])
    assert_type(get_device(), torch.device)
    assert_type(get_devices(), list[torch.device])
