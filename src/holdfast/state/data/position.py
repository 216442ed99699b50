"""Positions in the data as they are stored, and what becomes of them where another number of ranks goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..tree.values import PerRank

__all__ = ["elsewhere", "of_this_rank", "said", "with_ranks_apart"]

# What was said about data in this process, be it in the log or when a run started: once is enough.
said: set[str] = set()


def with_ranks_apart(position: Mapping[str, Any]) -> Mapping[str, Any]:
    """Mark what is another one on each rank: what a loader with a state of its own remembers. All else is equal."""
    if position["kind"] != "stateful" or isinstance(position["inner"], PerRank):
        return position
    return {**position, "inner": PerRank(position["inner"])}


def of_this_rank(position: Mapping[str, Any]) -> Mapping[str, Any]:
    """Undo `with_ranks_apart`, for a position that did not go through a checkpoint."""
    inner = position["inner"]
    return {**position, "inner": inner.value} if isinstance(inner, PerRank) else position


def elsewhere(position: Mapping[str, Any], world_size: int) -> str:
    """Say what becomes of a position in an epoch when ``world_size`` ranks go on from it and not as many as saved it.

    Args:
        position: what `ResumableBatches.state_dict` returned.
        world_size: number of ranks now.
    """
    before, epoch = int(position.get("world_size", world_size)), position["epoch"]
    if position["kind"] == "map" and (position["inner"] or {}).get("divides", True):
        return (
            f"data: the rest of epoch {epoch} after {position['samples']} samples is split over {world_size} rank(s), "
            f"was {before}"
        )
    if position["kind"] == "map":
        return (
            f"data: {position['inner']['sampler']} splits epoch {epoch} over the ranks by itself ({world_size} now, "
            f"{before} before): whether its rest holds each sample exactly once is not known. A sampler that knows "
            "nothing of ranks, or a DistributedSampler, is split again exactly"
        )
    if position.get("elastic"):
        return (
            f"data: epoch {epoch} goes on with {world_size} rank(s), was {before}: its loader is elastic and splits "
            "the rest by itself"
        )
    if position["kind"] == "stateful":
        return (
            f"data: a loader with its own state has one for each of {before} rank(s), which cannot be split again over "
            f"{world_size}: epoch {epoch} begins anew. A DataLoader over a map-style data set is split again exactly"
        )
    return (
        f"data: a loader without indices cannot be split again from {before} to {world_size} rank(s): each draws as "
        f"many batches again as make {position['samples']} samples on all of them, which is exact only if rank r has "
        "every n-th sample from the r-th on"
    )
