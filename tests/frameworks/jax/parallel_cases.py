"""A data-parallel training with JAX on workers of the function trainer: arrays that two processes share."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast as hf
from holdfast.jax import Pytree
from holdfast.torch import TorchTrainer


def join() -> Mesh:
    """Make one JAX of all workers, over gloo."""
    rank, port = torch.distributed.get_rank(), [0]
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = [free.getsockname()[1]]
    torch.distributed.broadcast_object_list(port)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port[0]}", torch.distributed.get_world_size(), rank)
    return Mesh(np.array(jax.devices()), ("data",))


def train(config: dict[str, Any]) -> None:
    """SGD whose noise comes from a key that is part of the state; one rank is killed once where the config says."""
    mesh, rank = join(), torch.distributed.get_rank()
    whole, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def fresh() -> Any:
        return {"w": jnp.ones(4), "key": jax.random.key(0)}

    def loss_of(w: Any, x: Any) -> Any:
        return ((w - x) ** 2).sum(1).mean()

    @jax.jit
    def step(tree: Any, shares: Any) -> Any:
        key, use = jax.random.split(tree["key"])
        x = shares[:, None] + jax.random.normal(use, (shares.shape[0], 4))
        loss, slope = jax.value_and_grad(loss_of)(tree["w"], x)
        return {"w": tree["w"] - 0.1 * slope, "key": key}, loss

    tree, checkpoint, first = Pytree(jax.jit(fresh, out_shardings=whole)()), hf.get_checkpoint(), 0
    assert not tree.value["w"].is_fully_addressable
    if checkpoint is not None:
        first = hf.load(checkpoint, {"train": tree})["step"]
    for number in range(first, config["steps"]):
        if checkpoint is None and number == config["kill"] and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        shares = jax.make_array_from_process_local_data(cut, np.full(3, rank + number, np.float32))
        tree.value, loss = step(tree.value, shares)
        # A score whose best is neither the first nor the last.
        metrics = {"step": number + 1, "loss": float(loss), "score": -abs(number - 1)}
        hf.report(metrics, state={"train": tree, "step": number + 1})


def run(root: str, name: str, kill: int | None = None) -> hf.Result:
    """Train on two workers."""
    return TorchTrainer(
        train,
        train_loop_config={"steps": 4, "kill": kill},
        scaling_config=hf.ScalingConfig(num_workers=2),
        run_config=hf.RunConfig(
            name=name,
            storage_path=root,
            checkpoint_config=hf.CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score"),
            failure_config=hf.FailureConfig(max_failures=1),
        ),
    ).fit()
