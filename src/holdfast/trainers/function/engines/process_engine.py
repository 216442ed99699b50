"""Engines whose workers are processes forked from a zygote: on this machine, and by an agent on each node of a cluster.

`ProcessEngine` is what both share. Which rank runs in which place of a cluster, and the variables it gets for that, is
decided by pure functions (`arrange`, `rank_environment`).
"""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from holdfast._log import get_logger
from holdfast.errors import HoldfastError, TrainingError
from holdfast.storage.base import Storage
from holdfast.writer.frames import Message

from .. import engine
from ..handoff import Unfinished
from ..transit import error_from_wire
from .agent import BEAT_S
from .agents import AgentLink, Agents, NodePlace, Nodes
from .supervisor import Child, LineLimit, LogText, Process, Supervisor, shown_and_kept, threads_for

_LOG = get_logger("trainers.function")
P = TypeVar("P", bound=Process)
_WORKER = "holdfast.trainers.function.worker.main:run"
_TASK = "holdfast.trainers.function.worker.main:run_task"
_TASK_END_S = 10.0  # for a task that has given its result but does not end
_HOST = "127.0.0.1"
_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
_SILENCE_S = 20.0
_PLACE_S = 60.0  # for a group whose places went away before it was started
_CLOSE_S = 5.0
# Variables of the driver that workers get; all others are those of their node.
_TRAVEL = ("HOLDFAST_", "NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS")
_LOOPBACKS = ("127.", "::1", "localhost")


class ProcessEngine(Generic[P]):
    """What the engines with processes share: workers, tasks, what happens to them; work of other threads.

    A subclass starts the processes, waits for what happens to them (`_wait`) and reaches them: `_pass_on`, `_kill`,
    `_limit`.
    """

    def __init__(self) -> None:
        self._ready: list[engine.Event] = []
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

    def events(self, timeout_s: float | None) -> list[engine.Event]:
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
            self._ready.append(engine.Woken())

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
            self._ready.append(engine.Started(rank=process.rank, pid=pid))

    def _said(self, process: P, message: Message) -> None:
        if process.rank is not None:
            self._ready.append(engine.Received(rank=process.rank, message=message))
        else:
            process.outcome = message
            self._limit(process, _TASK_END_S)

    def _said_for(self, number: int, message: Message) -> None:
        """Take a message in place of a worker that has died."""
        if (rank := self._ended_ranks.get(number)) is not None:
            self._ready.append(engine.Received(rank=rank, message=message))

    def _dying(self, process: P) -> None:
        if process.rank is not None:
            self._ready.append(engine.Dying(rank=process.rank))

    def _ended(self, process: P, status: int | None, why: str, reason: engine.Reason = "process") -> None:
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
                engine.Exited(
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
            self._ready.append(engine.TaskEnded(task=process.number, result=result, error=error))

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
        self, *, num_workers: int = 1, prepare: bool = True, entry: str = _WORKER, storage: Storage | None = None
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

    def start(self, spec: engine.GroupSpec) -> None:
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

    def _fork_all(self, spec: engine.GroupSpec) -> None:
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
            _TASK,
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


class _Child(Process):
    """A process on a node.

    Attributes:
        sinks: show and keep its output.
        node: id; "" before it has a place.
        forked: its agent was asked to start it.
        waiting: messages to it, sent before.
    """

    sinks: tuple[LogText, LogText]

    def __init__(self, number: int, name: str, rank: int | None, sinks: tuple[LogText, LogText]) -> None:
        super().__init__(number, name, rank, sinks)
        self.node, self.forked = "", False
        self.waiting: list[tuple[dict[str, Any], Sequence[bytes]]] = []


@dataclass(slots=True)
class _Group:
    """The group that is being started, or runs."""

    spec: engine.GroupSpec
    number: int
    until: float
    places: list[tuple[NodePlace, engine.Placed]] | None = None
    asked_port: bool = False
    forked: bool = False


class ClusterEngine(ProcessEngine[_Child]):
    """Implements `Engine` of `holdfast.trainers.function.engine` over nodes.

    An agent stays on its node over the restarts of groups, with the interpreter that workers are forked from. It is
    replaced when it ends; until then its places do not count.

    Args:
        nodes: finds nodes and starts agents; closed by `close`.
        storage: root of the run, which every node has to see; None: not checked.
        entry: "module:function" that workers run, as in the local engine.
        silence_s: an agent that sends nothing for so long is given up; None: 20 seconds.
    """

    def __init__(
        self, nodes: Nodes, *, storage: Storage | None = None, entry: str = _WORKER, silence_s: float | None = None
    ) -> None:
        super().__init__()
        self._entry = entry
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._children: dict[int, _Child] = {}
        self._outputs: dict[tuple[str, int], tuple[LogText, LogText]] = {}
        self._silent: set[tuple[str, int, int]] = set()  # ended streams of processes whose other stream goes on
        self._proven: set[str] = set()  # nodes on which a worker has reported
        self._absent: set[str] = set()  # modules that are missing on proven nodes too
        self._group: _Group | None = None
        self._numbers = 0
        self._announced: engine.Capacity | None = None
        self._closed = False
        self._read_at = time.monotonic()
        self._agents = Agents(
            nodes,
            storage,
            selector=self._selector,
            post=self._post,
            on_message=self._take,
            on_lost=self._lose,
            on_leaving=self._leave,
            on_unfit=lambda error: self._ready.append(engine.Unable(error=error)),
            silence_s=_SILENCE_S if silence_s is None else silence_s,
        )

    # ---- workers

    def start(self, spec: engine.GroupSpec) -> None:
        """Start a group without waiting for it.

        Raises:
            HoldfastError: workers of an earlier group have not exited yet.
        """
        self._begin_group()
        self._agents.give_up()
        self._group = _Group(spec=spec, number=self._number(), until=time.monotonic() + _PLACE_S)
        for rank in range(spec.num_workers):
            path = None if spec.log_directory is None else spec.log_directory / f"rank-{rank}.log"
            name = f"rank {rank}"
            # Of thousands of ranks not all can be shown; the file has every line.
            limit = None if path is None else LineLimit(f"{path.parent.name}/{path.name} of the run's logs")
            self._ranks[rank] = _Child(self._number(), name, rank, shown_and_kept(name, path, limit))
        self._advance()

    def run_task(self, blob: bytes, *, name: str = "task", log_file: Path | None = None) -> int:
        """Run a pickled function without arguments in a process of its own, on the first node that has an agent."""
        child = _Child(self._number(), name, None, shown_and_kept(name, log_file))
        child.waiting.append(({"do": "task"}, [blob]))
        self._tasks[child.number] = child
        self._advance()
        return child.number

    def close(self) -> None:
        """End everything that still runs and let go of all resources. Idempotent; takes seconds at most."""
        if self._closed:
            return
        self._closed = True
        self._agents.hang_up()
        deadline = time.monotonic() + _CLOSE_S
        while not self._agents.is_empty and time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())  # agents end their processes before they hang up
        self._agents.close()
        self._over = True
        self._work_off()  # agents that connected meanwhile are let go of
        for sinks in self._outputs.values():
            _end_output(sinks)
        self._selector.close()
        self._ranks.clear()

    # ---- what happens

    def _wait(self, timeout_s: float | None) -> None:
        due = self._agents.due()
        if self._group is not None and self._group.places is None:
            due.append(self._group.until)
        if due:
            left = max(0.0, min(due) - time.monotonic())
            timeout_s = left if timeout_s is None else min(left, timeout_s)
        now = time.monotonic()
        unread_s = now - self._read_at
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj == self._woken:
                self._on_wake()
            elif self._selector.get_map().get(key.fd) is key:
                self._agents.read(key.data)
        self._work_off()
        self._read_at = time.monotonic()
        if not self._closed:
            self._agents.see_time(now if unread_s > BEAT_S else 0.0)
            self._advance()

    def _take(self, link: AgentLink, message: Message) -> None:
        header = message.header
        on, child = header["on"], self._children.get(header.get("child", 0))
        if on == "listening":
            self._fork_all(header)
        elif on == "output":
            self._output(link, header["child"])[header["stream"]].feed(message.attachments[0])
        elif on == "closed":
            self._close_output(link, header["child"], header["stream"])
        elif child is None:
            if on == "message":  # its agent has finished an upload for it
                self._said_for(header["child"], Message(header=header["header"], attachments=message.attachments))
        elif on == "started":
            self._started(child, header["pid"])
        elif on == "message":
            passed = Message(header=header["header"], attachments=message.attachments)
            if child.rank is not None and self._is_unfit(child.node, passed.header):
                self._agents.lacks(child.node, passed.header["module"])
                return
            if child.rank is not None and passed.header.get("on") == "report":
                self._proven.add(child.node)
            self._said(child, passed)
        elif on == "dying":
            self._dying(child)
        elif on == "ended":
            for sink in child.sinks:
                sink.flush()
            self._ended(child, header["status"], header["why"])

    def _ended(self, process: _Child, status: int | None, why: str, reason: engine.Reason = "process") -> None:
        super()._ended(process, status, why, reason)
        self._children.pop(process.number, None)
        if self._group is not None and not self._ranks:
            self._group = None
            self._agents.use(())

    def _pass_on(self, process: _Child, header: dict[str, Any], attachments: Sequence[bytes]) -> None:
        link = self._agents.ready(process.node)
        if not process.forked:
            process.waiting.append((header, attachments))
        elif link is not None:
            link.pass_on(process.number, header, attachments)

    def _kill(self, process: _Child, grace_s: float) -> None:
        if process.forked:
            self._agents.tell_to(process.node, {"do": "kill", "child": process.number, "grace_s": grace_s})
        elif process.rank is None:
            self._ended(process, None, "was stopped before it was started")
        else:
            self._ended(process, signal.SIGKILL, "")

    def _limit(self, process: _Child, seconds: float) -> None:
        self._agents.tell_to(process.node, {"do": "limit", "child": process.number, "seconds": seconds})

    # ---- nodes and their agents

    def _leave(self, leaving: Mapping[str, float]) -> None:
        """Announce that nodes with workers are about to go."""
        ranks = tuple(rank for rank, child in self._ranks.items() if child.node in leaving)
        if ranks:
            soon = ", ".join(f"{engine.node_name(node)} goes in {leaving[node]:.0f} s" for node in sorted(leaving))
            self._ready.append(engine.Draining(ranks=ranks, detail=soon, left_s=min(leaving.values())))

    def _lose(self, node: str, why: str, reason: engine.Reason) -> None:
        """End every process on a node that is lost."""
        for key in [key for key in self._outputs if key[0] == node]:
            _end_output(self._outputs.pop(key))
        self._silent = {key for key in self._silent if key[0] != node}
        if self._closed:
            return
        self._proven.discard(node)
        for child in [child for child in self._processes() if child.node == node]:
            self._ended(child, None, why if child.rank is not None else f"is lost: {why}", reason)

    def _is_unfit(self, node: str, said: Mapping[str, Any]) -> bool:
        """Whether a worker failed because of its node: a module is missing there that nodes which trained have."""
        module = said.get("module")
        if not module or not self._proven:
            return False
        if node in self._proven:
            self._absent.add(module)
        return module not in self._absent

    def _processes(self) -> list[_Child]:
        return [*self._ranks.values(), *self._tasks.values()]

    # ---- starting

    def _advance(self) -> None:
        """Start what waits for places, agents or answers, if these are there."""
        self._agents.advance({child.node for child in self._processes()})
        self._tell_capacity()
        self._advance_tasks()
        group = self._group
        if group is None or group.forked:
            return
        if group.places is None:
            group.places = arrange(self._agents.usable(), group.spec.num_workers)
            if group.places is None:
                if time.monotonic() >= group.until:
                    for child in list(self._ranks.values()):
                        self._ended(child, None, "the places for it went away before it was started", "unplaced")
                return
            self._agents.use([place for place, _ in group.places])
            for place, placed in group.places:
                child = self._ranks[placed.rank]
                child.node, child.where = place.node, placed.where
                for sink in child.sinks:
                    sink.prefix = f"({child.name}, {engine.node_name(place.node)}) "
                self._ready.append(placed)
        nodes = {place.node for place, _ in group.places}
        whole = len(self._ranks) == group.spec.num_workers
        if whole and not group.asked_port and all(self._agents.ready(node) is not None for node in nodes):
            group.asked_port = True
            self._agents.tell_to(self._ranks[0].node, {"do": "listen", "group": group.number})

    def _tell_capacity(self) -> None:
        capacity = self._agents.capacity()
        if capacity is not None and capacity != self._announced:
            self._announced = capacity
            self._ready.append(capacity)

    def _fork_all(self, listening: Mapping[str, Any]) -> None:
        group = self._group
        if group is None or group.places is None or group.number != listening["group"] or group.forked:
            return
        if len(self._ranks) < group.spec.num_workers:
            return  # some are lost already: the controller kills the others
        group.forked = self._agents.trained = True
        for place, placed in group.places:
            gpus = [gpu for other, _ in group.places if other.node == place.node for gpu in other.gpus]
            variables = rank_environment(group.spec, placed, master=(listening["host"], listening["port"]), gpus=gpus)
            child = self._ranks[placed.rank]
            self._fork(
                child,
                self._entry,
                variables,
                listen=placed.rank == 0,
                size=placed.local_size,
                gpu=group.spec.use_gpu,
            )

    def _advance_tasks(self) -> None:
        waiting = [task for task in self._tasks.values() if not task.forked]
        link = self._agents.first_ready() if waiting else None
        for child in waiting if link is not None else ():
            child.node = link.node if link is not None else ""
            self._fork(child, _TASK, {}, listen=False, size=1, gpu=True)

    def _fork(
        self, child: _Child, entry: str, environment: Mapping[str, str], *, listen: bool, size: int, gpu: bool
    ) -> None:
        child.forked = True
        self._children[child.number] = child
        self._outputs[child.node, child.number] = child.sinks
        travel = {name: value for name, value in os.environ.items() if name.startswith(_TRAVEL)}
        request = {"child": child.number, "name": child.name, "entry": entry, "environment": {**travel, **environment}}
        request |= {"listen": listen, "local_size": size, "use_gpu": gpu, "arguments": list(sys.argv)}
        self._agents.tell_to(child.node, {"do": "fork", **request})
        waiting, child.waiting = child.waiting, []
        for header, attachments in waiting:
            self._pass_on(child, header, attachments)

    def _output(self, link: AgentLink, number: int) -> tuple[LogText, LogText]:
        key = (link.node, number)
        if key not in self._outputs:  # output of the agent's own zygote
            self._outputs[key] = shown_and_kept(f"workers on {engine.node_name(link.node)}", None)
        return self._outputs[key]

    def _close_output(self, link: AgentLink, number: int, stream: int) -> None:
        """End a stream; processes that a worker has started may hold it longer than the worker lives."""
        sink = self._output(link, number)[stream]
        sink.flush()
        sink.end()
        key = (link.node, number, stream)
        self._silent.add(key)
        if {(*key[:2], 0), (*key[:2], 1)} <= self._silent:
            self._silent -= {(*key[:2], 0), (*key[:2], 1)}
            del self._outputs[key[:2]]

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


def _end_output(sinks: tuple[LogText, LogText]) -> None:
    for sink in sinks:
        sink.flush()
        sink.end()


def arrange(places: Iterable[NodePlace], num_workers: int) -> list[tuple[NodePlace, engine.Placed]] | None:
    """Choose a place for each rank; None if there are too few.

    Ranks follow the ids of nodes and then the lowest accelerator, so that ranks of a node are neighbours and the same
    places always get the same ranks. With places to spare, those that are not extra come first, then nodes that have
    more of them.
    """
    given = list(places)
    lasting = [place for place in given if not place.extra]
    by_node: dict[str, list[NodePlace]] = {}
    for place in lasting if len(lasting) >= num_workers else given:
        by_node.setdefault(place.node, []).append(place)
    chosen: list[NodePlace] = []
    for _, members in sorted(by_node.items(), key=lambda item: (-len(item[1]), item[0])):
        chosen += sorted(members, key=_within)[: num_workers - len(chosen)]
    if len(chosen) < num_workers:
        return None
    chosen.sort(key=lambda place: (place.node, *_within(place)))
    nodes = sorted({place.node for place in chosen})
    seen = dict.fromkeys(nodes, 0)
    found = []
    for rank, place in enumerate(chosen):
        size = sum(1 for other in chosen if other.node == place.node)
        placed = engine.Placed(
            rank=rank,
            node=place.node,
            address=place.address,
            local_rank=seen[place.node],
            local_size=size,
            node_rank=nodes.index(place.node),
        )
        seen[place.node] += 1
        found.append((place, placed))
    return found


def rank_environment(
    spec: engine.GroupSpec, placed: engine.Placed, *, master: tuple[str, int], gpus: Iterable[str]
) -> dict[str, str]:
    """Return the variables of a worker that its node cannot know.

    Args:
        spec: the group.
        placed: where the rank runs.
        master: host and port where rank 0 listens.
        gpus: ids of the accelerators that all workers of this node have, in the order of their ranks.
    """
    host, port = master
    environment: Mapping[str, str] = {
        "RANK": str(placed.rank),
        "WORLD_SIZE": str(spec.num_workers),
        "LOCAL_RANK": str(placed.local_rank),
        "LOCAL_WORLD_SIZE": str(placed.local_size),
        "GROUP_RANK": str(placed.node_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus) if spec.use_gpu else "",
    }
    # Between machines gloo finds the interface by itself; where all run on this machine its name need not resolve.
    lo = {"GLOO_SOCKET_IFNAME": "lo"} if host.startswith(_LOOPBACKS) else {}
    return {**lo, **environment, **spec.environment.get(placed.rank, {})}


def _within(place: NodePlace) -> tuple[int, str, int]:
    first = min(place.gpus, key=lambda gpu: (len(gpu), gpu), default="")
    return len(first), first, place.number
