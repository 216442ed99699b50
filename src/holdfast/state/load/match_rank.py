"""What each rank has for itself: generators and `PerRank` values, on as many ranks as have saved or on others."""

from __future__ import annotations

from typing import Any

from ..tree import rng
from ..tree.values import PerRank, PerRankNode
from .derived_generators import restore_derived
from .match_plan import MatchPlan

__all__ = ["match_per_rank", "match_rng"]


def match_rng(plan: MatchPlan, saved: Any, path: str) -> Any:
    """Plan to restore the generators of this process, last of all."""
    stored = plan.stored
    parts = stored.per_rank
    if not plan.takes(path):
        return rng.RNG
    if not (isinstance(saved, PerRankNode) and saved.rng):
        plan.not_restored.append((path, "the checkpoint holds no generator states"))
    elif stored.resized is not None and (first := (stored.part(0) or {}).get(saved.key)) is not None:
        # The neighbour and the last rank show what was in step on all of them: groups of ranks may be among themselves.
        some = ({1, stored.manifest.world_size - 1} - {0}) & stored.parts.keys()
        others = ((stored.part(rank) or {}).get(saved.key) for rank in sorted(some))
        states = [plan.fresh(one["rng"], path) for one in (first, *others) if one is not None]
        plan.last.append(lambda: _derive(plan, states, path))
        plan.restored.append(path)
    elif parts is None or saved.key not in parts or stored.borrowed:
        plan.not_restored.append((path, "the checkpoint holds no generator states of this rank"))
    else:
        state = plan.fresh(parts[saved.key]["rng"], path)
        plan.last.append(lambda: plan.not_restored.extend((path, why) for why in rng.restore(plan.filled(state))))
        plan.restored.append(path)
    return rng.RNG


def _derive(plan: MatchPlan, states: list[Any], path: str) -> None:
    """Give this rank generators that follow from those of rank 0; the other states show what was in step."""
    manifest, now = plan.stored.manifest, plan.stored.resized or 1
    first, *others = map(plan.filled, states)
    in_step, problems = restore_derived(first, others, step=manifest.step, rank=plan.rank, world_size=now)
    note = f"random generators: derived for {now} rank(s) (the checkpoint has {manifest.world_size})"
    if in_step:
        note += f"; those in step on all ranks go on in step: {', '.join(in_step)}"
    plan.notes.append(note)
    plan.not_restored.extend((path, why) for why in problems)


def match_per_rank(plan: MatchPlan, live: PerRank, saved: Any, path: str) -> Any:
    """Match the value of this rank; one that was not there when the checkpoint was saved keeps what it has."""
    stored, before = plan.stored, plan.stored.manifest.world_size
    parts, now = stored.per_rank, stored.resized
    if not isinstance(saved, PerRankNode) or parts is None or saved.key not in parts:
        plan.not_restored.append((path, "the checkpoint has no part for this rank"))
        return live
    if now is not None:
        fate = f"those of ranks {now} to {before - 1} go to nobody" if now < before else "new ranks keep what they have"
        plan.notes.append(f"{path}: a value for each of {before} rank(s), {now} now: {fate}")
    if stored.borrowed:
        why = f"there was no rank {plan.rank}, saved by {before}: it keeps what it has"
        plan.not_restored.append((path, why))
        return live
    return PerRank(plan.match(live.value, parts[saved.key], path))
