"""`Result`: the outcome of a run, from `fit` or read from its directory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._optional import require
from holdfast._units import listed
from holdfast.checkpoint.handle import Checkpoint, file_system
from holdfast.config import Keep, stored_keep
from holdfast.errors import ConfigError, RunNotFoundError, TrainingFailedError, UnknownMetricError
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.run.catalog import Catalog
from holdfast.run.index import RUN_FILE
from holdfast.run.names import REPORTS
from holdfast.run.record import Record, flat_metrics, metric_value, timestamp
from holdfast.run.reports import Attempt, live_rows, read_history
from holdfast.run.retention import is_number, rank, rankable
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve, split_uri

from ..config import without_marks

if TYPE_CHECKING:
    import pandas as pd

_AFTER_THE_START = ("find", "start", "load")

_QUICK_BYTES = 4 << 20  # a history of so many bytes is read in a third of a second
_NUMBERED = re.compile(r"checkpoint_(\d+)")


class Result:
    """The outcome of a run: its newest and best checkpoints, its metrics, its starts. Reads only.

    Comes from `fit`, or from the directory of a run, finished or not, with `from_path`.

    Attributes:
        path: absolute path of the run's directory.
        storage: the storage rooted there.
        checkpoint: the newest good checkpoint; None if there is none.
        metrics: the last report; {} if there is none. Nested as it was given.
        error: why training failed; None if it did not.
        attempts: every start, oldest first: when, why it failed, seconds lost.
        return_value: what train_func returned on rank 0, from `fit`; None where it returned nothing.
    """

    __slots__ = (
        "_attempts",
        "_keep",
        "_live",
        "_memory",
        "_records",
        "_rows",
        "attempts",
        "checkpoint",
        "error",
        "metrics",
        "path",
        "return_value",
        "storage",
    )

    path: str
    storage: Storage
    checkpoint: Checkpoint | None
    metrics: dict[str, Any]
    error: BaseException | None
    attempts: list[_AttemptSummary]
    return_value: Any

    def __init__(
        self,
        storage: Storage,
        *,
        keep: Keep | None = None,
        error: BaseException | None = None,
        metrics: Mapping[str, Any] | None = None,
        memory: Mapping[str, Any] | None = None,
        return_value: Any = None,
    ) -> None:
        """Read the run at ``storage``; users call `from_path`.

        Args:
            storage: root of the run.
            keep: rules of retention, for the order of `best_checkpoints`; default: those that were applied last.
            error: why training failed; default: what the last start noted.
            metrics: the last report, if it is known: a long history is then read when it is first asked for.
            memory: the newest values of `save_checkpoint` where they were not written.
            return_value: what train_func returned on rank 0.
        """
        self.return_value = return_value
        root = storage.local_root
        self.path = str(root) if root is not None else split_uri(storage.uri)[1]
        self.storage = storage
        catalog = Catalog(storage)
        newest = catalog.latest()
        self.checkpoint = None if newest is None else Checkpoint.at(storage, newest.name)
        self._records = catalog.records()
        self._keep = keep if keep is not None else stored_keep(catalog.index.keep or catalog.index.notes.get("keep"))
        self._memory = memory
        self._attempts = catalog.index.attempts
        self._rows: list[dict[str, Any]] | None = None
        self._live: list[dict[str, Any]] = []
        finished = catalog.index.finished
        self.attempts = _summarise(self._attempts, self._records, self._reports, finished=finished)
        self.error = error if error is not None else _noted_error(self._attempts, finished)
        # At once where it is quick: the directory may be temporary.
        if metrics is None or sum(info.size for info in storage.list(REPORTS)) < _QUICK_BYTES:
            self._reports()
        last = self._live[-1]["metrics"] if self._live else metrics
        if last is None:
            last = self._records[0].metrics if self._records else {}
        self.metrics = without_marks(last)

    @classmethod
    def from_path(cls, path: str | os.PathLike[str] | Storage, storage_filesystem: Any = None) -> Result:
        """Read the run in the directory ``path``: never writes, needs no lease, works while the run goes on.

        A damaged or missing run index does not matter: everything is found again by looking at the checkpoints.

        Args:
            path: directory or URI of the run.
            storage_filesystem: the `holdfast.storage.Storage` in which ``path`` is a path.

        Raises:
            RunNotFoundError: there is no run.
        """
        storage = _run_storage(path, storage_filesystem)
        _check_is_run(storage)
        return cls(storage)

    @property
    def best_checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """The best checkpoints that exist and their metrics, the best last.

        As many as ``num_to_keep``, all without a limit; the newest last where no metric ranks. Of equal metrics the
        newer counts as better; a checkpoint without a number ranks below all others.
        """
        keep = self._keep
        ranked = rank(self._records, keep.metric, keep.mode) if keep.metric else self._records
        limit = keep.best if keep.metric else keep.last
        found: list[tuple[Checkpoint, dict[str, Any]]] = []
        for record in ranked:
            if limit is not None and len(found) == limit:
                break
            if self._exists(record):
                found.append((Checkpoint.at(self.storage, record.name), without_marks(record.metrics)))
        return found[::-1]

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint:
        """Find the best existing checkpoint by any metric, ``/`` leading into nested ones.

        Args:
            metric: name of the metric.
            mode: "max" or "min".

        Raises:
            ConfigError: the mode is wrong.
            UnknownMetricError: no checkpoint has a number for the metric.
            RunNotFoundError: the run has no checkpoint.
        """
        if mode not in ("max", "min"):
            raise ConfigError(f"get_best_checkpoint(mode={mode!r}): use 'max' (larger is better) or 'min'")
        existing = [record for record in rank(self._records, metric, mode) if self._exists(record)]
        if not existing:
            raise RunNotFoundError(f"the run {self.path} has no checkpoint")
        if not is_number(metric_value(existing[0].metrics, metric)):
            known = ", ".join(rankable(without_marks(record.metrics) for record in existing)) or "none at all"
            raise UnknownMetricError(
                f"get_best_checkpoint({metric!r}): no checkpoint of the run {self.path} has a number for this metric; "
                f"there are: {known}"
            )
        return Checkpoint.at(self.storage, existing[0].name)

    @property
    def metrics_dataframe(self) -> pd.DataFrame:
        """All reports that still count as a `pandas.DataFrame`, also those whose checkpoints are gone.

        One row for each report, with the columns step, attempt, time (UTC) and checkpoint (its name, if it has one),
        and a column for each metric, nested ones as "val/acc". A metric with the name of one of the first columns keeps
        it, the column is then ``_step`` and so on. Steps that a restart made void are not in it. Text that has no UTF-8
        form (a file name with a stray byte) is escaped, as `holdfast log` shows it; `metrics` has it as it is.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        pd = require("pandas", extra="pandas", purpose="metrics_dataframe")
        self._reports()
        rows = self._live
        metrics = [flat_metrics(without_marks(row["metrics"])) for row in rows]
        names = dict.fromkeys(name for row_metrics in metrics for name in row_metrics)
        columns: dict[str, Any] = {
            "step": [row.get("step") for row in rows],
            "attempt": [row["attempt"] for row in rows],
            "time": pd.to_datetime([row.get("time") for row in rows], unit="s", utc=True),
            "checkpoint": pd.Series([row.get("checkpoint") for row in rows], dtype=object),
        }
        if any(row.get("epoch") is not None for row in rows) and "epoch" not in names:
            columns["epoch"] = [row.get("epoch") for row in rows]
        columns = {f"_{name}" if name in names else name: values for name, values in columns.items()}
        for name in names:
            columns[_text(name)] = [_text(row_metrics.get(name)) for row_metrics in metrics]
        return pd.DataFrame(columns)

    # -- the style of Ray 1.x ------------------------------------------------------------------------------------

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest values of `save_checkpoint`, loaded on use; None if there are none."""
        if self._memory is not None:
            return dict(self._memory)
        return None if self.checkpoint is None else self.checkpoint.to_dict()

    @property
    def latest_checkpoint_id(self) -> int | None:
        """The number in the name of the newest checkpoint; None if it has none."""
        match = _NUMBERED.fullmatch(self.checkpoint.name) if self.checkpoint is not None else None
        return int(match[1]) if match else None

    @property
    def filesystem(self) -> Any:
        """What `path` is a path in: as `Checkpoint.filesystem`, that of pyarrow where it is installed."""
        return file_system(self.storage)

    @property
    def latest_checkpoint_dir(self) -> Path | str | None:
        """The directory that the checkpoints are in (a URI if it is remote); None without a checkpoint."""
        return None if self.checkpoint is None else self._place("")

    @property
    def best_checkpoint_path(self) -> Path | str | None:
        """The best checkpoint (a URI if it is remote); None without a checkpoint."""
        best = self.best_checkpoints
        return self._place(best[-1][0].name) if best else None

    # -- inside --------------------------------------------------------------------------------------------------

    def _reports(self) -> list[dict[str, Any]]:
        """Read all reports, once; those that still count go to ``_live``."""
        if self._rows is None:
            history = read_history(self.storage)
            self._rows = history.rows
            attempts = {**history.attempts, **{attempt.attempt: attempt for attempt in self._attempts}}
            live = live_rows(self._rows, attempts)
            self._live = _with_checkpoints(live, self._records)
        return self._rows

    def _place(self, name: str) -> Path | str:
        root = self.storage.local_root
        return root / name if root is not None else f"{self.storage.uri}/{name}".rstrip("/")

    def _exists(self, record: Record) -> bool:
        return self.storage.exists(f"{record.name}/{MANIFEST_NAME}")

    def __repr__(self) -> str:
        starts = f", attempts={len(self.attempts)}" if len(self.attempts) > 1 else ""
        error = f", error={type(self.error).__name__}" if self.error is not None else ""
        return f"Result(path={self.path!r}, checkpoint={self.checkpoint!r}, metrics={self.metrics!r}{starts}{error})"


def _run_storage(path: Any, filesystem: Any) -> Storage:
    if filesystem is None or not isinstance(filesystem, Storage) or isinstance(path, Storage):
        return resolve(path, filesystem)
    # As in Checkpoint(path, filesystem): absolute in the file system, or relative to its root.
    base = split_uri(filesystem.uri)[1].rstrip("/")
    text = os.fspath(path).rstrip("/")
    if text.startswith("/") and text != base and not text.startswith(f"{base}/"):
        raise ConfigError(f"Result.from_path({text!r}): the path is outside of {filesystem!r}")
    return resolve(text.removeprefix(base).strip("/"), filesystem)


def _check_is_run(storage: Storage) -> None:
    if storage.exists(RUN_FILE):
        return
    children = sorted(info.path.rstrip("/") for info in storage.list("", recursive=False))
    if MANIFEST_NAME in children:
        raise RunNotFoundError(f"{storage.uri} is a checkpoint: Result.from_path takes the directory of its run")
    if Catalog(storage).index.rows or REPORTS in children:
        return
    runs = [name for name in children if storage.exists(f"{name}/{RUN_FILE}")]
    hint = f"; it holds the runs {listed(runs)}: give one of them" if runs else "; check the path"
    raise RunNotFoundError(f"there is no run in {storage.uri}{hint}")


def _with_checkpoints(rows: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Add to each report what came late: the name of its checkpoint and the metrics of a validation."""
    saved = {(record.attempt, record.step): record for record in records}
    found = [dict(row) for row in rows]
    for row in found:
        if (record := saved.get((int(row["attempt"]), row.get("step")))) is not None:  # type: ignore[arg-type]
            row["checkpoint"] = row.get("checkpoint") or record.name
            row["metrics"] = {**row["metrics"], **record.metrics}
    return found


def _noted_error(attempts: Sequence[Attempt], finished: Mapping[str, Any] | None) -> TrainingFailedError | None:
    """Rebuild the error of a run that gave up from what its last start noted; tracebacks are in its logs."""
    if not attempts or (finished is not None and finished.get("attempt") == attempts[-1].attempt):
        return None
    failures = (attempts[-1].details or {}).get("failures")
    if attempts[-1].ended is None or not isinstance(failures, Mapping):
        return None
    causes: dict[int, BaseException] = {int(rank): RuntimeError(str(why)) for rank, why in failures.items()}
    return TrainingFailedError(attempts[-1].reason or "training failed", failures=causes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttemptSummary:
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


def _summarise(
    attempts: Sequence[Attempt],
    records: Sequence[Record],
    reports: Callable[[], Iterable[Mapping[str, Any]]],
    *,
    finished: Mapping[str, Any] | None,
) -> list[_AttemptSummary]:
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
            _AttemptSummary(
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


def _text(value: Any) -> Any:
    """Escape lone surrogates of strings: pandas takes none."""
    if isinstance(value, list):
        return [_text(item) for item in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
