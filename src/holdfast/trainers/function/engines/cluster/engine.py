"""Workers on the nodes of a cluster, forked there by agents; `Nodes` finds the nodes."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.storage.base import Storage
from holdfast.trainers.function.engine import Capacity, Draining, GroupSpec, Placed, Reason, Unable, node_name
from holdfast.writer.frames import Message

from ..local.engine import TASK, WORKER, ProcessEngine
from ..local.logs import LineLimit, LogText, shown_and_kept
from ..local.supervisor import Process
from .agent import BEAT_S
from .agents import AgentLink, Agents
from .nodes import NodePlace, Nodes, arrange, rank_environment

__all__ = ["ClusterEngine"]

_SILENCE_S = 20.0
_PLACE_S = 60.0  # for a group whose places went away before it was started
_CLOSE_S = 5.0
# Variables of the driver that workers get; all others are those of their node.
_TRAVEL = ("HOLDFAST_", "NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS")


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

    spec: GroupSpec
    number: int
    until: float
    places: list[tuple[NodePlace, Placed]] | None = None
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
        self, nodes: Nodes, *, storage: Storage | None = None, entry: str = WORKER, silence_s: float | None = None
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

    def _ended(self, process: _Child, status: int | None, why: str, reason: Reason = "process") -> None:
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
                    sink.prefix = f"({child.name}, {node_name(place.node)}) "
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
            self._fork(child, TASK, {}, listen=False, size=1, gpu=True)

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
