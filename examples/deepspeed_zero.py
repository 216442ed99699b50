"""Train with DeepSpeed ZeRO-3 on two workers, lose one on the way, and put the weights of both ranks together.

    python examples/deepspeed_zero.py [--folder PATH]

Needs deepspeed. Runs on CPUs over gloo. Without a folder one is made and removed.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from typing import Any

import torch

import holdfast
import holdfast.deepspeed
from holdfast.torch import TorchTrainer


def make() -> torch.nn.Module:
    """A small model."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def train(config: dict[str, Any]) -> None:
    """Learn to add; rank 1 is killed once."""
    import deepspeed

    # CPUs only: stay with gloo. DeepSpeed would compile collectives of its own (g++ and two minutes).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = torch.cuda.is_available()
    model = make()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 32,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        },
    )
    rank, step, checkpoint = holdfast.get_context().get_world_rank(), 0, holdfast.get_checkpoint()
    if checkpoint is not None:
        step = holdfast.deepspeed.load(engine, checkpoint)["step"]
    while step < config["steps"]:
        if checkpoint is None and step == 25 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = (engine(x) - x.sum(1, keepdim=True)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        step += 1
        if step % 10 == 0:
            holdfast.deepspeed.report({"step": step, "loss": loss.item()}, engine, client_state={"step": step})


def main() -> None:
    """Train, and use the weights without DeepSpeed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch:
        root = os.path.abspath(folder or scratch)
        result = TorchTrainer(
            train,
            train_loop_config={"steps": 60},
            scaling_config=holdfast.ScalingConfig(num_workers=2),
            run_config=holdfast.RunConfig(
                name="zero",
                storage_path=root,
                checkpoint_config=holdfast.CheckpointConfig(num_to_keep=2),
                failure_config=holdfast.FailureConfig(max_failures=1),
            ),
        ).fit()
        print(f"{len(result.attempts)} attempts; {result.metrics}")
        holdfast.import_checkpoint(result.checkpoint, f"{root}/weights", overwrite=True)
        model = make()
        holdfast.load(f"{root}/weights", {"model": model}, only="model")
        x = torch.randn(256, 16, generator=torch.Generator().manual_seed(99))
        error = (model(x) - x.sum(1, keepdim=True)).pow(2).mean().item()
        print(f"weights of both ranks put together, without DeepSpeed: mean squared error {error:.3f}")


if __name__ == "__main__":
    main()
