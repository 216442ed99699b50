"""What checkpointing and failures have cost a run: sums over the journal, the attempts and the reports.

Pure functions over the result of `RunIndex.read_history`; ``holdfast stats`` and the page of a run show the same
figures.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from .journal import JournalEvent
from .record import Record, timestamp
from .reports import Attempt, RunHistory, lineage

_IN_ORDER = ("finished", "stopped", "closed")  # these lives have saved their last step

_SIGNS, _PAUSES = 5, 3.0  # so many signs show a life's pace; it hangs after so many of its longest pauses without one

_PARTS = ("durable_s", "held_s", "lost_s")

_BEFORE_SNAPSHOTS = ("began", "snapshots")  # events that follow at once on the step that they name


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One committed checkpoint, whether or not it still exists.

    Attributes:
        time: when it was committed, in seconds since 1970.
        size: bytes a reader sees.
        reused: bytes of these that are shared with the checkpoint before it.
        durable_s: seconds from the start of the save to its commit; None if that is not known.
        held_s: seconds that the save held the training loop; None if that is not known.
        lost_s: ``held_s`` plus the seconds that steps took longer than usual meanwhile; None if that is not known.
    """

    name: str
    attempt: int
    step: int
    time: float
    kind: str = ""
    size: int | None = None
    reused: int | None = None
    durable_s: float | None = None
    held_s: float | None = None
    lost_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Describe as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """When and why a checkpoint was deleted."""

    name: str
    step: int | None
    time: float
    why: str


def saves(events: Iterable[JournalEvent], records: Iterable[Record] = ()) -> list[Save]:
    """Join the events of writer and trainer about each save, oldest first.

    Args:
        events: of the run.
        records: existing checkpoints; those without an event (saved before there was a journal) count by their record.
    """
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for record in records:
        known = {"step": record.step, "time": record.created, "size": record.size, "reused": record.reused}
        rows[record.attempt, record.name] = known
    for event in events:
        if event.what not in ("saved", "cost"):
            continue
        about = rows.setdefault((event.attempt, event.name), {"step": event.step or 0, "time": event.time})
        if event.what == "saved":
            about["durable_s"] = about.get("durable_s", event.durable_s)
            about |= {"time": event.time, "kind": event.kind, "size": event.bytes, "reused": event.reused}
        else:  # the trainer counts from the moment that it began
            about |= {name: value for name in _PARTS if (value := getattr(event, name)) is not None}
    made = [Save(attempt=attempt, name=name, **about) for (attempt, name), about in rows.items()]
    return sorted(made, key=lambda save: (save.attempt, save.time, save.step))


def deletions(events: Iterable[JournalEvent], *, is_remote: bool = False) -> dict[tuple[int, str], Deletion]:
    """Return the last deletion of each (attempt, name); of a mirrored run those of one side."""
    last = {}
    for event in events:
        if event.what == "deleted" and event.kind != ("local" if is_remote else "remote"):
            gone = Deletion(name=event.name, step=event.step, time=event.time, why=event.why)
            last[event.attempt, event.name] = gone
    return last


def attempt_rows(history: RunHistory, made: Sequence[Save]) -> list[dict[str, Any]]:
    """Describe each start of the run, and the cost of its end, as JSON.

    Returns:
        Rows with "died" (what ended it, as `holdfast run` saw it), "lost_steps" (steps that a later attempt had to do
        again), "lost_s" (seconds of training after the checkpoint that the next attempt went on from) and "down_s"
        (seconds until the next attempt began); None if not known.
    """
    last: dict[int, float] = {}
    for row in history.rows:
        number = row["attempt"]
        if _is_number(row.get("step")):
            last[number] = max(last.get(number, -math.inf), row["step"])
    for save in made:
        last[save.attempt] = max(last.get(save.attempt, -math.inf), save.step - 1)
    died = {event.attempt: event for event in history.events if event.what == "died"}
    attempts = history.attempts
    rows = [_attempt(attempts[number], last.get(number), died.get(number)) for number in sorted(attempts)]
    by_number = {row["attempt"]: row for row in rows}
    when, ends = _captured(history, made), _ends(history, _signs(history, made))
    for row, following in pairwise(rows):
        if following["started"] is not None and row["attempt"] in ends:
            row["down_s"] = max(0.0, following["started"] - ends[row["attempt"]][0])
    for row in rows:
        before = by_number.get(row["from_attempt"] or row["attempt"] - 1)
        if before is not None and row is not before:
            _charge(before, row, when, ends.get(before["attempt"], (None, None))[0])
    return rows


def _attempt(attempt: Attempt, last: float | None, died: JournalEvent | None) -> dict[str, Any]:
    source, details = attempt.resumed_from, attempt.details or {}
    done, stop = details.get("last_step"), details.get("stop")
    return {
        "attempt": attempt.attempt,
        "started": timestamp(attempt.started) or None,
        "ended": timestamp(attempt.ended or "") or (died.time if died else None),
        "reason": attempt.reason,
        "died": died.why if died else None,
        "stop": stop if isinstance(stop, str) else None,
        "host": attempt.host,
        "pid": attempt.pid,
        "from_name": None if source is None else str(source["name"]),
        "from_attempt": None if source is None else source.get("attempt"),
        "first_step": 0 if source is None else source["step"],
        "last_step": last,
        "steps_done": done if type(done) is int and done >= 0 else None,
        "lost_steps": 0,
        "lost_s": None,
        "down_s": None,
    }


def _charge(
    before: dict[str, Any], row: dict[str, Any], when: Mapping[tuple[int, str], float], ended: float | None
) -> None:
    """Add to an attempt the steps and seconds that its successor had to repeat."""
    if before["steps_done"] is not None:
        lost = before["steps_done"] - row["first_step"]
    elif before["last_step"] is not None:
        lost = before["last_step"] - row["first_step"] + 1
    else:
        lost = 0
    before["lost_steps"] = max(before["lost_steps"], lost, 0)
    safe = when.get((before["attempt"], row["from_name"] or ""), None if row["from_name"] else before["started"])
    if lost > 0 and safe is not None and ended is not None:
        before["lost_s"] = max(before["lost_s"] or 0.0, ended - safe)


def stats(history: RunHistory, records: Iterable[Record] = (), *, is_remote: bool = False) -> dict[str, Any]:
    """Sum up all of it as JSON, as ``holdfast stats --json`` prints it."""
    made = saves(history.events, records)
    attempts = attempt_rows(history, made)
    gone = deletions(history.events, is_remote=is_remote)
    lost = [event for event in history.events if event.what == "lost"]
    sized = [save for save in made if save.size is not None]
    return {
        "saves": len(made),
        "first_save": min((save.time for save in made), default=None),
        "last_save": max((save.time for save in made), default=None),
        "last_step": max((save.step for save in made), default=None),
        **{name: summary([value for save in made if (value := getattr(save, name)) is not None]) for name in _PARTS},
        "bytes_written": sum((save.size or 0) - (save.reused or 0) for save in sized),
        "bytes_reused": sum(save.reused or 0 for save in sized),
        "lost_saves": sum(event.times for event in lost),
        "lost_why": dict(_counted((event.why, event.times) for event in lost)),
        "skipped_saves": sum(event.times for event in history.events if event.what == "skipped"),
        "deleted": len(gone),
        "deleted_by": dict(_counted((deletion.why, 1) for deletion in gone.values())),
        "attempts": attempts,
        "failures": sum(bool(row["lost_steps"]) or row["reason"] not in (None, *_IN_ORDER) for row in attempts),
        "lost_steps": sum(row["lost_steps"] for row in attempts),
        "failure_s": sum((row["lost_s"] or 0.0) for row in attempts),
        "down_s": sum((row["down_s"] or 0.0) for row in attempts),
        "died_why": dict(_counted((event.why, event.times) for event in history.events if event.what == "died")),
    }


def summary(values: Sequence[float]) -> dict[str, float | int | None]:
    """Count, sum, mean, median, 95th percentile and maximum (percentiles are values that occurred: nearest rank)."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "sum": 0.0, "mean": None, "p50": None, "p95": None, "max": None}

    def at(part: float) -> float:
        return ordered[max(0, math.ceil(part * len(ordered)) - 1)]

    total = math.fsum(ordered)
    mean = statistics.fmean(ordered)
    return {"count": len(ordered), "sum": total, "mean": mean, "p50": at(0.5), "p95": at(0.95), "max": ordered[-1]}


def _counted(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    count: Counter[str] = Counter()
    for name, times in pairs:
        count[name] += times
    return count.most_common(50)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def goodput(history: RunHistory, made: Sequence[Save], *, now: float | None = None) -> dict[str, float] | None:
    """Divide the wall time of a run since its first start, in seconds.

    A life that was killed ends with its trainer; if nobody has noted that, with its last sign (a report, a save): what
    it trained after that counts as down, not as done again, and neither is useful. One that gave signs, and none for
    three of its longest pauses before it was killed, hung: it was down from then on.

    Args:
        history: of the run.
        made: its saves (`saves`).
        now: seconds since 1970 if the run is being trained; None: it ends with its last sign.

    Returns:
        "wall_s", and its parts "useful_s", "again_s" (trained by a life after the state that a later one went on
        from), "held_s" and "slowed_s" (the loop held by saves and snapshots, and steps slower than usual while saves
        were written), "starting_s" (until the first step was done) and "down_s"; "ratio" is the useful part. None for a
        run that has not been trained.

    Example:
        >>> goodput(RunHistory(rows=[], attempts={}, run_id="", notes={}, events=[]), []) is None
        True
    """
    lives = [history.attempts[number] for number in sorted(history.attempts) if history.attempts[number].started]
    if not lives:
        return None
    began = {event.attempt: event.time for event in history.events if event.what == "began"}
    snapshots = {event.attempt: event for event in history.events if event.what == "snapshots"}
    signs, captured = _signs(history, made), _captured(history, made)
    ends = _ends(history, signs)
    limits = _limits(lives, lineage(history.attempts, set(signs)))
    parts = dict.fromkeys(("again_s", "held_s", "slowed_s", "starting_s", "down_s"), 0.0)
    begins = [timestamp(life.started) for life in lives]
    for place, (life, begin) in enumerate(zip(lives, begins, strict=True)):
        number, following = life.attempt, place + 1 < len(lives)
        limit = begins[place + 1] if following else math.inf
        worked, ended = (max(begin, min(limit, moment)) for moment in ends[number])
        if not following and now is not None:
            worked = ended = max(ended, now)
        end, limit = worked, min(limit, ended) if not following else limit
        trains = min(end, max(begin, began.get(number) or _trains(life, begin, end, is_seen=number in signs)))
        own = [save for save in made if save.attempt == number]
        kept = min(end, max(trains, _kept(life, limits[number], own, captured)))
        parts["starting_s"] += trains - begin
        parts["again_s"] += end - kept
        parts["down_s"] += limit - end
        # A run of a few steps may have spent all of its time on saves; measured apart, they can come to a little more.
        held = math.fsum(save.held_s or 0.0 for save in own if captured[number, save.name] <= kept)
        held = min(kept - trains, held + _snapshots_s(snapshots.get(number), trains, kept))
        slowed = math.fsum(max(0.0, (save.lost_s or 0.0) - (save.held_s or 0.0)) for save in own if save.time <= kept)
        parts["held_s"] += held
        parts["slowed_s"] += min(kept - trains - held, slowed)
    wall = limit - begins[0]
    useful = max(0.0, wall - math.fsum(parts.values()))
    return {"wall_s": wall, "useful_s": useful, **parts, "ratio": useful / wall if wall > 0 else 0.0}


def _signs(history: RunHistory, made: Sequence[Save]) -> dict[int, list[float]]:
    """Return when each life that has trained was heard of, in order."""
    signs: dict[int, list[float]] = {}
    times = [(row["attempt"], row.get("time")) for row in history.rows]
    whats = ("began", "cost", "skipped", "snapshots")
    times += [(event.attempt, event.time) for event in history.events if event.what in whats]
    times += [(save.attempt, save.time) for save in made]
    for number, moment in times:
        if _is_number(moment):
            signs.setdefault(number, []).append(moment)
    return {number: sorted(moments) for number, moments in signs.items()}


def _ends(history: RunHistory, signs: Mapping[int, Sequence[float]]) -> dict[int, tuple[float, float]]:
    """Return until when each life has worked, and when it ended, which is later where it hung."""
    died = {event.attempt: event.time for event in history.events if event.what == "died"}
    ends = {}
    for number, life in history.attempts.items():
        begin, moments = timestamp(life.started), signs.get(number, ())
        ended = worked = timestamp(life.ended or "") or max([begin, died.get(number, begin), *moments])
        heard = [moment for moment in moments if moment <= ended]
        if life.reason not in _IN_ORDER and len(heard) >= _SIGNS:
            worked = min(ended, heard[-1] + _PAUSES * max(later - one for one, later in pairwise(heard)))
        if ended:  # else its description is lost, and nothing was heard of it
            ends[number] = worked, ended
    return ends


def _captured(history: RunHistory, made: Sequence[Save]) -> dict[tuple[int, str], float]:
    """Return when training went on from the state of each save: what came after that is not in it.

    A save is committed ``durable_s`` after it began, and holds the loop first. A snapshot that was saved when its
    trainer died is older than that: the last that was heard of its step, or of one before, is its moment.
    """
    rescued = {(event.attempt, event.name) for event in history.events if event.what == "saved" and event.why}
    steps = [(row["attempt"], row.get("step"), row.get("time")) for row in history.rows]
    steps += [(event.attempt, event.step, event.time) for event in history.events if event.what in _BEFORE_SNAPSHOTS]
    heard: dict[int, list[tuple[float, float]]] = {}
    for number, step, moment in steps:
        if _is_number(step) and _is_number(moment):
            heard.setdefault(number, []).append((step, moment))
    found = {}
    for save in made:
        moment = save.time - max(0.0, (save.durable_s or 0.0) - (save.held_s or 0.0))
        if (save.attempt, save.name) in rescued:
            before = [heard_of for step, heard_of in heard.get(save.attempt, ()) if step <= save.step]
            moment = min(moment, max(before, default=moment))
        found[save.attempt, save.name] = moment
    return found


def _limits(lives: Sequence[Attempt], path: Mapping[int, float]) -> dict[int, float]:
    """Return the last step of each life that counts: of those that a later one has gone back behind there is none.

    Where the path begins, at a fresh start or a checkpoint of another run, what had ended in order before stays whole.
    """
    first = min(path, default=math.inf)
    limits = {
        life.attempt: math.inf if life.reason in _IN_ORDER and life.attempt < first else -math.inf for life in lives
    }
    return {**limits, lives[-1].attempt: math.inf, **path}


def _trains(life: Attempt, begin: float, end: float, *, is_seen: bool) -> float:
    """Return when a life began to train of which no event says so: of workers, died before that, or older than it."""
    seconds = (life.details or {}).get("seconds")
    if isinstance(seconds, Mapping):
        phases = (seconds.get(name) for name in ("find", "start", "load"))
        return begin + math.fsum(value for value in phases if isinstance(value, (int, float)) and value > 0)
    return begin if is_seen else end


def _kept(life: Attempt, limit: float, own: Sequence[Save], captured: Mapping[tuple[int, str], float]) -> float:
    """Return until when the steps of a life count, up to ``limit``; infinite if all of it does."""
    has_all = life.reason in _IN_ORDER and limit >= max((save.step for save in own), default=-math.inf)
    if limit == math.inf or has_all:
        return math.inf
    moments = (captured[save.attempt, save.name] for save in own if save.step == limit)
    return max(moments, default=-math.inf)


def _snapshots_s(told: JournalEvent | None, trains: float, kept: float) -> float:
    """Return what the snapshots until ``kept`` have cost: they lie evenly over the time that they were counted in."""
    if told is None or told.time <= trains:
        return 0.0
    return (told.held_s or 0.0) * min(1.0, (kept - trains) / (told.time - trains))
