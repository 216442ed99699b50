"""Workers as processes of this machine, forked from a zygote that has torch loaded."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import HoldfastError, TrainingError
from holdfast.storage.base import Storage
from holdfast.trainers.function.engine import Dying, Event, Exited, GroupSpec, Received, Started, TaskEnded, Woken
from holdfast.trainers.function.transit import error_from_wire
from holdfast.trainers.function.unfinished import Unfinished
from holdfast.writer.frames import Message

from .logs import shown_and_kept
from .supervisor import Child, Supervisor, threads_for

__all__ = ["TASK", "TASK_END_S", "WORKER", "LocalEngine", "ProcessEngine"]

_LOG = get_logger("trainers.function")
WORKER = "holdfast.trainers.function.worker.main:run"
TASK = "holdfast.trainers.function.worker.main:run_task"
TASK_END_S = 10.0
"""For a task that has given its result but does not end."""
_HOST = "127.0.0.1"
_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


class ProcessEngine:
    """What the engines with processes share: events that wait to be taken, work of other threads, the ends of tasks."""

    def __init__(self) -> None:
        self._ready: list[Event] = []
        self._posted: deque[Callable[[], None]] = deque()
        self._over = False
        self._woken, self._waker = os.pipe()
        for fd in (self._woken, self._waker):
            os.set_blocking(fd, False)
            # Closed with the object, not in `close`: threads and signal handlers may call `wake` at any time.
            weakref.finalize(self, os.close, fd)

    def events(self, timeout_s: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout_s``. None waits until there is one.

        What a signal handler raises passes through and loses no event, but may cut a message in two: handlers had
        better call `wake`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._wait(left)
            if left == 0.0:
                break
        ready, self._ready = self._ready, []
        return ready

    def wake(self) -> None:
        """Make `events` return; callable from any thread and from signal handlers, also after `close`."""
        self._poke(b"w")

    def _wait(self, timeout_s: float | None) -> None:
        """Handle what happens next, for so long at most."""
        raise NotImplementedError

    def _post(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the thread of the engine; callable from any thread."""
        self._posted.append(work)
        if self._over:  # nobody waits any more
            self._work_off()
        else:
            self._poke(b"p")

    def _poke(self, why: bytes) -> None:
        try:
            os.write(self._waker, why)
        except BlockingIOError:  # the pipe is full: another byte adds nothing
            return

    def _on_wake(self) -> None:
        if b"w" in os.read(self._woken, 1 << 16):
            self._ready.append(Woken())

    def _work_off(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _task_ended(self, number: int, name: str, outcome: Message | None, how: str, words: str) -> None:
        """Add the event of a task.

        Args:
            number: of the task.
            name: of the task.
            outcome: what it sent; None: nothing.
            how: how its process ended, to follow its name.
            words: the end of its error output.
        """
        result: bytes | None = None
        error: BaseException | None = None
        if outcome is None:
            what = f"the process of {name} {how} before it had a result"
            error = TrainingError(what + (f":\n{words}" if words else ""))
        elif outcome.header["on"] == "failed":
            error = error_from_wire(outcome.header["error"], *outcome.attachments[:1])
        else:
            (result,) = outcome.attachments
        self._ready.append(TaskEnded(task=number, result=result, error=error))


class LocalEngine(ProcessEngine):
    """Implements `holdfast.trainers.function.engine.Engine`.

    Workers have sessions of their own: a Ctrl-C in the terminal does not reach them. They end with the driver, within
    seconds, whatever ends it. Not to be used from several threads, `wake` excepted.

    Args:
        num_workers: how many workers are expected; sizes the thread pools of the zygote.
        storage: root of the run, to which unfinished uploads of dead workers go; None: they are discarded.
        prepare: start the zygote now, so that torch is loaded while the driver does other things.
        entry: "module:function" that workers run, called with the `Channel` to this engine and the keywords
            ``listen_fd`` (a listening socket on MASTER_PORT for rank 0, else -1) and ``use_gpu``; returns the exit
            status.
    """

    def __init__(
        self, *, num_workers: int = 1, prepare: bool = True, entry: str = WORKER, storage: Storage | None = None
    ) -> None:
        super().__init__()
        self._entry = entry
        self._numbers = itertools.count(1)
        self._ranks: dict[int, Child] = {}
        self._ended_ranks: dict[int, int] = {}  # children of this group that died by themselves -> rank
        self._tasks: dict[int, Child] = {}
        self._unfinished = Unfinished(self._tell_for, _LOG.warning, storage=storage)
        self._supervisor = Supervisor(
            on_start=self._on_start, on_message=self._on_message, on_dying=self._on_dying, on_end=self._on_end
        )
        self._supervisor.watch(self._woken, self._on_wake)
        if prepare:
            self._supervisor.prepare(num_workers)

    # ---- workers

    def start(self, spec: GroupSpec) -> None:
        """Start a group without waiting for it.

        Raises:
            HoldfastError: workers of an earlier group have not exited yet, or nothing can be started at all.
        """
        if self._ranks:
            raise HoldfastError(f"ranks {sorted(self._ranks)} of the earlier group have not exited: kill them first")
        self._ended_ranks.clear()
        self._unfinished.give_up()
        self._supervisor.prepare(spec.num_workers)
        try:
            self._fork_all(spec)
        except OSError as error:
            self.kill()
            raise HoldfastError(
                f"cannot start {spec.num_workers} workers: {error}; check the limits on processes and open files"
            ) from error

    def _fork_all(self, spec: GroupSpec) -> None:
        base = dict(os.environ)
        # Bound here and handed to rank 0: a free port that is only chosen may be taken before it is used.
        with socket.create_server((_HOST, 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            for rank in range(spec.num_workers):
                log_file = None if spec.log_directory is None else spec.log_directory / f"rank-{rank}.log"
                self._ranks[rank] = self._supervisor.fork(
                    next(self._numbers),
                    f"rank {rank}",
                    self._entry,
                    rank=rank,
                    environment=_worker_environment(spec, rank, port, base),
                    sinks=shown_and_kept(f"rank {rank}", log_file),
                    listener=None if rank else listener,
                    use_gpu=spec.use_gpu,
                )

    def send(self, rank: int, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message without blocking; a message to a worker that has ended is dropped."""
        child = self._ranks.get(rank)
        if child is not None:
            child.send(header, attachments)

    def kill(self, ranks: Iterable[int] | None = None, grace_s: float = 0.0) -> None:
        """End workers (None: all) with everything they started: SIGTERM, and SIGKILL ``grace_s`` later."""
        for rank in list(self._ranks) if ranks is None else list(ranks):
            if rank in self._ranks:
                self._supervisor.kill(self._ranks[rank], grace_s)

    def run_task(self, blob: bytes, *, name: str = "task", log_file: Path | None = None) -> int:
        """Run a pickled function without arguments in a process of its own."""
        self._supervisor.prepare(1)
        child = self._supervisor.fork(
            next(self._numbers),
            name,
            TASK,
            environment=dict(os.environ),
            sinks=shown_and_kept(name, log_file),
            use_gpu=True,
        )
        self._tasks[child.number] = child
        child.send({"do": "task"}, [blob])
        return child.number

    def kill_task(self, task: int, grace_s: float = 0.0) -> None:
        """End a task; its TaskEnded still comes. A task that has ended is left alone."""
        if task in self._tasks:
            self._supervisor.kill(self._tasks[task], grace_s)

    def close(self) -> None:
        """End everything that still runs and let go of all resources. Idempotent; takes seconds at most."""
        self._supervisor.close()
        self._unfinished.close()
        self._ranks.clear()
        self._tasks.clear()

    # ---- what happens

    def _wait(self, timeout_s: float | None) -> None:
        self._supervisor.wait(timeout_s)
        self._work_off()

    def _tell_for(self, child: int, header: dict[str, Any], attachments: tuple[bytes, ...]) -> None:
        """Deliver a message in place of a worker that has died; called from another thread."""

        def deliver() -> None:
            if (rank := self._ended_ranks.get(child)) is not None:
                self._ready.append(Received(rank=rank, message=Message(header=header, attachments=attachments)))

        self._post(deliver)

    def _on_start(self, child: Child) -> None:
        if child.rank is not None and child.pid is not None:
            self._ready.append(Started(rank=child.rank, pid=child.pid))

    def _on_message(self, child: Child, message: Message) -> None:
        if child.rank is not None:
            self._unfinished.note(child.number, message.header)
            self._ready.append(Received(rank=child.rank, message=message))
        else:
            child.outcome = message
            self._supervisor.limit(child, TASK_END_S)

    def _on_dying(self, child: Child) -> None:
        if child.rank is not None:
            self._ready.append(Dying(rank=child.rank))

    def _on_end(self, child: Child, why: str) -> None:
        code = None if child.status is None else os.waitstatus_to_exitcode(child.status)
        number = -code if code is not None and code < 0 else None
        words = "\n".join(line for line in child.logs[1].sink.tail if line.strip())
        if child.rank is None:
            del self._tasks[child.number]
            if number is None:
                how = f"ended with status {code}"
            else:
                name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
                how = f"was ended by {name}"
            self._task_ended(child.number, child.name, child.outcome, why or how, words)
            return
        del self._ranks[child.rank]
        self._ready.append(
            Exited(
                rank=child.rank,
                exit_code=code if number is None else None,
                signal=number,
                detail="\n".join(part for part in (why, words) if part),
                reason="garbled" if child.channel.broken else "process",
            )
        )
        self._ended_ranks[child.number] = child.rank
        self._unfinished.end(child.number, finish=not child.killed)


def _worker_environment(spec: GroupSpec, rank: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return all variables of a worker.

    Args:
        spec: the group.
        rank: of the worker.
        port: where rank 0 listens.
        base: the driver's own variables.
    """
    environment = {
        # One machine: a host name that does not resolve, or resolves to a VPN, must not matter.
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        "OMP_NUM_THREADS": str(threads_for(spec.num_workers)),
        **base,
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.num_workers),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(spec.num_workers),
        "GROUP_RANK": "0",
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
    }
    if not spec.use_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return {**environment, **spec.environment.get(rank, {})}
