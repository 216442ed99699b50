"""The script of a job: what Ray is, it knows by the environment that jobs have."""

from __future__ import annotations

import sys

import job_steps

import holdfast as hf
from holdfast.torch import TorchTrainer

result = TorchTrainer(
    job_steps.train,
    train_loop_config={"folder": sys.argv[1]},
    scaling_config=hf.ScalingConfig(num_workers=2),
    run_config=hf.RunConfig(name="job", storage_path=sys.argv[1]),
).fit()
print("the job ends with", result.metrics["total"])
