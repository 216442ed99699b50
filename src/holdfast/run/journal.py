"""Events of a run, in order: saves and their cost, lost saves, deletions and their reason.

An event never costs a request or an fsync of its own: it waits in memory and is written with files that are written
anyway, run.json or ``run-changes.json`` of the next save and, for good, the next report segment
(`holdfast.run.reports`). So a machine that dies loses the events since the last save, and the list of checkpoints never
depends on any of them. Older versions skip events: a segment keeps them in lines that those versions read as empty
notes.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["MOST_READ", "Journal", "JournalEvent", "events_from", "merged"]

MOST_READ = 200_000
"""Events that a reader takes of one run, the newest."""
_MOST_WAITING = 500
_FULL_BYTES = 8 << 10
_LONGEST = 300
_KINDS = ("began", "saved", "cost", "snapshots", "lost", "skipped", "deleted", "died", "guard")
_JOINED = ("lost", "skipped", "snapshots")  # several in a row wait as one
_MOST_STACKS = 6000


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEvent:
    """An event of a run.

    Attributes:
        what: "began" (the first step of an attempt was done), "saved" (a checkpoint was committed), "cost" (the times
            of that save as the trainer saw them), "snapshots" (what those of the attempt have cost so far), "lost" (a
            save failed), "skipped" (a save was due while an earlier one was being written), "deleted", "died" (what
            `holdfast run` saw of the end of an attempt) or "guard" (a bad step, and what followed).
        time: seconds since 1970 by the clock of the host.
        attempt: the attempt that did it; of a deletion, the attempt that had saved the checkpoint.
        name: of the checkpoint.
        step: of the checkpoint.
        kind: of a save: "state" (the fast path), "ranks" (parts of several ranks), "files" (directories of the user) or
            "in place"; of a deletion in a mirrored run "local" or "remote".
        why: the rule that deleted it, the error that lost it, the end that a snapshot was saved for, or how the attempt
            ended.
        bytes: size of the checkpoint, of which ``reused`` are shared with the checkpoint before it.
        reused: see ``bytes``.
        durable_s: seconds from the start of the save to its commit.
        held_s: seconds that `step` held the training loop; of snapshots, all of them.
        lost_s: ``held_s`` plus the seconds that steps took longer than usual while the save was being written.
        times: how often in a row.
        stacks: of an attempt that hung, the Python stacks of its threads.
    """

    what: str
    time: float
    attempt: int = 0
    name: str = ""
    step: int | None = None
    kind: str = ""
    why: str = ""
    bytes: int | None = None
    reused: int | None = None
    durable_s: float | None = None
    held_s: float | None = None
    lost_s: float | None = None
    times: int = 1
    stacks: str = ""

    def to_json(self) -> dict[str, Any]:
        """Describe as JSON, without default values."""
        return {name: value for name, default in _DEFAULTS.items() if (value := getattr(self, name)) != default}

    @classmethod
    def from_json(cls, data: Any) -> JournalEvent:
        """Rebuild from `to_json`; raises ValueError, TypeError or KeyError for other data. Texts are cut."""
        known: dict[str, Any] = {}
        for name, value in data.items():
            kind = _KINDS_OF_VALUES.get(name)
            if kind == "str" and type(value) is str:
                known[name] = value[: _MOST_STACKS if name == "stacks" else _LONGEST]
            elif kind == "int" and type(value) is int and 0 <= value < 1 << 63:
                known[name] = value
            elif kind == "float" and type(value) in (int, float) and 0 <= value < 1e15:
                known[name] = round(float(value), 4)  # seconds
            elif kind is not None:
                raise TypeError(f"{name} is no {kind}")
        event = cls(**known)
        if event.what not in _KINDS:
            raise ValueError(f"not an event: {event.what!r}")
        return event


_DEFAULTS = {item.name: item.default for item in fields(JournalEvent)}
_KINDS_OF_VALUES = {item.name: str(item.type).removesuffix(" | None") for item in fields(JournalEvent)}


def events_from(data: Any) -> list[JournalEvent]:
    """Read a stored list of events; entries that are no events are left out."""
    events = []
    for row in data if isinstance(data, list) else ():
        try:
            events.append(JournalEvent.from_json(row))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return events


class Journal:
    """Events of a run that wait to be written; for any thread. Entries that are no events are dropped.

    Example:
        >>> journal = Journal()
        >>> journal.add("deleted", name="step_1", step=1, why="not among last 3")
        >>> waiting, number = journal.take_out()
        >>> [event["name"] for event in waiting], journal.is_full
        (['step_1'], False)
        >>> journal.written(number)
        >>> journal.waiting()
        []
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[tuple[JournalEvent, dict[str, Any], int]] = deque()  # with their JSON and its bytes
        self._num_gone = 0  # written for good, or dropped because too many waited
        self._handed = 0  # being written for good
        self._bytes = 0

    def add(self, what: str, **about: Any) -> None:
        """Note an event that happened now."""
        known = {name: value for name, value in about.items() if value is not None}
        self.take([{"time": time.time(), **known, "what": what}])

    def take(self, rows: Any) -> None:
        """Note a list of events as JSON: those that a trainer sends, or those that waited in an earlier process."""
        with self._lock:
            for event in events_from(rows):
                last = self._events[-1][0] if self._events else None
                is_ours = self._num_gone + len(self._events) > self._handed
                if last is not None and is_ours and event.what in _JOINED and _is_again(last, event):
                    # Of snapshots each event has the sum: the last one says it all.
                    joined = event if event.what == "snapshots" else replace(last, times=last.times + event.times)
                    self._events[-1] = joined, joined.to_json(), self._events[-1][2]
                    continue
                row = event.to_json()
                self._events.append((event, row, len(json.dumps(row))))
                self._bytes += self._events[-1][2]
            self._forget(len(self._events) - _MOST_WAITING)

    def waiting(self) -> list[dict[str, Any]]:
        """Return the waiting events as JSON."""
        with self._lock:
            return [row for _, row, _ in self._events]

    def take_out(self) -> tuple[list[dict[str, Any]], int]:
        """Return the waiting events, and a number for `written`, which is called once they are in a report segment."""
        with self._lock:
            self._handed = self._num_gone + len(self._events)
            return [row for _, row, _ in self._events], self._handed

    def written(self, number: int) -> None:
        """Forget the events that are in a segment by now."""
        with self._lock:
            self._forget(min(number - self._num_gone, len(self._events)))

    @property
    def is_full(self) -> bool:
        """Whether the waiting events are worth a request of their own, about once in fifty saves."""
        return self._bytes >= _FULL_BYTES

    def _forget(self, num: int) -> None:
        for _ in range(num):
            self._bytes -= self._events.popleft()[2]
            self._num_gone += 1


def merged(events: Iterable[JournalEvent]) -> list[JournalEvent]:
    """Join events of several files in order of time; an event that is in two files counts once."""
    counted: dict[JournalEvent, JournalEvent] = {}
    for event in events:  # the same event may have been counted on after it was written
        known = counted.setdefault(replace(event, times=1), event)
        if event.times > known.times:
            counted[replace(event, times=1)] = event
    return sorted(counted.values(), key=lambda event: event.time)


def _is_again(last: JournalEvent, event: JournalEvent) -> bool:
    return (last.what, last.why, last.attempt) == (event.what, event.why, event.attempt)
