"""Which ranks hold the same state as this rank: the others hold another (stages of a pipeline, experts).

The user names them, or the state does: a mesh or a process group of some ranks leaves the others out. A group that is
too small costs space, never data: each group stores what it holds, even if another group holds the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from holdfast.errors import ConfigError

from .spread import spread_types

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Alike", "common_group", "group_of", "parallel_group", "ranks_alike"]

Alike: TypeAlias = "DeviceMesh | ProcessGroup | Sequence[int] | None"
"""The ranks that hold the same as this rank; None: those that the state names, else all ranks."""


def ranks_alike(alike: Any, *, rank: int, world_size: int) -> tuple[int, ...] | None:
    """Return the ranks that ``alike`` names, None if it names none.

    Raises:
        ConfigError: it names no ranks, ranks outside of ``world_size``, or not this rank.
    """
    if alike is None:
        return None
    if isinstance(alike, Sequence) and not isinstance(alike, (str, bytes)):
        ranks = list(alike)
    elif hasattr(alike, "mesh") and isinstance(alike.mesh, torch.Tensor):
        ranks = alike.mesh.flatten().tolist()
    else:
        import torch.distributed as dist

        if not dist.is_available() or not isinstance(alike, dist.ProcessGroup):
            raise ConfigError(
                f"alike={alike!r}: name the ranks that hold the same as this rank, with a DeviceMesh (mesh['dp']), a "
                "process group or a list of ranks; [rank] where each rank holds something of its own"
            )
        ranks = dist.get_process_group_ranks(alike)
    good = all(type(member) is int and 0 <= member < world_size for member in ranks)
    if not good or rank not in ranks or len(set(ranks)) != len(ranks):
        raise ConfigError(
            f"alike names the ranks {ranks}, and this is rank {rank} of {world_size}: name each rank that holds the "
            "same as this rank once, and this rank, too"
        )
    return tuple(sorted(ranks))


def common_group(groups: Iterable[tuple[int, ...]], *, rank: int, world_size: int) -> tuple[int, ...] | None:
    """Return the ranks that all groups of a state have in common; None if these are all ranks."""
    common = set(range(world_size))
    for group in groups:
        if rank in group:
            common.intersection_update(group)
    return None if len(common) == world_size else tuple(sorted(common))


def group_of(state: Any, *, rank: int, world_size: int) -> tuple[int, ...] | None:
    """Find out from the modules and tensors of a state which ranks hold the same; None: all of them."""
    return common_group(set(_groups(state, ())), rank=rank, world_size=world_size)


def parallel_group(module: nn.Module) -> tuple[int, ...] | None:
    """Return the ranks over which a module is wrapped in DDP; None if it is not."""
    kind = nn.parallel.DistributedDataParallel
    if not isinstance(module, kind):
        return None
    import torch.distributed as dist

    return tuple(sorted(dist.get_process_group_ranks(module.process_group)))


def _groups(value: Any, above: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    kinds = spread_types()
    if isinstance(value, nn.Module):
        if (group := parallel_group(value)) is not None:
            yield group
        yield from _spread_over(value.parameters(), kinds)
    elif isinstance(value, torch.Tensor):
        yield from _spread_over([value], kinds)
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in above:
        items = value.values() if isinstance(value, Mapping) else value
        yield from _spread_over((item for item in items if isinstance(item, torch.Tensor)), kinds)
        for item in items:
            if not isinstance(item, (torch.Tensor, int, float, str)):
                yield from _groups(item, (*above, id(value)))


def _spread_over(tensors: Iterable[torch.Tensor], kinds: tuple[type, ...]) -> Iterator[tuple[int, ...]]:
    if not kinds:
        return
    from .sharded import spread_of  # not above: most states have no such tensor

    seen: dict[tuple[int, Any], Any] = {}
    for tensor in tensors:
        if isinstance(tensor, kinds):
            mesh = getattr(tensor, "device_mesh", None)
            key = (id(mesh), getattr(tensor, "placements", None)) if mesh is not None else (id(tensor), None)
            if key not in seen:
                seen[key] = mesh
                yield spread_of(tensor).ranks
