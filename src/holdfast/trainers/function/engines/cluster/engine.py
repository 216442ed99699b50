"""Workers on the nodes of a cluster, forked there by agents; `Nodes` finds the nodes."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage
from holdfast.trainers.function.engine import (
    Capacity,
    Draining,
    Dying,
    Exited,
    GroupSpec,
    Placed,
    Reason,
    Received,
    Started,
    Unable,
    node_name,
)
from holdfast.writer.frames import Message

from ..local.engine import TASK, TASK_END_S, WORKER, ProcessEngine
from ..local.logs import LineLimit, LogText, shown_and_kept
from .agent import BEAT_S
from .agents import AgentLink, Agents
from .nodes import NodePlace, Nodes, arrange, rank_environment

__all__ = ["ClusterEngine"]

_SILENCE_S = 20.0
_PLACE_S = 60.0  # for a group whose places went away before it was started
_CLOSE_S = 5.0
# Variables of the driver that workers get; all others are those of their node.
_TRAVEL = ("HOLDFAST_", "NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS")


@dataclass(slots=True)
class _Child:
    """A process on a node: a worker, or a task if ``rank`` is None."""

    number: int
    node: str
    name: str
    rank: int | None
    sinks: tuple[LogText, LogText]
    where: str = ""
    forked: bool = False
    outcome: Message | None = None


@dataclass(slots=True)
class _Group:
    """The group that is being started, or runs."""

    spec: GroupSpec
    number: int
    until: float
    places: list[tuple[NodePlace, Placed]] | None = None
    ranks: dict[int, _Child] = field(default_factory=dict)
    asked_port: bool = False
    forked: bool = False


class ClusterEngine(ProcessEngine):
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
        self, nodes: Nodes, *, storage: Storage | None = None, entry: str = WORKER, silence_s: float | None = None
    ) -> None:
        super().__init__()
        self._entry = entry
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._children: dict[int, _Child] = {}
        self._ended_ranks: dict[int, int] = {}  # children of this group that died by themselves -> rank
        self._outputs: dict[tuple[str, int], tuple[LogText, LogText]] = {}
        self._silent: set[tuple[str, int, int]] = set()  # ended streams of processes whose other stream goes on
        self._tasks: dict[int, tuple[_Child, bytes]] = {}
        self._waiting: dict[int, list[tuple[dict[str, Any], tuple[bytes, ...]]]] = {}  # sent before it was forked
        self._proven: set[str] = set()  # nodes on which a worker has reported
        self._absent: set[str] = set()  # modules that are missing on proven nodes too
        self._group: _Group | None = None
        self._numbers = 0
        self._announced: Capacity | None = None
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
            on_unfit=lambda error: self._ready.append(Unable(error=error)),
            silence_s=_SILENCE_S if silence_s is None else silence_s,
        )

    # ---- workers

    def start(self, spec: GroupSpec) -> None:
        """Start a group without waiting for it.

        Raises:
            HoldfastError: workers of an earlier group have not exited yet.
        """
        if self._group is not None:
            left = sorted(self._group.ranks)
            raise HoldfastError(f"ranks {left} of the earlier group have not exited: kill them first")
        number = self._number()
        self._ended_ranks.clear()
        self._agents.give_up()
        group = self._group = _Group(spec=spec, number=number, until=time.monotonic() + _PLACE_S)
        for rank in range(spec.num_workers):
            path = None if spec.log_directory is None else spec.log_directory / f"rank-{rank}.log"
            name = f"rank {rank}"
            # Of thousands of ranks not all can be shown; the file has every line.
            limit = None if path is None else LineLimit(f"{path.parent.name}/{path.name} of the run's logs")
            group.ranks[rank] = _Child(self._number(), "", name, rank, shown_and_kept(name, path, limit))
        self._advance()

    def send(self, rank: int, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message without blocking; a message to a worker that has ended is dropped."""
        child = self._group.ranks.get(rank) if self._group is not None else None
        if child is None:
            return
        if child.forked:
            self._pass_on(child, header, attachments)
        else:
            self._waiting.setdefault(child.number, []).append((header, tuple(attachments)))

    def kill(self, ranks: Iterable[int] | None = None, grace_s: float = 0.0) -> None:
        """End workers (None: all) with everything they started: SIGTERM, and SIGKILL ``grace_s`` later."""
        group = self._group
        if group is None:
            return
        for rank in list(group.ranks) if ranks is None else list(ranks):
            child = group.ranks.get(rank)
            if child is None:
                continue
            if child.forked:
                self._agents.tell_to(child.node, {"do": "kill", "child": child.number, "grace_s": grace_s})
            else:
                self._exit(child, number=signal.SIGKILL)

    # ---- tasks

    def run_task(self, blob: bytes, *, name: str = "task", log_file: Path | None = None) -> int:
        """Run a pickled function without arguments in a process of its own, on the first node that has an agent."""
        child = _Child(self._number(), "", name, None, shown_and_kept(name, log_file))
        self._tasks[child.number] = (child, blob)
        self._advance()
        return child.number

    def kill_task(self, task: int, grace_s: float = 0.0) -> None:
        """End a task; its TaskEnded still comes. A task that has ended is left alone."""
        if task not in self._tasks:
            return
        child = self._tasks[task][0]
        if child.forked:
            self._agents.tell_to(child.node, {"do": "kill", "child": task, "grace_s": grace_s})
        else:
            self._end_task(child, "was stopped before it was started")

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
        self._group = None

    # ---- what happens

    def _wait(self, timeout_s: float | None) -> None:
        due = self._agents.due()
        if self._group is not None and self._group.places is None:
            due.append(self._group.until)
        if due:
            left = max(0.0, min(due) - time.monotonic())
            timeout_s = left if timeout_s is None else min(left, timeout_s)
        now = time.monotonic()
        # If this thread was busy and did not read, silence of the agents does not count.
        unread_s = now - self._read_at
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj == self._woken:
                self._on_wake()
            elif self._selector.get_map().get(key.fd) is key:
                self._agents.read(key.data)
        self._work_off()
        self._read_at = time.monotonic()
        if unread_s > BEAT_S:
            self._agents.listened(now)
        if not self._closed:
            self._agents.see_time()
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
            rank = self._ended_ranks.get(header.get("child", 0))
            if on == "message" and rank is not None:  # its agent has finished an upload for it
                passed = Message(header=header["header"], attachments=message.attachments)
                self._ready.append(Received(rank=rank, message=passed))
        elif on == "started":
            if child.rank is not None:
                self._ready.append(Started(rank=child.rank, pid=header["pid"]))
        elif on == "message":
            passed = Message(header=header["header"], attachments=message.attachments)
            if child.rank is not None and self._is_unfit(child.node, passed.header):
                self._agents.lacks(child.node, passed.header["module"])
            elif child.rank is not None:
                if passed.header.get("on") == "report":
                    self._proven.add(child.node)
                self._ready.append(Received(rank=child.rank, message=passed))
            else:
                child.outcome = passed
                link.tell({"do": "limit", "child": child.number, "seconds": TASK_END_S})
        elif on == "dying":
            if child.rank is not None:
                self._ready.append(Dying(rank=child.rank))
        elif on == "ended":
            self._ended(child, header["status"], header["why"])

    def _ended(self, child: _Child, status: int | None, why: str) -> None:
        code = None if status is None else os.waitstatus_to_exitcode(status)
        for sink in child.sinks:
            sink.flush()
        if child.rank is None:
            self._end_task(
                child, why or (f"ended with status {code}" if (code or 0) >= 0 else f"signal {-(code or 0)}")
            )
            return
        number = -code if code is not None and code < 0 else None
        self._exit(child, code=code if number is None else None, number=number, why=why)

    def _exit(
        self,
        child: _Child,
        *,
        code: int | None = None,
        number: int | None = None,
        why: str = "",
        reason: Reason = "process",
    ) -> None:
        group, rank = self._group, child.rank
        if group is None or rank is None or rank not in group.ranks:
            return
        del group.ranks[rank]
        self._children.pop(child.number, None)
        self._waiting.pop(child.number, None)
        if reason == "process":
            self._ended_ranks[child.number] = rank
        words = "\n".join(line for line in child.sinks[1].tail if line.strip())
        detail = "\n".join(part for part in (why, words) if part)
        self._ready.append(
            Exited(rank=rank, exit_code=code, signal=number, detail=detail, node=child.where, reason=reason)
        )
        if not group.ranks:
            self._group = None
            self._agents.use(())

    def _end_task(self, child: _Child, how: str) -> None:
        self._tasks.pop(child.number, None)
        self._children.pop(child.number, None)
        self._task_ended(child.number, child.name, child.outcome, how, "\n".join(child.sinks[1].tail))

    # ---- nodes and their agents

    def _leave(self, leaving: Mapping[str, float]) -> None:
        """Announce that nodes with workers are about to go."""
        group = self._group
        ranks = () if group is None else tuple(rank for rank, child in group.ranks.items() if child.node in leaving)
        if ranks:
            soon = ", ".join(f"{node_name(node)} goes in {leaving[node]:.0f} s" for node in sorted(leaving))
            self._ready.append(Draining(ranks=ranks, detail=soon, left_s=min(leaving.values())))

    def _lose(self, node: str, why: str, reason: Reason) -> None:
        """End every process on a node that is lost."""
        for key in [key for key in self._outputs if key[0] == node]:
            _end_output(self._outputs.pop(key))
        self._silent = {key for key in self._silent if key[0] != node}
        if self._closed:
            return
        self._proven.discard(node)
        for child in list(self._group.ranks.values()) if self._group is not None else ():
            if child.node == node:
                self._exit(child, why=why, reason=reason)
        for child, _ in list(self._tasks.values()):
            if child.node == node:
                self._end_task(child, f"is lost: {why}")

    def _is_unfit(self, node: str, said: Mapping[str, Any]) -> bool:
        """Whether a worker failed because of its node: a module is missing there that nodes which trained have."""
        module = said.get("module")
        if not module or not self._proven:
            return False
        if node in self._proven:
            self._absent.add(module)
        return module not in self._absent

    def _is_busy(self, node: str) -> bool:
        """Whether a worker or a task is on a node, or is about to be."""
        ranks = () if self._group is None else self._group.ranks.values()
        return any(child.node == node for child in (*ranks, *(task[0] for task in self._tasks.values())))

    # ---- starting

    def _advance(self) -> None:
        """Start what waits for places, agents or answers, if these are there."""
        self._agents.advance(self._is_busy)
        self._tell_capacity()
        self._advance_tasks()
        group = self._group
        if group is None or group.forked:
            return
        if group.places is None:
            group.places = arrange(self._agents.usable(), group.spec.num_workers)
            if group.places is None:
                if time.monotonic() >= group.until:
                    for child in list(group.ranks.values()):
                        self._exit(child, why="the places for it went away before it was started", reason="unplaced")
                return
            self._agents.use([place for place, _ in group.places])
            for place, placed in group.places:
                child = group.ranks[placed.rank]
                child.node, child.where = place.node, placed.where
                for sink in child.sinks:
                    sink.prefix = f"({child.name}, {node_name(place.node)}) "
                self._ready.append(placed)
        nodes = {place.node for place, _ in group.places}
        whole = len(group.ranks) == group.spec.num_workers
        if whole and not group.asked_port and all(self._agents.ready(node) is not None for node in nodes):
            group.asked_port = True
            self._agents.tell_to(group.ranks[0].node, {"do": "listen", "group": group.number})

    def _tell_capacity(self) -> None:
        capacity = self._agents.capacity()
        if capacity is not None and capacity != self._announced:
            self._announced = capacity
            self._ready.append(capacity)

    def _fork_all(self, listening: Mapping[str, Any]) -> None:
        group = self._group
        if group is None or group.places is None or group.number != listening["group"] or group.forked:
            return
        if len(group.ranks) < group.spec.num_workers:
            return  # some are lost already: the controller kills the others
        group.forked = self._agents.trained = True
        travel = {name: value for name, value in os.environ.items() if name.startswith(_TRAVEL)}
        for place, placed in group.places:
            gpus = [gpu for other, _ in group.places if other.node == place.node for gpu in other.gpus]
            variables = rank_environment(group.spec, placed, master=(listening["host"], listening["port"]), gpus=gpus)
            child = group.ranks[placed.rank]
            self._fork(
                child,
                self._entry,
                {**travel, **variables},
                listen=placed.rank == 0,
                size=placed.local_size,
                gpu=group.spec.use_gpu,
            )

    def _advance_tasks(self) -> None:
        waiting = [task for task in self._tasks.values() if not task[0].forked]
        link = self._agents.first_ready() if waiting else None
        for child, blob in waiting if link is not None else ():
            child.node = link.node if link is not None else ""
            travel = {name: value for name, value in os.environ.items() if name.startswith(_TRAVEL)}
            self._fork(child, TASK, travel, listen=False, size=1, gpu=True)
            self._pass_on(child, {"do": "task"}, [blob])

    def _fork(
        self, child: _Child, entry: str, environment: Mapping[str, str], *, listen: bool, size: int, gpu: bool
    ) -> None:
        child.forked = True
        self._children[child.number] = child
        self._outputs[child.node, child.number] = child.sinks
        request = {"child": child.number, "name": child.name, "entry": entry, "environment": dict(environment)}
        request |= {"listen": listen, "local_size": size, "use_gpu": gpu, "arguments": list(sys.argv)}
        self._agents.tell_to(child.node, {"do": "fork", **request})
        for header, attachments in self._waiting.pop(child.number, ()):
            self._pass_on(child, header, attachments)

    def _pass_on(self, child: _Child, header: dict[str, Any], attachments: Sequence[bytes]) -> None:
        link = self._agents.ready(child.node)
        if link is not None:
            link.pass_on(child.number, header, attachments)

    def _output(self, link: AgentLink, number: int) -> tuple[LogText, LogText]:
        key = (link.node, number)
        if key not in self._outputs:  # output of the agent's own zygote
            self._outputs[key] = shown_and_kept(f"workers on {node_name(link.node)}", None)
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
