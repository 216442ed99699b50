"""Which engine a trainer runs on: the processes of this machine, or a Ray cluster."""

from __future__ import annotations

import os
from typing import Any

from holdfast._log import get_logger
from holdfast._optional import install_command
from holdfast.config import ScalingConfig
from holdfast.errors import ConfigError
from holdfast.storage.base import Storage

from .engines.cluster import ray_api
from .engines.cluster.engine import ClusterEngine
from .engines.cluster.ray_nodes import RayNodes, Wanted
from .engines.local.engine import LocalEngine

__all__ = ["make_engine", "runs_on_ray", "threads"]

_LOG = get_logger("trainers.function")
_SPARES = "HOLDFAST_SPARE_NODES"
_MOST_SPARES = "2"


def runs_on_ray(scaling: ScalingConfig) -> bool:
    """Whether this is a run on a Ray cluster.

    Raises:
        ConfigError: what is asked for needs Ray, which is not there.
    """
    if scaling.engine == "ray":
        return True
    if scaling.engine == "auto" and scaling.num_workers != 0 and ray_api.is_wanted():
        return True
    if isinstance(scaling.num_workers, tuple):
        raise ConfigError(
            f"ScalingConfig(num_workers={scaling.num_workers!r}): an elastic range needs a Ray cluster, and there is "
            "none: connect with ray.init(), set RAY_ADDRESS, or give one number"
        )
    return False


def make_engine(
    scaling: ScalingConfig, storage: Storage, *, max_failures: int, silence_s: float | None = None
) -> LocalEngine | ClusterEngine:
    """Make the engine; it begins to load what workers need while its caller goes on.

    Args:
        scaling: what was asked for.
        storage: root of the run.
        max_failures: failures after which the run ends; with 0 nothing is kept ready on spare nodes.
        silence_s: a node that says nothing for so long is given up; None: the engine's own limit.

    Raises:
        ConfigError: there is no cluster, or it cannot do this.
    """
    if not runs_on_ray(scaling):
        if scaling.label_selector is not None or scaling.placement_strategy != "PACK":
            _LOG.warning(
                "placement_strategy and label_selector choose nodes of a Ray cluster; this run has one machine"
            )
        if scaling.engine == "auto" and ray_api.is_missed():
            _LOG.warning(
                "RAY_ADDRESS names a cluster, and Ray is not installed here: this run stays on this machine; for the "
                "cluster %s, else say ScalingConfig(engine='local')",
                install_command("ray"),
            )
        return LocalEngine(num_workers=scaling.most_workers, storage=storage)
    resources = _resources(scaling)
    count = scaling.num_workers
    wanted = Wanted(
        least=count[0] if isinstance(count, tuple) else count,
        most=scaling.most_workers,
        resources=resources,
        strategy=scaling.placement_strategy,
        labels=scaling.label_selector,
        spares=_spares() if max_failures else 0,
    )
    nodes = RayNodes(ray_api.connect(), wanted, silence_s=silence_s or 0.0)
    return ClusterEngine(nodes, storage=storage, silence_s=silence_s)


def threads(scaling: ScalingConfig) -> dict[str, str]:
    """Return the variable that sizes thread pools of workers; {} where their number of cores is not known."""
    cores: Any = (scaling.resources_per_worker or {}).get("CPU")
    if not cores and runs_on_ray(scaling) and "OMP_NUM_THREADS" not in os.environ:
        cores = _resources(scaling).get("CPU")  # what is reserved
    return {} if not cores else {"OMP_NUM_THREADS": str(max(1, int(cores)))}


def _spares() -> int:
    """Return on how many nodes without workers an interpreter is kept ready.

    Raises:
        ConfigError: HOLDFAST_SPARE_NODES is no number.
    """
    text = os.environ.get(_SPARES, _MOST_SPARES)
    if not text.isdecimal():
        raise ConfigError(
            f"{_SPARES}={text!r}: give the number of nodes that an interpreter is kept ready on, 0 for none"
        )
    return int(text)


def _resources(scaling: ScalingConfig) -> dict[str, float]:
    """Return the amounts of each worker, by resource: one CPU unless configured otherwise, and its GPU.

    Raises:
        ConfigError: more than one GPU, or nothing at all.
    """
    found = scaling.reserved_per_worker
    if scaling.use_gpu and found["GPU"] != 1:
        raise ConfigError(
            f"ScalingConfig(resources_per_worker={dict(scaling.resources_per_worker or {})!r}): on Ray each worker "
            "gets one GPU, other amounts are not built yet; start more workers, or leave 'GPU' out"
        )
    if not found:
        raise ConfigError(
            f"ScalingConfig(resources_per_worker={dict(scaling.resources_per_worker or {})!r}): on Ray a worker has to "
            "reserve something; give a CPU, or a custom resource"
        )
    return found
