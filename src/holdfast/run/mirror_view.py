"""The checkpoints of a mirrored run: those on the local disk and those at the remote, seen as one list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .record import Record

__all__ = ["MirrorView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorView:
    """The checkpoints of both sides as one list.

    Attributes:
        records: one for each name, newest first. Where the sides have different checkpoints under one name it is the
            newer of the two.
        places: for each of these names "local", "remote" or "both".
    """

    records: tuple[Record, ...]
    places: Mapping[str, str]

    @classmethod
    def join(cls, local: Iterable[Record], remote: Iterable[Record]) -> MirrorView:
        """Put the records of both sides together."""
        here = {record.name: record for record in local}
        there = {record.name: record for record in remote}
        records = {**there, **here}
        places = {name: "local" if name in here else "remote" for name in records}
        for name in here.keys() & there.keys():
            one, other = here[name], there[name]
            if one.checkpoint_id == other.checkpoint_id:
                places[name] = "both"
            elif one.order < other.order:
                records[name], places[name] = other, "remote"
        newest_first = sorted(records.values(), key=lambda record: record.order, reverse=True)
        return cls(records=tuple(newest_first), places=places)
