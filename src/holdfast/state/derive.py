"""Random generators on another number of ranks than the checkpoint has.

The generators of four ranks are no generators for three: each rank gets new ones, a function of the state of rank 0's
in the checkpoint, of the step, the number of ranks and the rank, so that the same resume always gives the same
numbers and no two ranks draw alike. Generators that all ranks kept in step (the same seed everywhere and the same
draws, for decisions that ranks take together) stay in step: all ranks take that of rank 0.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from . import rng
from .seeding import mix

__all__ = ["restore_derived"]


def restore_derived(
    first: Mapping[str, Any], second: Mapping[str, Any] | None, *, step: int | None, rank: int, world_size: int
) -> tuple[list[str], list[str]]:
    """Set every generator of this process for a rank that goes on in a world of another size.

    Args:
        first: what `rng.capture` gave on rank 0.
        second: the same of rank 1, if there was one: tells which generators were kept in step.
        step: the step of the checkpoint.
        rank: this rank.
        world_size: number of ranks now.

    Returns:
        The names of the generators that stay in step, and one line for each that could not be set.
    """
    place = mix(step or 0, world_size, rank)
    in_step: list[str] = []
    derived: dict[str, Any] = {}
    for name in ("python", "numpy", "torch"):
        if name not in first:
            continue
        if second is not None and name in second and _bytes(first[name]) == _bytes(second[name]):
            in_step.append(name)
            derived[name] = first[name]
        else:
            derived[name] = _derived(name, first[name], mix(_hash(first[name]), place))
    problems = rng.restore(derived, devices=False)
    kinds = first.get("devices")
    for kind, states in (kinds if isinstance(kinds, Mapping) else {}).items():
        theirs = ((second or {}).get("devices") or {}).get(kind)
        # Each process lists all devices it sees and uses one of them, not the same one: the order says nothing.
        alike = theirs is not None and set(map(_bytes, states)) == set(map(_bytes, theirs))
        problems += rng.set_devices(str(kind), states[0] if alike else mix(_hash(states[0]), place))
        if alike:
            in_step.append(str(kind))
    return in_step, problems


def _derived(name: str, state: Any, seed: int) -> Any:
    """Return the state of a generator of the same kind that was seeded with ``seed``."""
    if name == "torch":
        return torch.Generator().manual_seed(seed).get_state()
    if name == "python":
        return rng.python_entry(random.Random(seed).getstate())
    import numpy as np

    kind = getattr(np.random, str(state["bit_generator"]))
    return {**rng.plain(kind(seed).state), "has_gauss": 0, "gauss": 0.0}


def _hash(state: Any) -> int:
    return xxhash.xxh3_64_intdigest(_bytes(state))


def _bytes(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        return state.cpu().numpy().tobytes()
    return repr(sorted(state.items()) if isinstance(state, Mapping) else state).encode()
