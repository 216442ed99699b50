"""Train a matrix that two ranks share with Megatron-Core, lose one of them, and go on with one.

    python examples/megatron_tp.py [--folder PATH]

Needs megatron-core and psutil. Runs on CPUs over gloo. Without a folder one is made and removed.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from typing import Any

import torch

import holdfast
import holdfast.megatron
from holdfast.torch import TorchTrainer

OUTPUTS, INPUTS = 8, 4


def train(config: dict[str, Any]) -> None:
    """Learn a linear map; every rank has some of its rows."""
    if not torch.cuda.is_available():  # dist_checkpointing asks for a GPU on its way
        torch.cuda.synchronize = lambda *_, **__: None
        torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    world = holdfast.get_context().get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    rank = parallel_state.get_tensor_model_parallel_rank()
    wanted = torch.arange(float(OUTPUTS * INPUTS)).reshape(OUTPUTS, INPUTS).chunk(world)[rank]
    rows, step, checkpoint = torch.zeros_like(wanted), 0, holdfast.get_checkpoint()

    def sharded_state_dict() -> dict[str, Any]:
        return {"rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, world)), "step": step}

    if checkpoint is not None:
        loaded = holdfast.megatron.load(sharded_state_dict(), checkpoint)
        rows.copy_(loaded["rows"])
        step = loaded["step"]
    while step < config["steps"]:
        if checkpoint is None and step == 25 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(16, INPUTS, generator=torch.Generator().manual_seed(step))
        error = x @ (rows - wanted).T
        rows -= 0.02 * error.T @ x
        step += 1
        if step % 10 == 0:
            holdfast.megatron.report({"step": step, "error": error.abs().max().item()}, sharded_state_dict())


def run(root: str, *, workers: int, steps: int) -> holdfast.Result:
    """Train up to so many steps."""
    return TorchTrainer(
        train,
        train_loop_config={"steps": steps},
        scaling_config=holdfast.ScalingConfig(num_workers=workers),
        run_config=holdfast.RunConfig(
            name="rows",
            storage_path=root,
            checkpoint_config=holdfast.CheckpointConfig(num_to_keep=2),
            failure_config=holdfast.FailureConfig(max_failures=1),
        ),
    ).fit()


def main() -> None:
    """Two ranks, one of which dies, then one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch:
        root = os.path.abspath(folder or scratch)
        first = run(root, workers=2, steps=30)
        print(f"two ranks, {len(first.attempts)} attempts: {first.metrics}")
        print(f"one rank goes on: {run(root, workers=1, steps=60).metrics}")


if __name__ == "__main__":
    main()
