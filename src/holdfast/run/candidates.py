"""The checkpoints a start may go on from: both sides of a mirrored run as one list, and the newest good checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from holdfast._units import listed
from holdfast.errors import CorruptCheckpointError

from .names import NUMBERED

if TYPE_CHECKING:
    from holdfast.format.manifest import Manifest

    from .record import Record

GONE = "gone meanwhile"

GUESTS = "guests"
"""Name of the note of a run that remembers copies by hand of checkpoints whose manifests do not tell their name."""

_Checked = TypeVar("_Checked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A committed checkpoint that a resume may try: its manifest was read just now and is sound."""

    record: Record
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorView:
    """The checkpoints of both sides as one list.

    Attributes:
        records: one for each name, newest first. Where the sides have different checkpoints of the same name, the
            newer one.
        places: for each of these names "local", "remote" or "both".
    """

    records: tuple[Record, ...]
    places: Mapping[str, str]

    @classmethod
    def join(cls, local: Iterable[Record], remote: Iterable[Record]) -> MirrorView:
        """Join the records of both sides."""
        here = {record.name: record for record in local}
        there = {record.name: record for record in remote}
        records = {**there, **here}
        places = {name: "local" if name in here else "remote" for name in records}
        for name in here.keys() & there.keys():
            local_record, remote_record = here[name], there[name]
            if local_record.checkpoint_id == remote_record.checkpoint_id:
                places[name] = "both"
            elif local_record.order < remote_record.order:
                records[name], places[name] = remote_record, "remote"
        newest_first = sorted(records.values(), key=lambda record: record.order, reverse=True)
        return cls(records=tuple(newest_first), places=places)


def find_copies(ids: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Tell which of some directories are copies by hand, from checkpoint ids alone; return copy -> original.

    Of several directories with one id the known one is the original, else one with a number that Holdfast gives, else
    the one with the shortest name.

    Args:
        ids: checkpoint id by directory.
        known: directory by checkpoint id.
    """
    first = dict(known)
    names = sorted(filter(ids.__getitem__, ids), key=lambda name: (NUMBERED.fullmatch(name) is None, len(name), name))
    return {name: original for name in names if (original := first.setdefault(ids[name], name)) != name}


def copies_shown(guests: Mapping[str, str]) -> str:
    """Name copies and what they are copies of, for people; many are cut short."""
    return listed((f"{name} (of {original})" for name, original in sorted(guests.items())), 5)


def newest_good(
    candidates: Iterable[tuple[str, _Checked]],
    check: Callable[[_Checked], str | None],
    *,
    bad: Mapping[str, str],
    where: str,
    advice: str,
) -> tuple[_Checked | None, list[tuple[str, str]]]:
    """Return the first good candidate, and (name, reason) of each bad candidate before it.

    Args:
        candidates: (name, argument of ``check``), newest first.
        check: returns None for a good candidate; else sets it aside and returns the reason why it is bad; `GONE` if it
            has been removed.
        bad: reasons against candidates that earlier starts have set aside, by name; these are not checked again.
        where: the run, for the error.
        advice: what the user may do if none is good, beside repairing a checkpoint.

    Raises:
        CorruptCheckpointError: there are checkpoints and none of them is good.
    """
    rejected: list[tuple[str, str]] = []
    for name, candidate in candidates:
        if name in bad:
            continue
        reason = check(candidate)
        if reason is None:
            return candidate, rejected
        if reason is not GONE:
            rejected.append((name, reason or "no reason is known"))
    every = {**bad, **dict(rejected)}
    if every:
        rows = "\n".join(f"  {name}: {reason}" for name, reason in every.items())
        raise CorruptCheckpointError(
            f"{where} has {len(every)} checkpoint(s) and none of them is good; not starting from zero:\n{rows}\n"
            f"what to do: repair or copy one back, {advice}"
        )
    return None, rejected
