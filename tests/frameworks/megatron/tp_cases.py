"""A training with Megatron-Core's tensor parallelism on workers of the function trainer."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.nn.functional import all_reduce

import holdfast as hf
from holdfast.torch import TorchTrainer


def without_a_gpu() -> None:
    """What dist_checkpointing asks of CUDA on the way; nothing of Holdfast needs it."""
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: torch.device("cpu")


class Parallel(torch.nn.Module):
    """Two matrices, the first cut by columns, the second by rows, as in Megatron's MLP; its own sharded state dict."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        up, down = torch.randn(12, 6, generator=generator), torch.randn(6, 12, generator=generator)
        self.rank, self.world = rank, world
        self.up = torch.nn.Parameter(up.chunk(world, 0)[rank].clone())
        self.down = torch.nn.Parameter(down.chunk(world, 1)[rank].clone())
        self.bias = torch.nn.Parameter(torch.zeros(6))

    def forward(self, x: Any) -> Any:
        part = torch.tanh(x @ self.up.T) @ self.down.T
        if self.world > 1:
            part = all_reduce(part)
        return part + self.bias

    def sharded_state_dict(self, momentum: dict[str, Any]) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        def cut(key: str, value: Any, axis: int) -> Any:
            return ShardedTensor.from_rank_offsets(key, value, (axis, self.rank, self.world))

        def whole(key: str, value: Any) -> Any:
            return ShardedTensor.from_rank_offsets(key, value, replica_id=self.rank)

        found = {}
        for prefix, values in (
            ("model", {name: p.data for name, p in self.named_parameters()}),
            ("momentum", momentum),
        ):
            found[prefix] = {
                "up": cut(f"{prefix}.up", values["up"], 0),
                "down": cut(f"{prefix}.down", values["down"], 1),
                "bias": whole(f"{prefix}.bias", values["bias"]),
            }
        return found


def steps(config: dict[str, Any], load: Callable[[Any], Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """SGD with momentum, of what is left: metrics and sharded state of each step; a rank is killed once if told so.

    ``load`` gives the state to go on from, None at a fresh start.
    """
    without_a_gpu()
    from megatron.core import parallel_state

    world = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    rank = parallel_state.get_tensor_model_parallel_rank()
    model = Parallel(rank, world)
    momentum = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    step = 0

    def state() -> dict[str, Any]:
        return {**model.sharded_state_dict(momentum), "step": step}

    loaded = load(state())
    if loaded is not None:
        step = loaded["step"]
        if "out" in config:
            torch.save({"step": step, **loaded["model"]}, config["out"])
        for name, parameter in model.named_parameters():
            parameter.data.copy_(loaded["model"][name])
            momentum[name].copy_(loaded["momentum"][name])
    while step < config["steps"]:
        if loaded is None and step == config.get("kill") and rank == world - 1:
            assert os.getsid(0) == os.getpid()
            os.killpg(0, signal.SIGKILL)  # with what Megatron has started: nobody else would end that
        batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        loss = model(batch).pow(2).mean()
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            momentum[name].mul_(0.9).add_(parameter.grad)
            parameter.data.sub_(momentum[name], alpha=0.01)
        step += 1
        yield {"step": step, "loss": loss.item(), "score": -abs(step - 2)}, state()


def train(config: dict[str, Any]) -> None:
    """On a worker of the function trainer: every step is reported."""
    import holdfast.megatron

    checkpoint = hf.get_checkpoint()

    def load(state: Any) -> Any:
        return None if checkpoint is None else holdfast.megatron.load(state, checkpoint)

    for metrics, state in steps(config, load):
        holdfast.megatron.report(metrics, state)


def loop(config: dict[str, Any]) -> None:
    """In a process of torchrun: every step is kept."""
    import holdfast.megatron

    torch.distributed.init_process_group("gloo")
    with holdfast.megatron.Keeper(config["run"], keep=hf.Keep(last=1, best=1, metric="score", mode="max")) as keeper:
        for metrics, state in steps(config, keeper.load):
            keeper.save(state, step=metrics["step"], metrics=metrics)
    torch.distributed.destroy_process_group()


def run(root: Any, name: str, *, workers: int, storage: Any = None, **config: Any) -> hf.Result:
    """Train on so many tensor-parallel workers."""
    return TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=hf.ScalingConfig(num_workers=workers),
        run_config=hf.RunConfig(
            name=name,
            storage_path=str(storage or root),
            checkpoint_config=hf.CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score"),
            failure_config=hf.FailureConfig(max_failures=1),
        ),
    ).fit()


if __name__ == "__main__":
    loop(json.loads(sys.argv[1]))
