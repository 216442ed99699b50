"""A controller played one step at a time: no processes, no storage, no clock but this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from holdfast.run.record import Record
from holdfast.trainers.function.control.actions import (
    Action,
    ActionResult,
    Commit,
    FindStart,
    NextAttempt,
    OpenRun,
    RunState,
    StopRequested,
    Tick,
)
from holdfast.trainers.function.control.checkpoints import RunContents
from holdfast.trainers.function.control.controller import Controller
from holdfast.trainers.function.control.plan import RunSpec
from holdfast.trainers.function.engine import Exited, Reason, Received, Started
from holdfast.trainers.function.transit import error_to_wire
from holdfast.writer.frames import Message
from holdfast.writer.messages import RunOpened, SaveResult

T = TypeVar("T")
URI = "/runs/run"


def plan(**fields: Any) -> RunSpec:
    return RunSpec(**{"run_name": "run", "storage": {"kind": "local"}, "uri": URI, "num_workers": 2, **fields})


def location(name: str) -> dict[str, Any]:
    return {"storage": {"kind": "local"}, "uri": URI, "name": name}


class Play:
    """Feeds events; ``out`` has the actions of the last step."""

    def __init__(self, **fields: Any) -> None:
        self.plan = plan(**fields)
        self.controller = Controller(self.plan)
        self.now = 100.0
        self.attempt = 1
        self.out: list[Action] = self.controller.start(self.now)

    @property
    def state(self) -> RunState:
        return self.controller.state

    def feed(self, event: Any, after: float = 0.0) -> list[Action]:
        self.now += after
        self.out = self.controller.handle(event, self.now)
        return self.out

    def all(self, kind: type[T]) -> list[T]:
        return [action for action in self.out if isinstance(action, kind)]

    def only(self, kind: type[T]) -> T:
        (action,) = self.all(kind)
        return action

    def kinds(self) -> list[str]:
        return [type(action).__name__ for action in self.out]

    def outcome(self, action: Action, value: Any = None, error: BaseException | None = None) -> list[Action]:
        return self.feed(ActionResult(action=action, value=value, error=error))

    # -- the run

    def open(self, **fields: Any) -> Play:
        opened = RunOpened(**{"run_id": "r", "attempt": 1, "start_id": "s1", **fields})
        self.outcome(self.only(OpenRun), opened)
        return self

    def found(self, *kept: Record, **fields: Any) -> Play:
        start = max(kept, key=lambda one: one.order, default=None)
        self.outcome(self.only(FindStart), RunContents(kept=kept, start=start, **fields))
        return self

    def next_attempt(self) -> Play:
        self.attempt += 1
        self.outcome(self.only(NextAttempt), {"attempt": self.attempt, "start_id": f"s{self.attempt}"})
        return self

    def run(self, *kept: Record) -> Play:
        """Open, find, start: up to train_func on every rank."""
        return self.open().found(*kept).go()

    def go(self) -> Play:
        """Start all workers, up to train_func."""
        for rank in range(self.plan.num_workers):
            self.feed(Started(rank=rank, pid=1000 + rank))
        for rank in range(self.plan.num_workers):
            self.say(rank, on="running")
        return self

    # -- workers

    def say(self, rank: int, *attachments: bytes, after: float = 0.0, **header: Any) -> list[Action]:
        return self.feed(Received(rank=rank, message=Message(header=header, attachments=attachments)), after)

    def rows(self, first: int, *metrics: dict[str, Any], rank: int = 0, after: float = 0.0) -> list[Action]:
        rows = [{"metrics": one, "time": 1.0} for one in metrics]
        return self.say(rank, on="rows", first=first, rows=rows, after=after)

    def count(self, rank: int, upto: int) -> list[Action]:
        return self.say(rank, on="count", upto=upto)

    def report(self, rank: int, index: int, kind: str = "directory", **header: Any) -> list[Action]:
        given = {
            "call": index * 10,
            "metrics": {"loss": float(index)} if rank == 0 else None,
            "time": 1.0,
            "name": None,
            "validation": False,
        }
        if kind == "directory":
            given["source"] = {"path": f"/tmp/{rank}-{index}", "owned": False}
        return self.say(rank, **{"on": "report", "index": index, "kind": kind, **given, **header})

    def part(self, rank: int, index: int, on: str = "part") -> list[Action]:
        return self.say(rank, on=on, index=index)

    def ask(self, rank: int, upto: int, what: str = "checkpoint", call: int = 7, **header: Any) -> list[Action]:
        return self.say(rank, on="ask", call=call, what=what, upto=upto, **header)

    def fail(self, rank: int, error: BaseException) -> list[Action]:
        told, data = error_to_wire(error)
        return self.say(rank, data, on="failed", error=told)

    def exit(
        self, rank: int, code: int | None = 1, signal: int | None = None, reason: Reason = "process"
    ) -> list[Action]:
        code = None if signal is not None else code
        return self.feed(Exited(rank=rank, exit_code=code, signal=signal, reason=reason))

    def exit_all(self, signal: int | None = 9) -> list[Action]:
        """All that are left exit; what comes out of it is in ``out``, together."""
        out: list[Action] = []
        for rank in range(self.plan.num_workers):
            if rank not in getattr(self.controller._group, "exited", {}):
                out += self.exit(rank, signal=signal)
        self.out = out
        return out

    def finish(self, *ranks: int) -> list[Action]:
        """train_func returns on these ranks, and the processes end."""
        out: list[Action] = []
        for rank in ranks or range(self.plan.num_workers):
            out += self.say(rank, on="finished")
            out += self.exit(rank, code=0)
        self.out = out
        return out

    def tick(self, after: float = 0.0) -> list[Action]:
        return self.feed(Tick(), after)

    def stop(self, why: str = "SIGINT") -> list[Action]:
        return self.feed(StopRequested(why=why))

    # -- checkpoints

    def committed(self, deleted: Sequence[str] = (), warnings: tuple[str, ...] = (), **_: Any) -> list[Action]:
        """The commits that the last step asked for are made."""
        out: list[Action] = []
        for action in self.all(Commit):
            result = SaveResult(
                directory=action.directory,
                manifest=b"",
                bytes_total=1,
                bytes_written=1,
                bytes_reused=0,
                seconds={},
                deleted=tuple((name, "why") for name in deleted),
                warnings=warnings,
            )
            out += self.outcome(action, result)
        self.out = out
        return out


def kept(name: str, step: int, attempt: int = 1, *, checkpoint_id: str = "", **metrics: Any) -> Record:
    """A checkpoint of the run."""
    return Record(name=name, attempt=attempt, step=step, metrics=metrics, checkpoint_id=checkpoint_id or f"id-{name}")
