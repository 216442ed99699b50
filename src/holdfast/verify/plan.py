"""The plan of a life of a verified run: passed from the driver to the watched processes as a file of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["LifePlan", "Moment", "Row"]

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
