"""The reports of a run: append-only segments of JSON lines, and which rows still count after resumes.

No storage can append durably everywhere, so the open segment is replaced whole until it is full, and every sixteen
full segments are merged into one: a flush costs at most one small object, and the number of objects stays logarithmic
in the bytes written. The writer gathers rows in a `ReportBuffer` and writes them about once a second.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from operator import itemgetter
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import ConfigError, HoldfastError, StorageNotFoundError
from holdfast.format.digest import check_object, close_object
from holdfast.storage.base import Storage
from holdfast.storage.together import together

from .journal import MOST_READ, Journal, JournalEvent, events_from
from .names import REPORTS
from .record import from_plain, to_plain

SEGMENT_BYTES = 64 << 10
FAN_IN = 16
MAX_MERGED_BYTES = 16 << 20
MAX_ATTEMPT = 999_999_998  # no run gets there; an invented number must not make ours unreadable
_NAME = re.compile(r"(\d{5,9})-([^-/]+)-(\d{6,})(?:-(\d{6,}))?\.jsonl")
_log = get_logger("catalog")
_LIMIT = 1 << 63
# The keys of versions that wrote no digest at the end of a line.
_EARLY = {"step", "epoch", "time", "metrics", "checkpoint", "attempt", "run_id", "started", "notes", "events"}
_EVERY_S = 0.8

Answer = Callable[[list[int], BaseException | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the run.

    Attributes:
        resumed_from: ``{"name", "step", "attempt"}`` of the checkpoint that it went on from; None for a fresh start.
        ended: ISO time, None while it runs (or if it died before it could note that).
        reason: how it ended.
        details: more about its start and end as small JSON, such as why it failed and where the seconds went.
    """

    attempt: int
    start_id: str
    host: str = ""
    pid: int = 0
    started: str = ""
    resumed_from: Mapping[str, Any] | None = None
    ended: str | None = None
    reason: str | None = None
    details: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Describe as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attempt:
        """Rebuild from `to_json`; raises TypeError, ValueError or AttributeError for other data."""
        known = {item.name for item in fields(cls)}
        attempt = cls(**{name: value for name, value in data.items() if name in known})
        resumed, details = attempt.resumed_from, attempt.details
        texts = (attempt.start_id, attempt.host, attempt.started, attempt.ended or "", attempt.reason or "")
        sound = (
            type(attempt.attempt) is type(attempt.pid) is int
            and 0 <= attempt.attempt <= MAX_ATTEMPT
            and all(type(text) is str for text in texts)
            and (details is None or isinstance(details, dict))
            and (resumed is None or (_is_whole(resumed["step"]) and type(resumed["name"]) is str))
            and (resumed is None or type(resumed.get("attempt")) in (int, type(None)))
        )
        if not sound:
            raise ValueError(f"not an attempt: {data!r:.80}")
        return attempt


@dataclass(frozen=True, slots=True, order=True)
class _Segment:
    attempt: int
    start_id: str
    first: int
    last: int

    @property
    def path(self) -> str:
        tail = f"-{self.last:06d}" if self.last != self.first else ""
        return f"{REPORTS}/{self.attempt:05d}-{self.start_id}-{self.first:06d}{tail}.jsonl"


class ReportLog:
    """Writes the segments of one attempt. Owned by the writer; one thread at a time.

    Args:
        storage: the run.
        attempt: whose rows these are.
        run_id: identity of the run.
        before: earlier attempts, which have ended by now; written along, since they could not know their own end.
        notes: the notes of the run so far.
        file_id: start id in the names of the segments, if it differs from the attempt's.
        journal: events that are written along.
    """

    def __init__(
        self,
        storage: Storage,
        attempt: Attempt,
        run_id: str,
        *,
        before: Sequence[Attempt] = (),
        notes: Mapping[str, Any] | None = None,
        file_id: str | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._journal = Journal() if journal is None else journal
        self._is_behind = False  # rows wait in the buffer that the storage did not take
        self._file_id = file_id or attempt.start_id
        if not re.fullmatch(r"[^-/]+", self._file_id):
            raise ConfigError(f"start id {attempt.start_id!r}: use letters and digits, it becomes part of file names")
        self._storage = storage
        self._attempt = attempt
        self._number = 0
        self._full: list[tuple[_Segment, int, int]] = []  # segment, bytes, merge level
        # The first rows make attempts, run id and notes recoverable when run.json is lost.
        self._buffer = bytearray(_line({"run_id": run_id, "started": attempt.to_json()}))
        for earlier in before:
            self._buffer += _line({"started": earlier.to_json()})
        if notes:
            self._buffer += _line({"notes": dict(notes)})
        self._put()

    def resumed(self, source: Mapping[str, Any]) -> None:
        """Note the checkpoint that the attempt went on from."""
        self._attempt = replace(self._attempt, resumed_from=dict(source))
        self._buffer += _line({"started": self._attempt.to_json()})
        self._put()

    def note(self, notes: Mapping[str, Any]) -> None:
        """Note small JSON values about the run."""
        self._buffer += _line({"notes": dict(notes)})
        self._put()

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows ``{step, epoch, time, metrics, checkpoint}``; durable on return.

        Rows that the storage does not take stay, and are written by the next call, be it of none.
        """
        number = self._attempt.attempt
        lines = [_line({**row, "attempt": number, "metrics": to_plain(row.get("metrics") or {})}) for row in rows]
        if not lines and not self._is_behind:
            return
        self._buffer += b"".join(lines)
        self.flush()

    def flush(self) -> None:
        """Write the waiting events and new rows; durable on return."""
        self._put()
        if len(self._buffer) >= SEGMENT_BYTES:
            self._full.append((self._segment(), len(self._buffer), 0))
            self._number += 1
            self._buffer = bytearray()
            self._merge()

    def _segment(self) -> _Segment:
        return _Segment(self._attempt.attempt, self._file_id, self._number, self._number)

    def _put(self) -> None:
        events, number = self._journal.take_out()
        before = len(self._buffer)
        if events:  # older versions read this line as empty notes
            self._buffer += _line({"notes": {}, "events": events})
        try:
            self._storage.put(self._segment().path, bytes(self._buffer))
        except BaseException:
            del self._buffer[before:]  # the events still wait
            self._is_behind = True
            raise
        self._is_behind = False
        self._journal.written(number)

    def _merge(self) -> None:
        """Merge the newest full segments while the last sixteen are of one level."""
        while len(self._full) >= FAN_IN:
            tail = self._full[-FAN_IN:]
            level = tail[0][2]
            size = sum(nbytes for _, nbytes, _ in tail)
            if any(other != level for _, _, other in tail) or size > MAX_MERGED_BYTES:
                return
            merged = replace(tail[0][0], last=tail[-1][0].last)
            # The merged segment first, then its parts are deleted: a crash in between leaves parts that readers skip.
            self._storage.put(merged.path, b"".join(self._storage.read(part.path) for part, _, _ in tail))
            for part, _, _ in tail:
                self._storage.delete(part.path)
            self._full[-FAN_IN:] = [(merged, size, level + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """The content of the segments of a run.

    Attributes:
        rows: reports in the order written.
        attempts: by number.
        run_id: "" if there is none.
        notes: small JSON values by name that stay with the run (`RunIndex.note`).
        events: saves, deletions and losses: the newest `MOST_READ`, oldest first.
        damaged: number of damaged lines, which are left out, by path of the segment.
    """

    rows: list[dict[str, Any]]
    attempts: dict[int, Attempt]
    run_id: str
    notes: dict[str, Any]
    events: list[JournalEvent]
    damaged: Mapping[str, int] = field(default_factory=dict)


def read_history(storage: Storage) -> RunHistory:
    """Read all segments. Damaged lines are left out and logged."""
    rows: list[dict[str, Any]] = []
    attempts: dict[int, Attempt] = {}
    notes: dict[str, Any] = {}
    events: deque[JournalEvent] = deque(maxlen=MOST_READ)
    run_id = ""
    covered: tuple[int, str, int] | None = None
    wanted: list[_Segment] = []
    damaged: dict[str, int] = {}
    for segment in _segments(storage):
        if covered is not None and covered[:2] == (segment.attempt, segment.start_id) and segment.first <= covered[2]:
            continue
        covered = (segment.attempt, segment.start_id, segment.last)
        wanted.append(segment)
    for segment, data in zip(
        wanted, together(storage, [partial(_read_segment, storage, segment) for segment in wanted]), strict=True
    ):
        for line in data.splitlines():
            try:
                row = _row(line)
                if "started" in row:
                    attempt = Attempt.from_json(row["started"])
                    attempts[attempt.attempt] = attempt
                    run_id = str(row.get("run_id") or run_id)
                elif "notes" in row:
                    notes |= dict(row["notes"])
                    events += events_from(row.get("events"))
                else:
                    row["metrics"] = from_plain(row.get("metrics") or {})
                    rows.append(_sound({**row, "attempt": int(row["attempt"])}))
            except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
                damaged[segment.path] = damaged.get(segment.path, 0) + 1
    for path, number in damaged.items():
        _log.warning("%s/%s: %d damaged lines left out", storage.uri, path, number)
    return RunHistory(rows=rows, attempts=attempts, run_id=run_id, notes=notes, events=list(events), damaged=damaged)


def _row(line: bytes) -> dict[str, Any]:
    """Read a line; raises ValueError or TypeError if it is not what was written."""
    closed = check_object(line)
    row = dict(json.loads(line))
    if closed is False or (closed is None and not row.keys() <= _EARLY):
        raise ValueError("it differs from its digest")
    row.pop("digest", None)
    return row


def _read_segment(storage: Storage, segment: _Segment) -> bytes:
    try:
        return storage.read(segment.path)
    except StorageNotFoundError:
        return b""  # merged by the live writer while we read; the next read finds the merged segment


def _is_whole(value: Any) -> bool:
    """Tell whether a value is a whole number that a float can be compared with."""
    return type(value) is int and abs(value) < _LIMIT


def _sound(row: dict[str, Any]) -> dict[str, Any]:
    """Return a report if its fields are of the kinds that were written; raises TypeError otherwise."""
    numbers = (row.get("step"), row.get("epoch"), row.get("time"))
    texts = (row.get("checkpoint"),)
    good = all(number is None or type(number) is float or _is_whole(number) for number in numbers)
    good = good and isinstance(row["metrics"], dict)
    if not good or not all(text is None or type(text) is str for text in texts):
        raise TypeError("no report")
    return row


def unused_start_id(storage: Storage, attempt: Attempt) -> str:
    """Return a new start id for further segments of an attempt, whose earlier segments must not be replaced."""
    used = {segment.start_id for segment in _segments(storage) if segment.attempt == attempt.attempt}
    names = (f"{attempt.start_id}r{number or ''}" for number in itertools.count())
    return next(name for name in names if name not in used)


def highest_attempt(storage: Storage) -> int:
    """Return the highest attempt that ever wrote a report, from names alone; 0 if none did."""
    return max((segment.attempt for segment in _segments(storage)), default=0)


def live_rows(rows: Sequence[Mapping[str, Any]], attempts: Mapping[int, Attempt]) -> list[dict[str, Any]]:
    """Drop rows that a resume made void, and merge rows of the same step.

    The newest attempt that did anything is followed back through the checkpoints that each resumed from: of each
    ancestor only the rows up to the resume step count, and attempts off that path do not count at all. A later row of
    the same step merges over the earlier one. Returned in the order of steps: a writer that was started again has got
    new rows before some that were repeated to it.
    """
    limits = lineage(attempts, {int(row["attempt"]) for row in rows})
    merged: dict[Any, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: int(row["attempt"])):
        step = row.get("step")
        limit = limits.get(int(row["attempt"]), -math.inf)
        if (step if step is not None else math.inf) > limit and limit != math.inf:
            continue
        key = step if step is not None else object()  # rows without a step stay apart
        earlier = merged.get(key)
        if earlier is None:
            merged[key] = dict(row)
            continue
        metrics = {**(earlier.get("metrics") or {}), **(row.get("metrics") or {})}
        merged[key] = {**earlier, **{k: v for k, v in row.items() if v is not None}, "metrics": metrics}
    live, place = list(merged.values()), -math.inf
    places = [place := place if row.get("step") is None else row["step"] for row in live]
    return [row for _, row in sorted(zip(places, live, strict=True), key=itemgetter(0))]


def lineage(attempts: Mapping[int, Attempt], reported: set[int]) -> dict[int, float]:
    """Map each attempt on the path to the newest attempt to the last of its steps that still counts.

    The others are of branches that a resume left out as a whole.

    Args:
        attempts: all of them.
        reported: those that did anything, beside those that resumed.
    """
    begun = reported | {number for number, attempt in attempts.items() if attempt.resumed_from is not None}
    limits: dict[int, float] = {}
    limit, current = math.inf, max(begun, default=0)
    while current > 0 and current not in limits:
        limits[current] = limit
        attempt = attempts.get(current)
        if attempt is None:
            # Its description is lost (run.json and the segment's first line): the attempt before it is the best guess.
            current = max((number for number in begun if number < current), default=0)
            continue
        if attempt.resumed_from is None:
            break
        limit = min(limit, attempt.resumed_from["step"])
        parent = attempt.resumed_from.get("attempt")
        current = parent if isinstance(parent, int) and parent < current else 0
    for number, attempt in attempts.items():
        # An attempt without a checkpoint may still have reported on the very step that it resumed from.
        source = attempt.resumed_from
        if number not in limits and source is not None and source["step"] <= limits.get(source.get("attempt") or 0, -1):
            limits[number] = source["step"]
    return limits


def _segments(storage: Storage) -> list[_Segment]:
    """List segments in reading order, a merged segment before the parts that it covers."""
    segments = []
    for info in storage.list(REPORTS, recursive=False):
        if match := _NAME.fullmatch(info.path.rsplit("/", 1)[-1]):
            first = int(match[3])
            segments.append(_Segment(int(match[1]), match[2], first, int(match[4] or first)))
    return sorted(segments, key=lambda segment: (segment.attempt, segment.start_id, segment.first, -segment.last))


def _line(row: Mapping[str, Any]) -> bytes:
    return close_object(json.dumps(row, separators=(",", ":"), default=str).encode()) + b"\n"


class ReportBuffer:
    """Gathers rows and writes them from its own thread, so that a long save does not delay them.

    The first row after a pause is written at once, later ones within a second, or once somebody waits for them.
    """

    def __init__(self, write: Callable[[list[dict[str, Any]]], None]) -> None:
        self._write = write
        self._rows: list[dict[str, Any]] = []
        self._calls: list[tuple[int, Answer]] = []
        self._error: BaseException | None = None  # why rows that have been answered could not be written yet
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # rows came, or the end
        self._closing = self._closed = self._hurries = False
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="holdfast-reports", daemon=True)
        self._thread.start()

    def add(self, call: int, rows: list[dict[str, Any]], answer: Answer) -> None:
        """Add rows; ``answer`` is called when they are durable, or with the error.

        Raises:
            HoldfastError: the buffer is closed.
        """
        with self._lock:
            if self._closed:
                raise HoldfastError("this run is closed: nothing more can be reported to it")
            self._rows += rows
            self._calls.append((call, answer))
            self._changed.notify_all()

    def flush(self) -> None:
        """Write the gathered rows now, and those that could not be written before."""
        with self._writing:
            with self._lock:
                rows, self._rows = self._rows, []
                calls, self._calls = self._calls, []
            if not calls and self._error is None:
                return
            error: BaseException | None = None
            try:
                self._write(rows)
            except Exception as caught:  # noqa: BLE001 - a thread edge: the callers that reported get the error
                error = caught
            self._error = error
            groups: dict[Answer, list[int]] = {}
            for call, answer in calls:
                groups.setdefault(answer, []).append(call)
            for answer, numbers in groups.items():
                answer(numbers, error)

    def hurry(self) -> None:
        """Let the thread write the gathered rows now."""
        with self._lock:
            self._hurries = bool(self._calls)
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._calls or self._closing)
                if self._closing:
                    return  # close() writes the rest
                self._hurries = False
            begun = time.monotonic()
            self.flush()
            with self._lock:
                pause = max(0.0, _EVERY_S - (time.monotonic() - begun))
                self._changed.wait_for(lambda: self._closing or self._hurries, pause)

    def close(self) -> None:
        """Write the rest and end the thread."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with self._lock:
            self._closed = True  # rows up to here are written below, later rows are refused
        self.flush()
        if self._error is not None:
            _log.warning("the metrics that could not be written are lost with the end of the run: %s", self._error)


def check_rows(rows: Any) -> list[dict[str, Any]]:
    """Return ``rows`` if they are a list of rows, before they are put together with those of others.

    Raises:
        HoldfastError: they are not.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise HoldfastError(f"report takes a list of rows, not {type(rows).__name__}")
    return rows
