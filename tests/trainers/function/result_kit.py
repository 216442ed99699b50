"""Writes runs as the writer does, at given times, with format-level code only."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import checkpoint_kit
import pytest

from holdfast.config import Keep
from holdfast.run import index
from holdfast.run.catalog import Catalog
from holdfast.run.index import RunIndex

BEGIN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


class Clock:
    """The time of the run, in seconds since its beginning."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @property
    def time(self) -> float:
        return BEGIN.timestamp() + self.seconds

    def iso(self) -> str:
        return (BEGIN + timedelta(seconds=self.seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give the index its times for the rest of a test."""
        monkeypatch.setattr(index, "_in_iso", lambda moment=None: self.iso())


class Run:
    """Writes a run as the writer does, at given times."""

    def __init__(self, storage, clock: Clock) -> None:
        self.storage, self.clock = storage, clock
        self.index = RunIndex.load(storage)
        self.saved = 0

    def start(self, at: float) -> None:
        self.clock.seconds = at
        self.index.register_attempt(f"a{len(self.index.attempts)}", host="here", pid=1)

    def resume(self, name: str) -> None:
        self.index.rows = Catalog(self.storage).index.rows
        self.index.resumed(name, step=unpack_step(self.index, name))

    def report(self, step: int, at: float, metrics: dict, *, checkpoint: bool = False) -> str | None:
        self.clock.seconds = at
        name = None
        attempt = self.index.current
        assert attempt is not None
        if checkpoint:
            self.saved += 1
            name = f"checkpoint_{self.saved:06d}"
            checkpoint_kit.build(
                self.storage, name, tensors=(), tree={"note": "first try"}, start=attempt.start_id.rjust(8, "0"),
                run_id=self.index.run_id, attempt=attempt.attempt, step=step, metrics=metrics,
                created=self.clock.iso(),
            )  # fmt: skip
        self.index.report([{"step": step, "time": self.clock.time, "metrics": metrics, "checkpoint": name}])
        return name

    def end(self, at: float, reason: str, **details) -> None:
        self.clock.seconds = at
        self.index.end_attempt(reason, details)

    def prune(self, keep: Keep) -> None:
        catalog = Catalog(self.storage)
        catalog.prune(keep)
        self.index.keep = catalog.index.keep
        self.index.rows = catalog.index.rows


def unpack_step(index: RunIndex, name: str) -> int:
    return index.rows[name][2]
