"""How each start of a run ended, and what its end cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from holdfast.run.record import Record, timestamp
from holdfast.run.reports import Attempt

__all__ = ["AttemptSummary", "summarise"]

_AFTER_THE_START = ("find", "start", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSummary:
    """A start of all workers.

    Attributes:
        attempt: its number, counted from 1 since the run began.
        started: when, in UTC; None if that is lost.
        ended: when; None while it runs, or when it was killed together with its driver.
        reason: how it ended ("finished", or what failed); None if that was not noted.
        resumed_from: name (or URI) of the checkpoint it went on from; None for a fresh start.
        seconds_lost: training that had to be done again because of its end, and the time until the next start trained.
            Time in which no driver ran is not counted.
        details: what else was noted, such as the seconds of each phase of a restart.
    """

    attempt: int
    started: datetime | None = None
    ended: datetime | None = None
    reason: str | None = None
    resumed_from: str | None = None
    seconds_lost: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)


def summarise(
    attempts: Sequence[Attempt],
    records: Sequence[Record],
    reports: Callable[[], Iterable[Mapping[str, Any]]],
    *,
    finished: Mapping[str, Any] | None,
) -> list[AttemptSummary]:
    """Describe every start of a run, oldest first.

    Args:
        attempts: as the run index has them.
        records: the checkpoints that exist.
        reports: gives all reports ever made; called only if they are needed.
        finished: what the end of training noted.
    """
    times = _Times(records, reports)
    found = []
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=False):
        over = following is not None or attempt.ended is not None
        reached_end = finished is not None and finished.get("attempt") == attempt.attempt
        found.append(
            AttemptSummary(
                attempt=attempt.attempt,
                started=_moment(attempt.started),
                ended=_moment(attempt.ended),
                reason=attempt.reason,
                resumed_from=attempt.resumed_from["name"] if attempt.resumed_from is not None else None,
                seconds_lost=round(_lost(attempt, following, times), 3) if over and not reached_end else 0.0,
                details=dict(attempt.details or {}),
            )
        )
    return found


class _Times:
    """When each checkpoint of an attempt was saved, and when the attempt last reported."""

    def __init__(self, records: Sequence[Record], reports: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._saved = {(record.attempt, record.step): record.created for record in records}
        self._reports = reports
        self._reported: dict[tuple[int, Any], float] | None = None

    def saved(self, attempt: int, step: int) -> float | None:
        """Return when the checkpoint of ``step`` was saved (seconds since 1970), or reported if it is gone."""
        return self._saved.get((attempt, step)) or self._rows().get((attempt, step))

    def last_saved(self, attempt: int) -> float | None:
        """Return when the newest checkpoint of an attempt was saved."""
        return max((moment for (number, _), moment in self._saved.items() if number == attempt), default=None)

    def last_sign(self, attempt: int) -> float | None:
        """Return when the newest report or checkpoint of an attempt without a noted end was made."""
        signs = [moment for (number, _), moment in self._rows().items() if number == attempt]
        return max([*signs, self.last_saved(attempt) or 0.0]) or None

    def _rows(self) -> dict[tuple[int, Any], float]:
        if self._reported is None:
            rows = [row for row in self._reports() if isinstance(row.get("time"), (int, float))]
            self._reported = {(int(row["attempt"]), row.get("step")): row["time"] for row in rows}
        return self._reported


def _lost(attempt: Attempt, following: Attempt | None, times: _Times) -> float:
    """Return seconds: from the last work that was kept to the end, and what the next start spent before it trained."""
    began = timestamp(attempt.started)
    end = timestamp(attempt.ended) if attempt.ended is not None else times.last_sign(attempt.attempt) or began
    kept: float | None = None
    if following is None:
        kept = times.last_saved(attempt.attempt)
    elif following.resumed_from is not None and following.resumed_from.get("attempt") == attempt.attempt:
        # What an older start had saved is neither the work nor the loss of this attempt.
        kept = times.saved(attempt.attempt, following.resumed_from["step"])
    phases = (following.details or {}).get("seconds") if following is not None else None
    seconds = phases if isinstance(phases, Mapping) else {}
    again = sum(seconds[name] for name in _AFTER_THE_START if isinstance(seconds.get(name), (int, float)))
    return float(max(0.0, end - max(kept or began, began)) + again)


def _moment(text: str | None) -> datetime | None:
    seconds = timestamp(text) if text else 0.0
    return datetime.fromtimestamp(seconds, timezone.utc) if seconds else None
