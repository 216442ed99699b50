"""What tests of engines share: a driver that waits for events, and what workers are told to do."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import cloudpickle

from holdfast.trainers.function.engine import Engine, Event, Exited, GroupSpec, Received, Started

if TYPE_CHECKING:
    import holdfast as hf
    from holdfast.torch import TorchTrainer

LIMIT_S = 60.0


@contextmanager
def fitting(made: TorchTrainer, limit_s: float) -> Iterator[Future[hf.Result]]:
    """Run fit() in a thread, as a test does something to its nodes meanwhile; it ends within ``limit_s`` after that."""
    future: Future[hf.Result] = Future()

    def work() -> None:
        try:
            future.set_result(made.fit())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield future
    thread.join(limit_s)
    assert not thread.is_alive()


class Driver:
    """Collects the events of an engine and waits for particular ones."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: list[Event] = []
        self.running: set[int] = set()

    def begin(self, num_workers: int, **fields: Any) -> None:
        """Start a group without waiting for it."""
        self.engine.start(GroupSpec(num_workers=num_workers, **fields))
        self.running = set(range(num_workers))

    def start(self, num_workers: int, **fields: Any) -> dict[int, int]:
        """Start a group; the pid of each rank."""
        self.begin(num_workers, **fields)
        begun = [self.next(Started) for _ in range(num_workers)]
        return {event.rank: event.pid for event in begun}

    def next(self, kind: type[Any], rank: int | None = None, timeout_s: float = LIMIT_S) -> Any:
        """Return the next event of this kind (of this rank) that was not returned before."""
        deadline = time.monotonic() + timeout_s
        while True:
            for place, event in enumerate(self.seen):
                if isinstance(event, kind) and (rank is None or event.rank == rank):
                    return self.seen.pop(place)
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__} of rank {rank} within {timeout_s} s; there were {self.seen}"
            for event in self.engine.events(left):
                self.seen.append(event)
                if isinstance(event, Exited):
                    self.running.remove(event.rank)

    def settle(self) -> None:
        """Start a group and end it, so that nothing is left to be said: an engine begins with what room there is."""
        self.start(1)
        self.clear()
        while self.engine.events(0.2):
            continue

    def ask(self, rank: int, function: Callable[..., Any], *attachments: bytes) -> None:
        """Have a worker call ``function(channel, facts, *attachments)``."""
        self.engine.send(rank, {"do": "run"}, [cloudpickle.dumps(function), *attachments])

    def value(self, rank: int) -> Any:
        """The value of the function that a worker has called."""
        return cloudpickle.loads(self.next(Received, rank).message.attachments[0])

    def run(self, rank: int, function: Callable[..., Any], *attachments: bytes) -> Any:
        """Call and wait."""
        self.ask(rank, function, *attachments)
        return self.value(rank)

    def clear(self) -> None:
        """End what runs, so that another group can be started."""
        self.seen.clear()
        self.engine.kill()
        while self.running:
            self.next(Exited)

    def leave(self, ranks: Sequence[int], status: int = 0) -> list[Exited]:
        """Let workers return from their main."""
        for rank in ranks:
            self.engine.send(rank, {"do": "leave", "status": status})
        return [self.next(Exited, rank) for rank in ranks]


def start_stubborn_children(channel: Any, facts: Any) -> list[int]:
    """Start processes that ignore SIGTERM: one in the worker's process group, one in a group of its own."""
    import subprocess
    import sys

    code = "import signal,time;signal.signal(signal.SIGTERM,signal.SIG_IGN);print(flush=True);time.sleep(600)"
    pids = []
    for prefix in ("", "import os;os.setpgid(0,0);"):
        process = subprocess.Popen([sys.executable, "-c", prefix + code], stdout=subprocess.PIPE)
        process.stdout.readline()
        pids.append(process.pid)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return pids
