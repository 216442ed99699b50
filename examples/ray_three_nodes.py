"""Train scikit-learn's digits on a Ray cluster of three nodes that loses one and gains one; every sample is used once.

    python examples/ray_three_nodes.py [--folder FOLDER] [--epochs N]

Needs `pip install '.[ray]' scikit-learn`. The nodes are raylets on this machine; on a real cluster only the
lines that start and end them are different.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import holdfast as hf
from holdfast.torch import TorchTrainer

BATCH = 32  # samples of one step, of all workers together


def train(config: dict[str, Any]) -> None:
    """Go through the samples in a fixed order, each worker through its share of every batch."""
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits

    context = hf.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    state: dict[str, Any] = {"model": model, "step": 0, "used": torch.zeros(len(x), dtype=torch.int32)}
    if (checkpoint := hf.get_checkpoint()) is not None:
        state.update(hf.load(checkpoint, state))
    total = config["epochs"] * (len(x) // BATCH)
    while state["step"] < total:
        step = state["step"]
        batch = torch.arange(BATCH * step, BATCH * (step + 1)) % (len(x) // BATCH * BATCH)
        mine = batch[rank::size]
        loss = torch.nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="sum") / BATCH
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None and size > 1:
                dist.all_reduce(parameter.grad)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad if parameter.grad is not None else 0, alpha=0.1)
        state["used"][batch] += 1
        state["step"] = step + 1
        metrics = {"step": step + 1, "workers": size, "loss": float(loss), "used": int(state["used"].sum())}
        time.sleep(config["pause"])
        if hf.should_save() or (step + 1) % 5 == 0 or step + 1 == total:
            hf.report(metrics, state=state)
        else:
            hf.report(metrics)
        Path(config["folder"], "progress").write_text(str(step + 1))


def disturb(cluster: Any, nodes: list[Any], progress: Path) -> None:
    """Take a node away after ten steps, without a word; add another one after twenty."""
    for after in (10, 20):
        while not (progress.exists() and int(progress.read_text() or 0) >= after):
            time.sleep(0.1)
        if after == 10:
            print("a node dies", flush=True)
            cluster.remove_node(nodes[0], allow_graceful=False)
        else:
            print("a node is added", flush=True)
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)


def main() -> None:
    """Start the cluster, train, and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("ray-runs"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two steps, so that there is time")
    told = parser.parse_args()
    told.folder.mkdir(parents=True, exist_ok=True)
    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        threading.Thread(target=disturb, args=(cluster, nodes, told.folder / "progress"), daemon=True).start()
        config = {"epochs": told.epochs, "pause": told.pause, "folder": str(told.folder.resolve())}
        result = TorchTrainer(
            train,
            train_loop_config=config,
            scaling_config=hf.ScalingConfig(num_workers=(1, 3), engine="ray"),
            run_config=hf.RunConfig(
                name="digits",
                storage_path=told.folder.resolve(),
                checkpoint_config=hf.CheckpointConfig(num_to_keep=2),
                failure_config=hf.FailureConfig(max_failures=3),
            ),
        ).fit()
        assert result.checkpoint is not None
        used = hf.load(result.checkpoint, only="used")["used"]
        sizes = list(dict.fromkeys(result.metrics_dataframe["workers"]))
        exact = bool((used[: len(used) // BATCH * BATCH] == told.epochs).all())
        print(
            f"workers over time: {sizes}; every sample used {told.epochs} times: {exact}; loss {result.metrics['loss']}"
        )
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
