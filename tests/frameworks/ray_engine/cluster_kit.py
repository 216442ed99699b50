"""A Ray cluster whose nodes are raylets on this machine, and trainers on it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from cluster_functions import parent
from ray.cluster_utils import Cluster

import holdfast as hf
from holdfast.torch import TorchTrainer

LIMIT_S = 120.0
# A node that is gone is noticed after some three seconds and not fifteen, which is all that tests would wait for.
_HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
_STORE = 80 << 20


class Nodes:
    """Nodes of a cluster besides its head. Those that a test has left as they were serve the next one."""

    def __init__(self, cluster: Any, dashboard: str) -> None:
        self._cluster = cluster
        self.address: str = cluster.address
        self.dashboard = dashboard
        self._added: list[Any] = []
        self._sizes: dict[int, int] = {}  # CPUs of nodes that are as they were, by the id of the object
        self._idle: list[Any] = []  # left by an earlier test

    def add(self, *cpus: int) -> list[Any]:
        """Add nodes with so many CPUs each."""
        added = [self._reuse(count) for count in cpus]
        self._remove_idle()
        for place, count in enumerate(cpus):
            if added[place] is None:
                node = added[place] = self._cluster.add_node(num_cpus=count, object_store_memory=_STORE, wait=False)
                self._sizes[id(node)] = count
        self._added += added
        self._cluster.wait_for_nodes(timeout=LIMIT_S)
        return added

    def add_with(self, **options: Any) -> Any:
        """Add a node with these options of `Cluster.add_node`."""
        self._remove_idle()
        self._added.append(self._cluster.add_node(**options, object_store_memory=_STORE))
        return self._added[-1]

    def _reuse(self, cpus: int) -> Any:
        found = next((node for node in self._idle if self._sizes[id(node)] == cpus), None)
        if found is not None:
            self._idle.remove(found)
        return found

    def _remove_idle(self) -> None:
        for node in self._idle:
            self._cluster.remove_node(node)
        gone = {node.node_id for node in self._idle}
        self._idle = []
        wait_until(
            lambda: not any(node["Alive"] and node["NodeID"] in gone for node in ray.nodes()), "idle nodes are gone"
        )

    def spoil(self, node: Any) -> None:
        """Note that a node is not what it was: it is removed after the test."""
        self._sizes.pop(id(node), None)

    def kill(self, node: Any) -> None:
        """End a raylet without a word."""
        self.spoil(node)
        self._added.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def of(self, agent: int) -> Any:
        """Give the node that an agent is on: it is a child of the raylet."""
        raylet = parent(agent)
        return next(node for node in self._added if node.all_processes["raylet"][0].process.pid == raylet)

    def drain(self, node: Any, seconds: float) -> None:
        """Announce that a node goes, as a cloud does that wants a machine back."""
        self.spoil(node)
        client = ray._raylet.GcsClient(address=self.address)
        deadline = int((time.time() + seconds) * 1000)
        accepted, why = client.drain_node(node.node_id, 2, "spot", deadline)  # 2: preemption
        assert accepted, why

    def release(self) -> None:
        """End a test: remove what is not as it was, and wait until the cluster knows it."""
        for node in self._added:
            if id(node) in self._sizes and node.all_processes["raylet"][0].process.poll() is None:
                self._idle.append(node)
            else:
                self._cluster.remove_node(node)
        self._added = []
        left = 1 + len(self._idle)
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == left, "the other nodes are gone")

    def shutdown(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def start_head() -> Nodes:
    """Start a cluster, connect to it."""
    from object_kit import free_port  # not above: tasks import this module, and nodes have no such one

    options = {"num_cpus": 0, "include_dashboard": True, "object_store_memory": _STORE, "_system_config": _HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "dashboard_port": free_port()})
    context = ray.init(address=cluster.address, log_to_driver=False)
    return Nodes(cluster, f"http://{context.dashboard_url}")


def trainer(root: Path, function: Any, *, workers: Any = 2, failures: int = 0, **options: Any) -> TorchTrainer:
    scaling = {"engine": "ray", "resources_per_worker": options.pop("resources", None), **options.pop("scaling", {})}
    return TorchTrainer(
        function,
        train_loop_config={"folder": str(root), **options.pop("config", {})},
        scaling_config=hf.ScalingConfig(num_workers=workers, **scaling),
        run_config=hf.RunConfig(
            **{"name": "run", "storage_path": root, **options},
            failure_config=hf.FailureConfig(max_failures=failures),
        ),
    )


def wait_until(met: Callable[[], Any], what: str, timeout_s: float = LIMIT_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := met()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.05)
    return value


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
