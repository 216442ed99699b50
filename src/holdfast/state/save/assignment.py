"""Who writes what of a state that all ranks hold: a pure function of its structure, so no rank has to ask another.

Replicated are the parameters of modules and what optimizers keep for them: these are divided over the ranks. What is
spread over ranks (DTensor) says itself who holds what; a box that several ranks hold is written by one of them. Values
that differ (`PerRank`, generators) are written by their rank, and everything else by rank 0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from holdfast.errors import UnsupportedStateError
from holdfast.format.digest import bytes_digest
from holdfast.format.division import Division, sketch

from .signature import Signature

__all__ = ["Assignment", "divide", "share_of"]

# Rank 0 writes them all (the step counts of optimizers, say): with its own index and that of rank 0, a rank of what is
# spread over ranks then has all it needs to load.
_SMALL = 64  # bytes
_SAMPLED = 64  # tensors whose values the ranks compare,
_SAMPLED_ALIKE = 256  # and where different ranks hold different things: names they have in common


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one rank writes.

    Attributes:
        writes: positions of the tensors it writes.
        aliases: position of a tied tensor -> position of one it writes, whose bytes are both's.
        division: what all ranks must have derived alike.
        sampled: positions of tensors to be compared between the ranks that hold the same.
    """

    writes: frozenset[int]
    aliases: dict[int, int]
    division: Division
    sampled: tuple[int, ...]


def divide(
    names: Sequence[str], sizes: Sequence[int], num_ranks: int, *, last: Collection[int] = frozenset()
) -> list[int]:
    """Give every tensor to one rank: the largest first, always to the rank that has least. O(n log n).

    The result depends on the set of (name, size), not on its order. No rank gets more than another by more than the
    largest tensor, neither in all nor in the tensors before ``last``.

    Args:
        names: of the tensors; no two are equal.
        sizes: their bytes.
        num_ranks: how many ranks there are.
        last: positions that come after all others: frozen tensors, which most saves link instead of writing.

    Returns:
        The rank of each tensor.
    """
    order = sorted(range(len(names)), key=names.__getitem__)
    order.sort(key=lambda one: -sizes[one])
    if last:
        order.sort(key=lambda one: one in last)
    ranks = [0] * len(names)
    loads = [(0, rank) for rank in range(num_ranks)]
    heapify(loads)
    for one in order:
        load, rank = loads[0]
        ranks[one] = rank
        heapreplace(loads, (load + sizes[one], rank))
    return ranks


def share_of(
    sig: Signature, sizes: Sequence[int], *, rank: int, num_ranks: int, alike: tuple[int, ...] | None = None
) -> Assignment:
    """Derive what ``rank`` writes.

    Tied tensors stay together: if one of them is replicated they all are. Only what differs between ranks is never
    tied to what does not: its values are others on the next rank.

    Args:
        sig: the structure; all but the values that differ must be the same on all ranks.
        sizes: bytes of each of its tensors.
        rank: the rank.
        num_ranks: how many ranks there are.
        alike: the ranks among which it is divided, where others hold something else; None: all of them.
    """
    group = tuple(range(num_ranks)) if alike is None else alike
    own, replicated = frozenset(sig.own), set(sig.replicated)
    aliases: dict[int, int] = {}
    heads: dict[tuple[int, bool], int] = {}  # (tie, whether it differs between ranks) -> its first tensor
    for number in sorted({*sig.aliases, *sig.aliases.values()}):
        head = heads.setdefault((sig.aliases.get(number, number), number in own), number)
        if head != number:
            aliases[number] = head
            if number in replicated:
                replicated.add(head)
    divided = sorted(replicated.difference(aliases), key=sig.names.__getitem__)
    names, lengths = [sig.names[one] for one in divided], [sizes[one] for one in divided]
    frozen = frozenset(place for place, one in enumerate(divided) if one in sig.frozen)
    owners = [group[place] for place in divide(names, lengths, len(group), last=frozen)]
    owners = [group[0] if size <= _SMALL else owner for owner, size in zip(owners, lengths, strict=True)]
    writes = {one for one, owner in zip(divided, owners, strict=True) if owner == rank}
    writes.update(number for number in own if number not in aliases)
    boxes, shared_boxes = _of_regions(sig, sizes, aliases, rank=rank, num_ranks=num_ranks, alike=alike)
    writes.update(boxes)
    if rank == group[0]:
        elsewhere = replicated.union(aliases, sig.regions)
        writes.update(number for number in range(len(sizes)) if number not in elsewhere)
    rows = [f"{name}\0{size}\0{place in frozen}" for place, (name, size) in enumerate(zip(names, lengths, strict=True))]
    ties = sorted(f"{sig.names[one]}\0{sig.names[head]}" for one, head in aliases.items() if head in replicated)
    spread = {
        f"{sig.names[one]}\0{sig.dtypes[one]}\0{region.shape}\0{region.spread.text}"
        for one, region in sig.regions.items()
    }
    text = "\n".join([*rows, "", *ties, *(["", *sorted(spread)] if spread else [])])
    known = {*names, *(sig.names[one] for one in sig.regions)}
    if alike is None:
        sampled = _sampled(divided, lengths) + _sampled(shared_boxes, [sizes[one] for one in shared_boxes])
    else:
        mine = [one for one in sig.loose if one in writes]
        sampled = _sampled_alike([*divided, *boxes, *shared_boxes, *mine], sig)
    return Assignment(
        writes=frozenset(writes),
        aliases={number: head for number, head in aliases.items() if head in writes},
        division=Division(
            num_ranks=num_ranks,
            structure=_digest(text),
            alike=alike,
            names=_digest("\n".join(sorted(known))),
            loose=sketch(sig.names[one] for one in sig.loose if one not in replicated),
            num_loose=len(sig.loose),
        ),
        sampled=sampled,
    )


def _digest(text: str) -> str:
    return bytes_digest(text.encode(errors="surrogatepass")).removeprefix("xxh3:")


def _of_regions(
    sig: Signature,
    sizes: Sequence[int],
    aliases: dict[int, int],
    *,
    rank: int,
    num_ranks: int,
    alike: tuple[int, ...] | None,
) -> tuple[list[int], list[int]]:
    """Return the positions of the boxes that ``rank`` writes, and those of boxes that other ranks hold as well.

    Ranks that hold one box alike hold the same boxes of everything that is spread in this way, so each of them comes
    to the same division.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, region in sig.regions.items():
        spread = region.spread
        if alike is not None:
            if spread.rank != rank or not set(alike).issubset(spread.ranks):
                raise UnsupportedStateError(
                    f"{sig.names[number]!r} is spread over a mesh of the ranks {list(spread.ranks)[:20]}, but the "
                    f"ranks {list(alike)[:20]} are said to hold the same: alike= has to name ranks of that mesh"
                )
        elif spread.num_ranks != num_ranks or spread.rank != rank:
            raise UnsupportedStateError(
                f"{sig.names[number]!r} is spread over a mesh of {spread.num_ranks} ranks, where this is rank "
                f"{spread.rank}, but {num_ranks} ranks save together and this is rank {rank}: make one mesh of all "
                "ranks (init_device_mesh) and give parts of it (mesh['tp']) to what is sharded over fewer"
            )
        if number not in aliases and all(region.box.shape):
            holders = spread.holders if alike is None else tuple(one for one in spread.holders if one in alike)
            groups.setdefault(holders, []).append(number)
    writes, several = list(groups.pop((rank,), ())), []
    for holders, numbers in sorted(groups.items()):
        names = {one: f"{sig.names[one]}\0{sig.regions[one].box.start}" for one in numbers}
        numbers.sort(key=names.__getitem__)
        frozen = frozenset(place for place, one in enumerate(numbers) if one in sig.frozen)
        owners = divide([names[one] for one in numbers], [sizes[one] for one in numbers], len(holders), last=frozen)
        writes.extend(one for one, owner in zip(numbers, owners, strict=True) if holders[owner] == rank)
        several.extend(numbers)
    return writes, several


def _sampled(divided: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """Choose tensors to compare: the largest, and others evenly over the names."""
    there = [one for one, length in zip(divided, lengths, strict=True) if length]
    if len(there) <= _SAMPLED:
        return tuple(there)
    largest = divided[max(range(len(lengths)), key=lengths.__getitem__)]
    spread = {there[place * len(there) // _SAMPLED] for place in range(_SAMPLED - 1)}
    return tuple(one for one in there if one == largest or one in spread)


def _sampled_alike(candidates: Sequence[int], sig: Signature) -> tuple[int, ...]:
    """Choose tensors by their names alone: what two ranks have in common, both of them choose."""
    if len(candidates) > _SAMPLED_ALIKE:
        order = sorted(set(candidates), key=lambda one: _digest(sig.names[one]))
        return tuple(sorted(order[:_SAMPLED_ALIKE]))
    return tuple(sorted(set(candidates)))
