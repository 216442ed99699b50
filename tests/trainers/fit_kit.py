"""Trainers for the end-to-end tests, and what is asked of their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fit_functions import count_up

import holdfast as hf
from holdfast.torch import TorchTrainer

LIMIT_S = 60.0


def make(root: Path, function: Any = count_up, *, workers: int = 2, failures: int = 0, **options: Any) -> TorchTrainer:
    failure: dict[str, Any] = {key: options.pop(key) for key in ("hang_timeout_s", "max_preemptions") if key in options}
    run: dict[str, Any] = {
        key: options.pop(key) for key in ("checkpoint_config", "callbacks", "name", "storage_path") if key in options
    }
    return TorchTrainer(
        function,
        scaling_config=hf.ScalingConfig(num_workers=workers),
        run_config=hf.RunConfig(
            **{"storage_path": root, "name": "run", **run},
            failure_config=hf.FailureConfig(max_failures=failures, **failure),
        ),
        **options,
    )


def epochs(result: hf.Result) -> list[Any]:
    return list(result.metrics_dataframe["epoch"])


def read(checkpoint: hf.Checkpoint | None) -> str:
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        return Path(directory, "epoch.txt").read_text()
