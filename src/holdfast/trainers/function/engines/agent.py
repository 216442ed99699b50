"""The agent of a node: runs workers there with a supervisor and a zygote of its own, as the driver asks over TCP.

It ends, with everything it started, when the connection to the driver ends or is silent for long.

Driver to agent: {"do": "probe" | "prepare" | "listen" | "fork" | "keep" | "send" | "kill" | "limit" | "give_up" |
"beat" | "close"}. Agent to driver: {"on": "here" | "probed" | "listening" | "started" | "message" | "ended" |
"output" | "closed" | "beat"}. ``child`` in a message is the driver's number of a process.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.util
import os
import platform
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast._version import __version__
from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage
from holdfast.storage.resolve import from_description
from holdfast.writer.frames import Channel, Message
from holdfast.writer.ranks.link import CHALLENGE_BYTES, PROOF_BYTES, make_answer, make_proof

from ..handoff import Unfinished
from .supervisor import Child, Supervisor, threads_for

BEAT_S = 2.0
_CONNECT_S = 30.0
_KEEP = 8  # both sides count in the same way
_HOLD_S = 1.0
_SEEN_S = 10.0  # for a file that the driver has just written, on a network file system
# What Ray sets for its own worker is not meant for ours.
_NOT_OURS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "RAY_JOB_ID", "RAY_RAYLET_PID")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """The arguments of an agent; `holdfast.trainers.function.engines.agent.run_agent` takes it.

    Attributes:
        host: where the driver listens.
        port: of the driver.
        token: proves that agent and driver belong together.
        number: of this agent among all that were ever started.
        silence_s: a driver that says nothing for so long is gone.
    """

    host: str
    port: int
    token: str = field(repr=False)
    number: int
    silence_s: float = 120.0


def run_agent(call: AgentCall) -> str:
    """Run the agent of this node until the driver leaves; return why it ended."""
    return Agent(join_cluster(call), silence_s=call.silence_s).serve()


def join_cluster(call: AgentCall) -> socket.socket:
    """Connect to the driver; both sides have shown that they know the token when this returns.

    Raises:
        HoldfastError: the driver cannot be reached, or is of another version or run.
    """
    try:
        sock = socket.create_connection((call.host, call.port), timeout=_CONNECT_S)
    except OSError as error:
        raise HoldfastError(
            f"the driver at {call.host}:{call.port} cannot be reached from this node: {error}; open its ports to the "
            "nodes of the cluster"
        ) from error
    challenge = _read(sock, CHALLENGE_BYTES)
    answer = make_answer(call.token, challenge, call.number)
    if answer is None:
        raise HoldfastError(f"{call.host}:{call.port} is no driver of this version of Holdfast")
    sock.sendall(answer)
    if not hmac.compare_digest(_read(sock, PROOF_BYTES), make_proof(call.token, challenge, answer)):
        raise HoldfastError(f"{call.host}:{call.port} does not know the token of this run")
    return connect(sock)


def connect(sock: socket.socket) -> socket.socket:
    """Set a connection between agent and driver up for messages."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Agent:
    """Serves a driver over its connection.

    Args:
        sock: connected and proven.
        silence_s: a driver that says nothing for so long is gone.
    """

    def __init__(self, sock: socket.socket, *, silence_s: float) -> None:
        self._sock, self._silence_s = sock, silence_s
        self._channel = Channel(sock, "the driver")
        self._supervisor = Supervisor(
            on_start=self._on_start,
            on_message=self._on_message,
            on_dying=lambda child: self._tell({"on": "dying", "child": child.number}),
            on_end=self._on_end,
            zygote_sinks=(_Sink(self._tell, 0, 0), _Sink(self._tell, 0, 1)),
        )
        self._supervisor.watch(sock.fileno(), self._read)
        self._children: dict[int, Child] = {}
        self._kept: dict[str, bytes] = {}
        self._unfinished = Unfinished(
            lambda child, header, parts: self._tell({"on": "message", "child": child, "header": header}, parts),
            lambda line: self._tell({"on": "output", "child": 0, "stream": 1}, (f"{line}\n".encode(),)),
        )
        self._listener: socket.socket | None = None
        self._heard = time.monotonic()
        self._ended: str | None = None
        self._does: dict[str, Callable[[Message], None]] = {
            "probe": self._probe,
            "prepare": lambda message: self._supervisor.prepare(message.header["num_workers"]),
            "listen": self._listen,
            "fork": self._fork,
            "keep": self._keep,
            "send": self._send,
            "kill": self._kill,
            "limit": self._limit,
            "give_up": lambda _: self._unfinished.give_up(),
            "beat": lambda _: None,
            "close": lambda _: self._end("the driver closed it"),
        }

    def serve(self) -> str:
        """Serve until the driver leaves or is silent; return why it ended. Nothing that it started is left then."""
        self._tell(_facts())
        next_beat = time.monotonic() + BEAT_S
        try:
            while self._ended is None:
                now = time.monotonic()
                if now >= next_beat:
                    self._tell({"on": "beat"})
                    next_beat = now + BEAT_S
                self._supervisor.wait(max(0.0, next_beat - now))
                if time.monotonic() > self._heard + self._silence_s:
                    self._end(f"the driver has said nothing for {self._silence_s:.0f} s")
        finally:
            self._supervisor.close()
            self._unfinished.close()
            if self._listener is not None:
                self._listener.close()
            self._channel.flush(_HOLD_S)
            self._channel.close()
        return self._ended or "an error"

    # ---- what the driver says

    def _read(self) -> None:
        for message in self._channel.read():
            self._heard = time.monotonic()
            if self._ended is None:
                self._does[message.header["do"]](message)
        if self._channel.ended:
            self._end("the driver is gone")

    def _end(self, why: str) -> None:
        self._ended = self._ended or why

    def _probe(self, message: Message) -> None:
        """Report whether this node sees the run's storage as the driver does; in a thread, the storage may be slow."""
        question = message.header

        def work() -> None:
            try:
                storage = self._unfinished.storage = from_description(question["storage"], question["secrets"])
                why = look_at_storage(storage, marker=question["marker"], node=question["node"])
            except Exception as error:  # noqa: BLE001 - a thread edge: the driver hears of it
                why = f"{type(error).__name__}: {error}"
            self._tell({"on": "probed", "why": why})

        threading.Thread(target=work, name="holdfast-probe", daemon=True).start()

    def _listen(self, message: Message) -> None:
        """Bind the port that rank 0 will listen on, at the address by which the driver is reached."""
        if self._listener is not None:
            self._listener.close()
        host = self._sock.getsockname()[0]
        self._listener = socket.create_server((host, 0), family=self._sock.family, backlog=1024)
        answer = {"on": "listening", "group": message.header["group"], "host": host}
        self._tell({**answer, "port": self._listener.getsockname()[1]})

    def _fork(self, message: Message) -> None:
        request = message.header
        number = request["child"]
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
        environment["OMP_NUM_THREADS"] = str(threads_for(request["local_size"]))
        try:
            self._supervisor.prepare(request["local_size"])
            self._children[number] = self._supervisor.fork(
                number,
                request["name"],
                request["entry"],
                environment={**environment, **request["environment"]},
                sinks=(_Sink(self._tell, number, 0), _Sink(self._tell, number, 1)),
                arguments=request["arguments"],
                listener=self._listener if request["listen"] else None,
                use_gpu=request["use_gpu"],
            )
        except (HoldfastError, OSError) as error:
            why = f"it could not be started: {error}; check the limits on processes and open files of the node"
            self._tell({"on": "ended", "child": number, "status": None, "why": why})
            return
        if request["listen"] and self._listener is not None:
            self._listener.close()  # the worker has it
            self._listener = None

    def _keep(self, message: Message) -> None:
        (self._kept[message.header["key"]],) = message.attachments
        while len(self._kept) > _KEEP:
            del self._kept[next(iter(self._kept))]

    def _send(self, message: Message) -> None:
        child = self._children.get(message.header["child"])
        if child is not None:
            given = iter(message.attachments)
            parts = [next(given) if key is None else self._kept[key] for key in message.header["parts"]]
            child.send(message.header["header"], parts)

    def _kill(self, message: Message) -> None:
        child = self._children.get(message.header["child"])
        if child is not None:
            self._supervisor.kill(child, message.header["grace_s"])

    def _limit(self, message: Message) -> None:
        child = self._children.get(message.header["child"])
        if child is not None:
            self._supervisor.limit(child, message.header["seconds"])

    # ---- what children do

    def _on_start(self, child: Child) -> None:
        self._tell({"on": "started", "child": child.number, "pid": child.pid})

    def _on_message(self, child: Child, message: Message) -> None:
        self._unfinished.note(child.number, message.header)
        self._tell({"on": "message", "child": child.number, "header": message.header}, message.attachments)

    def _on_end(self, child: Child, why: str) -> None:
        del self._children[child.number]
        self._tell({"on": "ended", "child": child.number, "status": child.status, "why": why})
        self._unfinished.end(child.number, finish=not child.killed)

    def _tell(self, header: dict[str, Any], attachments: tuple[bytes, ...] = ()) -> None:
        with contextlib.suppress(OSError):  # the driver is gone: the next read finds that
            self._channel.send(header, attachments)
            if header["on"] == "output" and not self._channel.flush(0):
                self._channel.flush(_HOLD_S)  # a process that prints faster than the network sends has to wait


class _Sink:
    """Sends the output of a stream to the driver."""

    def __init__(self, tell: Callable[..., None], child: int, stream: int) -> None:
        self._tell, self._child, self._stream = tell, child, stream
        self.tail: deque[str] = deque(maxlen=20)

    def feed(self, data: bytes) -> None:
        if data:
            self.tail.extend(data.decode(errors="replace").splitlines())
            self._tell({"on": "output", "child": self._child, "stream": self._stream}, (data,))

    def flush(self) -> None:
        """Do nothing: the driver flushes when the child has ended."""

    def end(self) -> None:
        self._tell({"on": "closed", "child": self._child, "stream": self._stream})


def _facts() -> dict[str, Any]:
    return {
        "on": "here",
        "holdfast": __version__,
        "python": platform.python_version(),
        "torch": importlib.util.find_spec("torch") is not None,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }


def look_at_storage(storage: Storage, *, marker: str, node: str) -> str:
    """Return what is wrong with the storage as seen from this node; "" if it is shared.

    Args:
        storage: root of the run.
        marker: a file that the driver has written there.
        node: id of this node.
    """
    until = time.monotonic() + _SEEN_S
    while not storage.exists(marker):  # a network file system may show it a little later
        if time.monotonic() < until:
            time.sleep(0.25)
            continue
        return "what the driver has written there is not seen from this node: it is another disk"
    mine = f"{marker}-{node[:16]}"
    storage.put(mine, b"seen")
    storage.delete(mine)
    return ""


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise HoldfastError("the driver has closed the connection: it is gone, or does not know this agent")
        data += more
    return data
