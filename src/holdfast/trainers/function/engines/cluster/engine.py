"""Workers on the nodes of a cluster, forked there by agents. What has the nodes is behind `Nodes`."""

from __future__ import annotations

import os
import platform
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import ConfigError, HoldfastError, TrainingError
from holdfast.run.remains import PROBE
from holdfast.storage.base import Storage
from holdfast.trainers.function.engine import (
    Capacity,
    Draining,
    Event,
    Exited,
    GroupSpec,
    Placed,
    Reason,
    Received,
    Started,
    TaskEnded,
    Unable,
    Woken,
)
from holdfast.trainers.function.failure import error_from_wire
from holdfast.writer.frames import Message

from ..local.logs import LineLimit, LogText, shown_and_kept
from .agent import BEAT_S, version
from .links import AgentLink, Door
from .nodes import AgentCall, AgentFailed, NodeEvent, Nodes, PlacesChanged, Refused
from .places import NodePlace, arrange, rank_environment, short

__all__ = ["ClusterEngine"]

_LOG = get_logger("runtime")
_WORKER = "holdfast.trainers.function.worker.main:run"
_TASK = "holdfast.trainers.function.worker.main:run_task"
_TASK_END_S = 10.0
_SILENCE_S = 20.0
_AGENT_S = 120.0  # to start an agent
_PLACE_S = 60.0  # for a group whose places went away before it was started
_AGAIN_S = 5.0
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


class ClusterEngine:
    """Implements `Engine` of `holdfast.trainers.function.engine` over nodes; runs single functions as tasks too.

    An agent stays on its node over the restarts of groups, with the interpreter that workers are forked from. It is
    replaced when it ends; until then its places do not count.

    Args:
        nodes: what has them; closed by `close`.
        storage: root of the run, which every node has to see; None: nobody looks.
        entry: what workers run, as in the local engine.
        silence_s: an agent that says nothing for so long is given up.
    """

    def __init__(
        self, nodes: Nodes, *, storage: Storage | None = None, entry: str = _WORKER, silence_s: float = _SILENCE_S
    ) -> None:
        self._nodes, self._storage, self._entry, self._silence_s = nodes, storage, entry, silence_s
        self._ready: list[Event] = []
        self._posted: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        for fd in (self._woken, self._waker):
            os.set_blocking(fd, False)
            weakref.finalize(self, os.close, fd)  # as in the local engine: `wake` may be called at any time
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._places: tuple[NodePlace, ...] = ()
        self._missing = ""
        self._draining: set[str] = set()
        self._drained: set[str] = set()  # the same, until the node is known to stay or a new one has its places
        self._barred: set[str] = set()  # nodes that came while a group ran, and cannot run workers
        self._suspects: set[str] = set()  # nodes whose agent is gone, until another one is there
        self._links: dict[str, AgentLink] = {}
        self._calls: dict[int, str] = {}  # number of an agent that was started -> node
        self._starting: dict[str, tuple[int, float]] = {}  # node -> agent that has not connected, and its limit
        self._again: dict[str, float] = {}  # node -> when to start another agent
        self._children: dict[int, _Child] = {}
        self._outputs: dict[tuple[str, int], tuple[LogText, LogText]] = {}
        self._silent: set[tuple[str, int, int]] = set()  # streams that have ended while their other one has not
        self._tasks: dict[int, tuple[_Child, bytes, dict[str, str]]] = {}
        self._waiting: dict[int, list[tuple[dict[str, Any], tuple[bytes, ...]]]] = {}  # sent before it was forked
        self._markers: set[str] = set()  # files of ours in the storage that nodes are to see
        self._cleaning: list[threading.Thread] = []
        self._group: _Group | None = None
        self._numbers = 0
        self._told: Capacity | None = None
        self._closed = False
        self._attended = time.monotonic()
        self._token = secrets.token_hex(32)
        self._door = Door(nodes.host, self._token, lambda number, sock: self._post(lambda: self._join(number, sock)))
        self._stop = threading.Event()
        threading.Thread(target=self._beat, name="holdfast-beat", daemon=True).start()
        nodes.open(lambda event: self._post(lambda: self._on_nodes(event)))

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
        group = self._group = _Group(spec=spec, number=number, until=time.monotonic() + _PLACE_S)
        for rank in range(spec.num_workers):
            path = None if spec.log_directory is None else spec.log_directory / f"rank-{rank}.log"
            name = f"rank {rank}"
            # Of thousands of ranks not all can be shown; the file has every line.
            limit = None if path is None else LineLimit(f"{path.parent.name}/{path.name} of the run's logs")
            group.ranks[rank] = _Child(self._number(), "", name, rank, shown_and_kept(name, path, limit))
        self._advance()

    def send(self, rank: int, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message without blocking; one to a worker that has ended is dropped."""
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
                self._links[child.node].tell({"do": "kill", "child": child.number, "grace_s": grace_s})
            else:
                self._exit(child, number=signal.SIGKILL)

    # ---- tasks

    def run_task(
        self,
        blob: bytes,
        *,
        name: str = "task",
        environment: Mapping[str, str] | None = None,
        log_file: Path | None = None,
    ) -> int:
        """Run a pickled function without arguments in a process of its own, on the first node that has an agent."""
        child = _Child(self._number(), "", name, None, shown_and_kept(name, log_file))
        self._tasks[child.number] = (child, blob, dict(environment or {}))
        self._advance()
        return child.number

    def kill_task(self, task: int, grace_s: float = 0.0) -> None:
        """End a task; its TaskEnded still comes. One that has ended is left alone."""
        if task not in self._tasks:
            return
        child = self._tasks[task][0]
        if child.forked:
            self._links[child.node].tell({"do": "kill", "child": task, "grace_s": grace_s})
        else:
            self._end_task(child, "was stopped before it was started")

    # ---- events

    def events(self, timeout_s: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout_s``. None waits until there is one."""
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
        try:
            os.write(self._waker, b"w")
        except BlockingIOError:
            return

    def close(self) -> None:
        """End everything that still runs and let go of all resources. Idempotent; takes seconds at most."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self._door.close()
        for link in self._links.values():
            link.tell({"do": "close"})
        deadline = time.monotonic() + _CLOSE_S
        while self._links and time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())  # agents end their processes before they hang up
        for link in self._links.values():
            link.close()
        self._nodes.close()
        for sinks in self._outputs.values():
            _end_output(sinks)
        self._clean_up()
        self._selector.close()
        self._group = None
        self._links.clear()

    # ---- what happens

    def _post(self, work: Callable[[], None]) -> None:
        """Have something done by the thread of the engine."""
        self._posted.append(work)
        self._poke()

    def _poke(self) -> None:
        try:
            os.write(self._waker, b"p")
        except BlockingIOError:
            return

    def _wait(self, timeout_s: float | None) -> None:
        due = [until for _, until in self._starting.values()] + list(self._again.values())
        due += [link.heard + self._silence_s for link in self._links.values()]
        if self._group is not None and self._group.places is None:
            due.append(self._group.until)
        if due:
            left = max(0.0, min(due) - time.monotonic())
            timeout_s = left if timeout_s is None else min(left, timeout_s)
        now = time.monotonic()
        # Whoever was busy elsewhere has not listened: nobody's silence counts before he has.
        deaf = now - self._attended
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj == self._woken:
                if b"w" in os.read(self._woken, 1 << 16):
                    self._ready.append(Woken())
            elif self._selector.get_map().get(key.fd) is key:
                self._read(key.data)
        while self._posted:
            self._posted.popleft()()
        self._attended = time.monotonic()
        if deaf > BEAT_S:
            for link in self._links.values():
                link.heard = max(link.heard, now)
        if not self._closed:
            self._see_time()
            self._advance()

    def _see_time(self) -> None:
        now = time.monotonic()
        for link in list(self._links.values()):
            if now >= link.heard + self._silence_s:
                why = f"its agent has said nothing for {self._silence_s:.0f} s; it may be alive and cut off"
                self._lose(link, why, "unreachable")
        for node, (number, until) in list(self._starting.items()):
            if now >= until:
                self._failed(node, number, f"its agent did not connect within {_AGENT_S:.0f} s")

    def _read(self, link: AgentLink) -> None:
        messages = list(link.inbox.read())
        if not link.inbox.ended:
            link.heard = time.monotonic()  # a part of a large message is a sign of life too
        for message in messages:
            self._take(link, message)
        if link.inbox.ended and self._links.get(link.node) is link:
            why = "the connection to its agent ended: the node, or Ray's process of the agent there, is gone"
            self._lose(link, why, "node")

    def _take(self, link: AgentLink, message: Message) -> None:
        header = message.header
        on, child = header["on"], self._children.get(header.get("child", 0))
        if on == "here":
            self._meet(link, header)
        elif on == "probed":
            self._probed(link, header["why"])
        elif on == "listening":
            self._fork_all(header)
        elif on == "output":
            self._output(link, header["child"])[header["stream"]].feed(message.attachments[0])
        elif on == "closed":
            self._close_output(link, header["child"], header["stream"])
        elif child is None:
            return  # a beat, or of a process that was given up
        elif on == "started":
            if child.rank is not None:
                self._ready.append(Started(rank=child.rank, pid=header["pid"]))
        elif on == "message":
            passed = Message(header=header["header"], attachments=message.attachments)
            if child.rank is not None:
                self._ready.append(Received(rank=child.rank, message=passed))
            else:
                child.outcome = passed
                link.tell({"do": "limit", "child": child.number, "seconds": _TASK_END_S})
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
        words = "\n".join(line for line in child.sinks[1].tail if line.strip())
        detail = "\n".join(part for part in (why, words) if part)
        self._ready.append(
            Exited(rank=rank, exit_code=code, signal=number, detail=detail, node=child.where, reason=reason)
        )
        if not group.ranks:
            self._group = None

    def _end_task(self, child: _Child, how: str) -> None:
        self._tasks.pop(child.number, None)
        self._children.pop(child.number, None)
        outcome, result, error = child.outcome, None, None
        if outcome is None:
            words = "\n".join(child.sinks[1].tail)
            what = f"the process of {child.name} {how} before it had a result"
            error = TrainingError(what + (f":\n{words}" if words else ""))
        elif outcome.header["on"] == "failed":
            error = error_from_wire(outcome.header["error"], *outcome.attachments[:1])  # type: ignore[assignment]
        else:
            (result,) = outcome.attachments
        self._ready.append(TaskEnded(task=child.number, result=result, error=error))

    # ---- nodes and their agents

    def _on_nodes(self, event: NodeEvent) -> None:
        if self._closed:
            return
        if isinstance(event, Refused):
            self._ready.append(Unable(error=event.error))
        elif isinstance(event, PlacesChanged):
            self._places, self._missing = tuple(event.places), event.missing
            listed = {place.node for place in self._places}
            self._suspects &= listed
            self._barred &= listed
            self._again = {node: due for node, due in self._again.items() if node in listed}
            # One that is listed and not about to go any more stays after all; one that is gone was drained.
            self._drained = (self._drained | event.draining.keys()) - (listed - event.draining.keys())
            self._drain(event.draining)
        else:
            self._on_agent_failed(event)

    def _drain(self, draining: Mapping[str, float]) -> None:
        new = draining.keys() - self._draining
        self._draining = set(draining)
        group = self._group
        if group is None or not new:
            return
        ranks = tuple(rank for rank, child in group.ranks.items() if child.node in new)
        if ranks:
            soon = ", ".join(f"{short(node)} goes in {draining[node]:.0f} s" for node in sorted(new))
            self._ready.append(Draining(ranks=ranks, detail=soon))

    def _on_agent_failed(self, event: AgentFailed) -> None:
        node = self._calls.pop(event.number, None)
        link = self._links.get(node) if node is not None else None
        if node is None:
            return
        if link is not None and link.number == event.number:
            self._lose(link, event.why, "node")
        elif self._starting.get(node, (0, 0.0))[0] == event.number:
            self._failed(node, event.number, event.why)

    def _failed(self, node: str, number: int, why: str) -> None:
        """An agent came to nothing. Its node is tried again, and nothing is started there meanwhile."""
        _LOG.warning("no workers can be started on %s: %s", short(node), why)
        del self._starting[node]
        self._nodes.end(number)
        self._suspects.add(node)
        self._again[node] = time.monotonic() + _AGAIN_S
        self._give_up(node, f"workers cannot be started there: {why}", "node")

    def _lose(self, link: AgentLink, why: str, reason: Reason) -> None:
        """An agent is gone, and with it every process there, for all that we can know."""
        del self._links[link.node]
        self._selector.unregister(link)
        link.close()
        for key in [key for key in self._outputs if key[0] == link.node]:
            _end_output(self._outputs.pop(key))
        self._silent = {one for one in self._silent if one[0] != link.node}
        if not self._closed:
            self._nodes.end(link.number)
            self._nodes.doubt(link.node)
            self._suspects.add(link.node)
            self._give_up(link.node, why, reason)

    def _give_up(self, node: str, why: str, reason: Reason) -> None:
        group = self._group
        if node in self._drained:
            reason = "drained"
        for child in list(group.ranks.values()) if group is not None else ():
            if child.node == node:
                self._exit(child, why=why, reason=reason)
        for child, _, _ in list(self._tasks.values()):
            if child.node == node:
                self._end_task(child, f"is lost: {why}")

    def _launch(self, node: str) -> None:
        number = self._number()
        self._calls[number] = node
        self._starting[node] = (number, time.monotonic() + _AGENT_S)
        self._again.pop(node, None)
        self._nodes.launch(
            node, AgentCall(host=self._nodes.host, port=self._door.port, token=self._token, number=number)
        )

    def _join(self, number: int, sock: socket.socket) -> None:
        node = self._calls.get(number)
        if self._closed or node is None or self._starting.get(node, (0, 0.0))[0] != number:
            sock.close()  # too late: another one was started in its place
            return
        del self._starting[node]
        link = self._links[node] = AgentLink(node, number, sock)
        self._selector.register(link, selectors.EVENT_READ, link)

    def _meet(self, link: AgentLink, facts: dict[str, Any]) -> None:
        """Check what runs on a node, then whether it sees the storage."""
        link.facts = facts
        where = f"{short(link.node)} ({facts['host']})"
        ours = platform.python_version()
        problem = None
        if facts["holdfast"] != version():
            problem = f"{where} has Holdfast {facts['holdfast']}, the driver {version()}: install one version"
        elif facts["python"].rpartition(".")[0] != ours.rpartition(".")[0]:
            problem = f"{where} has Python {facts['python']}, the driver {ours}: functions do not travel between them"
        elif not facts["torch"]:
            problem = f"{where} has no torch: install it there, or keep that node out with label_selector or resources"
        if problem is not None:
            self._refuse(link, ConfigError(problem))
            return
        link.tell({"do": "prepare", "num_workers": sum(1 for place in self._places if place.node == link.node) or 1})
        if self._storage is None:
            self._probed(link, "")
        else:
            threading.Thread(target=self._probe, args=(link, self._storage), name="holdfast-probe", daemon=True).start()

    def _probe(self, link: AgentLink, storage: Storage) -> None:
        """Leave something in the storage and have the node look for it; in a thread."""
        marker = self._marker(link)
        self._markers.add(marker)
        try:
            storage.put(marker, b"Written by the driver; nodes look whether they see it.\n")
        except Exception as error:  # noqa: BLE001 - a thread edge; a storage that takes nothing fails by itself soon
            _LOG.warning("the storage was not tried from %s: %s", short(link.node), error)
            self._post(lambda: self._probed(link, ""))
            return
        told = {"storage": storage.describe(), "secrets": storage.secrets(), "marker": marker, "node": link.node}
        link.tell({"do": "probe", **told})

    def _probed(self, link: AgentLink, why: str) -> None:
        if self._storage is not None:
            self._remove(self._marker(link))
        if self._links.get(link.node) is not link:
            return  # it has been lost meanwhile
        if why and self._storage is not None:
            host = (link.facts or {}).get("host", "")
            error = ConfigError(
                f"storage_path: {self._storage.uri} is private to some machines: {short(link.node)} ({host}) does not "
                f"share it with the driver: {why}. Give a directory on a file system that all nodes mount, or an "
                "object store such as s3://bucket/path"
            )
            self._refuse(link, error)
            return
        link.ready = True
        self._suspects.discard(link.node)

    def _refuse(self, link: AgentLink, error: ConfigError) -> None:
        """A node cannot run workers: nothing is started, or, while a group trains, nothing is started there."""
        if self._group is None or not self._group.forked:
            self._ready.append(Unable(error=error))
            return
        _LOG.warning("no workers are started on a node: %s", error)
        self._barred.add(link.node)
        self._lose(link, str(error), "node")

    def _remove(self, marker: str) -> None:
        """Remove what a node was to see; in a thread, it may be slow."""
        if marker in self._markers and self._storage is not None:
            self._markers.discard(marker)
            thread = threading.Thread(target=_remove, args=(self._storage, marker), name="holdfast-probe", daemon=True)
            thread.start()
            self._cleaning.append(thread)

    def _clean_up(self) -> None:
        deadline = time.monotonic() + _CLOSE_S
        for marker in list(self._markers):
            self._remove(marker)
        for thread in self._cleaning:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _marker(self, link: AgentLink) -> str:
        return f"{PROBE}{self._token[:16]}/{link.number}"

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            for link in list(self._links.values()):
                link.tell({"do": "beat"})

    # ---- starting

    def _advance(self) -> None:
        """Go on with whatever waits for places, agents or answers."""
        now = time.monotonic()
        for node in sorted({place.node for place in self._places} - self._barred - self._draining):
            if node not in self._links and node not in self._starting and now >= self._again.get(node, 0.0):
                self._launch(node)
        self._tell_capacity()
        self._advance_tasks()
        group = self._group
        if group is None or group.forked:
            return
        if group.places is None:
            group.places = arrange(self._usable(), group.spec.num_workers)
            if group.places is None:
                if now >= group.until:
                    for child in list(group.ranks.values()):
                        self._exit(child, why="the places for it went away before it was started", reason="unplaced")
                return
            for place, placed in group.places:
                child = group.ranks[placed.rank]
                child.node, child.where = place.node, short(place.node, place.address)
                for sink in child.sinks:
                    sink.prefix = f"({child.name}, {short(place.node)}) "
                self._ready.append(placed)
        nodes = {place.node for place, _ in group.places}
        whole = len(group.ranks) == group.spec.num_workers
        if whole and not group.asked_port and all(node in self._links and self._links[node].ready for node in nodes):
            group.asked_port = True
            self._links[group.ranks[0].node].tell({"do": "listen", "group": group.number})

    def _usable(self) -> list[NodePlace]:
        out = self._suspects | self._draining | self._barred
        return [place for place in self._places if place.node not in out]

    def _tell_capacity(self) -> None:
        if not self._places and not self._missing:
            return  # nothing is known yet
        found = self._usable()
        detail = f"there is room for {len(found)}"
        lost = sorted({short(p.node, p.address) for p in self._places if p.node in self._suspects})
        detail += f"; {', '.join(lost)} is lost" if lost else ""
        going = sorted({short(p.node, p.address) for p in self._places if p.node in self._draining})
        detail += f"; {', '.join(going)} is about to go" if going else ""
        detail += f"; {self._missing}" if self._missing else ""
        told = Capacity(num_workers=len(found), detail=detail)
        if told != self._told:
            self._told = told
            self._ready.append(told)

    def _fork_all(self, told: Mapping[str, Any]) -> None:
        group = self._group
        if group is None or group.places is None or group.number != told["group"] or group.forked:
            return
        if len(group.ranks) < group.spec.num_workers:
            return  # some are lost already: the controller kills the others
        group.forked = True
        travel = {name: value for name, value in os.environ.items() if name.startswith(_TRAVEL)}
        for place, placed in group.places:
            gpus = [gpu for other, _ in group.places if other.node == place.node for gpu in other.gpus]
            variables = rank_environment(group.spec, placed, master=(told["host"], told["port"]), gpus=gpus)
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
        waiting = [one for one in self._tasks.values() if not one[0].forked]
        node = min((node for node, link in self._links.items() if link.ready), default=None)
        for child, blob, environment in waiting if node is not None else ():
            child.node = node or ""
            travel = {name: value for name, value in os.environ.items() if name.startswith(_TRAVEL)}
            self._fork(child, _TASK, {**travel, **environment}, listen=False, size=1, gpu=True)
            self._pass_on(child, {"do": "task"}, [blob])

    def _fork(
        self, child: _Child, entry: str, environment: Mapping[str, str], *, listen: bool, size: int, gpu: bool
    ) -> None:
        child.forked = True
        self._children[child.number] = child
        self._outputs[child.node, child.number] = child.sinks
        told = {"child": child.number, "name": child.name, "entry": entry, "environment": dict(environment)}
        told |= {"listen": listen, "local_size": size, "use_gpu": gpu, "arguments": list(sys.argv)}
        self._links[child.node].tell({"do": "fork", **told})
        for header, attachments in self._waiting.pop(child.number, ()):
            self._pass_on(child, header, attachments)

    def _pass_on(self, child: _Child, header: dict[str, Any], attachments: Sequence[bytes]) -> None:
        self._links[child.node].pass_on(child.number, header, attachments)

    def _output(self, link: AgentLink, number: int) -> tuple[LogText, LogText]:
        key = (link.node, number)
        if key not in self._outputs:  # of the agent's own zygote
            self._outputs[key] = shown_and_kept(f"workers on {short(link.node)}", None)
        return self._outputs[key]

    def _close_output(self, link: AgentLink, number: int, stream: int) -> None:
        """End one stream; processes that a worker has started may hold it longer than the worker lives."""
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


def _remove(storage: Storage, marker: str) -> None:
    try:
        storage.delete(marker)
        storage.tidy(marker.rpartition("/")[0])
    except Exception as error:  # noqa: BLE001 - a thread edge: it is small, and the next start removes nothing of others
        _LOG.debug("the marker of a probe is left: %s", error)
