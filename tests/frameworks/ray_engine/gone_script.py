"""A driver whose cluster is ended in the middle of its run; prints how `fit` ended, and after how long."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import ray
from cluster_functions import steps
from cluster_kit import trainer
from ray.cluster_utils import Cluster

from holdfast.trainers.function.engines import ray_nodes


def main(root: Path) -> None:
    """Run until the cluster is gone."""
    options = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    ray.init(address=cluster.address, log_to_driver=False)
    gone: list[float] = []

    def disturb() -> None:
        while len(list(root.glob("waiting-*"))) < 2:
            time.sleep(0.05)
        for node in [cluster.head_node, *cluster.worker_nodes]:
            for processes in node.all_processes.values():
                for info in processes:
                    info.process.kill()
        gone.append(time.monotonic())

    threading.Thread(target=disturb, daemon=True).start()
    ray_nodes._PATIENCE_S = 8.0  # half a minute is all that the test would wait for
    try:
        trainer(root, steps, failures=-1, config={"wait_at": 2}).fit()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        print("seconds", time.monotonic() - gone[0], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
