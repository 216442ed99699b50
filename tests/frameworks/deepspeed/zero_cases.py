"""A training with DeepSpeed on workers of the function trainer."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch

import holdfast as hf
from holdfast.torch import TorchTrainer


def make(*, half: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(13) if half else torch.nn.BatchNorm1d(13)  # with buffers, if the CPU can
    return torch.nn.Sequential(torch.nn.Linear(8, 13), norm, torch.nn.ReLU(), torch.nn.Linear(13, 3))


def config_of(stage: int, *, half: bool = False) -> dict[str, Any]:
    adam = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "optimizer": adam}
    return {**config, **({"bf16": {"enabled": True}} if half else {})}


def engine_of(config: dict[str, Any]) -> Any:
    """An engine over gloo."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo: compiling its own takes two minutes
    model = make(half=config.get("half", False))
    for parameter in model[0].parameters() if config.get("frozen") else ():
        parameter.requires_grad_(False)
    trained = [one for one in model.parameters() if one.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained, config=config_of(config["stage"], half=config.get("half", False))
    )
    return engine


def steps(engine: Any, config: dict[str, Any], first: int | None) -> Iterator[dict[str, Any]]:
    """Train the steps that are left, tell the metrics of each, and leave the weights; killed once if told so."""
    import deepspeed

    rank, model = torch.distributed.get_rank(), engine.module
    dtype = next(one.dtype for one in model.parameters() if one.requires_grad)
    for step in range(first or 0, config["steps"]):
        if first is None and step == config.get("kill") and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank)).to(dtype)
        loss = engine(batch).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        # A score whose best is neither the first nor the last.
        yield {"step": step + 1, "loss": loss.item(), "score": -abs(step - 1)}
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=config["stage"] == 3):
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(weights, config["out"])


def train(config: dict[str, Any]) -> None:
    """On a worker of the function trainer: every step is reported."""
    import holdfast.deepspeed

    engine, checkpoint = engine_of(config), hf.get_checkpoint()
    first = None if checkpoint is None else holdfast.deepspeed.load(engine, checkpoint)["step"]
    for metrics in steps(engine, config, first):
        holdfast.deepspeed.report(metrics, engine, client_state={"step": metrics["step"]})


def loop(config: dict[str, Any]) -> None:
    """In a process of torchrun: every step is kept."""
    import holdfast.deepspeed

    engine = engine_of(config)
    with holdfast.deepspeed.Keeper(config["run"], keep=hf.Keep(last=1, best=1, metric="score", mode="max")) as keeper:
        state = keeper.load(engine)
        for metrics in steps(engine, config, None if state is None else state["step"]):
            keeper.save(engine, step=metrics["step"], metrics=metrics, client_state={"step": metrics["step"]})


def run(root: Any, name: str, *, workers: int = 2, storage: Any = None, **config: Any) -> tuple[hf.Result, Any]:
    """Train; the result, and the weights as the live engine had them at the end."""
    out = os.path.join(root, f"{name}.pt")
    result = TorchTrainer(
        train,
        train_loop_config={"out": out, "steps": 4, **config},
        scaling_config=hf.ScalingConfig(num_workers=workers),
        run_config=hf.RunConfig(
            name=name,
            storage_path=storage or root,
            checkpoint_config=hf.CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score"),
            failure_config=hf.FailureConfig(max_failures=1),
        ),
    ).fit()
    return result, torch.load(out, weights_only=True)


if __name__ == "__main__":
    loop(json.loads(sys.argv[1]))
