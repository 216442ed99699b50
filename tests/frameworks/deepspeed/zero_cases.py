"""A training with DeepSpeed on workers of the function trainer."""

from __future__ import annotations

import os
import signal
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


def train(config: dict[str, Any]) -> None:
    """So many steps, each reported; killed once where the config says."""
    import deepspeed

    import holdfast.deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo: compiling its own takes two minutes
    model = make(half=config.get("half", False))
    for parameter in model[0].parameters() if config.get("frozen") else ():
        parameter.requires_grad_(False)
    trained = [one for one in model.parameters() if one.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained, config=config_of(config["stage"], half=config.get("half", False))
    )
    context, checkpoint, step = hf.get_context(), hf.get_checkpoint(), 0
    if checkpoint is not None:
        step = holdfast.deepspeed.load(engine, checkpoint)["step"]
    while step < config["steps"]:
        if checkpoint is None and step == config.get("kill") and context.get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(2 * step + context.get_world_rank())
        batch = torch.randn(4, 8, generator=generator).to(next(iter(trained)).dtype)
        loss = engine(batch).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        step += 1
        # A score whose best is neither the first nor the last.
        metrics = {"step": step, "loss": loss.item(), "score": -abs(step - 2)}
        holdfast.deepspeed.report(metrics, engine, client_state={"step": step})
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=config["stage"] == 3):
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if context.get_world_rank() == 0:
        torch.save(weights, config["out"])


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
