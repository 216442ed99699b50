"""What each rank has for itself: generators and `PerRank` values, on as many ranks as have saved or on others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tree import rng
from ..tree.values import PerRank, PerRankNode
from .derived_generators import restore_derived

if TYPE_CHECKING:
    from .match import Matcher

__all__ = ["match_per_rank", "match_rng"]


def match_rng(matcher: Matcher, saved: Any, path: str) -> Any:
    """Plan to restore the generators of this process, last of all."""
    stored = matcher.stored
    parts = stored.per_rank
    if not matcher.takes(path):
        return rng.RNG
    if not (isinstance(saved, PerRankNode) and saved.rng):
        matcher.not_restored.append((path, "the checkpoint holds no generator states"))
    elif stored.resized is not None and (first := (stored.part(0) or {}).get(saved.key)) is not None:
        # The neighbour and the last rank show what was in step on all of them: groups of ranks may be among themselves.
        some = ({1, stored.manifest.world_size - 1} - {0}) & stored.parts.keys()
        others = ((stored.part(rank) or {}).get(saved.key) for rank in sorted(some))
        states = [matcher.fresh(one["rng"], path) for one in (first, *others) if one is not None]
        matcher.last.append(lambda: _derive(matcher, states, path))
        matcher.restored.append(path)
    elif parts is None or saved.key not in parts or stored.borrowed:
        matcher.not_restored.append((path, "the checkpoint holds no generator states of this rank"))
    else:
        state = matcher.fresh(parts[saved.key]["rng"], path)
        matcher.last.append(
            lambda: matcher.not_restored.extend((path, why) for why in rng.restore(matcher.filled(state)))
        )
        matcher.restored.append(path)
    return rng.RNG


def _derive(matcher: Matcher, states: list[Any], path: str) -> None:
    """Give this rank generators that follow from those of rank 0; the other states show what was in step."""
    manifest, now = matcher.stored.manifest, matcher.stored.resized or 1
    first, *others = map(matcher.filled, states)
    in_step, problems = restore_derived(first, others, step=manifest.step, rank=matcher.rank, world_size=now)
    note = f"random generators: derived for {now} rank(s) (the checkpoint has {manifest.world_size})"
    if in_step:
        note += f"; those in step on all ranks go on in step: {', '.join(in_step)}"
    matcher.notes.append(note)
    matcher.not_restored.extend((path, why) for why in problems)


def match_per_rank(matcher: Matcher, live: PerRank, saved: Any, path: str) -> Any:
    """Match the value of this rank; one that was not there when the checkpoint was saved keeps what it has."""
    stored, before = matcher.stored, matcher.stored.manifest.world_size
    parts, now = stored.per_rank, stored.resized
    if not isinstance(saved, PerRankNode) or parts is None or saved.key not in parts:
        matcher.not_restored.append((path, "the checkpoint has no part for this rank"))
        return live
    if now is not None:
        fate = f"those of ranks {now} to {before - 1} go to nobody" if now < before else "new ranks keep what they have"
        matcher.notes.append(f"{path}: a value for each of {before} rank(s), {now} now: {fate}")
    if stored.borrowed:
        why = f"there was no rank {matcher.rank}, saved by {before}: it keeps what it has"
        matcher.not_restored.append((path, why))
        return live
    return PerRank(matcher.match(live.value, parts[saved.key], path))
