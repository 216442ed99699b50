"""Nodes without a cluster: each is an agent in a process of its own on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from holdfast.trainers.function.engines.agent import AgentCall
from holdfast.trainers.function.engines.agents import AgentFailed, NodeEvent, NodePlace, PlacesChanged, missing_module

_MARK = "HOLDFAST_FAKE_NODE"
_NAME = "HOLDFAST_FAKE_NODE_NAME"
_START = """
import json, sys
from holdfast.trainers.function.engines.agent import AgentCall, run_agent
"""
_RUN = "run_agent(AgentCall(**json.loads(sys.argv[1])))\n"
# Forked from a process with torch it forks its zygote, too. For forks /proc has the environment of the process that was
# forked, but the name that was given.
_FORKED = f"""
import os
from pathlib import Path
from forked_kit import forks_itself
Path("/proc/self/comm").write_text(os.environ.pop({_NAME!r}))
with forks_itself():
    {_RUN}"""


class Wire:
    """The network between the driver and one agent: it can be cut without either of them hearing of it."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Carry nothing any more."""
        self._whole.clear()

    @property
    def is_cut(self) -> bool:
        """Whether nothing is carried."""
        return not self._whole.is_set()

    def mend(self) -> None:
        """Carry what was sent meanwhile, and what follows."""
        self._whole.set()

    def close(self) -> None:
        self._whole.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # the driver is gone
                    near.close()
                    continue
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self._whole.wait()
                other.sendall(data)
            self._whole.wait()
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
        other.close()


class FakeNodes:
    """Implements `holdfast.trainers.function.engines.agents.Nodes`.

    Args:
        spares: nodes on which an agent may get ready.
        sizes: places by node.

    Attributes:
        agents: the process of each node's agent.
        launched: nodes in the order in which agents were started.
        preludes: code that an agent runs first, by node.
        environments: variables of a node, by node.
        options: of the interpreters of agents; those with any are never forked (`forked_kit`).
        refused: nodes that cannot run workers, as the engine found.
        used: numbers of the places that a group has.
        wires: what stands between the driver and the agent of a node.
    """

    host = "127.0.0.1"

    def __init__(self, *, spares: Sequence[str] = (), **sizes: int) -> None:
        self.sizes = dict(sizes)
        self.spares = tuple(spares)
        self.draining: dict[str, float] = {}
        self.refused: list[str] = []
        self.used: frozenset[int] = frozenset()
        self.environments: dict[str, dict[str, str]] = {}
        self.wires: dict[str, Wire] = {}
        self._all_wires: list[Wire] = []
        self._seen: list[str] = []
        self._mark = uuid.uuid4().hex
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.options: tuple[str, ...] = ()
        self.launched: list[str] = []
        self._numbers: dict[int, subprocess.Popen[bytes]] = {}
        self._post: Callable[[NodeEvent], Any] = lambda _: None
        self.preludes: dict[str, str] = {}

    def open(self, post: Callable[[NodeEvent], Any]) -> None:
        self._post = post
        self.tell()

    def tell(self, missing: str = "") -> None:
        places = [
            NodePlace(node=node, address="127.0.0.1", number=self._first(node) + number)
            for node, size in self.sizes.items()
            for number in range(size)
        ]
        self._post(
            PlacesChanged(
                places=places,
                missing=missing or ("" if places else "no nodes"),
                draining=dict(self.draining),
                spares=self.spares,
            )
        )

    def _first(self, node: str) -> int:
        if node not in self._seen:
            self._seen.append(node)
        return 100 * self._seen.index(node)

    def launch(self, node: str, call: AgentCall) -> None:
        self.launched.append(node)
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        wire = self.wires[node] = Wire(call.port)
        self._all_wires.append(wire)
        is_forked = self.options in getattr(subprocess.Popen, "servers", {})
        code = self.preludes.get(node, "") + _START + (_FORKED if is_forked else _RUN)
        marks = {_MARK: f"{self._mark}-{node}", _NAME: self._name(node)}
        process = subprocess.Popen(
            [sys.executable, *self.options, "-c", code, json.dumps(asdict(replace(call, port=wire.port)))],
            env={**os.environ, "PYTHONPATH": paths, **self.environments.get(node, {}), **marks},
            stderr=subprocess.PIPE,
        )
        self.agents[node] = self._numbers[call.number] = process

        def watch() -> None:
            assert process.stderr is not None
            said = process.stderr.read().decode(errors="replace")
            sys.stderr.write(said)
            process.stderr.close()
            process.wait()
            why = said.strip().rpartition("\n")[2] or f"status {process.returncode}"
            self._post(AgentFailed(number=call.number, why=why, module=missing_module(why)))

        threading.Thread(target=watch, daemon=True).start()

    def doubt(self, node: str) -> None:
        """Look whether a node is still there: these say so themselves."""

    def refuse(self, node: str) -> None:
        """Its places are gone; who wants others adds a node."""
        self.refused.append(node)
        self.sizes.pop(node, None)
        self.spares = tuple(one for one in self.spares if one != node)
        self.tell("each worker needs a place")

    def use(self, numbers: frozenset[int]) -> None:
        self.used = numbers

    def end(self, number: int) -> None:
        process = self._numbers.get(number)
        node = next((node for node, agent in self.agents.items() if agent is process), "")
        if process is not None and not (node and self.wires[node].is_cut):  # no word of this comes to a node cut off
            process.kill()

    def close(self) -> None:
        for process in self._numbers.values():
            process.kill()
            process.wait()
        for wire in self._all_wires:
            wire.close()

    def kill_node(self, node: str) -> None:
        """End every process of a node at once, writers too."""
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, node: str) -> list[int]:
        """Find everything that descends from the agent of a node."""
        found = []
        mark = f"{_MARK}={self._mark}-{node}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (
                    mark in (entry / "environ").read_bytes().split(b"\0")
                    or (entry / "comm").read_text() == f"{self._name(node)}\n"
                ):
                    found.append(int(entry.name))
        return found

    def _name(self, node: str) -> str:
        """Return what forks of a node are called: as many characters as the system keeps."""
        return f"{node}-{self._mark}"[:15]

    def drain(self, node: str, seconds: float = 30.0) -> None:
        """Announce that a node goes."""
        self.draining[node] = seconds
        self.tell()

    def set(self, **sizes: int) -> None:
        """Nodes come and go; those that are not named stay."""
        self.sizes = {node: size for node, size in {**self.sizes, **sizes}.items() if size}
        self.tell()
