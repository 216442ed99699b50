"""A checkpoint that is a single file: rank 0 gathers what every rank has for itself, and writes it."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from holdfast.state.data.seeding import generators_kept
from holdfast.state.load.rank_values import restore_derived
from holdfast.state.save.torch_file import from_plain, to_plain
from holdfast.state.tree import rng
from holdfast.state.tree.values import PerRank

from ..training.ranks import Ranks
from .schema import plain_leaf

__all__ = ["gathered", "of_rank"]

_KEY = "of_ranks"  # {"of_ranks": [that of rank 0, ...]} stands for a value that each rank has for itself


def gathered(found: dict[str, Any], ranks: Ranks) -> dict[str, Any] | None:
    """Return a state in nested dictionaries with what all ranks have for themselves; None on other ranks than 0."""
    own = {path: per_rank.value for path, per_rank in _per_rank(found)}
    whole = found.get("rng") is rng.RNG
    mine = [{"values": to_plain(own, plain_leaf), "rng": to_plain(rng.capture()) if whole else None}]
    if ranks.world_size > 1 and (own or whole):
        every: list[dict[str, Any]] = []
        ranks.agree("file", lambda: _packed(mine[0]), lambda packed: every.extend(map(_unpacked, packed)))
        mine = every
    if not ranks.leads:
        return None
    single = ranks.world_size == 1

    def joined(path: str, _: PerRank) -> Any:
        return own[path] if single else {_KEY: [part["values"][path] for part in mine]}

    filled: dict[str, Any] = _replaced(found, joined)
    return {**filled, "rng": [part["rng"] for part in mine]} if whole else filled


def of_rank(found: dict[str, Any], rank: int, world_size: int, *, step: int | None) -> dict[str, Any]:
    """Undo `gathered` for one rank of ``world_size``; "rng" is what it is to have, or is left out."""
    generators = found.pop("rng", None)
    state: dict[str, Any] = _resolved(found, rank)
    metrics = state["state"].get("train_metrics")
    if metrics:
        # One process has gathered them for all; a rank that was not there has nothing.
        state["state"]["train_metrics"] = PerRank(metrics)
        saved_by = len(generators) if isinstance(generators, list) else 1
        if rank >= saved_by:
            del state["state"]["train_metrics"]
    if isinstance(generators, list) and generators:
        state["rng"] = (
            generators[rank] if len(generators) == world_size else _derived(generators, rank, world_size, step)
        )
    elif isinstance(generators, Mapping):
        state["rng"] = generators
    return state


def _derived(generators: list[Any], rank: int, world_size: int, step: int | None) -> dict[str, Any]:
    first, *others = generators
    with generators_kept():
        restore_derived(first, others, step=step, rank=rank, world_size=world_size)
        derived: dict[str, Any] = rng.capture(devices=False)
        return derived


def _per_rank(value: Any, path: str = "") -> Iterator[tuple[str, PerRank]]:
    if isinstance(value, PerRank):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _per_rank(item, f"{path}/{key}")


def _replaced(value: Any, by: Callable[[str, PerRank], Any], path: str = "") -> Any:
    if isinstance(value, PerRank):
        return by(path, value)
    if type(value) is dict:
        return {key: _replaced(item, by, f"{path}/{key}") for key, item in value.items()}
    return value


def _resolved(value: Any, rank: int) -> Any:
    if type(value) is dict:
        if value.keys() == {_KEY}:
            every = value[_KEY]
            return every[rank] if rank < len(every) else every[0]
        return {key: _resolved(item, rank) for key, item in value.items()}
    return value


def _packed(value: dict[str, Any]) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _unpacked(text: str) -> dict[str, Any]:
    found: dict[str, Any] = from_plain(
        torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)
    )
    return found
