"""``run.json``: identity and attempts of a run, and a cache of what its checkpoints say about themselves.

Truth are the manifests, their ``.metrics.json`` and the report segments; a lost or damaged run.json is rebuilt from
them (`holdfast.checkpoint.catalog.Catalog` does it) and never stops a resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from holdfast.errors import StorageError, StorageNotFoundError, StoragePermissionError
from holdfast.storage.base import Storage

from .history import (
    Attempt,
    ReportLog,
    highest_attempt,
    live_rows,
    read_notes,
    read_reports,
    unused_start_id,
)
from .record import COLUMNS

__all__ = ["RUN_FILE", "Attempt", "RunIndex"]

RUN_FILE = "run.json"
_FORMAT = "holdfast-run"
_VERSION = 1
# More than one, because a start may be killed between run.json and its first segment.
_RETOLD = 8


class RunIndex:
    """What run.json holds, in memory. Only the holder of the lease calls what writes.

    Attributes:
        run_id: identity shared by all checkpoints of the run; "" before the first attempt.
        attempts: every start so far, oldest first.
        rows: packed rows by checkpoint name (`record.unpack` reads one).
        quarantined: checkpoint name -> why it is not to be resumed from.
        finished: what the end of training noted, or None.
        keep: the retention rules applied last, as JSON; for display only.
        notes: small JSON values that whoever runs the training keeps here.
        damage: why the stored file could not be used; None when it was fine. "missing" for a new run.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.run_id = ""
        self.attempts: list[Attempt] = []
        self.rows: dict[str, list[Any]] = {}
        self.quarantined: dict[str, str] = {}
        self.finished: dict[str, Any] | None = None
        self.keep: dict[str, Any] | None = None
        self.notes: dict[str, Any] = {}
        self.damage: str | None = None
        self._log: ReportLog | None = None

    @classmethod
    def load(cls, storage: Storage) -> RunIndex:
        """Read run.json. Damage is noted in `damage`, never raised.

        Raises:
            StoragePermissionError: the file is there and may not be read; that is not damage.
            StorageError: a storage that is not a local disk did not answer; that is not damage either.
        """
        index = cls(storage)
        try:
            index._parse(json.loads(storage.read(RUN_FILE)))
        except StorageNotFoundError:
            index.damage = "missing"
        except StoragePermissionError:
            raise
        except (StorageError, ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
            if isinstance(error, StorageError) and storage.local_root is None:
                raise  # a disk that cannot read a file has lost it; a network may have it again in a moment
            index = cls(storage)
            index.damage = f"{type(error).__name__}: {error}"
        return index

    def _parse(self, body: dict[str, Any]) -> None:
        if body["format"] != _FORMAT or body["version"] != _VERSION:
            raise ValueError(f"format {body.get('format')!r} version {body.get('version')!r} is not known here")
        if tuple(body["columns"]) != COLUMNS:
            raise ValueError("other columns than this version caches")
        rows = body["rows"]
        if not all([type(at) is type(step) is int and type(name) is str for name, at, step, _ in rows]):  # noqa: C419 - a list is twice as fast here
            raise ValueError("a row is not what was written")
        self.rows = {row[0]: row for row in rows}
        self.run_id = str(body["run_id"])
        self.attempts = [Attempt.from_json(one) for one in body["attempts"]]
        self.quarantined = {str(name): str(why) for name, why in body["quarantined"].items()}
        finished = body["finished"]
        self.finished = dict(finished) if finished is not None else None
        self.keep = body.get("keep")
        self.notes = dict(body.get("notes") or {})

    def to_bytes(self) -> bytes:
        """Serialise; people can read all but the rows."""
        head = {
            "format": _FORMAT,
            "version": _VERSION,
            "run_id": self.run_id,
            "attempts": [one.to_json() for one in self.attempts],
            "quarantined": self.quarantined,
            "finished": self.finished,
            "keep": self.keep,
            "notes": self.notes,
            "columns": COLUMNS,
        }
        rows = json.dumps(list(self.rows.values()), separators=(",", ":"))
        return f'{json.dumps(head, indent=1, default=str)[:-2]},\n "rows": {rows}\n}}\n'.encode()

    def save(self) -> None:
        """Replace run.json atomically; durable on return."""
        self.storage.put(RUN_FILE, self.to_bytes())
        self.damage = None

    # -- attempts ------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    def register_attempt(self, start_id: str, *, host: str, pid: int, above: int = 0) -> Attempt:
        """Begin a new attempt, numbered one above everything ever seen, and write it down. Needs the lease.

        Args:
            start_id: identity of this start.
            host: where the trainer runs.
            pid: the trainer.
            above: an attempt known from elsewhere.
        """
        seen = [one.attempt for one in self.attempts]
        seen += [row[1] for row in self.rows.values()]
        number = max([*seen, highest_attempt(self.storage), above]) + 1
        self.run_id = self.run_id or os.urandom(8).hex()
        attempt = Attempt(attempt=number, start_id=start_id, host=host, pid=pid, started=_now())
        before = self.attempts[-_RETOLD:]
        self.attempts.append(attempt)
        self.save()
        self._log = ReportLog(self.storage, attempt, self.run_id, before=before, notes=self.notes)
        return attempt

    def rejoin(self, attempt: Attempt, run_id: str) -> None:
        """Go on with an attempt that a writer of the same trainer registered before it died. Needs the lease."""
        self.run_id = self.run_id or run_id
        if all(one.attempt != attempt.attempt for one in self.attempts):  # run.json was lost as well
            self.attempts.append(attempt)
        # Segments of their own: the earlier ones must not be replaced.
        self._log = ReportLog(self.storage, attempt, self.run_id, file_id=unused_start_id(self.storage, attempt))

    def resumed(self, name: str, *, step: int, attempt: int | None = None) -> None:
        """Note what the current attempt goes on from.

        Args:
            name: checkpoint of this run, or the URI of another one.
            step: the step it was saved at.
            attempt: the attempt that saved it; looked up for checkpoints of this run.
        """
        if attempt is None and name in self.rows:
            attempt = self.rows[name][1]
        source = {"name": name, "step": step, "attempt": attempt}
        self.attempts[-1] = replace(self.attempts[-1], resumed_from=source)
        self.save()
        if self._log is not None:
            self._log.resumed(source)

    def end_attempt(self, reason: str, details: Mapping[str, Any] | None = None, *, save: bool = True) -> None:
        """Note how the current attempt ended; ``details`` join those it has."""
        if self.attempts:
            self.attempts[-1] = replace(self.attempts[-1], ended=_now(), reason=reason)
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
        self.finished = {**info, "attempt": number, "time": _now()}
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

    def history(self) -> list[dict[str, Any]]:
        """Every report that still counts, oldest first (see `live_rows`)."""
        rows, noted, _ = read_reports(self.storage)
        return live_rows(rows, {**noted, **{one.attempt: one for one in self.attempts}})

    def rebuild_attempts(self) -> None:
        """Recover run id, attempts and notes from the report segments."""
        _, noted, run_id = read_reports(self.storage)
        self.run_id = run_id
        self.notes = {key: value for key, value in read_notes(self.storage).items() if value is not None}
        self.attempts = [noted[number] for number in sorted(noted)]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
