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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from holdfast._log import get_logger
from holdfast.errors import HoldfastError, TrainingError
from holdfast.storage.base import Storage
from holdfast.trainers.function.engine import (
    Dying,
    Event,
    Exited,
    GroupSpec,
    Reason,
    Received,
    Started,
    TaskEnded,
    Woken,
)
from holdfast.trainers.function.handoff import Unfinished
from holdfast.trainers.function.transit import error_from_wire
from holdfast.writer.frames import Message

from .logs import shown_and_kept
from .supervisor import Child, Process, Supervisor, threads_for

__all__ = ["TASK", "WORKER", "LocalEngine", "ProcessEngine"]

_LOG = get_logger("trainers.function")
P = TypeVar("P", bound=Process)
WORKER = "holdfast.trainers.function.worker.main:run"
TASK = "holdfast.trainers.function.worker.main:run_task"
_TASK_END_S = 10.0  # for a task that has given its result but does not end
_HOST = "127.0.0.1"
_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


class ProcessEngine(Generic[P]):
    """What the engines with processes share: workers, tasks, what happens to them; work of other threads.

    A subclass starts the processes, waits for what happens to them (`_wait`) and reaches them: `_pass_on`, `_kill`,
    `_limit`.
    """

    def __init__(self) -> None:
        self._ready: list[Event] = []
        self._posted: deque[Callable[[], None]] = deque()
        self._over = False
        self._ranks: dict[int, P] = {}
        self._tasks: dict[int, P] = {}
        self._ended_ranks: dict[int, int] = {}  # processes of this group that died by themselves -> rank
        self._woken, self._waker = os.pipe()
        for fd in (self._woken, self._waker):
            os.set_blocking(fd, False)
            # Closed with the object, not in `close`: threads and signal handlers may call `wake` at any time.
            weakref.finalize(self, os.close, fd)

    # ---- what the controller asks

    def send(self, rank: int, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message without blocking; a message to a worker that has ended is dropped."""
        if rank in self._ranks:
            self._pass_on(self._ranks[rank], header, attachments)

    def kill(self, ranks: Iterable[int] | None = None, grace_s: float = 0.0) -> None:
        """End workers (None: all) with everything they started: SIGTERM, and SIGKILL ``grace_s`` later."""
        for rank in list(self._ranks) if ranks is None else list(ranks):
            if rank in self._ranks:
                self._kill(self._ranks[rank], grace_s)

    def kill_task(self, task: int, grace_s: float = 0.0) -> None:
        """End a task; its TaskEnded still comes. A task that has ended is left alone."""
        if task in self._tasks:
            self._kill(self._tasks[task], grace_s)

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

    def _begin_group(self) -> None:
        """Begin with the processes of a new group; refuse that while workers of an earlier one are left."""
        if self._ranks:
            raise HoldfastError(f"ranks {sorted(self._ranks)} of the earlier group have not exited: kill them first")
        self._ended_ranks.clear()

    # ---- what happens

    def _started(self, process: P, pid: int) -> None:
        if process.rank is not None:
            self._ready.append(Started(rank=process.rank, pid=pid))

    def _said(self, process: P, message: Message) -> None:
        if process.rank is not None:
            self._ready.append(Received(rank=process.rank, message=message))
        else:
            process.outcome = message
            self._limit(process, _TASK_END_S)

    def _said_for(self, number: int, message: Message) -> None:
        """Take a message in place of a worker that has died."""
        if (rank := self._ended_ranks.get(number)) is not None:
            self._ready.append(Received(rank=rank, message=message))

    def _dying(self, process: P) -> None:
        if process.rank is not None:
            self._ready.append(Dying(rank=process.rank))

    def _ended(self, process: P, status: int | None, why: str, reason: Reason = "process") -> None:
        """Take the end of a process.

        Args:
            process: it.
            status: as of `os.waitpid`; None: not known.
            why: what is known besides, for people; of a task, to follow its name.
            reason: of a worker's end.
        """
        code = None if status is None else os.waitstatus_to_exitcode(status)
        number = -code if code is not None and code < 0 else None
        words = "\n".join(line for line in process.sinks[1].tail if line.strip())
        if process.rank is None:
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            how = why or (f"ended with status {code}" if number is None else f"was ended by {name}")
            self._task_ended(process, f"{how} before it had a result" + (f":\n{words}" if words else ""))
        elif self._ranks.get(process.rank) is process:
            del self._ranks[process.rank]
            self._ready.append(
                Exited(
                    rank=process.rank,
                    exit_code=code if number is None else None,
                    signal=number,
                    detail="\n".join(part for part in (why, words) if part),
                    node=process.where,
                    reason=reason,
                )
            )
            if reason in ("process", "garbled"):
                self._ended_ranks[process.number] = process.rank

    def _task_ended(self, process: P, how: str) -> None:
        outcome = process.outcome
        result: bytes | None = None
        error: BaseException | None = None
        if outcome is None:
            error = TrainingError(f"the process of {process.name} {how}")
        elif outcome.header["on"] == "failed":
            error = error_from_wire(outcome.header["error"], *outcome.attachments[:1])
        else:
            (result,) = outcome.attachments
        if self._tasks.pop(process.number, None) is not None:
            self._ready.append(TaskEnded(task=process.number, result=result, error=error))

    # ---- what a subclass has

    def _wait(self, timeout_s: float | None) -> None:
        """Handle what happens next, for so long at most."""
        raise NotImplementedError

    def _pass_on(self, process: P, header: dict[str, Any], attachments: Sequence[bytes]) -> None:
        """Send a message to a process, at once or when it is up."""
        raise NotImplementedError

    def _kill(self, process: P, grace_s: float) -> None:
        """End a process: SIGTERM, and SIGKILL after the grace."""
        raise NotImplementedError

    def _limit(self, process: P, seconds: float) -> None:
        """Give a process so much time to end by itself."""
        raise NotImplementedError


class LocalEngine(ProcessEngine[Child]):
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
        self._unfinished = Unfinished(self._brought, _LOG.warning, storage=storage)
        self._supervisor = Supervisor(
            on_start=lambda child: self._started(child, child.pid or 0),
            on_message=self._on_message,
            on_dying=self._dying,
            on_end=self._on_end,
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
        self._begin_group()
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
        # Bound here and handed to rank 0: a free port that is only chosen may be taken before it is used.
        with socket.create_server((_HOST, 0), backlog=1024) as listener:
            common = {
                # One machine: a host name that does not resolve, or resolves to a VPN, must not matter.
                "GLOO_SOCKET_IFNAME": _LOOPBACK,
                "OMP_NUM_THREADS": str(threads_for(spec.num_workers)),
                **os.environ,
                "WORLD_SIZE": str(spec.num_workers),
                "LOCAL_WORLD_SIZE": str(spec.num_workers),
                "GROUP_RANK": "0",
                "MASTER_ADDR": _HOST,
                "MASTER_PORT": str(listener.getsockname()[1]),
                **({} if spec.use_gpu else {"CUDA_VISIBLE_DEVICES": ""}),
            }
            for rank in range(spec.num_workers):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **spec.environment.get(rank, {})}
                log_file = None if spec.log_directory is None else spec.log_directory / f"rank-{rank}.log"
                self._ranks[rank] = self._supervisor.fork(
                    next(self._numbers),
                    f"rank {rank}",
                    self._entry,
                    rank=rank,
                    environment={**common, **own},
                    sinks=shown_and_kept(f"rank {rank}", log_file),
                    listener=None if rank else listener,
                    use_gpu=spec.use_gpu,
                )

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

    def _pass_on(self, process: Child, header: dict[str, Any], attachments: Sequence[bytes]) -> None:
        process.send(header, attachments)

    def _kill(self, process: Child, grace_s: float) -> None:
        self._supervisor.kill(process, grace_s)

    def _limit(self, process: Child, seconds: float) -> None:
        self._supervisor.limit(process, seconds)

    def _on_message(self, child: Child, message: Message) -> None:
        self._unfinished.note(child.number, message.header)
        self._said(child, message)

    def _on_end(self, child: Child, why: str) -> None:
        self._ended(child, child.status, why, "garbled" if child.channel.broken else "process")
        self._unfinished.end(child.number, finish=not child.killed)

    def _brought(self, child: int, header: dict[str, Any], attachments: tuple[bytes, ...]) -> None:
        """Take the message about an upload that was finished for a dead worker; called from another thread."""
        self._post(lambda: self._said_for(child, Message(header=header, attachments=attachments)))
