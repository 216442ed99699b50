"""Workers as processes of this machine, forked from a zygote that has torch loaded."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from holdfast.trainers.function.transit import error_from_wire
from holdfast.trainers.function.unfinished import Unfinished
from holdfast.writer.frames import Message

from .logs import shown_and_kept
from .supervisor import Child, Supervisor, threads_for

__all__ = ["LocalEngine"]

_LOG = get_logger("trainers.function")
_WORKER = "holdfast.trainers.function.worker.main:run"
_TASK = "holdfast.trainers.function.worker.main:run_task"
_HOST = "127.0.0.1"
_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
_TASK_END_S = 10.0  # for a task that has given its result but does not end


class LocalEngine:
    """Implements `holdfast.trainers.function.engine.Engine`; also runs single functions as tasks (`run_task`).

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
        self, *, num_workers: int = 1, prepare: bool = True, entry: str = _WORKER, storage: Storage | None = None
    ) -> None:
        self._entry = entry
        self._posted: deque[Received] = deque()  # by other threads
        self._killed: set[int] = set()  # numbers of children that the driver wants to end
        self._ended_ranks: dict[int, int] = {}  # children of this group that died by themselves -> rank
        self._unfinished = Unfinished(self._post, _LOG.warning, storage=storage)
        self._ready: list[Event] = []
        self._ranks: dict[int, Child] = {}
        self._rank_of: dict[int, int] = {}  # number of a child -> rank
        self._tasks: dict[int, Child] = {}
        self._outcomes: dict[int, Message] = {}  # number of a task -> what it sent
        self._woken, self._waker = os.pipe()
        for fd in (self._woken, self._waker):
            os.set_blocking(fd, False)
            # Closed with the object, not in `close`: threads and signal handlers may call `wake` at any time.
            weakref.finalize(self, os.close, fd)
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
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            for rank in range(spec.num_workers):
                log_file = None if spec.log_directory is None else spec.log_directory / f"rank-{rank}.log"
                child = self._supervisor.fork(
                    f"rank {rank}",
                    self._entry,
                    environment=_worker_environment(spec, rank, port, base),
                    sinks=shown_and_kept(f"rank {rank}", log_file),
                    listener=None if rank else listener,
                    use_gpu=spec.use_gpu,
                )
                self._ranks[rank] = child
                self._rank_of[child.number] = rank

    def send(self, rank: int, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message without blocking; a message to a worker that has ended is dropped."""
        child = self._ranks.get(rank)
        if child is not None:
            child.send(header, attachments)

    def kill(self, ranks: Iterable[int] | None = None, grace_s: float = 0.0) -> None:
        """End workers (None: all) with everything they started: SIGTERM, and SIGKILL ``grace_s`` later."""
        for rank in list(self._ranks) if ranks is None else list(ranks):
            child = self._ranks.get(rank)
            if child is not None:
                self._killed.add(child.number)
                self._supervisor.kill(child, grace_s)

    # ---- tasks

    def run_task(self, blob: bytes, *, name: str = "task", log_file: Path | None = None) -> int:
        """Run a pickled function without arguments in a process of its own."""
        self._supervisor.prepare(1)
        child = self._supervisor.fork(
            name,
            _TASK,
            environment=dict(os.environ),
            sinks=shown_and_kept(name, log_file),
            use_gpu=True,
        )
        self._tasks[child.number] = child
        child.send({"do": "task"}, [blob])
        return child.number

    def kill_task(self, task: int, grace_s: float = 0.0) -> None:
        """End a task; its TaskEnded still comes. A task that has ended is left alone."""
        child = self._tasks.get(task)
        if child is not None:
            self._supervisor.kill(child, grace_s)

    # ---- events

    def events(self, timeout_s: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout_s``. None waits until there is one.

        What a signal handler raises passes through and loses no event, but may cut a message in two: handlers had
        better call `wake`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._supervisor.wait(left)
            if left == 0.0:
                break
        ready, self._ready = self._ready, []
        return ready

    def wake(self) -> None:
        """Make `events` return; callable from any thread and from signal handlers, also after `close`."""
        try:
            os.write(self._waker, b"w")
        except BlockingIOError:  # the pipe is full: another byte adds nothing
            return

    def close(self) -> None:
        """End everything that still runs and let go of all resources. Idempotent; takes seconds at most."""
        self._supervisor.close()
        self._unfinished.close()
        self._ranks.clear()
        self._tasks.clear()

    def _on_wake(self) -> None:
        os.read(self._woken, 1 << 16)
        self._ready.append(Woken())
        while self._posted:
            self._ready.append(self._posted.popleft())

    def _post(self, child: int, header: dict[str, Any], attachments: tuple[bytes, ...]) -> None:
        """Deliver a message in place of a worker that has died; called from another thread."""
        rank = self._ended_ranks.get(child)
        if rank is not None:
            self._posted.append(Received(rank=rank, message=Message(header=header, attachments=attachments)))
            self.wake()

    def _on_start(self, child: Child) -> None:
        rank = self._rank_of.get(child.number)
        if rank is not None and child.pid is not None:
            self._ready.append(Started(rank=rank, pid=child.pid))

    def _on_message(self, child: Child, message: Message) -> None:
        rank = self._rank_of.get(child.number)
        if rank is not None:
            self._unfinished.note(child.number, message.header)
            self._ready.append(Received(rank=rank, message=message))
        else:
            self._outcomes[child.number] = message
            self._supervisor.limit(child, _TASK_END_S)

    def _on_dying(self, child: Child) -> None:
        rank = self._rank_of.get(child.number)
        if rank is not None:
            self._ready.append(Dying(rank=rank))

    def _on_end(self, child: Child, why: str) -> None:
        code, number = _decode(child.status)
        rank = self._rank_of.pop(child.number, None)
        if rank is not None:
            del self._ranks[rank]
            detail = "\n".join(part for part in (why, child.last_words()) if part)
            reason: Reason = "garbled" if child.channel.broken else "process"
            self._ready.append(Exited(rank=rank, exit_code=code, signal=number, detail=detail, reason=reason))
            self._ended_ranks[child.number] = rank
            self._unfinished.end(child.number, finish=child.number not in self._killed)
            self._killed.discard(child.number)
            return
        del self._tasks[child.number]
        outcome = self._outcomes.pop(child.number, None)
        result: bytes | None = None
        error: BaseException | None = None
        if outcome is None:
            how = why or (f"ended with status {code}" if number is None else f"was ended by {_signal_name(number)}")
            words = child.last_words()
            error = TrainingError(
                f"the process of {child.name} {how} before it had a result" + (f":\n{words}" if words else "")
            )
        elif outcome.header["on"] == "failed":
            error = error_from_wire(outcome.header["error"], *outcome.attachments[:1])
        else:
            (result,) = outcome.attachments
        self._ready.append(TaskEnded(task=child.number, result=result, error=error))


def _decode(status: int | None) -> tuple[int | None, int | None]:
    """Split the status of `os.waitpid` into exit code and signal."""
    if status is None:
        return None, None
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (None, -code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
