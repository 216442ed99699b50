"""All calls of Ray, in one place, those of private or new functions too."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import socket
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast._log import get_logger
from holdfast._optional import install_command
from holdfast.errors import ConfigError

from .agent import AgentCall

_LOG = get_logger("trainers.function")
_NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node
_CLIENT = (
    "a driver over Ray Client (ray://) is not on the cluster: its nodes cannot connect to it. Submit the script as a "
    "job (ray job submit -- python train.py), or run it on a node of the cluster"
)


def is_wanted() -> bool:
    """Whether ``engine="auto"`` means Ray here: a cluster is connected, or RAY_ADDRESS names one (jobs have it).

    Not inside a task, an actor or a Tune trial: there ``engine="ray"`` is needed.
    """
    if importlib.util.find_spec("ray") is None:
        return False
    import sys

    ray: Any = sys.modules.get("ray")  # a process that has not imported it is not connected
    if ray is not None and ray.is_initialized():
        # A task or a trial has its own share of the cluster, and may be all that it has room for.
        return bool(ray.get_runtime_context().worker.mode != ray.WORKER_MODE)
    return bool(os.environ.get("RAY_ADDRESS"))


def is_missed() -> bool:
    """Whether RAY_ADDRESS names a cluster that cannot be reached from here for want of Ray."""
    return bool(os.environ.get("RAY_ADDRESS")) and importlib.util.find_spec("ray") is None


def connect() -> RayApi:
    """Connect to the cluster that is there, unless this process is connected.

    Raises:
        ConfigError: Ray is not installed, there is no cluster, or the connection is over Ray Client.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"ScalingConfig(engine='ray'): Ray cannot be imported ({error}): {install_command('ray')}"
        ) from error
    if ray.util.client.ray.is_connected() or os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise ConfigError(f"ScalingConfig(engine='ray'): {_CLIENT}")
    if not ray.is_initialized():
        try:
            ray.init(address="auto")
        except ConnectionError as error:
            raise ConfigError(
                "ScalingConfig(engine='ray'): there is no Ray cluster here (ray start --head starts one), and "
                f"RAY_ADDRESS names none: {error}"
            ) from error
    return RayApi(ray)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node that is alive.

    Attributes:
        address: IP address.
        port: of Ray's process there.
        resources: amounts by name.
        labels: by name; empty where this Ray knows none.
    """

    address: str
    port: int
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def answers(self, timeout_s: float = 1.0) -> bool:
        """Return whether Ray's process on it takes connections; the cluster notices a lost node only much later."""
        try:
            socket.create_connection((self.address, self.port), timeout=timeout_s).close()
        except OSError:
            return False
        return True


class RayApi:
    """Calls of Ray that wait for no more than an answer of the cluster's control service."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._state: Any = getattr(getattr(getattr(ray, "_private", None), "state", None), "state", None)
        self._said = False
        self._agent = ray.remote(num_cpus=0, max_restarts=0)(_AgentActor)
        self._slot = ray.remote(max_restarts=0)(_SlotActor)
        # What a task or an actor asks for belongs to its job and outlives its process.
        mode = getattr(getattr(ray.get_runtime_context(), "worker", None), "mode", None)
        self._owner = _GroupOwner(ray, self.host) if mode == ray.WORKER_MODE else None

    @property
    def host(self) -> str:
        """Address of this machine in the cluster."""
        return str(self._ray.util.get_node_ip_address())

    def nodes(self) -> dict[str, NodeFacts]:
        """Return the nodes that the cluster holds alive, by id."""
        return {
            node["NodeID"]: NodeFacts(
                address=node["NodeManagerAddress"],
                port=node["NodeManagerPort"],
                resources=node["Resources"],
                labels=node.get("Labels") or {},
            )
            for node in self._ray.nodes()
            if node["Alive"]
        }

    def draining(self) -> dict[str, float]:
        """Return the nodes that are about to go, with the seconds until then; {} where this Ray does not tell."""
        try:
            found = self._state.get_draining_nodes()
        except AttributeError as error:  # it is private to Ray
            if not self._said:
                _LOG.warning("this Ray does not tell which nodes are being drained; they end like lost ones: %s", error)
            self._said = True
            return {}
        now = time.time()
        return {node: max(0.0, deadline / 1000 - now) if deadline else 3600.0 for node, deadline in found.items()}

    def free(self) -> dict[str, Mapping[str, float]]:
        """Return the free resources by node; {} where this Ray does not tell."""
        try:
            found: dict[str, Mapping[str, float]] = self._ray._private.state.available_resources_per_node()
        except AttributeError as error:  # it is private to Ray
            _LOG.debug("this Ray does not tell what is free on each node: %s", error)
            return {}
        return found

    def shrinks(self) -> bool:
        """Return whether an autoscaler may remove idle nodes, as far as this Ray tells.

        A node with an actor is never idle to it, however little the actor reserves: a worker process that is in use
        makes the node busy. Ray keeps the autoscaler's configuration only where that reports it (the same is read by
        Ray Data for this question); that of ``ray up`` and of KubeRay does not.
        """
        try:
            config = self._state.get_cluster_config()
            groups = config.node_group_configs if config is not None else ()
            return any(group.max_count == -1 or group.max_count > group.min_count for group in groups)
        except Exception as error:  # noqa: BLE001 - private to Ray, and not in every version; the run does not need it
            _LOG.debug("this Ray does not tell whether the cluster autoscales: %s", error)
            return False

    @property
    def can_exclude(self) -> bool:
        """Whether a placement group can keep off certain nodes."""
        return "bundle_label_selector" in self._parameters

    @property
    def _parameters(self) -> Mapping[str, Any]:
        from ray.util.placement_group import placement_group

        return inspect.signature(placement_group).parameters

    def reserve(
        self,
        bundles: Sequence[Mapping[str, float]],
        strategy: str,
        labels: Mapping[str, str] | None,
        *,
        avoid: Collection[str] = (),
        near: str | None = None,
    ) -> Any:
        """Ask for a placement group; it is made when there is room.

        Args:
            bundles: amounts of each place.
            strategy: of Ray.
            labels: of nodes that may be used; None: all.
            avoid: nodes that may not be used, where this Ray can tell them apart.
            near: the preferred node for a group of one place.

        Raises:
            ConfigError: this Ray knows no labels.
        """
        more: dict[str, Any] = {}
        if labels and not self.can_exclude:
            raise ConfigError(
                f"ScalingConfig(label_selector=...): Ray {self._ray.__version__} knows no labels of nodes; it came "
                "with 2.47: install a newer version, or use resources_per_worker with a custom resource"
            )
        if avoid and self.can_exclude:
            labels = {_NODE_LABEL: f"!in({','.join(sorted(avoid))})", **(labels or {})}
        if labels:
            more["bundle_label_selector"] = [dict(labels)] * len(bundles)
        if near is not None and len(bundles) == 1 and "_soft_target_node_id" in self._parameters:
            strategy = "STRICT_PACK"  # the same for one place, and the only strategy with which Ray takes a hint
            more["_soft_target_node_id"] = near
        wanted = [dict(bundle) for bundle in bundles]
        if self._owner is not None:
            return self._owner.reserve(wanted, strategy, more)
        from ray.util.placement_group import placement_group

        return placement_group(wanted, strategy=strategy, **more)

    def bundles(self, groups: Sequence[Any]) -> list[dict[int, str]]:
        """Return, for each placement group, the node of each placed bundle; it may be dead. Makes a single request."""
        util = self._ray.util
        if len(groups) == 1:
            tables = [util.placement_group_table(groups[0])]
        else:
            every = util.placement_group_table()
            tables = [every.get(group.id.hex(), {}) for group in groups]
        return [
            {int(number): node for number, node in (table.get("bundles_to_node_id") or {}).items() if node}
            for table in tables
        ]

    def release(self, group: Any) -> None:
        """Give a placement group back."""
        self._ray.util.remove_placement_group(group)

    def start_agent(self, node: str) -> Any:
        """Start the actor of an agent on this node only."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return self._agent.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()

    def start_slot(self, group: Any, bundle: int, resources: Mapping[str, float]) -> tuple[Any, Any]:
        """Start an actor that takes the accelerator of a bundle; return it, and a reference to the ids."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        actor = self._slot.options(num_cpus=0, num_gpus=resources["GPU"], scheduling_strategy=strategy).remote()
        return actor, actor.gpus.remote()

    def serve(self, actor: Any, call: Mapping[str, Any]) -> Any:
        """Let an agent connect; return a reference that is ready when it has ended."""
        return actor.serve.remote(dict(call))

    def ended(self, refs: Sequence[Any]) -> list[Any]:
        """Return the references that are ready, without waiting."""
        return list(self._ray.wait(list(refs), num_returns=len(refs), timeout=0)[0]) if refs else []

    def outcome(self, ref: Any) -> Any:
        """Return what an actor returned; raise what it raised, or an error about its death."""
        return self._ray.get(ref, timeout=10)

    def close(self) -> None:
        """End the owner of the placement groups, if this object has started it."""
        if self._owner is not None:
            self._owner.close()

    def kill(self, actor: Any) -> None:
        """End an actor at once."""
        self._ray.kill(actor, no_restart=True)


class _GroupOwner:
    """Asks for placement groups in place of a task or actor, so that they end with its process.

    A detached actor owns them, and ends when its connection to this process does; no data is sent on it.
    """

    def __init__(self, ray: Any, host: str) -> None:
        self._ray = ray
        self._listener = socket.create_server((host, 0))
        options = {"num_cpus": 0, "lifetime": "detached", "namespace": "holdfast", "name": f"keeper-{uuid.uuid4().hex}"}
        # On the node of this process: the death of another node must not end what this process has asked for.
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self._actor = (
            ray.remote(_GroupOwnerActor)
            .options(max_restarts=0, max_concurrency=2, scheduling_strategy=here, **options)
            .remote()
        )
        self._actor.watch.remote(host, self._listener.getsockname()[1])

    def reserve(self, bundles: list[dict[str, float]], strategy: str, more: dict[str, Any]) -> Any:
        return self._ray.get(self._actor.reserve.remote(bundles, strategy, more))

    def close(self) -> None:
        self._listener.close()
        self._ray.kill(self._actor, no_restart=True)


class _GroupOwnerActor:
    """Owns placement groups."""

    def watch(self, host: str, port: int) -> None:
        """Wait for the end of the process that listens there, and end too, with the groups that this actor owns."""
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=30) as connection:
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            connection.recv(1)
        os._exit(0)

    def reserve(self, bundles: list[dict[str, float]], strategy: str, more: dict[str, Any]) -> Any:
        from ray.util.placement_group import placement_group

        return placement_group(bundles, strategy=strategy, **more)


class _AgentActor:
    """An agent in a worker process of Ray."""

    def serve(self, call: dict[str, Any]) -> str:
        from .agent import run_agent

        return run_agent(AgentCall(**call))


class _SlotActor:
    """Takes the accelerator of a bundle and returns its id."""

    def gpus(self) -> list[str]:
        import ray

        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
