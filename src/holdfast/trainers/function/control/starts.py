"""What a group of workers starts from, and the first message to its ranks.

The newest checkpoint that is whole is found; damaged ones are set aside; a start is never silently from zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.verify import verify
from holdfast.errors import CheckpointError, StorageError
from holdfast.format.commit import read_manifest
from holdfast.run.candidates import GONE, newest_good
from holdfast.run.index import RunIndex
from holdfast.run.record import Record, unpack
from holdfast.storage.base import Storage

from ..engine import Placed
from ..types import VALIDATED
from .actions import Begin, Resumed
from .commits import UnwrittenValues
from .plan import RunSpec

__all__ = ["RunContents", "Start", "choose_start", "find_start", "find_unvalidated"]

_LOOKED_AT = 1000  # most checkpoints whose manifests are searched for validations that did not run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContents:
    """What a run holds.

    Attributes:
        kept: every committed checkpoint that may be used.
        start: the newest good checkpoint.
        skipped: (name, reason) of those set aside now.
        taken: every name under the run.
        set_aside: names of damaged checkpoints, found now or earlier.
        unvalidated: validations that were asked for and have no result, by checkpoint.
        starts: start ids of all attempts so far, the current one included, oldest first.
    """

    kept: tuple[Record, ...] = ()
    start: Record | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    taken: frozenset[str] = frozenset()
    set_aside: frozenset[str] = frozenset()
    unvalidated: Mapping[str, Any] = field(default_factory=dict)
    starts: tuple[str, ...] = ()


def find_start(
    storage: Storage,
    rows: Iterable[Sequence[Any]],
    *,
    quarantined: Mapping[str, str],
    quarantine: Callable[[str, str], None],
    deep: Collection[str] = (),
    dead: Collection[str] = (),
    validations: bool = False,
) -> RunContents:
    """Find the newest checkpoint whose files are all there and, if nobody compares them later, whose bytes are right.

    What was saved as a state is compared with its digests when it is loaded, and a download while it comes. Files that
    users reported to a run on a disk are opened by them where they lie: they are read here once, before a life begins.

    Args:
        storage: root of the run.
        rows: of its committed checkpoints, newest first.
        quarantined: those set aside earlier, with reasons.
        quarantine: sets a checkpoint aside; takes its name and the reason.
        deep: names of checkpoints that are compared byte by byte with their digests.
        dead: names at which an owner that was taken over may still be at work.
        validations: look for validations without a result too.

    Raises:
        CorruptCheckpointError: there are checkpoints and none of them is good.
        StorageError: the storage failed.
    """
    kept = [unpack(row) for row in rows]
    where_they_lie = ("user",) if storage.local_root is not None else ()

    def check(record: Record) -> str | None:
        outcome = verify(storage, record.name, deep=record.name in deep or where_they_lie, beside=False)
        if outcome.ok:
            return None
        if outcome.state == "missing":
            return GONE  # deleted since it was listed
        reason = "; ".join(outcome.problems) or outcome.state
        if outcome.state == "unreadable":
            raise StorageError(f"{storage.uri}/{record.name} cannot be read: {reason}")
        quarantine(record.name, reason)
        return reason

    found = newest_good(
        [(record.name, record) for record in kept],
        check,
        bad=quarantined,
        where=storage.uri,
        advice="start a run of another name with resume_from_checkpoint=<path>, or delete the run's directory",
    )
    start, skipped = found
    bad = {**quarantined, **dict(skipped)}
    usable = tuple(record for record in kept if record.name not in bad)
    return RunContents(
        kept=usable,
        start=start,
        skipped=tuple(skipped),
        taken=frozenset(info.path.rstrip("/") for info in storage.list("", recursive=False)),
        set_aside=frozenset({*bad, *dead}),
        unvalidated=find_unvalidated(storage, usable) if validations else {},
        starts=tuple(attempt.start_id for attempt in RunIndex.load(storage, head_only=True).attempts),
    )


def find_unvalidated(storage: Storage, kept: Iterable[Record]) -> dict[str, Any]:
    """Find validations that were asked for and have no result, oldest first."""
    wanted: dict[str, Any] = {}
    for record in sorted(kept, key=lambda record: record.order)[-_LOOKED_AT:]:
        if VALIDATED in record.metrics:
            continue
        try:
            validation = read_manifest(storage, record.name).extra.get("validation")
        except (CheckpointError, StorageError):
            continue  # gone meanwhile, or damaged: its next reader raises that
        if validation:
            wanted[record.name] = validation
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a group begins.

    Attributes:
        location: checkpoint to go on from; None: there is none, or it is in memory.
        memory: packed values to go on from.
        step: number of the last report that is part of it.
        kept: the checkpoint, if it is of this run.
        resumed: what the index of the run notes; None for a fresh start.
        words: the same for people.
    """

    location: Mapping[str, Any] | None = None
    memory: bytes | None = None
    step: int = 0
    kept: Record | None = None
    resumed: Resumed | None = None
    words: str = "the beginning"

    def begin(
        self,
        plan: RunSpec,
        rank: int,
        *,
        size: int,
        placed: Placed | None,
        attempt: int,
        start_id: str,
        past: Sequence[str] = (),
    ) -> Begin:
        """Make the first message to a worker.

        Args:
            plan: of the run.
            rank: of the worker.
            size: number of workers.
            placed: where it was started; None: all are on the driver's machine.
            attempt: number of the attempt.
            start_id: id of the attempt.
            past: ids of earlier attempts of the run, which have ended.
        """
        storage = dict(plan.storage)
        header = {
            "do": "begin",
            "rank": rank,
            "world_size": size,
            "local_rank": rank if placed is None else placed.local_rank,
            "local_world_size": size if placed is None else placed.local_size,
            "node_rank": 0 if placed is None else placed.node_rank,
            "apart": placed is not None,  # the driver cannot read what only this node has
            "first_index": self.step + 1,
            "experiment_name": plan.run_name,
            "run_name": plan.run_name,
            "storage": storage,
            "local_dir": plan.local_dir,
            "run_root": {"storage": storage, "uri": plan.uri, "name": ""},
            "attempt": attempt,
            "start_id": start_id,
            "past": list(past),
            "strategy": None if plan.strategy is None else dict(plan.strategy),
            "score": None if plan.score is None else dict(plan.score),
            "report_timeout_s": plan.limits.report_s,
            "all_metrics": plan.has_callbacks,
            "checkpoint": None if self.location is None else dict(self.location),
        }
        return Begin(rank=rank, header=header, memory=self.memory)


def choose_start(plan: RunSpec, kept: Record | None, memory: UnwrittenValues | None) -> Start:
    """Choose the newest of what there is.

    Args:
        plan: of the run; it may name a checkpoint for runs that have none of their own.
        kept: the newest good checkpoint of the run.
        memory: the newest values that were not written.
    """
    if memory is not None and (kept is None or memory.order > kept.order[:2]):
        name = f"{memory.name} (in memory)"
        resumed = Resumed(name=name, step=memory.step, attempt=memory.attempt)
        return Start(memory=memory.values, step=memory.step, resumed=resumed, words=name)
    if kept is not None:
        resumed = Resumed(name=kept.name, step=kept.step, attempt=kept.attempt)
        location = plan.location(kept.name)
        return Start(location=location, step=kept.step, kept=kept, resumed=resumed, words=kept.name)
    first = plan.first_checkpoint
    if first is not None:
        uri = f"{first['uri'].rstrip('/')}/{first['name']}"
        return Start(location=first, resumed=Resumed(name=uri, step=0), words=uri)
    if plan.first_memory is not None:
        return Start(memory=plan.first_memory, words="the values of resume_from_checkpoint")
    return Start()
