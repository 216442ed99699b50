"""A driver for tests that kill or signal one: a plain script without a main guard."""

from __future__ import annotations

import itertools
import json
import os
import sys

from fit_functions import learn, load_epoch, meet, save_directory

import holdfast as hf
from holdfast.torch import TorchTrainer

told = json.loads(sys.argv[1])


def train(config: dict[str, object]) -> None:
    start = load_epoch()
    for epoch in itertools.count(start) if config.get("forever") else range(start, 4):
        meet()
        save_directory(epoch, {"epoch": epoch, "score": 0.0})
        print(f"epoch {epoch}")
        print(f"pid {os.getpid()}")


TorchTrainer(
    learn if told.get("learn") else train,
    train_loop_config=told,
    scaling_config=hf.ScalingConfig(num_workers=told.get("workers", 2)),
    run_config=hf.RunConfig(
        name="run",
        storage_path=told["root"],
        checkpoint_config=hf.CheckpointConfig(num_to_keep=3),
        failure_config=hf.FailureConfig(max_failures=told.get("failures", 0)),
    ),
).fit()
