"""Find the checkpoint that a start goes on from: newest first, damaged ones are set aside, never silently from zero."""

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

_LOOKED_AT = 1000  # checkpoints whose manifests are read for validations that were not come to


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContents:
    """What lies in a run.

    Attributes:
        kept: every committed checkpoint that may be used.
        start: the newest good one.
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
    """Look for the newest checkpoint whose files are all there.

    Args:
        storage: root of the run.
        rows: of its committed checkpoints, newest first.
        quarantined: those set aside earlier, with reasons.
        quarantine: sets one aside.
        deep: names whose every byte is compared with its digest.
        dead: names at which an owner that was taken over may still be at work.
        validations: look for those that have no result too.

    Raises:
        CorruptCheckpointError: there are checkpoints and none of them is good.
        StorageError: the storage failed.
    """
    kept = [unpack(row) for row in rows]

    def check(one: Record) -> str | None:
        outcome = verify(storage, one.name, deep=one.name in deep)
        if outcome.ok:
            return None
        if outcome.state == "missing":
            return GONE  # somebody deleted it since it was listed
        reason = "; ".join(outcome.problems) or outcome.state
        if outcome.state == "unreadable":
            raise StorageError(f"{storage.uri}/{one.name} cannot be read: {reason}")
        quarantine(one.name, reason)
        return reason

    found = newest_good(
        [(one.name, one) for one in kept],
        check,
        bad=quarantined,
        where=storage.uri,
        advice="start a run of another name with resume_from_checkpoint=<path>, or delete the run's directory",
    )
    start, skipped = found
    bad = {**quarantined, **dict(skipped)}
    usable = tuple(one for one in kept if one.name not in bad)
    return RunContents(
        kept=usable,
        start=start,
        skipped=tuple(skipped),
        taken=frozenset(info.path.rstrip("/") for info in storage.list("", recursive=False)),
        set_aside=frozenset({*bad, *dead}),
        unvalidated=find_unvalidated(storage, usable) if validations else {},
        starts=tuple(one.start_id for one in RunIndex.load(storage, head_only=True).attempts),
    )


def find_unvalidated(storage: Storage, kept: Iterable[Record]) -> dict[str, Any]:
    """Find validations that were asked for and have no result, oldest first."""
    wanted: dict[str, Any] = {}
    for one in sorted(kept, key=lambda one: one.order)[-_LOOKED_AT:]:
        if VALIDATED in one.metrics:
            continue
        try:
            validation = read_manifest(storage, one.name).extra.get("validation")
        except (CheckpointError, StorageError):
            continue  # gone meanwhile, or damaged: whoever uses it will say so
        if validation:
            wanted[one.name] = validation
    return wanted
