"""Lightning's strategies and environment for workers of the function trainer, under the names Ray Train gives them.

Lightning counts its processes by ``devices`` and ``num_nodes``. These take ranks, device and world size from
`holdfast.get_context` instead, so that ``devices="auto"`` is right on every worker.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import ConfigError
from holdfast.trainers.function.worker.session import get_context

from .grafted import Grafted

__all__ = [
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "prepare_trainer",
]


class _Strategy(Grafted):
    """The workers' ranks and devices; for the first of Lightning's names that is imported."""

    EXTRA = "lightning"
    ALONE = True

    @property
    def root_device(self) -> Any:
        """The device of this worker."""
        from holdfast.trainers.torch_helpers import get_device

        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which part of the data this worker has."""
        context = get_context()
        return {"num_replicas": context.get_world_size(), "rank": context.get_world_rank()}


class RayDDPStrategy(_Strategy):
    """`DDPStrategy` of Lightning over the workers of the function trainer; takes its arguments."""

    BASES = ("lightning.pytorch.strategies:DDPStrategy", "pytorch_lightning.strategies:DDPStrategy")


class RayFSDPStrategy(_Strategy):
    """`FSDPStrategy` of Lightning over the workers of the function trainer; takes its arguments."""

    BASES = ("lightning.pytorch.strategies:FSDPStrategy", "pytorch_lightning.strategies:FSDPStrategy")


class RayDeepSpeedStrategy(_Strategy):
    """`DeepSpeedStrategy` of Lightning over the workers of the function trainer; takes its arguments."""

    BASES = ("lightning.pytorch.strategies:DeepSpeedStrategy", "pytorch_lightning.strategies:DeepSpeedStrategy")


class RayLightningEnvironment(Grafted):
    """Tells Lightning who this worker is; processes are started by the function trainer."""

    BASES = (
        "lightning.pytorch.plugins.environments:LightningEnvironment",
        "pytorch_lightning.plugins.environments:LightningEnvironment",
    )
    EXTRA = "lightning"
    ALONE = True

    @property
    def creates_processes_externally(self) -> bool:
        """Lightning is to start none."""
        return True

    def world_size(self) -> int:
        """Return the number of workers."""
        return get_context().get_world_size()

    def set_world_size(self, size: int) -> None:
        """Take no notice of what Lightning counts."""

    def global_rank(self) -> int:
        """Return the rank among all workers."""
        return get_context().get_world_rank()

    def set_global_rank(self, rank: int) -> None:
        """Take no notice of what Lightning counts."""

    def local_rank(self) -> int:
        """Return the rank among the workers of this machine."""
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        """Return the number of this machine."""
        return get_context().get_node_rank()

    def teardown(self) -> None:
        """Leave the variables of the environment alone: they are the worker's."""


def prepare_trainer(trainer: Any) -> Any:
    """Return a trainer of Lightning if its processes are the workers of the function trainer.

    Raises:
        ConfigError: it counts other processes than there are workers.
        SessionError: called outside of train_func.
    """
    there, counted = get_context().get_world_size(), trainer.world_size
    if there != counted:
        raise ConfigError(
            f"prepare_trainer: there are {there} workers, and this trainer counts {counted}: make it with "
            "strategy=RayDDPStrategy() and plugins=[RayLightningEnvironment()] of holdfast.lightning, or with "
            f"devices={there} and strategy='ddp'"
        )
    return trainer
