"""What happened to a run, in order: saves and what they cost, saves that were lost, deletions and why.

An event never costs a request or an fsync of its own: it waits in memory and rides on what is written anyway, run.json
or ``run-changes.json`` of the next save and, for good, the next report segment (`holdfast.run.reports`). So a
machine that dies loses the events since the last save, and the list of checkpoints never depends on any of them. Older
versions read past events: a segment keeps them in lines that they take for empty notes.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["MOST_READ", "Journal", "JournalEvent", "events_from", "merged"]

MOST_READ = 200_000
"""Events that a reader takes of one run, the newest."""
_MOST_WAITING = 500
_FULL_BYTES = 8 << 10
_LONGEST = 300
_KINDS = ("saved", "cost", "lost", "skipped", "deleted")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEvent:
    """One thing that happened to a run.

    Attributes:
        what: "saved" (a checkpoint was committed), "cost" (what the trainer adds about that save), "lost" (a save
            failed), "skipped" (a save was due while the one before was being written) or "deleted".
        time: seconds since 1970 by the clock of the host.
        attempt: the attempt that did it; of a deletion, the attempt that had saved the checkpoint.
        name: of the checkpoint.
        step: of the checkpoint.
        kind: of a save: "state" (the fast path), "ranks" (parts of several ranks), "files" (directories of the user) or
            "in place"; of a deletion in a mirrored run "local" or "remote".
        why: the rule that deleted it, or the error that lost it.
        bytes: size of the checkpoint, of which ``reused`` are shared with the one before.
        reused: see ``bytes``.
        durable_s: seconds from the start of the save to its commit.
        held_s: seconds that `step` held the training loop.
        lost_s: ``held_s``, and what steps took longer than usual while the save was being written.
        times: how often in a row.
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

    def to_json(self) -> dict[str, Any]:
        """Describe as JSON, without what says nothing."""
        values = {name: getattr(self, name) for name in _CHECKS}
        return {name: value for name, value in values.items() if value != _DEFAULTS.get(name)}

    @classmethod
    def from_json(cls, data: Any) -> JournalEvent:
        """Rebuild from `to_json`; raises ValueError, TypeError or KeyError for anything else. Texts are cut."""
        event = cls(**{name: _CHECKS[name](value) for name, value in data.items() if name in _CHECKS})
        if event.what not in _KINDS:
            raise ValueError(f"not an event: {event.what!r}")
        return event


_DEFAULTS = {"attempt": 0, "name": "", "kind": "", "why": "", "times": 1, **dict.fromkeys(("step", "bytes", "reused"))}
_DEFAULTS |= dict.fromkeys(("durable_s", "held_s", "lost_s"))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("no text")
    return value[:_LONGEST]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError("no count")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e15:
        raise TypeError("no number of seconds")
    return round(float(value), 4)


_CHECKS: dict[str, Callable[[Any], Any]] = {one.name: _text for one in fields(JournalEvent)}
_CHECKS |= dict.fromkeys(("attempt", "step", "bytes", "reused", "times"), _count)
_CHECKS |= dict.fromkeys(("time", "durable_s", "held_s", "lost_s"), _seconds)


def events_from(data: Any) -> list[JournalEvent]:
    """Read a stored list of events; what is none is left out."""
    found = []
    for one in data if isinstance(data, list) else ():
        try:
            found.append(JournalEvent.from_json(one))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return found


class Journal:
    """Events of a run that wait for something to be written; for any thread. Never raises over what it is given.

    Example:
        >>> journal = Journal()
        >>> journal.add("deleted", name="step_1", step=1, why="not among last 3")
        >>> waiting, number = journal.take_out()
        >>> [one["name"] for one in waiting], journal.is_full
        (['step_1'], False)
        >>> journal.written(number)
        >>> journal.waiting()
        []
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[tuple[JournalEvent, int]] = deque()  # with the length of its JSON
        self._num_gone = 0  # written for good, or dropped because nothing could be written for long
        self._handed = 0  # being written for good
        self._bytes = 0

    def add(self, what: str, **about: Any) -> None:
        """Note an event of now."""
        values = {name: value[:_LONGEST] if isinstance(value, str) else value for name, value in about.items()}
        known = {name: value for name, value in values.items() if value is not None}
        self.take([{"time": time.time(), **known, "what": what}])

    def take(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Note events as JSON, such as a trainer sends, or an earlier life had waiting."""
        with self._lock:
            for event in events_from([dict(one) for one in rows]):
                last = self._events[-1][0] if self._events else None
                is_ours = self._num_gone + len(self._events) > self._handed
                if last is not None and is_ours and event.what in ("lost", "skipped") and _is_again(last, event):
                    self._events[-1] = replace(last, times=last.times + event.times), self._events[-1][1]
                    continue
                self._events.append((event, len(json.dumps(event.to_json()))))
                self._bytes += self._events[-1][1]
            self._forget(len(self._events) - _MOST_WAITING)

    def waiting(self) -> list[dict[str, Any]]:
        """Return what waits as JSON."""
        with self._lock:
            return [one.to_json() for one, _ in self._events]

    def take_out(self) -> tuple[list[dict[str, Any]], int]:
        """Return what waits, and a number to tell `written` once it is in a report segment."""
        with self._lock:
            self._handed = self._num_gone + len(self._events)
            return [one.to_json() for one, _ in self._events], self._handed

    def written(self, number: int) -> None:
        """Forget what is in a segment by now."""
        with self._lock:
            self._forget(min(number - self._num_gone, len(self._events)))

    @property
    def is_full(self) -> bool:
        """Whether so much waits that a segment is worth a request, once in some fifty saves."""
        return self._bytes >= _FULL_BYTES

    def _forget(self, num: int) -> None:
        for _ in range(num):
            self._bytes -= self._events.popleft()[1]
            self._num_gone += 1


def merged(events: Iterable[JournalEvent]) -> list[JournalEvent]:
    """Put events of several places into order; those that lie at two places count once."""
    found: dict[JournalEvent, JournalEvent] = {}
    for event in events:  # one that was counted on after it had been written once is the same
        known = found.setdefault(replace(event, times=1), event)
        if event.times > known.times:
            found[replace(event, times=1)] = event
    return sorted(found.values(), key=lambda one: one.time)


def _is_again(last: JournalEvent, event: JournalEvent) -> bool:
    return (last.what, last.why, last.attempt) == (event.what, event.why, event.attempt)
