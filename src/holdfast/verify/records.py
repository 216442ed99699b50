"""Read what the observer recorded of the lives of a script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Record", "Step", "read_records", "saved_after", "stages"]

Step = dict[str, Any]
"""A row of the observer, written before a step of an optimizer (`observer.Observer`)."""


@dataclass(slots=True)
class Record:
    """What one process recorded.

    Attributes:
        rank: of the process.
        steps: a row for each step of an optimizer, in order.
        optimizers: what is known of each optimizer, by its number.
        loaders: what is known of each loader, by its number.
        end: the row that was written when the process ended by itself.
        error: why the observation ended early, empty if it did not.
    """

    rank: int
    steps: list[Step] = field(default_factory=list)
    optimizers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    loaders: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None
    error: str = ""

    @property
    def num_epochs(self) -> int:
        """Return how often a loader came to its end."""
        return int(self.steps[-1]["ep"]) if self.steps else 0


def read_records(trace: Path, life: int) -> dict[int, Record]:
    """Return the records of a life by rank; of several processes of a rank the one that made most steps."""
    found: dict[int, Record] = {}
    for path in sorted(trace.glob(f"life-{life}.rank-*.steps")):
        record = _read(path)
        best = found.get(record.rank)
        if best is None or len(record.steps) > len(best.steps):
            found[record.rank] = record
    return found


def _read(path: Path) -> Record:
    record = Record(rank=int(path.name.partition("rank-")[2].partition(".")[0]))
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue  # the process was killed while it wrote
        row = json.loads(line)
        match row.get("event"):
            case None:
                record.steps.append(row)
            case "optimizer":
                record.optimizers[row["o"]] = row
            case "loader":
                record.loaders[row["loader"]] = row
            case "end":
                record.end = row
            case "error":
                record.error = row["text"]
    return record


def saved_after(record: Record, changes: Iterable[int]) -> list[int]:
    """Return after how many steps files were written, ascending, without the start and the end.

    Args:
        record: the life.
        changes: of each, how many steps had been begun.
    """
    return sorted({count for count in changes if 0 < count < len(record.steps)})


def stages(steps: Sequence[Step]) -> list[int]:
    """Return the numbers of the steps that are the first ones of an epoch, but for the very first."""
    return [number for number in range(1, len(steps)) if steps[number]["ep"] != steps[number - 1]["ep"]]
