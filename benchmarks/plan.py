"""Saving from many ranks: what each of them plans, what rank 0 merges, what a reader unites. It should all be linear.

No rank asks another, so one process can play them all: the shards are fakes with the shapes, boxes and holders that a
mesh of so many ranks gives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

import torch

from holdfast.checkpointer.pending_saves import manifest_fields
from holdfast.format.commit import PartSummary
from holdfast.format.contents import unite
from holdfast.format.division import Box
from holdfast.format.index import FileNumbers, Index, IndexFile
from holdfast.format.index_group import read_indexes
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.format.names import join
from holdfast.format.parts import put_part
from holdfast.format.strict_json import paused_gc
from holdfast.state.load.stored import Stored
from holdfast.state.load.targets import Cuts, Targets, box_of
from holdfast.state.save.plan import Layout, Signature, plan
from holdfast.state.tree.sharded import Placement, Region
from holdfast.storage.memory import MemoryStorage
from holdfast.writer.messages import PartsJob
from holdfast.writer.save import commit_parts

from .bench import Context, Goal, Outcome, timed

__all__ = ["run"]

_WIDTH = 4
_REPLICAS = 2
_ID = "abcd0000-1"
_FIELDS = manifest_fields(run_id=None, checkpoint_id=_ID, parent=None, attempt=1, step=1, epoch=None, metrics={})


def run(context: Context) -> Outcome:
    """Measure worlds of growing size that hold the same number of pieces in all."""
    outcome = Outcome()
    pieces = 4_000 if context.quick else 1_000_000
    worlds = (4, 16, 40) if context.quick else (16, 100, 1_000, 10_000)
    for world in worlds:
        method = f"{world} ranks"
        held = pieces * _REPLICAS // world  # each is written by one of those that hold it
        layouts: list[Layout] = []
        for rank in sorted({0, 1, world // 2, world - 1}):
            sig = _signature(rank, world, held)
            outcome.add(method, plan_s=timed(_plan, sig, rank, world, layouts))
        for turn in range(2):
            storage = MemoryStorage(f"plan-{world}-{turn}")
            job = _parts(storage, world, layouts[0])
            outcome.add(method, merge_s=timed(partial(commit_parts, storage, job, None, again=False)))
        # A tenth of the pieces shows the slope as well.
        indexes = [_index(rank, world, max(1, held // 10)) for rank in range(world)]
        outcome.add(method, reshard_s=timed(_reshard, indexes, world))
        outcome.add(method, own_s=timed(_own, [_index(rank, world, held) for rank in (0, world - 1)]))
        slowest = max(outcome.samples[method]["plan_s"])
        context.say(f"{method}, {held} pieces each: plan {slowest:.3f} s")
        merge = outcome.median(method, "merge_s")
        outcome.goals += [
            Goal(what=f"slowest of {world} ranks plans {held} boxes", value=slowest, unit="s", at_most=1.0),
            Goal(what=f"rank 0 merges {world} parts", value=merge, unit="s", at_most=1.0),
            Goal(
                what=f"same layout: a rank of {world} reads the boxes it has saved",
                value=outcome.median(method, "own_s"),
                unit="s",
                at_most=2.0,
            ),
        ]
    held_by_rank = [pieces * _REPLICAS / world for world in worlds]
    planned = [outcome.median(f"{world} ranks", "plan_s") for world in worlds]
    merged = [outcome.median(f"{world} ranks", "merge_s") for world in worlds]
    resharded = [outcome.median(f"{world} ranks", "reshard_s") for world in worlds]
    sizes, cpu = (pieces // 100, pieces // 10, pieces), list[float]()
    for size in sizes:
        # A hundred pieces on each rank.
        world = max(2 * _REPLICAS, worlds[-1] * size // pieces)
        indexes = [_index(rank, world, size * _REPLICAS // world) for rank in range(world)]
        begun = time.process_time()
        _reshard(indexes, world)
        cpu.append(time.process_time() - begun)
        context.say(f"{size} pieces of {world} ranks: a rank of another layout plans, {cpu[-1]:.3f} s of processor")
    outcome.goals += [
        Goal(what="plan: slope over pieces of a rank (log-log)", value=_slope(held_by_rank, planned), at_most=1.15),
        Goal(what="merge: slope over ranks (log-log)", value=_slope(worlds, merged), at_most=1.15),
        Goal(
            what=f"another layout: a rank plans the reading of {pieces} pieces of {worlds[-1]} ranks, processor",
            value=cpu[-1],
            unit="s",
            at_most=2.0,
        ),
        Goal(what="another layout: slope over pieces (log-log)", value=_slope(sizes, cpu), at_most=1.15),
        Goal(
            what="another layout: slope over ranks, pieces the same (log-log)",
            value=_slope(worlds, resharded),
            at_most=0.3,
        ),
    ]
    return outcome


@paused_gc()
def _plan(sig: Signature, rank: int, world: int, layouts: list[Layout]) -> None:
    layouts.append(plan(sig, rank=rank, num_ranks=world))


def _slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the exponent that fits best: 1 is linear."""
    x, y = [math.log(size) for size in sizes], [math.log(one) for one in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def _region(rank: int, world: int) -> Region:
    shards = world // _REPLICAS
    place = rank % shards
    spread = Placement(text="fake", num_ranks=world, rank=rank, holders=tuple(range(place, world, shards)))
    return Region((shards * 8, _WIDTH), Box((place * 8, 0), (8, _WIDTH)), spread)


def _signature(rank: int, world: int, held: int) -> Signature:
    """Describe a rank that holds so many shards; half of them are written by the replica of its box."""
    return Signature(
        names=[f"model/layers.{number}.weight" for number in range(held)],
        dtypes=[torch.float32] * held,
        shapes=[torch.Size((8, _WIDTH))] * held,
        files=["model"] * held,
        frozen=set(),
        aliases={},
        own=[],
        replicated=[],
        regions=dict.fromkeys(range(held), _region(rank, world)),
    )


def _parts(storage: MemoryStorage, world: int, layout: Layout) -> PartsJob:
    """Put the part files of all ranks into a storage, as their writers do, for files that hold nothing."""
    division = layout.division
    for rank in range(world):
        paths = [
            f"{stem}-{rank:05d}-{_ID}.{kind}"
            for stem, kind in (("model", "safetensors"), ("index", "json"), ("digests", "bin"))
        ]
        for path in paths:
            storage.put(join("one", path), b"")
        roles = ("tensors", "index", "digests")
        entries = [
            FileEntry(path=path, size=0, digest=f"xxh3:{rank:032x}", role=role, writer=rank)
            for path, role in zip(paths, roles, strict=True)
        ]
        put_part(storage, "one", _ID, PartSummary(writer=rank, files=tuple(entries), division=division))
    return PartsJob(
        directory="one", save_id=_ID, writers=tuple(range(world)), manifest={**_FIELDS, "world_size": world}, run=False
    )


def _index(rank: int, world: int, held: int) -> bytes:
    """Return the index of a rank, as it is stored."""
    layout = plan(_signature(rank, world, held), rank=rank, num_ranks=world)
    file = layout.files[-1]
    return next(source for source, _, _ in file.segments if isinstance(source, bytes))


@paused_gc()
def _reshard(indexes: list[bytes], world: int) -> None:
    """Do what a rank of three quarters as many does with all indexes: unite them, check them, plan what it reads."""
    stored = Stored(MemoryStorage("plan"), Manifest(**{**_fields(), "world_size": world}))
    texts = (IndexFile(f"index-{rank:05d}-{_ID}.json", _ID, data) for rank, data in enumerate(indexes))
    files = FileNumbers()
    stored.entries, stored.aliases = unite(read_indexes(texts, files), where="plan", files=files)
    targets = Targets(stored)
    rows = world // _REPLICAS * 8
    wanted = Box((0, 0), (-(-rows // max(1, world // _REPLICAS * 3 // 4)), _WIDTH))
    live = torch.empty(wanted.shape)
    for entry in stored.entries.values():
        targets._boxes(entry, torch.float32, [(wanted, live)])
    if sum(request.nbytes for request in targets.requests) != live.nbytes * len(stored.entries):
        raise AssertionError("not all is read, or more")


@paused_gc()
def _own(indexes: list[bytes]) -> None:
    """Do what a rank does with its own index and that of rank 0, which is all it needs in the layout it has saved."""
    for data in indexes:
        for entry in Index.from_bytes(data, save_id=_ID).tensors.values():
            boxes = [box_of(piece, entry.shape) for piece in entry.pieces]
            if not Cuts.of(entry.shape, boxes).make_up(boxes[0]):
                raise AssertionError(f"{entry.name}: its own box is not there")


def _fields() -> dict[str, object]:
    return {"created": "2026-01-01T00:00:00Z", "files": (), "checkpoint_id": _ID}
