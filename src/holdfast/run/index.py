"""``run.json``: identity and attempts of a run, and a cache of the records of its checkpoints.

The truth is in the manifests, their ``.metrics.json`` and the report segments; a lost or damaged run.json is rebuilt
from them (`holdfast.run.catalog.Catalog` does it) and never stops a resume.

While its rows are few, run.json is replaced by each save. With many, a save replaces ``run-changes.json`` instead,
which has the rows that were changed since, and names its run.json; when these rows have become many as well, run.json
is replaced with all of them. So a save writes a bounded number of bytes, and no storage has to append.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from holdfast._paused_gc import paused_gc
from holdfast.errors import CorruptCheckpointError, StorageError, StorageNotFoundError, StoragePermissionError
from holdfast.format.digest import bytes_digest
from holdfast.format.strict_json import check_depth
from holdfast.storage.base import Storage
from holdfast.storage.together import together

from .journal import Journal, events_from, merged
from .names import CHANGES_FILE, RUN_FILE
from .record import COLUMNS, RecordTable
from .reports import (
    MAX_ATTEMPT,
    Attempt,
    ReportLog,
    RunHistory,
    highest_attempt,
    live_rows,
    read_history,
    unused_start_id,
)

__all__ = ["CHANGES_FILE", "RUN_FILE", "Attempt", "RunIndex"]

_FORMAT = "holdfast-run"
_VERSION = 1
_MAX_DEPTH = 200
_MAX_BYTES = 1 << 30
_HEAD_END, _ROWS_END = b',\n "head_digest": "', b',\n "rows_digest": "'
_CHANGES_END = b',\n "changes_digest": "'
# Bytes of rows up to which run.json is replaced by each save, and of changes up to which it is not.
_FEW_BYTES, _MANY_BYTES = 64 << 10, 64 << 10
_DAMAGE = (CorruptCheckpointError, ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError)
# Earlier attempts in a new segment: several, because a start may be killed between run.json and its first segment.
_RETOLD = 8


class RunIndex:
    """The content of run.json, in memory. Only the holder of the lease calls methods that write.

    Attributes:
        run_id: identity shared by all checkpoints of the run; "" before the first attempt.
        attempts: every start so far, oldest first.
        rows: packed rows by checkpoint name (`record.unpack` reads one).
        quarantined: checkpoint name -> why no start resumes from it.
        finished: the values noted at the end of training, or None.
        keep: the retention rules applied last, as JSON; for display only.
        notes: small JSON values that the trainer keeps here.
        damage: why the stored file could not be used; None when it was fine. "missing" for a new run.
        journal: events that are not in a report segment yet; written along by `save` and with the next report.
        has_changes: whether a part of this index is stored in the file of changes and not in run.json.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.run_id = ""
        self.attempts: list[Attempt] = []
        self.rows = RecordTable()  # the object stays, its content changes
        self.quarantined: dict[str, str] = {}
        self.finished: dict[str, Any] | None = None
        self.keep: dict[str, Any] | None = None
        self.notes: dict[str, Any] = {}
        self.damage: str | None = None
        self.journal = Journal()
        self._log: ReportLog | None = None
        self.has_changes = False
        # Of the stored run.json: the id that changes refer to ("" if it has none), its head, the names touched since.
        self._base, self._head, self._touched = "", "", self.rows.watch()

    @classmethod
    @paused_gc()
    def load(cls, storage: Storage, *, head_only: bool = False) -> RunIndex:
        """Read run.json and the changes since. Damage is noted in `damage`, never raised.

        Args:
            storage: the run.
            head_only: leave the rows out: for callers that ask about the run itself; they must not save this index.

        Raises:
            StoragePermissionError: the file exists and may not be read; that is not damage.
            StorageError: a storage that is not a local disk did not answer; that is not damage either.
        """
        index = cls(storage)
        try:
            data = _read(storage, RUN_FILE)
        except StorageNotFoundError:
            index.damage = "missing"
            return index
        except StoragePermissionError:
            raise
        except StorageError as error:
            if storage.local_root is None:
                raise  # a disk that cannot read a file has lost it; a network may have it again in a moment
            index.damage = f"{type(error).__name__}: {error}"
            return index
        head, rows, why = _divide(data)
        index._take(head, index._take_head, why)
        if not head_only:
            index._take(rows, index._take_rows, why)
        if index._base and not index._take_changes():
            with suppress(StorageNotFoundError):
                if storage.read(RUN_FILE) != data:
                    return cls.load(storage)  # it was replaced, and the changes with it, between the two reads
        index._head = index._head_text()
        return index

    def _take(self, part: bytes | None, take: Callable[[dict[str, Any]], None], why: str) -> None:
        """Read one part of a file; damage is noted."""
        try:
            if part is None:
                raise ValueError(why)
            check_depth(part, max_depth=_MAX_DEPTH, where=RUN_FILE)
            take(json.loads(part))
        except _DAMAGE as error:
            self.damage = f"{type(error).__name__}: {error}"

    def _take_head(self, body: dict[str, Any]) -> None:
        if body["format"] != _FORMAT or body["version"] != _VERSION:
            raise ValueError(f"format {body.get('format')!r} version {body.get('version')!r} is not known here")
        attempts = [Attempt.from_json(row) for row in body["attempts"]]
        quarantined, finished = body["quarantined"], body["finished"]
        keep, notes = body.get("keep"), body.get("notes") or {}  # early versions wrote neither
        sound = type(body["run_id"]) is str and type(quarantined) is type(notes) is dict
        sound = sound and all(type(value) is dict or value is None for value in (finished, keep))
        sound = sound and all(type(why) is str for why in quarantined.values())
        if not sound or type((finished or {}).get("attempt", 0)) is not int:
            raise ValueError("the head is not what was written")
        self.run_id, self.attempts, self.quarantined = body["run_id"], attempts, quarantined
        self.finished, self.keep, self.notes = finished, keep, notes

    def _take_rows(self, body: dict[str, Any]) -> None:
        if tuple(body["columns"]) != COLUMNS:
            raise ValueError("other columns than this version caches")
        rows = body["rows"]
        if type(body.get("changes", "")) is not str or not _are_rows(rows):
            raise ValueError("a row is not what was written")
        self.rows.update({row[0]: row for row in rows})
        self._touched.clear()
        self._base = body.get("changes", "")
        self.journal.take(body.get("events"))

    def _take_changes(self) -> bool:
        """Read the changes since run.json was written; False if no changes belong to it."""
        try:
            data = _read(self.storage, CHANGES_FILE)
        except StorageNotFoundError:
            return False
        except StoragePermissionError:
            raise
        except StorageError as error:
            if self.storage.local_root is None:
                raise
            self.damage = f"{type(error).__name__}: {error}"
            return True
        self.has_changes = True
        text, _, end = data.rpartition(_CHANGES_END)
        whole = end == bytes_digest(text).encode() + b'"}\n'
        before = len(self._touched)
        self._take(text + b"}" if whole else None, self._apply, f"{CHANGES_FILE} differs from its digest")
        return self.damage is not None or len(self._touched) > before

    def _apply(self, body: dict[str, Any]) -> None:
        rows, gone = body["rows"], body["gone"]
        if body["of"] != self._base:
            return  # of an earlier run.json: this one has these changes
        if not _are_rows(rows) or not all(type(name) is str for name in gone):
            raise ValueError("a change is not what was written")
        self.rows.update({row[0]: row for row in rows})
        for name in gone:
            self.rows.pop(name)
        self.journal = Journal()  # the events of run.json are in this file as well, or in a segment by now
        self.journal.take(body.get("events"))

    def _head_text(self, indent: int | None = None) -> str:
        head = {
            "format": _FORMAT,
            "version": _VERSION,
            "run_id": self.run_id,
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "quarantined": self.quarantined,
            "finished": self.finished,
            "keep": self.keep,
            "notes": self.notes,
        }
        return json.dumps(head, indent=indent, default=str)

    def to_bytes(self) -> bytes:
        """Serialise head and rows; people can read all but the rows. Each of the two parts is closed by a digest."""
        return self._bytes(self._rows_text(), "")

    def _rows_text(self) -> str:
        return json.dumps(list(self.rows.values()), separators=(",", ":"))

    def _bytes(self, rows: str, base: str) -> bytes:
        first = self._head_text(indent=1)[:-2].encode()
        changes = f',\n "changes": "{base}"' if base else ""
        second = f' "columns": {json.dumps(COLUMNS)}{changes}{self._events_text()},\n "rows": {rows}'.encode()
        ends = bytes_digest(first).encode(), bytes_digest(second).encode()
        return first + _HEAD_END + ends[0] + b'",\n' + second + _ROWS_END + ends[1] + b'"\n}\n'

    def _changes(self) -> tuple[bytes, int]:
        """Return the bytes of run-changes.json, and how many of them are events, whose number has its own bound."""
        gone = sorted(name for name in self._touched if name not in self.rows)
        rows = [self.rows[name] for name in sorted(self._touched) if name in self.rows]
        first = json.dumps({"of": self._base, "gone": gone, "rows": rows}, separators=(",", ":"))[:-1].encode()
        events = self._events_text().encode()
        first += events
        return first + _CHANGES_END + bytes_digest(first).encode() + b'"}\n', len(events)

    def _events_text(self) -> str:
        waiting = self.journal.waiting()
        return f',\n "events": {json.dumps(waiting, separators=(",", ":"))}' if waiting else ""

    @property
    def may_change_beside(self) -> bool:
        """Whether the next save may replace the file of changes alone."""
        return bool(self._base)

    def save(self) -> None:
        """Store the changes: in run.json or, with many rows, in the file beside it. Atomic, durable on return."""
        head = self._head_text()
        if self._base and self.damage is None and head == self._head:
            changes, events_bytes = self._changes()
            if len(changes) - events_bytes <= _MANY_BYTES:
                self.storage.put(CHANGES_FILE, changes)
                self.has_changes = True
                return
        rows, self._base = self._rows_text(), ""  # if the put fails, either version may be stored
        base = os.urandom(8).hex() if len(rows) > _FEW_BYTES else ""
        self.storage.put(RUN_FILE, self._bytes(rows, base))
        self.damage, self._head, self._base = None, head, base
        self._touched.clear()
        if self.has_changes:
            # Nothing refers to the file any more. If it stays, it is ignored, and a later save replaces or removes it.
            with suppress(StorageError):
                self.storage.delete(CHANGES_FILE)
                self.has_changes = False

    # -- attempts ------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def has_finished(self) -> bool:
        """Whether training came to its end, and no later attempt is on or has ended before the end of its own."""
        finished, now = self.finished, self.current
        if finished is None or now is None:
            return finished is not None
        return finished.get("attempt", 0) >= now.attempt or now.reason in ("finished", "closed")

    def register_attempt(
        self, start_id: str, *, host: str, pid: int, above: int = 0, reported: int | None = None
    ) -> Attempt:
        """Begin a new attempt, numbered above all known attempts, and store it. Needs the lease.

        Args:
            start_id: identity of this start.
            host: where the trainer runs.
            pid: the trainer.
            above: an attempt known from elsewhere.
            reported: what `highest_attempt` has found under this lease.
        """
        seen = [earlier.attempt for earlier in self.attempts]
        seen += [row[1] for row in self.rows.values()]
        number = max([*seen, highest_attempt(self.storage) if reported is None else reported, above]) + 1
        if number > MAX_ATTEMPT:
            raise CorruptCheckpointError(
                f"{self.storage.uri}: a manifest, a fence-*.json or a file of reports/ there says that it is of "
                f"attempt {number - 1}, which no run reaches: somebody made that up; move it away"
            )
        self.run_id = self.run_id or os.urandom(8).hex()
        attempt = Attempt(attempt=number, start_id=start_id, host=host, pid=pid, started=_in_iso())
        before = self.attempts[-_RETOLD:]
        self.attempts.append(attempt)

        def begin_log() -> None:
            self._log = ReportLog(
                self.storage, attempt, self.run_id, before=before, notes=self.notes, journal=self.journal
            )

        # Each of the two files is enough to number the next attempt above this one.
        together(self.storage, [self.save, begin_log])
        return attempt

    def rejoin(self, attempt: Attempt, run_id: str) -> None:
        """Go on with an attempt that a writer of the same trainer registered before it died. Needs the lease."""
        self.run_id = self.run_id or run_id
        if all(known.attempt != attempt.attempt for known in self.attempts):  # run.json was lost as well
            self.attempts.append(attempt)
        # New names: the earlier segments of the attempt must not be replaced.
        file_id = unused_start_id(self.storage, attempt)
        self._log = ReportLog(self.storage, attempt, self.run_id, file_id=file_id, journal=self.journal)

    def resumed(self, name: str, *, step: int, attempt: int | None = None) -> None:
        """Note the checkpoint that the current attempt goes on from.

        Args:
            name: checkpoint of this run, or the URI of another checkpoint.
            step: the step it was saved at.
            attempt: the attempt that saved it; looked up for checkpoints of this run.
        """
        if attempt is None and name in self.rows:
            attempt = self.rows[name][1]
        source = {"name": name, "step": step, "attempt": attempt}
        self.attempts[-1] = replace(self.attempts[-1], resumed_from=source)
        log = self._log
        together(self.storage, [self.save, *([] if log is None else [lambda: log.resumed(source)])])

    def end_attempt(
        self, reason: str, details: Mapping[str, Any] | None = None, *, ended: float | None = None, save: bool = True
    ) -> None:
        """Note how the current attempt ended, and when (in seconds since 1970; None: now); add to its details."""
        if self.attempts:
            self.attempts[-1] = replace(self.attempts[-1], ended=_in_iso(ended), reason=reason)
            self.describe_attempt(details or {}, save=save)

    def describe_attempt(self, details: Mapping[str, Any], *, save: bool = True) -> None:
        """Add to the details of the current attempt."""
        if details:
            self.attempts[-1] = replace(self.attempts[-1], details={**(self.attempts[-1].details or {}), **details})
        if save:
            self.save()

    def note(self, key: str, value: Any) -> None:
        """Keep a small JSON value under ``key``; None forgets it."""
        self.notes = {**self.notes, key: value}
        if value is None:
            del self.notes[key]
        self.save()
        if self._log is not None:
            self._log.note({key: value})

    def finish(self, info: Mapping[str, Any]) -> None:
        """Note that training reached its end; a later attempt that saves again clears it."""
        number = self.attempts[-1].attempt if self.attempts else 0
        self.finished = {**info, "attempt": number, "time": _in_iso()}
        self.save()

    def quarantine(self, name: str, reason: str) -> None:
        """Never pick this checkpoint again. Its files stay as they are."""
        self.quarantined[name] = reason
        self.save()

    # -- reports -------------------------------------------------------------------------------------------------

    def report(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows ``{step, epoch, time, metrics, checkpoint}`` of the current attempt; durable on return."""
        if self._log is None:
            raise RuntimeError("report before register_attempt")
        self._log.write(rows)

    def flush_journal(self) -> None:
        """Write the waiting events into the open segment; called when `Journal.is_full`."""
        if self._log is not None:
            self._log.flush()

    def history(self) -> list[dict[str, Any]]:
        """Return every report that still counts, oldest first (see `live_rows`)."""
        history = self.read_history()
        return live_rows(history.rows, history.attempts)

    def read_history(self) -> RunHistory:
        """Read reports, attempts and events from the segments; the attempts of run.json win over theirs."""
        history = read_history(self.storage)
        attempts = {**history.attempts, **{attempt.attempt: attempt for attempt in self.attempts}}
        events = merged([*history.events, *events_from(self.journal.waiting())])
        return replace(history, attempts=attempts, events=events)

    def rebuild_attempts(self) -> None:
        """Recover run id, attempts and notes from the report segments."""
        history = read_history(self.storage)
        self.run_id = history.run_id
        self.notes = {key: value for key, value in history.notes.items() if value is not None}
        self.attempts = [attempt for _, attempt in sorted(history.attempts.items())]


def _read(storage: Storage, name: str) -> bytes:
    if storage.local_root is None:
        return storage.read(name)  # one request
    with storage.open(name) as reader:
        if reader.size > _MAX_BYTES:  # a sparse file may have any size
            return b""
        data = bytearray(reader.size)
        if data:
            reader.read_into(0, memoryview(data))
    return bytes(data)


def _are_rows(rows: Any) -> bool:
    return type(rows) is list and all(
        [  # noqa: C419 - a generator takes twice as long for ten thousand rows, and a start waits for it
            type(row) is list
            and len(row) == 4
            and type(row[0]) is type(row[3]) is str
            and type(row[1]) is type(row[2]) is int
            and 0 <= row[1] <= MAX_ATTEMPT
            for row in rows
        ]
    )


def _divide(data: bytes) -> tuple[bytes | None, bytes | None, str]:
    """Divide the file into its two parts, each a JSON object; None for a part whose digest is wrong. Third: the reason.

    A file from before there were digests is both parts.
    """
    head, found, rest = data.partition(_HEAD_END)
    rows, closed, end = rest.rpartition(_ROWS_END)
    if not found and _ROWS_END not in data:
        return data, data, ""
    stated, comma, rows = rows.partition(b'",\n')
    parts: list[bytes | None] = [None, None]
    if found and comma and stated == bytes_digest(head).encode():
        parts[0] = head + b"}"
    if found and closed and end == bytes_digest(rows).encode() + b'"\n}\n':
        parts[1] = b"{" + rows + b"}"
    return parts[0], parts[1], "a part of it differs from its digest"


def _in_iso(moment: float | None = None) -> str:
    when = datetime.now(timezone.utc) if moment is None else datetime.fromtimestamp(moment, timezone.utc)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
