"""An agent on each node that is used, or may be soon: started, checked, watched, replaced. No groups, no workers.

The connections to them are here too: accepting them, messages, and when an agent counts as gone. `Nodes` is what that
needs of a cluster: it finds places for workers, and starts agents.
"""

from __future__ import annotations

import contextlib
import platform
import re
import secrets
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import xxhash

from holdfast._log import get_logger
from holdfast._version import __version__
from holdfast.errors import ConfigError, HoldfastError
from holdfast.run.names import PROBE
from holdfast.storage.base import Storage
from holdfast.writer.frames import Channel, Message
from holdfast.writer.ranks.link import ANSWER_BYTES, make_challenge, make_proof, read_answer

from ..engine import Capacity, Reason, node_name
from .agent import BEAT_S, AgentCall, connect

_LOG = get_logger("trainers.function")
_HELLO_S = 10.0
_PAUSE_S = 0.1
_STRANGERS = 256
_KEEP = 8
_LARGE = 64 << 10
_WORDS = b"Written by the driver; nodes look whether they see it.\n"
_CLEAN_S = 5.0
_PROBE_AGAIN_S = 2.0
_TRIALS = 4  # an agent looks for 10 s
_AGENT_S = 120.0  # to start an agent
_AGAIN_S = 5.0
_AGENT_SILENCE_S = 120.0
_MISSING = re.compile(r"No module named '([^']+)'")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """Room for one worker.

    Attributes:
        node: id of the node.
        address: of the node, for people.
        number: of the place among all; two places never share a number.
        gpus: ids of its accelerators on that node.
        extra: given back when no group uses it, for there are enough others.
    """

    node: str
    address: str = ""
    number: int = 0
    gpus: tuple[str, ...] = ()
    extra: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacesChanged:
    """The places for workers now.

    Attributes:
        places: all of them.
        missing: why there are not more, for people.
        draining: nodes that are about to go: seconds until then, when that was seen. Nothing is started there any more.
        spares: nodes without a place, on which an agent may get ready for a place that comes later.
    """

    places: Sequence[NodePlace]
    missing: str = ""
    draining: Mapping[str, float] = field(default_factory=dict)
    spares: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFailed:
    """An agent could not be started, or has ended; if it was connected, the connection ends too.

    Attributes:
        number: of the agent.
        why: for people.
        module: name of a module that cannot be imported on its node; "" where that is not the cause.
    """

    number: int
    why: str
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No worker can run on this cluster at all."""

    error: BaseException


NodeEvent: TypeAlias = PlacesChanged | AgentFailed | Refused


class Nodes(Protocol):
    """Finds places and starts agents. `post` is called from any thread; no method waits for long."""

    @property
    def host(self) -> str:
        """Address of this machine that nodes can connect to."""

    def open(self, post: Callable[[NodeEvent], Any]) -> None:
        """Begin to look for places; PlacesChanged comes first of all, and whenever they change."""

    def launch(self, node: str, call: AgentCall) -> None:
        """Start an agent on a node. It connects by itself, or AgentFailed comes."""

    def doubt(self, node: str) -> None:
        """Check whether a node still answers: the connection to its agent has ended."""

    def refuse(self, node: str) -> None:
        """Replace the places on this node by others: no worker can run there."""

    def use(self, numbers: frozenset[int]) -> None:
        """Note the places of the running group; others may be given back if they are too many."""

    def end(self, number: int) -> None:
        """End an agent, whatever it does. Idempotent."""

    def close(self) -> None:
        """End all agents and give all places back. Idempotent, bounded."""


class AgentLink:
    """An agent, as long as it is connected.

    Attributes:
        node: where it runs.
        number: of the agent.
        heard: when it last sent something, as of `time.monotonic`.
        facts: what it reported about its node; None before.
        ready: it sees the storage and may run workers.
    """

    def __init__(self, node: str, number: int, sock: socket.socket) -> None:
        self.node, self.number = node, number
        self.channel = Channel(sock, "an agent")
        self._kept: OrderedDict[str, None] = OrderedDict()
        self.heard = time.monotonic()
        self.facts: dict[str, Any] | None = None
        self.ready = False

    def fileno(self) -> int:
        """Descriptor for a selector."""
        return self.channel.fileno()

    def tell(self, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send without blocking; dropped if the agent is gone, which the reading side notices."""
        try:
            self.channel.send(header, attachments)
        except OSError as error:
            _LOG.debug("the agent on %s takes nothing: %s", self.node, error)

    def pass_on(self, child: int, header: dict[str, Any], attachments: Sequence[bytes]) -> None:
        """Send a message to a process of this agent; a large attachment that several processes get travels once."""
        parts: list[str | None] = []
        rest: list[bytes] = []
        for item in attachments:
            key = xxhash.xxh3_128_hexdigest(item) if len(item) >= _LARGE else None
            parts.append(key)
            if key is None:
                rest.append(item)
            elif key not in self._kept:
                self.tell({"do": "keep", "key": key}, [item])
                self._kept[key] = None
                if len(self._kept) > _KEEP:
                    self._kept.popitem(last=False)
        self.tell({"do": "send", "child": child, "header": header, "parts": parts}, rest)

    def close(self) -> None:
        """Close the connection: the agent ends. Idempotent."""
        self.channel.close()


class AgentListener:
    """Listens for agents and accepts those that know the token.

    Args:
        host: address to listen on.
        token: of this run.
        welcome: takes the number of an agent and its socket; called on another thread.
    """

    def __init__(self, host: str, token: str, welcome: Callable[[int, socket.socket], None]) -> None:
        self._token, self._welcome = token, welcome
        self._closed = False
        self._room = threading.BoundedSemaphore(_STRANGERS)
        try:
            self._listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise HoldfastError(f"cannot listen on {host} for the nodes of the cluster: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="holdfast-agents", daemon=True).start()

    def close(self) -> None:
        """Accept no more agents. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                _LOG.warning("an agent could not connect: %s", error)  # out of descriptors, say: it comes again
                time.sleep(_PAUSE_S)
                continue
            if not self._room.acquire(blocking=False):
                sock.close()  # more than so many unproven connections are not agents
                continue
            threading.Thread(target=self._greet, args=(sock,), name="holdfast-hello", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        """Check that the other side knows the token. Nothing is parsed before that."""
        deadline = time.monotonic() + _HELLO_S
        try:
            sock.settimeout(_HELLO_S)
            challenge = make_challenge()
            sock.sendall(challenge)
            answer = b""
            while len(answer) < ANSWER_BYTES and time.monotonic() < deadline:
                more = sock.recv(ANSWER_BYTES - len(answer))
                if not more:
                    break
                answer += more
            number = read_answer(self._token, challenge, answer) if len(answer) == ANSWER_BYTES else None
            if number is None or self._closed:
                sock.close()
                return
            sock.sendall(make_proof(self._token, challenge, answer))
            self._welcome(number, connect(sock))
        except OSError:
            sock.close()
        finally:
            self._room.release()


class Agents:
    """Keeps an agent on every node that has places, and on spare nodes once workers have run.

    Every method belongs to the engine's thread. A node on which no worker can run (no torch, another version, a
    package missing, a storage of its own) is an error as long as nothing has run; later it is left out.

    Args:
        nodes: finds nodes and starts agents; closed by `close`.
        storage: root of the run, which every node has to see; None: not checked.
        selector: of the engine, which calls `read` with the link that is ready.
        post: runs a function on the engine's thread; callable from any thread.
        on_message: takes what an agent says about the processes on its node.
        on_lost: takes a node on which nothing runs any more, as far as is known; why, for people and as a `Reason`.
        on_leaving: takes nodes that are announced to go, with the seconds until then.
        on_unfit: takes the error with which the run cannot go on, or not begin.
        silence_s: an agent that sends nothing for so long is given up.

    Attributes:
        trained: workers have been started once.
    """

    def __init__(
        self,
        nodes: Nodes,
        storage: Storage | None,
        *,
        selector: selectors.BaseSelector,
        post: Callable[[Callable[[], None]], None],
        on_message: Callable[[AgentLink, Message], None],
        on_lost: Callable[[str, str, Reason], None],
        on_leaving: Callable[[Mapping[str, float]], None],
        on_unfit: Callable[[BaseException], None],
        silence_s: float,
    ) -> None:
        self._nodes, self._selector, self._post = nodes, selector, post
        self._on_message, self._on_lost, self._on_leaving, self._on_unfit = on_message, on_lost, on_leaving, on_unfit
        self._silence_s = silence_s
        self.trained = False
        self._closed = False
        self._places: tuple[NodePlace, ...] = ()
        self._spares: tuple[str, ...] = ()
        self._missing = ""
        self._draining: set[str] = set()
        self._drained: set[str] = set()  # the same, until the node stays after all or another node has its places
        self._barred: set[str] = set()  # nodes that cannot run workers, found out while a run went on
        self._suspects: dict[str, str] = {}  # nodes whose agent is gone, until another one is connected -> why it is
        self._links: dict[str, AgentLink] = {}
        self._calls: dict[int, str] = {}  # number of an agent that was started -> node
        self._starting: dict[str, tuple[int, float]] = {}  # node -> agent that has not connected, and its limit
        self._again: dict[str, float] = {}  # node -> when to start another agent
        self._number = 0
        self._token = secrets.token_hex(32)
        self._probe = None if storage is None else StorageProbe(storage, self._token[:16])
        self._listener = AgentListener(
            nodes.host, self._token, lambda number, sock: post(lambda: self._join(number, sock))
        )
        self._stop = threading.Event()
        threading.Thread(target=self._beat, name="holdfast-beat", daemon=True).start()
        nodes.open(lambda event: post(lambda: self._on_nodes(event)))

    # ---- what the engine asks

    @property
    def is_empty(self) -> bool:
        """Whether no agent is connected."""
        return not self._links

    def usable(self) -> list[NodePlace]:
        """Return the places that workers can be started on, now or when their node's agent is ready."""
        out = self._suspects.keys() | self._draining | self._barred
        return [place for place in self._places if place.node not in out]

    def ready(self, node: str) -> AgentLink | None:
        """Return the agent of a node if it can start workers."""
        link = self._links.get(node)
        return link if link is not None and link.ready else None

    def first_ready(self) -> AgentLink | None:
        """Return the first agent, by node, that can start processes on our places; None if there is none."""
        found = (self.ready(node) for node in sorted({place.node for place in self._places}))
        return next((link for link in found if link is not None), None)

    def tell_to(self, node: str, header: dict[str, Any]) -> None:
        """Send a message to a node's agent, if it is connected."""
        if node in self._links:
            self._links[node].tell(header)

    def give_up(self) -> None:
        """Have every agent stop what it finishes for workers that have ended: a group begins."""
        for link in self._links.values():
            if link.ready:
                link.tell({"do": "give_up"})

    def capacity(self) -> Capacity | None:
        """Return how many workers there is room for; None: not known yet."""
        if not self._places and not self._missing:
            return None
        found = self.usable()
        detail = f"there is room for {len(found)}"
        lost = {node_name(p.node, p.address): self._suspects[p.node] for p in self._places if p.node in self._suspects}
        detail += "".join(f"; {node} is lost ({why})" for node, why in sorted(lost.items()))
        going = sorted({node_name(p.node, p.address) for p in self._places if p.node in self._draining})
        detail += f"; {', '.join(going)} is about to go" if going else ""
        barred = sorted(node_name(node) for node in self._barred)
        detail += f"; no workers can run on {', '.join(barred)}" if barred else ""
        detail += f"; {self._missing}" if self._missing else ""
        ready = sum(1 for place in found if self.ready(place.node) is not None)
        return Capacity(num_workers=len(found), num_ready=ready, detail=detail)

    def use(self, places: Collection[NodePlace]) -> None:
        """Note which places a group has; empty: there is no group."""
        self._nodes.use(frozenset(place.number for place in places))

    def bar(self, node: str, error: ConfigError) -> None:
        """Start no worker on a node: it cannot run them. Ends the run if no worker has run anywhere yet."""
        if not self.trained:
            self._on_unfit(error)
            return
        if node in self._barred:
            return
        _LOG.warning("no workers are started on a node: %s", error)
        self._barred.add(node)
        self._drop_agent(node)
        self._nodes.refuse(node)
        self._give_up(node, str(error), "unplaced")

    def lacks(self, node: str, module: str) -> None:
        """Start no worker on a node where this module cannot be imported; see `bar`."""
        address = next((place.address for place in self._places if place.node == node), "")
        where = node_name(node, address)
        error = ConfigError(
            f"{where} cannot run workers: No module named '{module}'; every node needs the packages of the driver"
        )
        self.bar(node, error)

    def advance(self, busy: Collection[str]) -> None:
        """Start agents where they are wanted; end those on nodes that are neither listed nor busy."""
        if self._closed:
            return
        now = time.monotonic()
        listed = {place.node for place in self._places} | set(self._spares if self.trained else ())
        for node in sorted(listed - self._barred - self._draining):
            if node not in self._links and node not in self._starting and now >= self._again.get(node, 0.0):
                self._launch(node)
        for node in [*self._links, *self._starting]:
            if node not in listed and node not in busy:
                self._drop_agent(node)
                self._give_up(node, "its agent is not needed any more", "node")

    # ---- time

    def due(self) -> list[float]:
        """Return when `see_time` or `advance` has something to do if nothing happens."""
        due = [until for _, until in self._starting.values()]
        due += [until for node, until in self._again.items() if node not in self._barred | self._draining]
        return due + [link.heard + self._silence_s for link in self._links.values()]

    def see_time(self, read_at: float) -> None:
        """Give up agents that are silent, or have not come.

        Args:
            read_at: silence counts from then on only: this thread was busy before, and has not read.
        """
        now = time.monotonic()
        for link in list(self._links.values()):
            link.heard = max(link.heard, read_at)
            if now >= link.heard + self._silence_s:
                why = f"its agent has said nothing for {self._silence_s:.0f} s; it may be alive and cut off"
                self._lose(link, why, "unreachable")
        for node, (number, until) in list(self._starting.items()):
            if now >= until:
                self._failed(node, number, f"its agent did not connect within {_AGENT_S:.0f} s")

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            for link in list(self._links.values()):
                link.tell({"do": "beat"})

    # ---- what agents say

    def read(self, link: AgentLink) -> None:
        """Take what an agent has sent, or its end."""
        messages = list(link.channel.read())
        if not link.channel.ended:
            link.heard = time.monotonic()  # a part of a large message is a sign of life too
        for message in messages:
            if self._links.get(link.node) is link:  # not given up for an earlier message
                self._take(link, message)
        if link.channel.ended and self._links.get(link.node) is link:
            why = "the connection to its agent ended: the node, or Ray's process of the agent there, is gone"
            self._lose(link, link.channel.broken or why, "node")

    def _take(self, link: AgentLink, message: Message) -> None:
        on = message.header["on"]
        if on == "here":
            self._meet(link, message.header)
        elif on == "probed":
            self._probed(link, message.header["why"])
        elif on != "beat":
            self._on_message(link, message)

    def _meet(self, link: AgentLink, facts: dict[str, Any]) -> None:
        """Check the versions on a node, then whether it sees the storage."""
        link.facts = facts
        where = f"{node_name(link.node)} ({facts['host']})"
        ours = platform.python_version()
        problem = None
        if facts["holdfast"] != __version__:
            problem = f"{where} has Holdfast {facts['holdfast']}, the driver {__version__}: install one version"
        elif facts["python"].rpartition(".")[0] != ours.rpartition(".")[0]:
            problem = f"{where} has Python {facts['python']}, the driver {ours}: functions do not travel between them"
        elif not facts["torch"]:
            problem = f"{where} has no torch: install it there, or keep that node out with label_selector or resources"
        if problem is not None:
            self.bar(link.node, ConfigError(problem))
            return
        link.tell({"do": "prepare", "num_workers": sum(1 for place in self._places if place.node == link.node) or 1})
        if self._probe is None:
            self._probed(link, "")
        else:
            self._probe.ask(link, lambda: self._post(lambda: self._probed(link, "")))

    def _probed(self, link: AgentLink, why: str) -> None:
        if self._probe is not None:
            self._probe.answered(link)
        if self._links.get(link.node) is not link:
            return  # the agent was lost meanwhile
        if why and self._probe is not None:
            where = f"{node_name(link.node)} ({(link.facts or {}).get('host', '')})"
            error = ConfigError(
                f"storage_path: {self._probe.uri} is private to some machines: {where} does not share it with the "
                f"driver: {why}. Give a directory on a file system that all nodes mount, or an object store such as "
                "s3://bucket/path"
            )
            self.bar(link.node, error)
            return
        link.ready = True
        self._suspects.pop(link.node, None)

    # ---- what nodes do

    def _on_nodes(self, event: NodeEvent) -> None:
        if self._closed:
            return
        if isinstance(event, Refused):
            self._on_unfit(event.error)
        elif isinstance(event, PlacesChanged):
            self._places, self._missing, self._spares = tuple(event.places), event.missing, tuple(event.spares)
            placed = {place.node for place in self._places}
            listed = placed | set(self._spares)
            self._suspects = {node: why for node, why in self._suspects.items() if node in listed}
            self._again = {node: due for node, due in self._again.items() if node in listed}
            # A node that is listed and not about to go any more stays after all; a node that is gone was drained.
            self._drained = (self._drained | event.draining.keys()) - (placed - event.draining.keys())
            new = event.draining.keys() - self._draining
            self._draining = set(event.draining)
            if new:
                self._on_leaving({node: event.draining[node] for node in new})
        else:
            self._on_agent_failed(event)

    def _on_agent_failed(self, event: AgentFailed) -> None:
        node = self._calls.pop(event.number, None)
        if node is None:
            return
        link = self._links.get(node)
        starts = self._starting.get(node, (0, 0.0))[0] == event.number
        if event.module and (starts or (link is not None and link.number == event.number)):
            self.lacks(node, event.module)
        elif link is not None and link.number == event.number:
            self._lose(link, event.why, "node")
        elif starts:
            self._failed(node, event.number, event.why)

    # ---- a single agent

    def _launch(self, node: str) -> None:
        self._number += 1
        self._calls[self._number] = node
        self._starting[node] = (self._number, time.monotonic() + _AGENT_S)
        self._again.pop(node, None)
        call = AgentCall(
            host=self._nodes.host,
            port=self._listener.port,
            token=self._token,
            number=self._number,
            silence_s=max(_AGENT_SILENCE_S, 2 * self._silence_s),  # the agent is the last to give up
        )
        self._nodes.launch(node, call)

    def _join(self, number: int, sock: socket.socket) -> None:
        node = self._calls.get(number)
        if self._closed or node is None or self._starting.get(node, (0, 0.0))[0] != number:
            sock.close()  # too late: another agent was started in its place
            return
        del self._starting[node]
        link = self._links[node] = AgentLink(node, number, sock)
        self._selector.register(link, selectors.EVENT_READ, link)

    def _failed(self, node: str, number: int, why: str) -> None:
        """Note that an agent did not start. Its node is tried again, and no worker is started there meanwhile."""
        _LOG.warning("no workers can be started on %s: %s", node_name(node), why)
        del self._starting[node]
        self._nodes.end(number)
        self._suspects[node] = why
        self._again[node] = time.monotonic() + _AGAIN_S
        self._give_up(node, f"workers cannot be started there: {why}", "node")

    def _lose(self, link: AgentLink, why: str, reason: Reason) -> None:
        """Give up an agent that is gone, and every process on its node with it."""
        self._drop_agent(link.node)
        if not self._closed:
            self._nodes.doubt(link.node)
            self._suspects[link.node] = why
            self._give_up(link.node, why, reason)

    def _drop_agent(self, node: str) -> None:
        """End the agent of a node, whether it is starting or connected."""
        number, _ = self._starting.pop(node, (0, 0.0))
        link = self._links.pop(node, None)
        if link is not None:
            number = link.number
            self._selector.unregister(link)
            link.close()
        if number and not self._closed:
            self._calls.pop(number, None)
            self._nodes.end(number)

    def _give_up(self, node: str, why: str, reason: Reason) -> None:
        self._on_lost(node, why, "drained" if node in self._drained else reason)

    # ---- the end

    def hang_up(self) -> None:
        """Have all agents end their processes, and accept no more agents; `is_empty` when they have done it."""
        self._closed = True
        self._stop.set()
        self._listener.close()
        for link in self._links.values():
            link.tell({"do": "close"})

    def close(self) -> None:
        """Let go of all agents and nodes, whether they have ended or not. Bounded."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._nodes.close()
        if self._probe is not None:
            self._probe.close()


class StorageProbe:
    """Leaves a file for each agent and removes it afterwards, in threads: a storage may be slow.

    Args:
        storage: root of the run.
        ident: of this driver among all that probe the same run.

    Attributes:
        uri: of the storage, for people.
    """

    def __init__(self, storage: Storage, ident: str) -> None:
        self._storage, self._ident, self.uri = storage, ident, storage.uri
        self._markers: set[str] = set()
        self._cleaning: list[threading.Thread] = []

    def ask(self, link: AgentLink, untried: Callable[[], None]) -> None:
        """Have an agent look for the file; it answers by itself. ``untried`` is called if it was not written."""
        thread = threading.Thread(target=self._ask, args=(link, untried), name="holdfast-probe", daemon=True)
        thread.start()

    def _ask(self, link: AgentLink, untried: Callable[[], None]) -> None:
        marker = self._marker(link)
        self._markers.add(marker)
        try:
            self._storage.put(marker, _WORDS)
        except Exception as error:  # noqa: BLE001 - a thread edge; a storage that takes nothing fails by itself soon
            _LOG.warning("the storage was not tried from %s: %s", node_name(link.node), error)
            untried()
            return
        where = {"storage": self._storage.describe(), "secrets": self._storage.secrets()}
        link.tell({"do": "probe", **where, "marker": marker, "node": link.node})
        # An attempt that begins now sweeps remains of earlier attempts, and this file with them.
        for _ in range(_TRIALS):
            time.sleep(_PROBE_AGAIN_S)
            if marker not in self._markers:
                return
            with contextlib.suppress(HoldfastError):
                self._storage.put(marker, _WORDS)
            if marker not in self._markers:  # answered meanwhile
                self._delete(marker)
                return

    def answered(self, link: AgentLink) -> None:
        """Remove the file of an agent that has answered."""
        self._remove(self._marker(link))

    def close(self) -> None:
        """Remove the files that are left. Bounded."""
        deadline = time.monotonic() + _CLEAN_S
        for marker in list(self._markers):
            self._remove(marker)
        for thread in self._cleaning:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _remove(self, marker: str) -> None:
        if marker in self._markers:
            self._markers.discard(marker)
            thread = threading.Thread(target=self._delete, args=(marker,), name="holdfast-probe", daemon=True)
            thread.start()
            self._cleaning.append(thread)

    def _delete(self, marker: str) -> None:
        try:
            self._storage.delete(marker)
            self._storage.tidy(marker.rpartition("/")[0])
        except Exception as error:  # noqa: BLE001 - a thread edge: it is small, and the next start removes nothing of others
            _LOG.debug("the marker of a probe is left: %s", error)

    def _marker(self, link: AgentLink) -> str:
        return f"{PROBE}{self._ident}/{link.number}"


def missing_module(words: str) -> str:
    """Return the module that could not be imported, from an error's text; "" if it has another cause."""
    found = _MISSING.findall(words)
    return found[-1] if found else ""
