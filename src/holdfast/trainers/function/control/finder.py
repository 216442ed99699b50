"""Find the checkpoint that a start goes on from: newest first; damaged ones are set aside; never silently from zero."""

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

from .known_checkpoints import VALIDATED

__all__ = ["RunContents", "find_start", "find_unvalidated"]

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
