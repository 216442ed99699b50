"""The processes that train together, seen from one of them: their group, and what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from holdfast._ranks import RankInfo, current_ranks
from holdfast.checkpointer.meeting import Alone, Meeting, meet
from holdfast.checkpointer.rendezvous import Rendezvous, store_of_this_life
from holdfast.errors import ConfigError, HoldfastError
from holdfast.state.accelerator import group_backend, make_current

__all__ = ["TIMEOUT_S", "Ranks"]

TIMEOUT_S = 600.0
_BUCKET = 250 << 20


class Ranks:
    """One process alone, or one of several that make the same calls in the same order.

    Args:
        info: who we are.

    Attributes:
        rank, world_size: ours among all.
        leads: we are rank 0, which alone writes what is not divided: files, links, logs.
    """

    def __init__(self, info: RankInfo | None = None) -> None:
        self.info = info if info is not None else RankInfo()
        self.rank, self.world_size = self.info.rank, self.info.world_size
        self.leads = self.rank == 0
        self._meeting: Meeting = Alone()
        self._number = 0
        self._topic: str | None = None
        self._host_group: Any = None  # of gloo: what is read on the host must not wait for a device
        if self.world_size > 1:
            self._meeting = self.meeting("trainer")
            if "gloo" not in str(dist.get_backend_config()):
                self._host_group = dist.new_group(backend="gloo")

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Find the other ranks, and make the process group if nobody did.

        Raises:
            ConfigError: there are other ranks, and nothing says where they meet.
        """
        info = current_ranks()
        if info.world_size > 1:
            make_current(device)
            if not dist.is_initialized():
                _make_group(info, device)
        return cls(info)

    def meeting(self, name: str) -> Meeting:
        """Return somewhere else to meet."""
        return meet(
            self.info, name=f"loop-{name}", timeout_s=TIMEOUT_S, otherwise="start the trainer in one process alone"
        )

    def agree(
        self,
        topic: str,
        give: Callable[[], Any],
        decide: Callable[[list[Any]], Any] = lambda values: values[0],
        *,
        work_s: float = 0.0,
    ) -> Any:
        """Let every rank give plain data and rank 0 decide; all return, or raise, the same. See `Rendezvous.agree`."""
        before, self._number = self._topic, self._number + 1
        self._topic = f"{self._number}/{topic}"
        decision = self._meeting.agree(self._topic, give, decide, work_s=work_s)
        if isinstance(self._meeting, Rendezvous) and before is not None:
            self._meeting.forget(before)  # all have come here, so nobody reads it any more
        return decision

    def watch(self, watch: Callable[[], HoldfastError | None] | None) -> None:
        """Give up what is being agreed on when ``watch`` returns an error: a rank is gone."""
        if isinstance(self._meeting, Rendezvous):
            self._meeting.watch = watch

    def lead(self, topic: str, act: Callable[[], Any], *, work_s: float = 0.0) -> Any:
        """Let rank 0 do something; all return what came of it, or raise what it raised. See `agree`."""
        return self.agree(topic, act if self.leads else lambda: None, work_s=work_s)

    # -- numbers, through the process group

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up numbers of the host over all ranks."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._host_group)
        return tensor.tolist()

    def mean(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to take the mean of a tensor over all ranks, on its device; what is returned ends it."""
        if self.world_size == 1:
            return lambda: value
        mean = value.detach() / self.world_size
        work = dist.all_reduce(mean, async_op=True)

        def ended() -> torch.Tensor:
            work.wait()
            return mean

        return ended

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their means over all ranks."""
        kinds: dict[Any, list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for kind in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in kind]) / self.world_size
            dist.all_reduce(flat)
            for tensor, mean in zip(kind, torch.split(flat, [tensor.numel() for tensor in kind]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every rank the values that rank 0 has."""
        if self.world_size > 1 and tensors:
            group = dist.distributed_c10d._get_default_group()
            dist._broadcast_coalesced(group, list(tensors), _BUCKET, 0)  # type: ignore[attr-defined]


def _make_group(info: RankInfo, device: torch.device) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"this is rank {info.rank} of {info.world_size}, and {' and '.join(missing)} do not say where the ranks "
            "meet: start with torchrun, or call torch.distributed.init_process_group before the Trainer is made"
        )
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{group_backend(device.type)}"
    store, rank, world_size = next(dist.rendezvous("env://", info.rank, info.world_size))  # type: ignore[attr-defined]
    # The store of torchrun may outlive a restart of the ranks: gloo must not find the addresses of an earlier life.
    timeout_s = dist.distributed_c10d.default_pg_timeout.total_seconds()
    life = store_of_this_life(store, info, timeout_s=timeout_s)
    dist.init_process_group(backend, store=life, rank=rank, world_size=world_size)
