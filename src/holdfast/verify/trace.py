"""What passes between the driver of a verified run and the watched processes: the plan of a life, and its records.

All are files of JSON. A process is given a `LifePlan`; the `Witness` of a `Checkpointer` answers with rows at the
boundaries of steps, the observer of any script with a row before each step of an optimizer (`Record`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["BESIDE", "LifePlan", "Moment", "Record", "Records", "Row", "Step", "saved_after", "saves_after", "stages"]

BESIDE = "not in the state"
"""First part of the paths of items for modules that train beside a state; compared where both lives have them."""

Row = dict[str, Any]
"""A line of a trace: event ("start", "boundary", "report"), run, step, nth, items, batches, metrics, and its rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment of a run.

    Attributes:
        step: the step.
        event: "boundary" (the step is over) or "report" (right after `ck.report`).
        nth: how often that event came at this step before, in the same life; the boundary of an epoch's last step comes
            again at the end of the epoch.
        run: key of the run (`Witness`), None for any.
    """

    step: int
    event: str = "boundary"
    nth: int = 0
    run: str | None = None

    def is_at(self, row: Row) -> bool:
        """Tell whether a row was written at this moment."""
        own = (row["step"], row["event"], row["nth"])
        return own == (self.step, self.event, self.nth) and self.run in (None, row["run"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LifePlan:
    """The plan of a life.

    Attributes:
        trace: directory of the traces, a file for each life and rank.
        life: number of this life.
        signal: path of a named pipe, to which a process writes that it has come to ``stop`` and waits.
        home: directory that takes the runs of the script; None leaves path and options alone.
        root: directory that the life got as the place of its runs: they are named by their paths in it.
        initial: directory for the state that the first life begins with, so that the other lives begin with the same.
        save: steps to save, at their boundaries; with ``home`` only these, and those that the script saves itself.
        stop: where to stop, for good.
        every: record the state after every so many steps.
        observe: record the steps of torch's optimizers too (`observer`).
        witness: a Checkpointer of the script is watched; else it saves as ever, and the observer alone records.
        whole: sum weights and state whole at each observed step, whatever it costs.
        seed: of the generators that every fresh process seeds by chance; None leaves them alone.
        kill_at: number of the observed step before which to stop, for good; counted in each process from 0.
        gentle: the process goes on once the file ``signal`` + ".go" is there, which follows a SIGTERM.
    """

    trace: str
    life: int
    signal: str
    home: str | None = None
    root: str | None = None
    initial: str | None = None
    save: tuple[Moment, ...] = ()
    stop: Moment | None = None
    every: int = 1
    observe: bool = False
    witness: bool = True
    whole: bool = False
    seed: int | None = None
    kill_at: int | None = None
    gentle: bool = False

    def write(self, path: Path) -> None:
        """Write the plan to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> LifePlan:
        """Read a plan from a file."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        stop = fields.pop("stop")
        save = tuple(Moment(**moment) for moment in fields.pop("save"))
        return cls(**fields, save=save, stop=None if stop is None else Moment(**stop))

    def rows(self, life: int | None = None) -> list[Row]:
        """Read the rows recorded by the processes of a life (default: this one), each rank's rows in their order."""
        rows = []
        for path in sorted(Path(self.trace).glob(f"life-{self.life if life is None else life}.*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):  # a process may be killed while it writes the last line
                    rows.append(json.loads(line))
        return rows

    def records(self) -> Records:
        """Read what the observer recorded; of several processes of a rank the one that made most steps counts."""
        found = Records()
        for path in sorted(Path(self.trace).glob(f"life-{self.life}.rank-*.steps")):
            record = _read(path)
            if record.rank not in found or len(record.steps) > len(found[record.rank].steps):
                found[record.rank] = record
        return found


@dataclass(slots=True, kw_only=True)
class Counter:
    """Counts how often an event came at a step."""

    _seen: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def next(self, run: str, event: str, step: int) -> int:
        """Return how often it came before."""
        key = (run, event, step)
        number = self._seen.get(key, 0)
        self._seen[key] = number + 1
        return number


# ---- of the observer


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


class Records(dict[int, Record]):
    """The records of a life by rank; a rank of which nothing is known has made no step."""

    def __missing__(self, rank: int) -> Record:
        return Record(rank=rank)


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


def saves_after(written: Iterable[tuple[str, int, int]], step: int) -> int:
    """Return how many saves a life has finished that hold more steps than ``step``, as far as that is certain.

    Each kind of large file counts for itself, and the one with the fewest decides: the best weights may be written
    often, and what a life goes on from seldom.

    Args:
        written: the files that the life finished: name without numbers, steps begun, bytes.
        step: counted as the life counts.
    """
    rows = [row for row in written if row[1] > 0]
    largest = max((size for _, _, size in rows), default=0)
    moments: dict[str, set[int]] = {}
    for name, begun, size in rows:
        if 2 * size >= largest:
            moments.setdefault(name, set()).add(begun)
    return min((sum(moment > step for moment in of_kind) for of_kind in moments.values()), default=0)


def stages(steps: Sequence[Step]) -> list[int]:
    """Return the numbers of the steps that are the first ones of an epoch, but for the very first."""
    return [number for number in range(1, len(steps)) if steps[number]["ep"] != steps[number - 1]["ep"]]
